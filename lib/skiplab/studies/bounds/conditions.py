"""Statements about κ: Always Skip Attention (arXiv 2505.01996), propositions 4.1 and 4.2, and the FFN's."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from skiplab.companion.cases import Draws, Statement, judged, shaped
from skiplab.theory import bounds, counterexamples
from skiplab.theory.bounds import BoundCheck
from skiplab.theory.conditioning import condition_number


def _square_weights(draws: Draws, d: int, count: int) -> tuple[Tensor, ...]:
    make = draws.orthonormal if draws.whole(0, 1) else draws.normal
    return tuple(make(d, d) for _ in range(count))


def _any_shape(draws: Draws) -> tuple:
    n, d = draws.whole(2, 8), draws.whole(2, 8)
    return draws.normal(n, d), *_square_weights(draws, d, 3)


def _tall(draws: Draws) -> tuple:
    d = draws.whole(2, 7)
    return draws.full_rank(d + draws.whole(0, 4), d), *_square_weights(draws, d, 3)


def _definite(draws: Draws) -> tuple:
    n, d = draws.whole(2, 8), draws.whole(2, 8)
    w = draws.weight(d, d)
    same = (
        (w, w)
        if draws.whole(0, 1)
        else (torch.eye(d, dtype=torch.float64) + 0.5 * draws.small(d), torch.eye(d).double())
    )
    return draws.normal(n, d), *same, draws.weight(d, d)


def _heads(draws: Draws, n: int, d: int, width: int) -> tuple:
    return draws.normal(n, d), *(draws.normal(d, width) for _ in range(3))


def _narrow(draws: Draws) -> tuple:
    d = draws.whole(3, 8)
    if draws.whole(0, 3) == 0:
        return counterexamples.cubic_heads(draws.uniform(0.1, 1.5))
    return _heads(draws, d + draws.whole(0, 8), d, draws.whole(2, d - 1))


def _ffn_shapes(draws: Draws) -> tuple:
    d = draws.whole(2, 6)
    make = draws.orthonormal if draws.whole(0, 1) else draws.normal
    return draws.normal(d + draws.whole(0, 6), d), make(d, 4 * d), make(4 * d, d)


def _cancelling(d: int, distance: float = 1e-6) -> Tensor:
    """Return M = diag(−1 + distance, ½, …, ½)."""
    m = torch.full((d,), 0.5, dtype=torch.float64)
    m[0] = distance - 1
    return m.diag()


def _skipped(draws: Draws) -> tuple:
    d = draws.whole(2, 7)
    m = draws.normal(d, d) if draws.whole(0, 1) else _cancelling(d, 10 ** draws.uniform(-6, -1))
    return draws.full_rank(d + draws.whole(0, 4), d), m


def _rotated(build: Callable, check: Callable, theta: float) -> BoundCheck:
    """Check that a counterexample reaches 1/cos θ where the published bound says 1, both to a relative 1e-6."""
    found = check(*build(theta), form="paper")
    return judged(found.name, max(abs(found.measured * math.cos(theta) - 1), abs(found.bound - 1)), 1e-6)


def _raised(x: Tensor, m: Tensor) -> BoundCheck:
    """Check κ(XM) ≤ κ(XM + X): adding the input does not help."""
    return judged("4.2, the other way", condition_number(x @ m), condition_number(x @ m + x))


def _tall_and(draw: Callable[[Draws, int], Tensor]) -> Callable[[Draws], tuple]:
    def both(draws: Draws) -> tuple:
        d = draws.whole(2, 7)
        return draws.full_rank(d + draws.whole(0, 4), d), draw(draws, d)

    return both


def _nearly_singular(draws: Draws, d: int) -> Tensor:
    m = 0.3 * draws.small(d)
    m[:, -1] *= 1e-6
    return m


def _angle(draws: Draws) -> tuple[float]:
    return (draws.uniform(0.01, 1.56),)


CUBIC, FFN, SKIP = (
    partial(check, form="paper") for check in (bounds.cubic_condition, bounds.ffn_condition, bounds.skip_condition)
)


# Why the counterexamples have no search.
BUILT = "says what a counterexample reaches, which has nothing free but one angle or distance"

CONDITIONS = {
    "asa.prop41.as_stated": Statement(
        _any_shape, CUBIC, label="4.1 as published", search=(CUBIC, shaped((3, 4), (4, 4), (4, 4), (4, 4)))
    ),
    "asa.prop41.narrow_heads": Statement(
        _narrow, CUBIC, label="4.1 for a head's weights", search=(CUBIC, shaped((6, 4), (4, 2), (4, 2), (4, 2)))
    ),
    "asa.prop41.counterexample": Statement(
        _angle, partial(_rotated, counterexamples.cubic_wide, bounds.cubic_condition), unsearched=BUILT
    ),
    "asa.prop41.heads_counterexample": Statement(
        _angle, partial(_rotated, counterexamples.cubic_heads, bounds.cubic_condition), unsearched=BUILT
    ),
    "asa.prop41.repaired": Statement(
        _tall,
        bounds.cubic_condition,
        label="4.1, square weights, n ≥ d",
        search=(bounds.cubic_condition, shaped((5, 3), (3, 3), (3, 3), (3, 3))),
    ),
    "asa.prop41.definite": Statement(
        _definite,
        partial(bounds.cubic_condition, form="definite"),
        label="4.1, W_Q W_Kᵀ definite",
        search=(
            lambda x, w, v: bounds.cubic_condition(x, w, w, v, "definite"),
            shaped((3, 4), (4, 4), (4, 4)),
        ),
    ),
    "asa.ffn.as_stated": Statement(
        _ffn_shapes, FFN, label="FFN as published", search=(FFN, shaped((5, 3), (3, 12), (12, 3)))
    ),
    "asa.ffn.repaired": Statement(
        lambda draws: _tall(draws)[:3],
        bounds.ffn_condition,
        label="FFN, square weights",
        search=(bounds.ffn_condition, shaped((5, 3), (3, 3), (3, 3))),
    ),
    "asa.ffn.product": Statement(
        _ffn_shapes,
        partial(bounds.ffn_condition, form="product"),
        label="FFN, κ(W_up W_down)",
        search=(partial(bounds.ffn_condition, form="product"), shaped((5, 3), (3, 12), (12, 3))),
    ),
    "asa.ffn.counterexample": Statement(
        _angle, partial(_rotated, counterexamples.ffn_wide, bounds.ffn_condition), unsearched=BUILT
    ),
    "asa.prop42.as_stated": Statement(_skipped, SKIP, label="4.2 as published", search=(SKIP, shaped((5, 3), (3, 3)))),
    "asa.prop42.counterexample": Statement(_tall_and(lambda draws, d: _cancelling(d)), _raised, unsearched=BUILT),
    "asa.prop42.ratio": Statement(
        _tall_and(Draws.small),
        bounds.skip_condition,
        label="4.2, (1+m)/(1−m)",
        search=(lambda x, m: bounds.skip_condition(x, m / 10), shaped((5, 3), (3, 3))),
    ),
    "asa.prop42.definite": Statement(
        _tall_and(lambda draws, d: draws.small(d) * draws.uniform(0.1, 3)),
        partial(bounds.skip_condition, form="definite"),
        label="4.2, (1+m)/(1+μ)",
        search=(lambda x, m: bounds.skip_condition(x, m / 10, "definite"), shaped((5, 3), (3, 3))),
    ),
    "asa.prop42.sufficient": Statement(
        lambda draws: (draws.orthonormal(9, 4) * draws.uniform(1, 3), _nearly_singular(draws, 4)),
        partial(bounds.skip_condition, form="lowers"),
        label="4.2, κ(M) large enough",
        search=(  # M of κ ≈ 10⁴, which the search may lower until the hypothesis stops it
            lambda x, m: bounds.skip_condition(x, m / 10 * torch.logspace(0, -4, 3, dtype=torch.float64), "lowers"),
            shaped((5, 3), (3, 3)),
        ),
    ),
}
