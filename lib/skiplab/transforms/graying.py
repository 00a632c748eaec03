"""Token Graying: raise the small singular values (or DCT magnitudes) of an image's patches.

"Always Skip Attention" (Ji et al., ICCV 2025, arXiv 2505.01996), Token Graying section. X = U diag(σ) Vᵀ
holds one image's tokens; SVD-TG returns U diag((σ/σ_max)^ε) Vᵀ with ε in (0, 1], so κ becomes κ^ε.
DCT-TG does the same to the magnitudes of the two-dimensional orthonormal DCT-II, signs kept.
`rescale=True` multiplies back by the largest value; the paper's wording fits both forms.

No SVD is needed: with m = min(n, d) and G the m×m Gram matrix, SVD-TG is (G/λ_max)^((ε−1)/2) times X.
Everything that squares a condition number is in float64, which neither autocast nor TF32 touches.
"""

import functools
import math
from numbers import Real

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from skiplab.errors import InputError, indivisible, unknown

DCT_FLOOR = 1e-12  # magnitudes up to this share of the largest are float64 rounding
TINY = torch.finfo(torch.float64).tiny  # stands for the largest value of an image of zeros, to divide by
DENSE_DCT = {"cpu": 64, "cuda": 256}  # axes up to this go through a dense product, longer ones through an FFT
LARGE = 2**14  # entries; with fewer, calling an operation takes longer than its arithmetic,
TALL = 96  # as it does for the parts of a Gram matrix with fewer rows
FAST_KAPPA = 3e4  # the fast path is fitted for condition numbers up to this,
FAST_DOUBLINGS = 33  # so its exponents must go well beyond κ², up to 2^33


def gray_svd(tokens: Tensor, epsilon: float, *, rescale: bool = True, cutoff: float = 1e-6) -> Tensor:
    """Return U diag(σ_max·(σ/σ_max)^ε) Vᵀ for every (n, d) matrix of `tokens` (…, n, d), exactly.

    `rescale=False` leaves out σ_max. Singular values up to `cutoff`·σ_max count as zero and stay zero.
    Shape and dtype are kept. Relative Frobenius error ≤ 2e-5 against a float64 SVD with the same cutoff
    (float64 input: ≤ 1e-8 where κ ≤ 1e4; σ/σ_max under about 1e-7 drowns in the Gram matrix's rounding,
    so a smaller `cutoff` lets noise in). Waits for the device: `eigh` does so on CUDA.
    Gradients (once) are those of the map at fixed rank, finite for repeated and for zero singular values.
    Raises InputError for ε outside (0, 1], tokens that are not floating, not matrices or not finite.
    """
    if not 0 <= cutoff < 1:
        raise InputError(f"cutoff is {cutoff!r}; it must lie in [0, 1), usually 1e-6")
    epsilon = _check(tokens, epsilon)
    if _nothing_to_do(tokens, epsilon, rescale):
        return tokens.clone()
    if _transformed():
        return _TransformedGraySvd.apply(tokens, epsilon, rescale, cutoff)[0]
    if _derived(tokens):
        return _GraySvd.apply(tokens, epsilon, rescale, cutoff)
    return _exact(tokens, epsilon, rescale, cutoff)[0]


def _exact(tokens: Tensor, epsilon: float, rescale: bool, cutoff: float) -> tuple[Tensor, ...]:
    """Return the grayed tokens, and λ, its eigenvectors and weights w(λ) (0: it counts as zero) for the gradient.

    On a CPU, in a worker, calling an operation on few numbers takes longer than its arithmetic: there are few.
    """
    z, gram, wide, scale = _gram(tokens, lower=True)
    _check_finite(tokens, gram)
    eigenvalues, q = torch.linalg.eigh(gram)
    top = eigenvalues[..., -1:].clamp_min(TINY)
    # What counts as zero becomes infinite, and infinity to any power below 0 is 0.
    weight = functional.threshold(eigenvalues / top, cutoff**2, math.inf).pow(min((epsilon - 1) / 2, -TINY))
    if not rescale:
        weight = weight / top.sqrt()
    factor = (q * weight.unsqueeze(-2)) @ q.mT
    # On a CPU float32 halves the last product, where that is large; weights up to 100 keep its rounding below 1e-5.
    if rescale and tokens.numel() > LARGE and _float32_products(tokens) and weight.amax().item() <= 100:
        z, factor = tokens, factor.float()
    return _apply(factor, z, wide, scale if rescale else None, tokens.dtype), eigenvalues, q, weight


class _GraySvd(torch.autograd.Function):
    """SVD-TG through `eigh`; derivatives of its own, since eigh's divide by λ_i − λ_j. One derivative, in any mode."""

    @staticmethod
    def forward(ctx, tokens, epsilon, rescale, cutoff):
        output = _exact(tokens, epsilon, rescale, cutoff)
        _GraySvd.keep(ctx, (tokens, epsilon, rescale, cutoff), output)
        return output[0]

    @staticmethod
    def keep(ctx, inputs, output):
        tokens, ctx.epsilon, ctx.rescale, _ = inputs
        ctx.save_for_backward(tokens, *output[1:])
        ctx.save_for_forward(tokens, *output[1:])

    @staticmethod
    def backward(ctx, grad, *_):
        """Daleckii–Krein: dF = Q(Γ ∘ QᵀdGQ)Qᵀ, and F is symmetric, so that the transposed map has the same Γ."""
        tokens, eigenvalues, q, weight = ctx.saved_tensors
        with torch.no_grad():
            z, _, wide, scale = _gram(tokens)
            if not wide:
                z, grad = z.mT, grad.mT
            gamma, top, power = _divided_differences(eigenvalues, weight, ctx.epsilon, ctx.rescale)
            grad_q, z_q = q.mT @ grad.double(), q.mT @ z
            outer = grad_q @ z_q.mT
            outer = (outer + outer.mT) / 2
            inner = gamma * outer
            inner[..., -1, -1] += (weight * outer.diagonal(dim1=-2, dim2=-1)).sum(-1) * power / top
            result = q @ (weight[..., None] * grad_q + 2 * inner @ z_q)
            if not ctx.rescale and scale is not None:
                result = result / scale
            result = (result if wide else result.mT).to(tokens.dtype)
        return _once(result, grad, tokens), None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        tokens, eigenvalues, q, weight = ctx.saved_tensors
        with torch.no_grad():
            z, _, wide, scale = _gram(tokens)
            change = tangent.double() if scale is None else tangent / scale
            if not wide:
                z, change = z.mT, change.mT
            gamma, top, power = _divided_differences(eigenvalues, weight, ctx.epsilon, ctx.rescale)
            change_q, z_q = q.mT @ change, q.mT @ z
            outer = change_q @ z_q.mT
            outer = outer + outer.mT
            inner = gamma * outer + torch.diag_embed(weight * (outer[..., -1:, -1] * power / top[..., None]))
            result = q @ (inner @ z_q + weight[..., None] * change_q)
            if ctx.rescale and scale is not None:
                result = result * scale
            result = (result if wide else result.mT).to(tokens.dtype)
        return _Once.apply(result, tangent, tokens)


class _TransformedGraySvd(_GraySvd):
    """The same within torch.func and torch.vmap, which ask for this form; it takes longer to call."""

    @staticmethod
    def forward(tokens, epsilon, rescale, cutoff):
        return _exact(tokens, epsilon, rescale, cutoff)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*output[1:])
        _GraySvd.keep(ctx, inputs, output)

    @staticmethod
    def vmap(info, in_dims, tokens, *settings):
        return _TransformedGraySvd.apply(tokens.movedim(in_dims[0], 0), *settings), (0, 0, 0, 0)

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _GraySvd.jvp(ctx, tangent), None, None, None


def _divided_differences(
    eigenvalues: Tensor, weight: Tensor, epsilon: float, rescale: bool
) -> tuple[Tensor, Tensor, float]:
    """Return Γ_ij = (w_i − w_j)/(λ_i − λ_j) with w = λ^(−s)·λ_max^p and λ_max held, then λ_max and p."""
    kept = weight > 0
    s = (1 - epsilon) / 2
    positive = eigenvalues.where(kept, 1.0)
    # In terms of u = log λ_i − log λ_j both differences keep their digits as u → 0, where Γ → −s·w/λ.
    u = positive.log()[..., :, None] - positive.log()[..., None, :]
    slope = (torch.expm1(-s * u) / torch.expm1(u)).where(u != 0, -s)
    quotient = weight / positive
    both = kept[..., :, None] & kept[..., None, :]
    # A zero λ has w = 0 and stays so: against a kept λ the divided difference is w/λ.
    gamma = (slope * quotient[..., None, :]).where(both, quotient[..., :, None] + quotient[..., None, :])
    return gamma, eigenvalues[..., -1].clamp_min(TINY), s if rescale else s - 0.5


def _once(gradient: Tensor, grad: Tensor, tokens: Tensor) -> Tensor:
    """Return a gradient, which was computed without a graph, as one that refuses to be derived."""
    return _Once.apply(gradient, grad, tokens) if _transformed() or _derived(tokens) else gradient


class _Once(torch.autograd.Function):
    """Pass a derivative on that depends on the `sources`, and refuse to derive it by them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(derivative, *sources):
        return derivative.view_as(derivative)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise InputError("SVD Token Graying has one derivative, and a second is asked for; the method 'dct' has both")

    @staticmethod
    def jvp(ctx, *_):
        return _Once.backward(ctx)


def _transformed() -> bool:
    """Tell whether torch.func or torch.vmap surrounds the call, as torch.autograd.Function asks itself."""
    return torch._C._are_functorch_transforms_active()


def _derived(tokens: Tensor) -> bool:
    """Tell whether a derivative is taken of what happens to the tokens, backward or forward."""
    return torch.is_grad_enabled() and tokens.requires_grad or forward_ad.unpack_dual(tokens).tangent is not None


def gray_svd_fast(tokens: Tensor, epsilon: float, *, rescale: bool = True) -> Tensor:
    """Return SVD-TG of `tokens` (…, n, d) for any ε with matrix products only: made for a GPU.

    With Y = I − G/λ_max, the wanted (G/λ_max)^(−s), s = (1−ε)/2, is a sum of a few powers of Y: 46 products
    of m×m matrices in float64, most of them squarings. A GPU with slow float64 is better served by `gray_svd`,
    and a CPU always is.
    Relative Frobenius error ≤ 2e-5 on photographs with κ ≤ 3e4, ≤ 2e-4 on any tokens so conditioned (the worst
    have hundreds of singular values within percents of σ_max). Beyond that κ the smallest singular values
    lose accuracy, never finiteness; zero ones stay zero.
    Raises like `gray_svd`, but nothing here waits for a device: only on a CPU are non-finite tokens
    refused, on a device they give a non-finite image (that one only). Gradients pass through the products.
    """
    epsilon = _check(tokens, epsilon)
    if _nothing_to_do(tokens, epsilon, rescale):
        return tokens.clone()
    z, gram, wide, scale = _gram(tokens)
    if gram.device.type == "cpu":
        _check_finite(tokens, gram)
    top = _positive(_largest_eigenvalue(gram))
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    y = power = identity - gram / top
    zeroth, first, third, *doubling = _fast_coefficients(epsilon)
    factor = zeroth * identity + first * y + third * (y @ y @ y)
    for coefficient in doubling:
        power = power @ power
        factor = torch.add(factor, power, alpha=coefficient)
    if not rescale:
        factor = factor / top.sqrt()
    return _apply(factor, z, wide, scale if rescale else None, tokens.dtype)


def _largest_eigenvalue(gram: Tensor) -> Tensor:
    """Return λ_max (…, 1, 1)."""
    if _transformed():
        return _TransformedTop.apply(gram)[0]
    return _Top.apply(gram) if _derived(gram) else _top(gram)[0]


def _top(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return λ_max and its vector: the best Rayleigh quotient among the columns of G^1024."""
    columns = gram
    for _ in range(10):
        columns = columns / _positive(torch.linalg.matrix_norm(columns, keepdim=True))
        columns = columns @ columns
    lengths = (columns * columns).sum(-2, keepdim=True)
    quotients = (columns * (gram @ columns)).sum(-2, keepdim=True) / _positive(lengths)
    best = quotients.argmax(-1, keepdim=True).expand(*gram.shape[:-1], 1)
    vector = columns.take_along_dim(best, -1)
    vector = vector / _positive(torch.linalg.matrix_norm(vector, keepdim=True))
    return vector.mT @ gram @ vector, vector


class _Top(torch.autograd.Function):
    """λ_max, with one derivative: dλ_max = vᵀ dG v."""

    @staticmethod
    def forward(ctx, gram):
        top, vector = _top(gram)
        ctx.save_for_backward(gram, vector)
        ctx.save_for_forward(gram, vector)
        return top

    @staticmethod
    def backward(ctx, grad, *_):
        gram, vector = ctx.saved_tensors
        return _once(vector @ (grad @ vector.mT), grad, gram)

    @staticmethod
    def jvp(ctx, tangent):
        gram, vector = ctx.saved_tensors
        return _Once.apply(vector.mT @ tangent @ vector, tangent, gram)


class _TransformedTop(_Top):
    """The same within torch.func and torch.vmap, which ask for this form; it takes longer to call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gram):
        return _top(gram)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0], output[1])

    @staticmethod
    def jvp(ctx, tangent):
        return _Top.jvp(ctx, tangent), None


@functools.lru_cache
def _fast_coefficients(epsilon: float) -> list[float]:
    """Fit x^(−s), s = (1−ε)/2, on [1/κ², 1] by a sum of powers of y = 1 − x, exponents 0, 1, 3, 2, 4, 8, ….

    x^(−s) is an integral of e^(−tx) over t; the trapezoid rule in log t turns it into such a sum, and
    doubling t is fine enough. Least squares, reweighted towards the worst points, takes the maximal relative
    error below 2e-5 for every ε (y³ alone gains a factor of 6); on the host, so no device waits.
    """
    x = np.geomspace(FAST_KAPPA**-2, 1, 1500)
    log_y = np.log1p(-x, where=x < 1, out=np.full_like(x, -1e3))
    exponents = np.array([0, 1, 3, *2.0 ** np.arange(1, FAST_DOUBLINGS + 1)])
    terms = np.exp(np.outer(log_y, exponents)) * x[:, None] ** ((1 - epsilon) / 2)
    weights, best_error = np.ones_like(x), np.inf
    for _ in range(30):
        root = np.sqrt(weights / weights.mean())
        coefficients = np.linalg.lstsq(terms * root[:, None], root, rcond=1e-14)[0]
        error = np.abs(terms @ coefficients - 1)
        if error.max() < best_error:
            best, best_error = coefficients.tolist(), error.max()
        weights *= error / error.max() + 0.02
    return best


def gray_dct(tokens: Tensor, epsilon: float, *, rescale: bool = True) -> Tensor:
    """Return DCT-TG of `tokens` (…, n, d): magnitudes c_max·(|c|/c_max)^ε, signs kept, c the 2-D DCT-II.

    `rescale=False` leaves out c_max. Shape and dtype are kept; relative Frobenius error ≤ 1e-6
    against scipy in float64 (1e-11 for float64 input). |c|^ε has infinite slope at 0, so magnitudes up to
    DCT_FLOOR·c_max, which are rounding, are zero and have slope zero: gradients are finite.
    Raises like `gray_svd`; non-finite tokens on a device give a non-finite image, so that nothing waits.
    """
    epsilon = _check(tokens, epsilon)
    if _nothing_to_do(tokens, epsilon, rescale):
        return tokens.clone()
    # Rounding of 1e-8 becomes (1e-8)^ε of the largest magnitude: below ε = 0.9 the transform needs float64.
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    coefficients = _dct(tokens.double() if epsilon < 0.9 else tokens.to(dtype), False)
    top = coefficients.abs().amax((-2, -1), keepdim=True)
    if top.device.type == "cpu":
        _check_finite(tokens, top)
    top = _positive(top)
    coefficients = functional.hardshrink(coefficients / top, DCT_FLOOR).to(dtype)
    coefficients = coefficients * coefficients.abs().clamp_min(DCT_FLOOR) ** (epsilon - 1)
    result = _dct(coefficients, True)
    return (result * top if rescale else result).to(tokens.dtype)


def _dct(x: Tensor, inverse: bool) -> Tensor:
    return (_TransformedDct if _transformed() else _Dct).apply(x, inverse)


def _dct_values(x: Tensor, inverse: bool) -> Tensor:
    if x.device.type == "cpu" and max(x.shape[-2:]) > DENSE_DCT["cpu"]:
        from scipy import fft  # it takes most of a second to import

        transform = fft.idctn if inverse else fft.dctn
        return torch.from_numpy(transform(x.numpy(), axes=(-2, -1), norm="ortho"))
    return _dct_axis(_dct_axis(x.double(), inverse).mT, inverse).mT.to(x.dtype)


class _Dct(torch.autograd.Function):
    """Two-dimensional orthonormal DCT-II or its inverse; orthonormal, so backward is the other one."""

    @staticmethod
    def forward(ctx, x, inverse):
        ctx.inverse = inverse
        return _dct_values(x, inverse)

    @staticmethod
    def backward(ctx, grad):
        return _dct(grad, not ctx.inverse), None

    @staticmethod
    def jvp(ctx, tangent, _):
        return _dct(tangent, ctx.inverse)


class _TransformedDct(_Dct):
    """The same within torch.func and torch.vmap, which ask for this form; it takes longer to call."""

    @staticmethod
    def forward(x, inverse):
        return _dct_values(x, inverse)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.inverse = inputs[1]

    @staticmethod
    def vmap(info, in_dims, x, inverse):
        return _TransformedDct.apply(x.movedim(in_dims[0], 0), inverse), 0


def _dct_axis(x: Tensor, inverse: bool) -> Tensor:
    """Transform the last axis (float64) on any device: dense product if short, else Makhoul's one FFT."""
    n = x.shape[-1]
    if n <= DENSE_DCT.get(x.device.type, 256):
        matrix = _dct_matrix(n, x.device)
        return x @ (matrix if inverse else matrix.mT)
    k = torch.arange(n, device=x.device, dtype=x.dtype)
    twiddle = torch.polar(torch.ones_like(k), -math.pi * k / (2 * n))
    size = ((1 + k.sign()) / n).sqrt()
    if not inverse:
        shuffled = torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], -1)
        return (torch.fft.fft(shuffled) * twiddle).real * size
    x = x / size
    mirrored = torch.cat([torch.zeros_like(x[..., :1]), x[..., 1:].flip(-1)], -1)
    shuffled = torch.fft.ifft(torch.complex(x, -mirrored) * twiddle.conj()).real
    result = torch.empty_like(shuffled)
    result[..., ::2], result[..., 1::2] = shuffled[..., : (n + 1) // 2], shuffled[..., (n + 1) // 2 :].flip(-1)
    return result


@functools.lru_cache(maxsize=16)
def _dct_matrix(n: int, device: torch.device) -> Tensor:
    from scipy import fft

    return torch.from_numpy(fft.dct(np.eye(n), axis=0, norm="ortho")).to(device)


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Cut images (…, C, H, W) into tokens (…, H/p·W/p, C·p·p).

    Patches run row by row; a patch is flattened in the order (c, row, column), as a patch embedding's
    convolution does. DCT-TG depends on this order. Raises InputError if p does not divide H and W.
    """
    if images.ndim < 3:
        raise InputError(f"images have shape {tuple(images.shape)}; expected (…, C, H, W)")
    _check_patch(patch_size, *images.shape[-2:])
    *batch, channels, height, width = images.shape
    p = patch_size
    grid = images.reshape(*batch, channels, height // p, p, width // p, p)
    grid = grid.movedim((-4, -2), (-5, -4))  # rows and columns of patches before (c, row, column)
    return grid.reshape(*batch, (height // p) * (width // p), channels * p * p)


def unpatchify(tokens: Tensor, patch_size: int, channels: int, height: int, width: int) -> Tensor:
    """Put tokens (…, H/p·W/p, C·p·p) back into images (…, C, H, W): the inverse of `patchify`.

    Raises InputError if the tokens' shape is not that of such images.
    """
    _check_patch(patch_size, height, width)
    p = patch_size
    expected = ((height // p) * (width // p), channels * p * p)
    if tuple(tokens.shape[-2:]) != expected:
        raise InputError(f"tokens have shape {tuple(tokens.shape)}; images of {channels}×{height}×{width} "
                         f"in patches of {p} need (…, {expected[0]}, {expected[1]})")  # fmt: skip
    batch = tokens.shape[:-2]
    grid = tokens.reshape(*batch, height // p, width // p, channels, p, p)
    return grid.movedim((-5, -4), (-4, -2)).reshape(*batch, channels, height, width)


class TokenGraying(nn.Module):
    """Apply Token Graying to images (B, C, H, W) on their device, or to one image (C, H, W) in a worker.

    Args:
        method: "svd" (exact), "svd_fast" (matrix products only) or "dct".
        epsilon: exponent in (0, 1]; the paper's default for "dct" is 0.95.
        patch_size: side of a patch; give the model's.
        rescale: multiply back by the largest singular value or magnitude.
        at_evaluation: gray in `eval()` mode too. By default `eval()` returns the images unchanged,
            as TG belongs to training; the paper leaves open whether it is kept for evaluation.

    Images may be normalised or not (TG is not the same on both); dtype and shape are kept.
    Raises InputError like `patchify` and the function behind `method`.
    """

    def __init__(self, method: str, epsilon: float, patch_size: int, *, rescale: bool = True,
                 at_evaluation: bool = False):  # fmt: skip
        super().__init__()
        if method not in METHODS:
            raise unknown("Token Graying method", method, METHODS)
        self.method, self.epsilon, self.patch_size = method, _check_epsilon(epsilon), _check_patch(patch_size)
        self.rescale, self.at_evaluation = rescale, at_evaluation

    def forward(self, images: Tensor) -> Tensor:
        if not (self.training or self.at_evaluation):
            return images
        tokens = METHODS[self.method](patchify(images, self.patch_size), self.epsilon, rescale=self.rescale)
        return unpatchify(tokens, self.patch_size, *images.shape[-3:])

    def extra_repr(self) -> str:
        return (f"{self.method!r}, epsilon={self.epsilon}, patch_size={self.patch_size}, "
                f"rescale={self.rescale}, at_evaluation={self.at_evaluation}")  # fmt: skip


METHODS = {"svd": gray_svd, "svd_fast": gray_svd_fast, "dct": gray_dct}


def _nothing_to_do(tokens: Tensor, epsilon: float, rescale: bool) -> bool:
    return tokens.numel() == 0 or (epsilon == 1 and rescale)


def _gram(tokens: Tensor, lower: bool = False) -> tuple[Tensor, Tensor, bool, Tensor | None]:
    """Return z, the tokens in float64; the smaller Gram matrix; whether it is z zᵀ; and z's scale, if any.

    With `lower` only its lower triangle counts, all that `eigh` reads: a quarter of a large one's products is left out.

    The square of a float32 number fits a float64; only float64 tokens need dividing by their largest entry.
    """
    z, scale = tokens.double(), None
    if tokens.dtype == torch.float64:
        scale = _positive(tokens.detach().abs().amax((-2, -1), keepdim=True))
        z = tokens / scale
    wide = z.shape[-2] <= z.shape[-1]
    rows = z if wide else z.mT
    if not lower or rows.shape[-2] < TALL:
        return z, rows @ rows.mT, wide, scale
    half = rows.shape[-2] // 2
    first = rows[..., :half, :]
    above = functional.pad(first @ first.mT, (0, rows.shape[-2] - half))
    return z, torch.cat([above, rows[..., half:, :] @ rows.mT], dim=-2), wide, scale


def _float32_products(tokens: Tensor) -> bool:
    """Tell whether products of these tokens run in true float32, not bfloat16 or TF32."""
    plain = tokens.dtype == torch.float32 and tokens.device.type == "cpu"
    return plain and not torch.is_autocast_enabled("cpu") and torch.get_float32_matmul_precision() == "highest"


def _apply(factor: Tensor, z: Tensor, wide: bool, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scale is not None:
        factor = factor * scale
    return (factor @ z if wide else z @ factor).to(dtype)


def _positive(x: Tensor) -> Tensor:
    """Return x with 1 in place of 0 (and of an eigenvalue rounded below 0), to divide by."""
    return x.where(x > 0, 1.0)


def _check(tokens: Tensor, epsilon: float) -> float:
    if not isinstance(tokens, Tensor) or not tokens.is_floating_point():
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise InputError(f"tokens are {kind}; convert to float (images: divide by 255) first")
    if tokens.ndim < 2:
        raise InputError(f"tokens have shape {tuple(tokens.shape)}; expected (…, n, d)")
    if torch.compiler.is_exporting():
        raise InputError(
            "Token Graying cannot be exported; it belongs to training: export in eval() mode or without it"
        )
    return _check_epsilon(epsilon)


def _check_finite(tokens: Tensor, derived: Tensor) -> None:
    """Refuse non-finite tokens, seen in smaller matrices that inherit NaN or infinity from them."""
    try:
        finite = math.isfinite(derived.sum().item())  # makes the host wait for a device
    except RuntimeError:
        if _transformed():  # in torch.vmap no number can be looked at
            return
        raise
    if not finite:
        count = tokens.numel() - int(tokens.isfinite().sum())
        raise InputError(f"{count} of {tokens.numel()} token entries are NaN or infinite; all must be finite")


def _check_epsilon(epsilon: float) -> float:
    if not isinstance(epsilon, Real) or isinstance(epsilon, bool) or not 0 < epsilon <= 1:
        raise InputError(f"epsilon is {epsilon!r}; it must be a number in (0, 1], for example 0.9")
    return float(epsilon)


def _check_patch(patch_size: int, *sides: int) -> int:
    if not isinstance(patch_size, int) or isinstance(patch_size, bool) or patch_size < 1:
        raise InputError(f"patch_size is {patch_size!r}; it must be a whole number from 1 on")
    for name, side in zip(("height", "width"), sides):
        if side % patch_size or not side:
            raise indivisible(name, side, "patch_size", patch_size)
    return patch_size
