"""The outcome of checking an inequality, the comparison of its two sides, and checks of the inputs."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.linalg import matrix_norm, svdvals

from skiplab.errors import InputError, unknown
from skiplab.theory.spectral import check_attention

TOLERANCE = 1e-9  # relative; how far a published inequality may be missed before it counts as violated
EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class BoundCheck:
    """The outcome of checking `measured` ≤ `bound`.

    `holds` is None where one of the `hypotheses` fails, since the statement then says nothing. `slack` is
    ln(bound / measured): 0 where the bound is attained, negative where it is violated. `log_ratio` is −slack as a
    tensor with its gradient, which `counterexamples.adversarial_search` follows.
    """

    name: str
    measured: float
    bound: float
    hypotheses: dict[str, bool]
    holds: bool | None
    slack: float
    log_ratio: Tensor = field(repr=False, compare=False)


def compare(
    name: str, measured: Tensor | float, bound: Tensor | float, hypotheses: dict[str, bool], rounding: float = 0.0
) -> BoundCheck:
    """Check `measured` ≤ `bound` in float64. `rounding` is the absolute error that computing both may have caused."""
    measured, bound = (torch.as_tensor(side, dtype=torch.float64) for side in (measured, bound))
    if (measured.isnan() or bound.isnan()) and all(hypotheses.values()):
        raise InputError(f"{name} cannot be computed in float64 here: measured {float(measured)}, bound {float(bound)}")
    holds = bool(measured <= bound * (1 + TOLERANCE) + rounding)
    log_ratio = torch.zeros(()) if measured == bound else torch.log(measured) - torch.log(bound)
    return BoundCheck(
        name,
        measured=float(measured.detach()),
        bound=float(bound.detach()),
        hypotheses=hypotheses,
        holds=holds if all(hypotheses.values()) else None,
        slack=0.0 - float(log_ratio.detach()),
        log_ratio=log_ratio,
    )


def compare_kappa(
    name: str,
    x: Tensor,
    right: Tensor,
    factors: tuple[Tensor, ...],
    bound: Tensor,
    hypotheses: dict[str, bool],
) -> BoundCheck:
    """Check κ(x @ right) ≤ `bound`, where `right` was computed as a product of `factors`.

    Rounding can move the computed σ_min by a few eps times the product of the norms. Where κ exceeds the bound by no
    more than that, float64 cannot decide, and the hypothesis "decided in float64" fails.
    """
    product = x @ right
    values = svdvals(product)
    norms = math.prod(float(svdvals(factor.detach())[0]) for factor in (x, *factors))
    error = 4 * max(*x.shape, *right.shape) * EPS * norms
    measured = kappa(product)
    least = values[0] / (values[-1] + error)
    decided = bool((measured <= bound * (1 + TOLERANCE)) | (least > bound))
    return compare(name, measured, bound, hypotheses | {"decided in float64": decided})


def kappa(x: Tensor) -> Tensor:
    """Return the same as `conditioning.condition_number` for a float64 `x` (n, d), but with its gradient."""
    values = svdvals(x)
    return torch.where(values[-1] <= max(x.shape) * EPS * values[0], torch.inf, values[0] / values[-1])


def rounding_of(x: Tensor, *weights: Tensor) -> float:
    """Return a generous bound of the rounding error of ‖HC[A X W …]‖_F. It grows with all of X, not only with HC[X]."""
    sizes = [float(matrix_norm(tensor.detach())) for tensor in (x, *weights)]
    return 8 * (sum(x.shape) + sum(w.shape[1] for w in weights)) * math.sqrt(len(x)) * EPS * math.prod(sizes)


# --- Inputs ---------------------------------------------------------------------------------------------------------


def float64(tensor: Tensor) -> Tensor:
    """Return `tensor` in float64 on the CPU (an Apple GPU has no float64)."""
    return tensor.cpu().double()


def matrices(**tensors: Tensor) -> list[Tensor]:
    """Return the named tensors in float64. Raises InputError for one that is no finite, non-empty matrix."""
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not tensor.numel() or not tensor.isfinite().all():
            raise InputError(f"{name} must be a non-empty matrix of finite numbers; saw shape {tuple(tensor.shape)}")
    return [float64(tensor) for tensor in tensors.values()]


def attention_maps(*attns: Tensor) -> list[Tensor]:
    """Return each map (n, n) in float64, its rows rescaled to sum to 1 in that precision."""
    checked = [float64(check_attention(attn)) for attn in attns]
    if any(attn.ndim != 2 for attn in checked):
        raise InputError(f"a check takes one map (n, n) at a time; saw {shapes(*checked)}")
    return [attn / attn.sum(dim=1, keepdim=True) for attn in checked]


def shapes(*tensors: Tensor) -> str:
    """Return the shapes of tensors in words, for an error message."""
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)


def check_form(form: str, *allowed: str) -> None:
    """Raise InputError for a form of a statement that a check does not have."""
    if form not in allowed:
        raise unknown("form", form, allowed)
