"""Random numbers and orthogonal matrices that are the same bits on every machine.

What torch draws is not: its normal numbers, and timm's truncated ones, pass through vector kernels and mathematical
functions that differ between processors and libraries. Here the generator's integers become float64, and from there on
only +, −, ×, ÷ and √ are used, one numpy call each, which IEEE 754 defines to the last bit. Sums run over the first
axis, which numpy adds row by row. Normal numbers come from the inverse of their distribution function, by the rational
approximations of Wichura, "Algorithm AS 241", Applied Statistics 37 (1988), accurate to 1e-15.
"""

import math

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WIDEST = 256  # matrices with more columns are left to LAPACK: the loops below would take minutes for a ViT-B
MOST_SWEEPS = 60  # of Jacobi's rotations; six to ten are usual
CHUNK = 1 << 16  # numbers worked on at a time, so that they stay in the cache

# Numerators and denominators, lowest power first: for |p − ½| ≤ 0.425 in 0.425² − (p − ½)², and for the tails in
# √(−ln p) − 1.6 up to 5 and in √(−ln p) − 5 beyond.
_CENTRE = (
    (
        3.3871328727963666080e0,
        1.3314166789178437745e2,
        1.9715909503065514427e3,
        1.3731693765509461125e4,
        4.5921953931549871457e4,
        6.7265770927008700853e4,
        3.3430575583588128105e4,
        2.5090809287301226727e3,
    ),
    (
        1.0,
        4.2313330701600911252e1,
        6.8718700749205790830e2,
        5.3941960214247511077e3,
        2.1213794301586595867e4,
        3.9307895800092710610e4,
        2.8729085735721942674e4,
        5.2264952788528545610e3,
    ),
)
_TAIL = (
    (
        1.42343711074968357734e0,
        4.63033784615654529590e0,
        5.76949722146069140550e0,
        3.64784832476320460504e0,
        1.27045825245236838258e0,
        2.41780725177450611770e-1,
        2.27238449892691845833e-2,
        7.74545014278341407640e-4,
    ),
    (
        1.0,
        2.05319162663775882187e0,
        1.67638483018380384940e0,
        6.89767334985100004550e-1,
        1.48103976427480074590e-1,
        1.51986665636164571966e-2,
        5.47593808499534494600e-4,
        1.05075007164441684324e-9,
    ),
)
_FAR_TAIL = (
    (
        6.65790464350110377720e0,
        5.46378491116411436990e0,
        1.78482653991729133580e0,
        2.96560571828504891230e-1,
        2.65321895265761230930e-2,
        1.24266094738807843860e-3,
        2.71155556874348757815e-5,
        2.01033439929228813265e-7,
    ),
    (
        1.0,
        5.99832206555887937690e-1,
        1.36929880922735805310e-1,
        1.48753612908506148525e-2,
        7.86869131145613259100e-4,
        1.84631831751005468180e-5,
        1.42151175831644588870e-7,
        2.04426310338993978564e-15,
    ),
)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Draw uniform numbers in [low, high), float64 of `shape`, from a CPU generator (torch's global one if None)."""
    return torch.from_numpy(numpy.asarray(low + (high - low) * _unit(shape, generator)))


def normal(*shape: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw standard normal numbers, float64 of `shape`, from a CPU generator (torch's global one if None)."""
    return torch.from_numpy(normal_quantile(_unit(shape, generator)))


def _unit(shape: tuple[int, ...], generator: torch.Generator | None) -> NDArray[numpy.float64]:
    """Return torch's own uniform numbers in [0, 1): 53 bits of an integer, exactly."""
    return torch.rand(shape, generator=generator, dtype=torch.float64).numpy()


def normal_quantile(p: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
    """Return the standard normal quantiles of probabilities in (0, 1), any shape; p = 0, which a generator may give,
    counts as 2⁻⁵⁴, half of the next smallest."""
    flat = numpy.maximum(p.ravel(), 2.0**-54)
    chunks = [_quantile(flat[start : start + CHUNK]) for start in range(0, len(flat), CHUNK)]
    return numpy.concatenate([numpy.empty(0), *chunks]).reshape(p.shape)


def _quantile(p: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
    q = p - 0.5
    result = q * _rational(_CENTRE, 0.180625 - q * q)
    tails = numpy.abs(q) > 0.425
    r = numpy.sqrt(-log(numpy.minimum(p[tails], 1 - p[tails])))
    far = numpy.where(r > 5, _rational(_FAR_TAIL, r - 5), _rational(_TAIL, r - 1.6))
    result[tails] = numpy.where(q[tails] < 0, -far, far)
    return result


def _rational(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: NDArray) -> NDArray:
    above, below = (numpy.polyval(part[::-1], x) for part in coefficients)
    return above / below


def log(x: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
    """Return ln x of positive numbers to about 1e-16, by arithmetic alone: 2 artanh((m − 1)/(m + 1)) + e ln 2."""
    m, exponent = numpy.frexp(x)
    small = m < math.sqrt(0.5)
    m = numpy.where(small, 2 * m, m)  # now from √½ to √2, so that twelve terms are enough
    s = (m - 1) / (m + 1)
    series = numpy.polyval([1 / (2 * k + 1) for k in reversed(range(12))], s * s)
    return (exponent - small) * math.log(2) + 2 * s * series


# ── Weights ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Portable(TorchDispatchMode):
    """Within, what torch draws by floating point (`uniform_`, `normal_`, `erfinv_`, `rand`, …) is drawn as above.

    timm's initial weights are then the same on every machine; torch's generator is used as ever, so `torch.manual_seed`
    decides. Raises NotImplementedError for a random operation that is not known here.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(args[0] if args else None, Tensor) and args[0].is_meta:  # only its shape is wanted
            return function(*args, **kwargs)
        if function in _REPLACEMENTS:
            return _REPLACEMENTS[function](*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in function.tags and function not in _INTEGERS:
            raise NotImplementedError(f"{function} draws in its own way, which may differ between machines")
        return function(*args, **kwargs)


def _uniform_(tensor: Tensor, low: float = 0.0, high: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """As `Tensor.uniform_`, but strictly between the ends, also after rounding: timm takes the inverse of erf there."""
    numbers = uniform(*tensor.shape, low=low, high=high, generator=generator).to(tensor.dtype)
    ends = torch.tensor([low, high], dtype=tensor.dtype)
    inner = torch.nextafter(ends, ends.flip(0))
    return tensor.copy_(numbers.clamp(*inner))


def _normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    return tensor.copy_(torch.from_numpy(mean + std * normal(*tensor.shape, generator=generator).numpy()))


def _erfinv_(tensor: Tensor) -> Tensor:
    p = (tensor.double().numpy() + 1) / 2
    return tensor.copy_(torch.from_numpy(normal_quantile(p) / math.sqrt(2)))


def _bernoulli_(tensor: Tensor, p: float = 0.5, generator: torch.Generator | None = None) -> Tensor:
    return tensor.copy_(uniform(*tensor.shape, generator=generator) < p)


def _new(fill):
    """Return the form of an in-place draw that makes its tensor: torch.rand's or torch.randn's."""

    def draw(size, *, generator=None, dtype=None, layout=None, device=None, pin_memory=None):
        return fill(torch.empty(size, dtype=dtype, device=device), generator=generator)

    return draw


_ATEN = torch.ops.aten
_REPLACEMENTS = {
    _ATEN.uniform_.default: _uniform_,
    _ATEN.normal_.default: _normal_,
    _ATEN.erfinv_.default: _erfinv_,
    _ATEN.bernoulli_.float: _bernoulli_,
    _ATEN.rand.default: _new(_uniform_),
    _ATEN.rand.generator: _new(_uniform_),
    _ATEN.randn.default: _new(_normal_),
    _ATEN.randn.generator: _new(_normal_),
}
_INTEGERS = {
    _ATEN.randperm.default,
    _ATEN.randperm.generator,
    _ATEN.randint.default,
    _ATEN.randint.low,
    _ATEN.randint.generator,
    _ATEN.randint.low_generator,
    _ATEN.random_.default,
    _ATEN.random_.to,
}


# ── Orthogonal matrices ───────────────────────────────────────────────────────────────────────────────────────────────


def orthogonal(rows: int, columns: int) -> Tensor:
    """Draw a Haar-distributed (semi-)orthogonal matrix, float64 (rows, columns), from torch's global generator.

    The Q of a Gaussian matrix's QR decomposition with a positive diagonal of R (Mezzadri, arXiv math-ph/0609050).
    """
    if rows < columns:
        return orthogonal(columns, rows).mT.contiguous()
    gaussian = normal(rows, columns)
    if columns <= WIDEST:
        return torch.from_numpy(_gram_schmidt(gaussian.numpy()))
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal().sign()


def _gram_schmidt(matrix: NDArray) -> NDArray:
    """Return Q of QR with a positive diagonal of R. Done twice, since once is orthogonal only to u κ(matrix)."""
    q = matrix.copy()
    for _ in range(2):
        for j in range(q.shape[1]):
            q[:, j] /= numpy.sqrt((q[:, j : j + 1] * q[:, j : j + 1]).sum(0))
            column, rest = q[:, j : j + 1], q[:, j + 1 :]
            rest -= column * (column * rest).sum(0)
    return q


def leading_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return P, Q (…, d, rank) with P Qᵀ the best approximation of that rank to float64 matrices (…, d, d).

    The singular values are split by square roots, so that the columns of P and Q have equal norms, largest first; each
    column of P has a sum that is not negative, which makes them unique where the singular values differ.
    """
    rows = numpy.moveaxis(matrix.numpy(), -2, 0)  # sums run over the first axis
    if matrix.shape[-1] <= WIDEST:
        u_sigma = _rotate_columns(rows)
    else:  # the eigenvectors of the Gram matrix, of which a ViT-B needs 144: three times as fast as an SVD
        squares, u = torch.linalg.eigh(matrix @ matrix.mT)
        u_sigma = numpy.moveaxis((u * squares.clamp_min(0)[..., None, :].sqrt()).flip(-1).numpy(), -2, 0)
    u_sigma = u_sigma[..., :rank]
    u_sigma = numpy.where(u_sigma.sum(0) < 0, -u_sigma, u_sigma)
    root = numpy.sqrt(numpy.sqrt((u_sigma * u_sigma).sum(0)).clip(numpy.finfo(float).tiny))
    sigma_v = sum(row[..., :, None] * other[..., None, :] for row, other in zip(rows, u_sigma))
    p, q = numpy.moveaxis(u_sigma / root, 0, -2), sigma_v / root[..., None, :] / (root * root)[..., None, :]
    return torch.from_numpy(p.copy()), torch.from_numpy(q)


def _rotate_columns(rows: NDArray) -> NDArray:
    """Return U Σ, largest columns first, of matrices M = U Σ Vᵀ given and returned with their rows first (d, …, d).

    One-sided Jacobi (Hestenes 1958): rotate pairs of columns until all are orthogonal. Each round rotates disjoint
    pairs, left[i] with right[i]; then all but the first move on by one place, so that d − 1 rounds meet every pair.
    """
    if rows.shape[-1] % 2:  # a column of zeros makes the pairs come out even
        rows = numpy.concatenate([rows, numpy.zeros_like(rows[..., :1])], axis=-1)
    left, right = numpy.split(rows, 2, axis=-1)
    for _ in range(MOST_SWEEPS):
        largest = 0.0  # cosine of two columns in this sweep
        for _ in range(rows.shape[-1] - 1):
            left, right, cosine = _rotate(left, right)
            largest = max(largest, cosine)
            moved = numpy.concatenate([right[..., :1], left[..., 1:]], axis=-1)
            left = numpy.concatenate([left[..., :1], moved[..., :-1]], axis=-1)
            right = numpy.concatenate([right[..., 1:], moved[..., -1:]], axis=-1)
        if not largest > 1e-15 * len(rows):
            break
    columns = numpy.concatenate([left, right], axis=-1)
    order = numpy.argsort(-(columns * columns).sum(0), axis=-1, kind="stable")
    return numpy.take_along_axis(columns, order[None], axis=-1)[..., : len(rows)]


def _rotate(left: NDArray, right: NDArray) -> tuple[NDArray, NDArray, float]:
    """Make each pair of columns orthogonal; return them and the largest |cosine| that a pair had before."""
    a, b, c = (left * left).sum(0), (right * right).sum(0), (left * right).sum(0)
    bound = numpy.sqrt(a * b)
    turn = numpy.abs(c) > 1e-16 * bound
    zeta = (b - a) / numpy.where(turn, 2 * c, 1)
    tangent = numpy.where(turn, numpy.copysign(1, zeta) / (numpy.abs(zeta) + numpy.sqrt(1 + zeta * zeta)), 0)
    cosine = 1 / numpy.sqrt(1 + tangent * tangent)
    sine = cosine * tangent
    largest = (numpy.abs(c) / numpy.where(turn, bound, math.inf)).max(initial=0.0)
    return cosine * left - sine * right, sine * left + cosine * right, float(largest)
