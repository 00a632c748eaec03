"""The statements of data/claims.yaml that notebook 04 counts, by name, and surveys of them.

STATEMENTS holds how a case of each is drawn, judged and searched for, SHARES the same for each share of
draws. The mathematics is in `skiplab.theory.bounds`."""

from collections.abc import Callable

from skiplab.companion.cases import Draws, Statement, Survey, count
from skiplab.errors import unknown
from skiplab.studies.bounds.conditions import CONDITIONS, CUBIC, FFN, SKIP
from skiplab.studies.bounds.dominance import SKIPLESS
from skiplab.studies.bounds.rates import RATES
from skiplab.studies.bounds.stacks import STACKS

STATEMENTS = CONDITIONS | STACKS | RATES | SKIPLESS
# What the figure of slack calls each inequality, from the published ones to the repaired and the sharper.
LABELS = {claim: statement.label for claim, statement in STATEMENTS.items() if statement.label}


def _all(make: Callable[[Draws], Callable], *shapes: tuple[int, int]) -> Callable[[Draws], tuple]:
    """Draw a Gaussian X of the first shape and weights of the others."""
    return lambda draws: (draws.normal(*shapes[0]), *(make(draws)(*shape) for shape in shapes[1:]))


def _gaussian(draws: Draws) -> Callable:
    return draws.normal


def _orthonormal(draws: Draws) -> Callable:
    return draws.orthonormal


SHARES = {
    "asa.prop41.gaussian_draws": Statement(_all(_gaussian, (8, 16), *[(16, 16)] * 3), CUBIC),
    "asa.prop41.orthogonal_draws": Statement(_all(_orthonormal, (8, 16), *[(16, 16)] * 3), CUBIC),
    "asa.prop41.heads_draws": Statement(_all(_gaussian, (8, 4), *[(4, 2)] * 3), CUBIC),
    "asa.ffn.gaussian_draws": Statement(_all(_gaussian, (16, 8), (8, 32), (32, 8)), FFN),
    "asa.ffn.orthonormal_draws": Statement(_all(_orthonormal, (16, 8), (8, 32), (32, 8)), FFN),
    "asa.prop42.gaussian_draws": Statement(_all(_gaussian, (16, 8), (8, 8)), SKIP),
}


def survey(claim: str, cases: int, seed: int = 0) -> Survey:
    """Judge `cases` generated cases of a statement of STATEMENTS or SHARES. Raises InputError as `count` does."""
    known = STATEMENTS | SHARES
    if claim not in known:
        raise unknown("statement", claim, known)
    return count(claim, known[claim], cases, seed)
