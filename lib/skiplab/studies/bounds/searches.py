"""Searches for worst cases: how close to a bound, or how far beyond it, gradients find their way."""

import math

from skiplab.companion.cases import shaped
from skiplab.studies.bounds.stacks import worst_gain
from skiplab.studies.bounds.statements import STATEMENTS
from skiplab.theory import bounds, counterexamples


def worst_cases(steps: int, restarts: int = 2) -> dict[str, float]:
    """Return for each statement that has a search, the largest measured/bound that gradient ascent finds."""
    return {
        name: counterexamples.adversarial_search(*statement.search, steps=steps, restarts=restarts).ratio
        for name, statement in STATEMENTS.items()
        if statement.search
    }


def largest_step(steps: int, seed: int = 0, n: int = 16) -> float:
    """Return the largest ‖HC A HC‖₂ that a search finds over positive row-stochastic (n, n): at most √(n/2)."""
    check = STATEMENTS["anti.cor2.dobrushin"].search[0]
    return counterexamples.adversarial_search(
        check, shaped((1, n, n)), steps=steps, step_size=0.3, seed=seed
    ).check.measured


def never_smoothing_keeps(layers: int, n: int = 8) -> float:
    """Return how many percent of HC the stack A_l = (1 − 2⁻ˡ)I + 2⁻ˡ 11ᵀ/n leaves."""
    return float(100 * worst_gain(counterexamples.never_smoothing(layers, n)))


def largest_normed(steps: int, seed: int = 0) -> tuple[float, float]:
    """Return the largest ‖HC[LN(x)]‖/‖HC[x]‖ that a search finds, and the share of the repaired bound reached there."""
    found = counterexamples.adversarial_search(
        lambda rest: bounds.layer_norm_rate(1 + rest / 50, form="paper"), shaped((6, 4)), steps=steps, seed=seed
    )
    x = 1 + found.inputs[0] / 50
    return found.ratio, math.exp(-bounds.layer_norm_rate(x).slack)
