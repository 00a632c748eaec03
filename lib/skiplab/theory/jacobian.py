"""The Jacobian K = ∂vec(SA(Z))/∂vec(Z) of a self-attention layer: by its formula, by autograd, or without forming it.

Follows Ji, Martens, Zheng, Zhou, Moghadam, Zhang, Saratchandran, Lucey, "Cutting the Skip", ICLR 2026,
arXiv 2510.00345: K = (Z W_V W_O ⊗ I_n)ᵀ A' + (W_V W_O)ᵀ ⊗ A. vec stacks columns, so entry c·n + i of vec(Z) is
feature c of token i. A skip adds I to K. Take Z after the layer norm: before it K is singular by construction.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from skiplab import draws
from skiplab.errors import InputError
from skiplab.theory.conditioning import condition_number

STEADY = 10  # steps over which a value must not move before it counts as converged
LARGEST_DENSE = 8192  # n·d up to which K is formed: 512 MiB in float64


def attention(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, heads: int = 1) -> Tensor:
    """Return SA(X) (n, d_out) of tokens `x` (n, d): per head softmax(Q Kᵀ / √d_h) V, heads side by side, times W_O.

    `w_q`, `w_k` and `w_v` are (d, heads·width) and `w_o` is (heads·width of V, d_out), to be multiplied from the
    right; no biases (those of Q and K change the logits, those of V and O shift the output by a constant). Raises
    InputError where the shapes do not fit.
    """
    _check_shapes(x, w_q, w_k, w_v, w_o, heads)
    maps = torch.softmax(_split(x @ w_q, heads) @ _split(x @ w_k, heads).mT * (w_q.shape[1] / heads) ** -0.5, dim=-1)
    return (maps @ _split(x @ w_v, heads)).movedim(0, 1).flatten(1) @ w_o


def attention_jacobian(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, heads: int = 1) -> Tensor:
    """Return K (n·d_out, n·d) of `attention` at `x` by the Kronecker formula: the sum of the `jacobian_terms`."""
    softmax_term, value_term = jacobian_terms(x, w_q, w_k, w_v, w_o, heads)
    return softmax_term + value_term


def jacobian_terms(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, heads: int = 1
) -> tuple[Tensor, Tensor]:
    """Return both terms of K, each (n·d_out, n·d): (Z W_V W_O ⊗ I_n)ᵀ A', and (W_V W_O)ᵀ ⊗ A, each summed over heads.

    Arguments as for `attention`. Raises InputError where shapes do not fit, or n·d exceeds `LARGEST_DENSE`.

    Derivation. SA(Z) = A Y with Y = Z M and M = W_V W_O. Varying Z in Y alone gives A dZ M, and
    vec(A dZ M) = (Mᵀ ⊗ A) vec dZ. Varying A alone gives vec(dA Y) = (Y ⊗ I)ᵀ vec dA, where A' dZ is
    da_ij = a_ij (dp_ij − Σ_k a_ik dp_ik), p_ij = z_i B z_jᵀ and B = W_Q W_Kᵀ / √d_h. So token i of dA Y is
    Σ_j a_ij dp_ij (y_j − ȳ_i), ȳ_i = Σ_k a_ik y_k, and dp_ij = dz_i B z_jᵀ + z_i B dz_jᵀ. We sum over j at once and
    never form A', which has n²·n·d entries.
    """
    _check_shapes(x, w_q, w_k, w_v, w_o, heads)
    n, d = x.shape
    widest = max(d, w_o.shape[1])
    if n * widest > LARGEST_DENSE:
        raise InputError(f"a dense Jacobian needs n·d ≤ {LARGEST_DENSE}; saw {n}·{widest}; use jacobian_extremes")
    softmax_term = value_term = torch.zeros((), dtype=x.dtype, device=x.device)
    for head_q, head_k, head_v, head_o in zip(*(w.chunk(heads, dim=1) for w in (w_q, w_k, w_v)), w_o.chunk(heads)):
        b, m = head_q @ head_k.mT * head_q.shape[1] ** -0.5, head_v @ head_o
        attn, y = torch.softmax(x @ b @ x.mT, dim=-1), x @ m
        value_term = value_term + torch.kron(m.mT.contiguous(), attn)
        weighted = attn[:, :, None] * (y - (attn @ y)[:, None])  # (i, j, c): a_ij (y_j − ȳ_i)
        blocks = torch.einsum("ijc,ie->ciej", weighted, x @ b)  # through z_j, as key
        through_query = torch.einsum("ijc,je->cie", weighted, x @ b.mT)
        blocks.diagonal(dim1=1, dim2=3).add_(through_query.transpose(1, 2))
        softmax_term = softmax_term + blocks.reshape(n * m.shape[1], n * d)
    return softmax_term, value_term


def autograd_jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ∂vec(f(X))/∂vec(X) of any `f` from (n, d) to (n, d_out), column-stacked, by autograd, row by row.

    Raises InputError where n·d exceeds `LARGEST_DENSE`.
    """
    if x.numel() > LARGEST_DENSE:
        raise InputError(f"a dense Jacobian needs n·d ≤ {LARGEST_DENSE}; saw {x.numel()}; use jacobian_extremes")
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = torch.func.jacrev(f, chunk_size=64)(x)  # (n, d_out, n, d)
    return jacobian.permute(1, 0, 3, 2).reshape(-1, x.numel())


def jacobian_kappa(jacobian: Tensor) -> tuple[float, float]:
    """Return kappa of a square `jacobian` K without its skip, and of K + I with it; inf below the rank floor."""
    skip = torch.eye(len(jacobian), dtype=jacobian.dtype, device=jacobian.device)
    return float(condition_number(jacobian)), float(condition_number(jacobian + skip))


@dataclass(frozen=True)
class JacobianExtremes:
    """The extreme singular values of a Jacobian, as far as `steps` of Lanczos found them.

    `sigma_max` is a lower bound and `sigma_min` an upper bound, so their ratio is a lower bound of kappa. An estimate
    has converged when a singular value lies within the relative `tolerance` of it, and when it moved by no more than
    that over the last `STEADY` steps (or no direction is left to search). It is then off by no more than `tolerance`,
    unless the random start nearly misses a more extreme direction.
    """

    sigma_max: float
    sigma_max_converged: bool
    sigma_min: float
    sigma_min_converged: bool
    steps: int


def jacobian_extremes(
    f: Callable[[Tensor], Tensor], x: Tensor, *, tolerance: float = 1e-3, max_steps: int = 60, seed: int = 0
) -> JacobianExtremes:
    """Estimate the extreme singular values of the Jacobian K of `f` at `x` without forming K.

    `f` maps `x`, (n, d) or of any shape, to as many numbers. A step costs one product with K and one with Kᵀ. The
    search stops once both estimates have converged to `tolerance`, or after `max_steps`. Memory is that of
    differentiating `f` and 2·max_steps vectors of the size of `x`. Raises InputError where `f` changes the size or is
    not finite, or for max_steps < 1.

    Golub-Kahan-Lanczos bidiagonalisation with full reorthogonalisation: K V = U T with orthonormal columns in V and U
    and T (k+1)×k bidiagonal, so for every y, ‖K V y‖ = ‖T y‖: the singular values of T lie between those of K. For a
    singular triple (θ, u, v) of T, Kᵀ(U u) misses θ·(V v) by the next α times |last entry of u|, so a singular value of
    K lies that near to θ. Extreme, isolated values come first. A σ_min at κ ~ 10⁶ among many small values takes too
    long, and is then reported as not converged.
    """
    if max_steps < 1:
        raise InputError(f"max_steps must be at least 1; saw {max_steps}")
    x = x.detach()
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        y, backward = torch.func.vjp(f, x)
        if y.numel() != x.numel():
            raise InputError(
                f"jacobian_extremes needs f to keep the size; saw {tuple(x.shape)} become {tuple(y.shape)}"
            )
        if not y.isfinite().all():
            raise InputError("jacobian_extremes needs f(x) to be finite; saw nan or inf")
        # u ↦ Kᵀ u is linear, so its own transposed derivative is v ↦ K v (torch's forward mode warns on first use).
        _, forward = torch.func.vjp(lambda u: backward(u)[0], torch.zeros_like(y))
        return _lanczos(
            lambda v: forward(v.reshape(x.shape))[0].flatten(),
            lambda u: backward(u.reshape(y.shape))[0].flatten(),
            draws.normal(x.numel(), generator=torch.Generator().manual_seed(seed)).to(x),
            tolerance,
            max_steps,
        )


def _lanczos(
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor], Tensor],
    start: Tensor,
    tolerance: float,
    max_steps: int,
) -> JacobianExtremes:
    """Bidiagonalise K, given v ↦ K v and u ↦ Kᵀ u, from the left vector `start`."""
    rounding = 10 * torch.finfo(start.dtype).eps
    max_steps = min(max_steps, start.numel())
    left, right = start.new_empty(2, max_steps + 1, start.numel())  # row k is u_k, v_k
    t = torch.zeros(max_steps + 1, max_steps, dtype=torch.float64)
    history = []
    left[0] = start / start.norm()
    right[0], alpha = _next(backward(left[0]), right[:0], 0.0)
    for step in range(1, max_steps + 1):
        t[step - 1, step - 1] = alpha
        left[step], beta = _next(forward(right[step - 1]), left[:step], rounding * float(t.max()))
        t[step, step - 1] = beta
        right[step], alpha = _next(backward(left[step]), right[:step], rounding * float(t.max()))
        vectors, values, _ = torch.linalg.svd(t[: step + 1, :step], full_matrices=False)
        history.append(values[[0, -1]])
        residuals = alpha * vectors[-1, [0, -1]].abs() + rounding * values[0]
        accurate = residuals <= tolerance * history[-1]
        # A direction that the start hardly contains appears late, while all values already look accurate: wait for it.
        moved = (history[-1] - history[-min(step, STEADY)]).abs()
        settled = (moved <= tolerance * history[-1]) & (step >= STEADY)
        converged = accurate & (settled | (step == start.numel()))
        if converged.all():
            break
    largest, smallest = history[-1].tolist()
    return JacobianExtremes(largest, bool(converged[0]), smallest, bool(converged[1]), step)


def _next(vector: Tensor, basis: Tensor, negligible: float) -> tuple[Tensor, float]:
    """Return the unit vector and length of the part of `vector` orthogonal to the rows of `basis`.

    Where only rounding is left, the search continues from a random direction, with length 0.
    """
    if len(basis) == len(vector):
        return torch.zeros_like(vector), 0.0
    vector = _orthogonal(vector, basis)
    length = float(vector.norm())
    if length <= negligible:
        generator = torch.Generator().manual_seed(len(basis))
        vector = _orthogonal(draws.normal(len(vector), generator=generator).to(vector), basis)
        length = 0.0
    return _orthogonal(vector / vector.norm(), basis), length


def _orthogonal(vector: Tensor, basis: Tensor) -> Tensor:
    """Remove from `vector` its part along the rows of `basis`; twice, since rounding leaves some the first time."""
    for _ in range(2):
        vector = vector - basis.mT @ (basis @ vector)
    return vector


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).movedim(-2, 0)


def _check_shapes(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, heads: int) -> None:
    shapes = {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}
    seen = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in shapes.items())
    fits = (
        all(tensor.ndim == 2 and tensor.numel() for tensor in shapes.values())
        and len(w_q) == len(w_k) == len(w_v) == x.shape[1]
        and w_q.shape == w_k.shape
        and w_v.shape[1] == len(w_o)
        and heads >= 1
        and w_q.shape[1] % heads == w_v.shape[1] % heads == 0
    )
    if not fits:
        raise InputError(
            "expected x (n, d), w_q and w_k (d, heads·a), w_v (d, heads·b), w_o (heads·b, d_out); "
            f"saw {heads} heads, {seen}"
        )
