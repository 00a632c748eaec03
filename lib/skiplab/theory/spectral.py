"""Tokens and attention in the Fourier domain: the shared part (DC), the rest (HC), and how attention acts on each band.

Follows Wang, Zheng, Chen, Wang, "Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis",
ICLR 2022, arXiv 2203.05962: the definitions before Theorem 1, and the quantities of figures 1 and 5.
"""

import torch
from torch import Tensor
from torch.linalg import matrix_norm, vector_norm

from skiplab.errors import InputError, unknown

# How far a row of attention may sum from 1: a few roundings of the number type it was computed in.
ROW_SUM_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def dc(x: Tensor) -> Tensor:
    """Return the part of `x` (…, n, d) that is the same for every token: DC[X] = (1/n) 11ᵀX, (…, n, d).

    Here and below half precision is computed and returned in float32. Raises InputError for fewer than two dimensions,
    an empty tensor or a type that is not floating point.
    """
    return _tokens(x).mean(dim=-2, keepdim=True).expand_as(x)


def hc(x: Tensor) -> Tensor:
    """Return the part of `x` (…, n, d) that differs between tokens: HC[X] = X − DC[X], (…, n, d)."""
    return x - dc(x)


def hc_ratio(x: Tensor) -> Tensor:
    """Return ‖HC[X]‖_F / ‖DC[X]‖_F of `x` (…, n, d) as (…): 0 where HC vanishes, inf where only DC does."""
    high, low = matrix_norm(hc(x)), matrix_norm(dc(x))
    return torch.where(high == 0, high, high / low)


def log_hc_intensity(x: Tensor, x0: Tensor) -> Tensor:
    """Return ln(‖HC[X]‖_F / ‖X_0‖_F) as (…): the height of one point of figure 1 of the paper.

    `x` (…, n, d) holds the tokens after a layer, `x0` (…, n, d) the tokens before the first one. −inf where HC
    vanishes. Raises InputError where `x0` is all zeros.
    """
    reference = matrix_norm(_tokens(x0))
    if (reference == 0).any():
        raise InputError("log_hc_intensity needs initial tokens x0 that are not all zero; saw ‖x0‖ = 0")
    return torch.log(matrix_norm(hc(x)) / reference)


def signal_spectrum(x: Tensor) -> Tensor:
    """Return the amplitude of each band of `x` (…, n, d) as (…, n): ‖(F X)_i‖₂ over channels, F the unitary DFT.

    Bands come in the order of `torch.fft.fftfreq(n)`. Band 0 is ‖DC[X]‖_F, the others make up ‖HC[X]‖_F (Parseval).
    """
    x = _tokens(x)
    half = torch.view_as_real(torch.fft.rfft(x, dim=-2, norm="ortho"))  # torch's norm of complex numbers is slow
    gains = vector_norm(half, dim=(-2, -1))
    return torch.cat([gains, gains[..., 1 : (x.shape[-2] + 1) // 2].flip(-1)], dim=-1)  # band n−i mirrors band i


def frequency_response(attn: Tensor, side: str = "output") -> Tensor:
    """Return the gain ‖Λ_i‖₂ of each band of `attn` (…, n, n) as (…, n), Λ = F A F⁻¹ with F the unitary DFT.

    With `side` "output" Λ_i is row i, all that reaches band i of the output; with "input" it is column i, all that
    band i of the input becomes. Bands come in the order of `torch.fft.fftfreq(n)`. Raises InputError as
    `check_attention` does.

    Λ is never formed: a unitary factor leaves lengths alone, so ‖row i of F A F⁻¹‖ = ‖row i of F A‖, and likewise for
    columns of A F⁻¹. One FFT of a real matrix is enough, and half of its bands mirror the other half.
    """
    sides = ("output", "input")
    if side not in sides:
        raise unknown("side", side, sides)
    attn = check_attention(attn)
    return signal_spectrum(attn if side == "output" else attn.mT)


def low_pass_share(gains: Tensor, times: float = 1.0) -> float:
    """Return the percentage of rows of `gains` (…, n) with band 0 above `times` the mean of the upper half of bands.

    For an attention map A, `times` = 1 is a weak demand: the square of band 0 is Σ_j (mean of column j)² n ≥ 1, while
    the squares of all bands sum to ‖A‖_F² ≤ n, so that their mean is at most 1.
    """
    upper = gains[..., torch.fft.fftfreq(gains.shape[-1]).abs() > 0.25].mean(dim=-1)
    return float(100 * (gains[..., 0] > times * upper).double().mean())


def token_similarity(x: Tensor) -> Tensor:
    """Return the mean cosine between different tokens of `x` (…, n, d) as (…), in [−1/(n−1), 1].

    A zero token has cosine 0 with every other. Raises InputError for fewer than two tokens.

    No n×n matrix is needed: with unit tokens u_i, Σ_{i≠j} u_i·u_j = ‖Σ u_i‖² − Σ ‖u_i‖².
    """
    x = _tokens(x)
    n = x.shape[-2]
    if n < 2:
        raise InputError(f"a similarity of different tokens needs at least 2 tokens; saw {n}")
    tiny = torch.finfo(x.dtype).tiny
    scaled = x / x.abs().amax(dim=-1, keepdim=True).clamp(min=tiny)  # the square of 1e-30 underflows in float32
    unit = torch.nn.functional.normalize(scaled, dim=-1, eps=tiny)
    pairs = unit.sum(dim=-2).square().sum(dim=-1) - unit.square().sum(dim=(-2, -1))
    return pairs / (n * (n - 1))


def attention_similarity(attn: Tensor) -> Tensor:
    """Return the mean cosine between different columns of each map in `attn` (…, n, n) as (…).

    The cross-patch similarity of Wang et al. (arXiv 2203.05962), appendix F.1: 1 where every token attends to one token
    as much as to another. Raises InputError as `check_attention` does, and for fewer than two tokens.
    """
    return token_similarity(check_attention(attn).mT)


def check_attention(attn: Tensor) -> Tensor:
    """Return `attn` (…, n, n) unchanged if it is row-stochastic.

    Raises InputError, naming what was seen, for an empty or non-square tensor, for a number type other than those of
    `ROW_SUM_TOLERANCE`, for negative or non-finite entries, and for a row that does not sum to 1 within the tolerance
    of its number type.
    """
    shape = tuple(attn.shape)
    if attn.numel() == 0:
        raise InputError(f"attention is empty: shape {shape}; was anything captured?")
    if attn.ndim < 2 or shape[-1] != shape[-2]:
        raise InputError(f"attention must be square, (…, n, n); saw shape {shape}")
    if attn.dtype not in ROW_SUM_TOLERANCE:
        raise unknown("number type of attention", attn.dtype, ROW_SUM_TOLERANCE)
    smallest, largest = (float(end) for end in attn.detach().aminmax())
    if not (smallest >= 0 and largest < float("inf")):  # also catches nan, which no comparison accepts
        where = (~((attn >= 0) & torch.isfinite(attn))).nonzero()[0].tolist()
        raise InputError(f"attention entries must be finite and ≥ 0; saw {attn[tuple(where)]:.6g} at {where}")
    sums = attn.detach().sum(dim=-1, dtype=torch.promote_types(attn.dtype, torch.float32))
    tolerance = ROW_SUM_TOLERANCE[attn.dtype]
    worst = int((sums - 1).abs().argmax())
    seen = float(sums.flatten()[worst])
    if abs(seen - 1) > tolerance:
        raise InputError(
            f"rows of attention must sum to 1 within {tolerance:g}; saw {seen:.9g} in row {worst % shape[-1]}"
        )
    return attn


def _tokens(x: Tensor) -> Tensor:
    """Return `x` (…, n, d), halves as float32 (a CPU has no FFT for them); refuse what has no tokens."""
    if x.ndim < 2 or x.numel() == 0:
        raise InputError(f"tokens must have shape (…, n, d) with nothing empty; saw {tuple(x.shape)}")
    if not x.is_floating_point():
        raise InputError(f"tokens must be real floating-point numbers; saw {x.dtype}")
    return x.to(torch.promote_types(x.dtype, torch.float32))


def bands(n: int) -> Tensor:
    """Return the non-negative frequencies of n tokens, in cycles per token, by index of the first ⌊n/2⌋ + 1 bands."""
    return torch.arange(n // 2 + 1) / n
