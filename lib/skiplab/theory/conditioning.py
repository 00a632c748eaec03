"""Condition numbers of token matrices, the quantity of Always Skip Attention (arXiv 2505.01996), section 4."""

import torch
from torch import Tensor

from skiplab.errors import InputError

WORST = 36.7  # ln of the largest kappa that float64 tells from infinity


def singular_values(x: Tensor) -> Tensor:
    """Return the min(n, d) singular values of matrices (…, n, d), descending, as (…, min(n, d)) in float64 on the CPU.

    The SVD is in float64, never through the Gram matrix, whose condition number is the square. A matrix with an entry
    that is not finite has NaN for all its values. No gradient flows. Raises InputError for a tensor that is not
    floating point, has fewer than two dimensions, or has n = 0 or d = 0.
    """
    if not x.is_floating_point() or x.ndim < 2 or 0 in x.shape[-2:]:
        expected = "real floating-point matrices (…, n, d) with n, d ≥ 1"
        raise InputError(f"expected {expected}, got {x.dtype} of shape {tuple(x.shape)}")
    x = x.detach().cpu().double()
    finite = x.isfinite().all(dim=(-2, -1))
    values = torch.linalg.svdvals(torch.where(finite[..., None, None], x, 0.0))  # LAPACK refuses NaN and infinity
    return torch.where(finite[..., None], values, torch.nan)


def condition_number(x: Tensor) -> Tensor:
    """Return kappa = sigma_max / sigma_min over the min(n, d) singular values of (…, n, d), as (…) in float64.

    It is `inf` where sigma_min ≤ max(n, d) · eps · sigma_max, eps being that of the *input's* dtype (the rank floor of
    numpy and MATLAB: bfloat16 tokens are below it from max(n, d) = 128 on), so also for the zero matrix; 1 for a
    single non-zero row or column; NaN where an entry is not finite. Raises as `singular_values`.
    """
    values = singular_values(x)
    largest, smallest = values[..., 0], values[..., -1]
    floor = max(x.shape[-2:]) * torch.finfo(x.dtype).eps * largest if min(x.shape[-2:]) > 1 else 0.0
    return torch.where(smallest <= floor, torch.inf, largest / smallest)


def effective_rank(x: Tensor) -> Tensor:
    """Return exp(−Σ p_i ln p_i), p_i = sigma_i / Σ sigma, of matrices (…, n, d), as (…) in float64.

    The effective rank of Roy and Vetterli (EUSIPCO 2007): how many directions the tokens use, 1 if they are multiples
    of one, min(n, d) if all singular values are equal, and never more than the rank. It needs no rank floor. 0 for the
    zero matrix, NaN where an entry is not finite. Raises as `singular_values`.
    """
    values = singular_values(x)
    largest = values[..., :1]
    shares = values / largest.where(largest > 0, 1.0)  # first, as a sum of huge ones would be infinite
    entropy = torch.special.entr(shares / shares.sum(dim=-1, keepdim=True).clamp(min=1)).sum(dim=-1)
    return torch.where(values[..., 0] == 0, 0.0, entropy.exp())


def summarise_log_kappa(kappa: Tensor) -> dict[str, float | int]:
    """Summarise condition numbers of any shape by the median of the finite ln kappa (natural log) and by counts.

    Returns `median_log_kappa` (NaN where none is finite), `n_inf` (rank-deficient), `n_nan` and `n`.
    """
    finite = kappa[kappa.isfinite()].double()
    return {
        "median_log_kappa": finite.log().quantile(0.5).item() if len(finite) else float("nan"),
        "n_inf": int(kappa.isinf().sum()),
        "n_nan": int(kappa.isnan().sum()),
        "n": kappa.numel(),
    }
