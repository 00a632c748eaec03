"""Decide an empirical claim from its values, by an interval at 90 %: 5 % of what is decided by chance on either side.

The interval is Student's t for a mean, one value a seed, and Clopper and Pearson's for a share of cases. A claim names
the side of a threshold on which its effect lies and the smallest effect of interest; one that says "about" also names
the largest. An interval that decides nothing says how many values would: intervals shrink like 1/√n.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from scipy.stats import beta, t

CONFIDENCE = 0.9
HOLDS, CONTRADICTED, INCONCLUSIVE = "holds", "contradicted", "inconclusive"
MOST = 10_000  # where more values than these would be needed, their number is not worth stating


@dataclass(frozen=True)
class Interval:
    """A mean of `n` values with their standard deviation, and where it lies at CONFIDENCE."""

    mean: float
    low: float
    high: float
    sd: float
    n: int


def mean_interval(values: Iterable[float]) -> Interval:
    """Return the t interval of a mean: of infinite width for one value, of none where all values are equal.

    Raises ValueError for no value and for one that is not finite.
    """
    values = [float(value) for value in values]
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"expected finite values, got {values}")
    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return Interval(mean, -math.inf, math.inf, math.nan, 1)
    sd = statistics.stdev(values)
    half = half_width(sd, n)
    return Interval(mean, mean - half, mean + half, sd, n)


def half_width(sd: float, n: int) -> float:
    """Return half the width of the t interval of n ≥ 2 values with standard deviation `sd`."""
    return _quantile(n - 1) * sd / math.sqrt(n)


@lru_cache(maxsize=MOST)
def _quantile(degrees: int) -> float:
    return float(t.ppf((1 + CONFIDENCE) / 2, degrees))


def share_interval(hits: int, cases: int) -> Interval:
    """Return the percentage of `cases` ≥ 1 that are hits, with Clopper and Pearson's interval, never too short.

    Its `sd` is that of one case.
    """
    tail, share = (1 - CONFIDENCE) / 2, hits / cases
    low = float(beta.ppf(tail, hits, cases - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - tail, hits + 1, cases - hits)) if hits < cases else 1.0
    return Interval(100 * hits / cases, 100 * low, 100 * high, 100 * math.sqrt(share * (1 - share)), cases)


def decide_effect(effect: Interval, least: float, most: float = math.inf) -> str:
    """Decide a claim of an effect above 0: all of the interval above 0 and none above `most` holds.

    All of it below `least`, the smallest effect of interest, or all above `most` contradicts the claim.
    """
    if effect.high < least or effect.low > most:
        return CONTRADICTED
    return HOLDS if effect.low > 0 and effect.high <= most else INCONCLUSIVE


def decide_within(found: Interval, centre: float, tolerance: float) -> str:
    """Decide a number or an equivalence: all of the interval within centre ± tolerance holds, all outside contradicts.

    For an equivalence this is two one-sided tests at 5 % each.
    """
    slack = 1e-9 * max(1.0, abs(centre))  # 81.3 - 81.0 is not quite 0.3 in binary
    low, high = centre - tolerance - slack, centre + tolerance + slack
    if found.low > high or found.high < low:
        return CONTRADICTED
    return HOLDS if low <= found.low and found.high <= high else INCONCLUSIVE


def values_needed(sd: float, width: float) -> int | None:
    """Return the least n ≥ 2 whose interval is narrower than `width`, or None where it exceeds MOST or is not known.

    An interval narrower than the smallest effect of interest cannot reach from 0 to it, and so decides.
    """
    if not (math.isfinite(sd) and width > 0) or 2 * half_width(sd, MOST) >= width:
        return None
    low, high = 2, MOST
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if 2 * half_width(sd, middle) < width else (middle + 1, high)
    return low
