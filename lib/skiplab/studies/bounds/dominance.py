"""Statements about the diagonal's dominance: Cutting the Skip (arXiv 2510.00345), propositions 1 and 2."""

from functools import partial

import torch
from torch import Tensor
from torch.linalg import matrix_norm

from skiplab import draws as portable
from skiplab.companion.cases import Draws, Statement, judged, shaped
from skiplab.theory import bounds
from skiplab.theory.bounds import BoundCheck


def _nearly_constant(draws: Draws) -> tuple[Tensor]:
    n = draws.whole(2, 20)
    return (draws.uniform(-5, 5) + draws.uniform(0, 0.1) * portable.uniform(n, n, generator=draws.generator),)


def uniform(logits: Tensor) -> BoundCheck:
    """Check that entries of A lie in [e⁻ʳ/n, eʳ/n], r the largest range of a row."""
    r = (logits.amax(dim=1) - logits.amin(dim=1)).max()
    scaled = (len(logits) * torch.softmax(logits, dim=1)).log().abs().max()
    return judged("skipless 1, uniform", scaled.exp(), r.exp())


def _dominant_diagonal(draws: Draws) -> tuple[Tensor]:
    n = draws.whole(2, 20)
    logits = draws.normal(n, n)
    return (logits + (logits.max() - logits.min() + draws.uniform(0, 12)) * torch.eye(n, dtype=torch.float64),)


def diagonal(logits: Tensor) -> BoundCheck:
    """Check a_ii ≥ 1 / (1 + (n−1) e^−m), m the least excess of the diagonal."""
    n = len(logits)
    off = torch.where(torch.eye(n, dtype=torch.bool), -torch.inf, logits)
    excess = (logits.diagonal() - off.amax(dim=1)).min()
    return judged(
        "skipless 1, identity", 1 / (1 + (n - 1) * torch.exp(-excess)), torch.softmax(logits, dim=1).diagonal().min()
    )


def _main_and_rest(limit: str, draws: Draws) -> tuple[Tensor, Tensor]:
    """Return a matrix and a smaller one: smaller than its norm, or than its smallest singular value."""
    d = draws.whole(2, 7)
    main, rest = draws.weight(d, d), draws.normal(d, d)
    u, sizes, vh = torch.linalg.svd(main)
    if limit == "norm" and draws.whole(0, 1):  # the worst: nearly all of what is smallest is taken away
        return main, -0.999 * sizes[-1] * u[:, -1:] @ vh[-1:]
    size = sizes[0 if limit == "norm" else -1]
    return main, rest * draws.uniform(0.01, 0.99) * size / matrix_norm(rest, 2)


def norm_is_enough(main: Tensor, rest: Tensor) -> BoundCheck:
    """Check κ(main + rest) ≤ κ(main)(1 + ρ)/(1 − ρ), ρ = ‖rest‖/‖main‖ < 1: proposition 2 read too freely."""
    rho = matrix_norm(rest, 2) / matrix_norm(main, 2)
    cond = torch.linalg.cond  # with its gradient
    return judged("skipless 2, norm", cond(main + rest), cond(main) * (1 + rho) / (1 - rho), said=bool(rho < 1))


SKIPLESS = {
    "cut.prop1.uniform": Statement(
        _nearly_constant, uniform, label="skipless 1, nearly uniform", search=(uniform, shaped((5, 5)))
    ),
    "cut.prop1.diffuse": Statement(
        lambda draws: (draws.logits(draws.whole(2, 12)),),
        bounds.diffuse_rows,
        label="skipless 1, diffuse rows",
        search=(bounds.diffuse_rows, shaped((5, 5))),
    ),
    "cut.prop1.diagonal": Statement(
        _dominant_diagonal, diagonal, label="skipless 1, diagonal entries", search=(diagonal, shaped((5, 5)))
    ),
    "cut.prop1.diagonal_kappa": Statement(
        _dominant_diagonal,
        bounds.diagonal_rows,
        label="skipless 1, diagonal rows",
        search=(lambda p: bounds.diagonal_rows(p + 6 * torch.eye(5)), shaped((5, 5))),
    ),
    "cut.prop2.smaller_norm": Statement(
        partial(_main_and_rest, "norm"),
        norm_is_enough,
        label="skipless 2, smaller norm",
        search=(lambda main, rest: norm_is_enough(main, rest / 10), shaped((4, 4), (4, 4))),
    ),
    "cut.prop2.repaired": Statement(
        partial(_main_and_rest, "least"),
        bounds.dominant_term,
        label="skipless 2, ‖rest‖ < σ_min",
        search=(
            lambda main, rest: bounds.dominant_term(main + 6 * torch.eye(4), rest / 10),
            shaped((4, 4), (4, 4)),
        ),
    ),
}
