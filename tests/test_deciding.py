"""The decisions of the ledger: their intervals against scipy's, and how often they are wrong, by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from skiplab.companion import deciding
from skiplab.companion.deciding import CONTRADICTED, HOLDS, INCONCLUSIVE, Interval

DRAWS = 4000
ERROR = 3 * math.sqrt(0.05 * 0.95 / DRAWS)  # three standard errors of a share of 5 %


def outcomes(effect, sd, n, decide):
    """Return the share of each outcome over DRAWS samples of n values."""
    samples = np.random.default_rng(0).normal(effect, sd, (DRAWS, n))
    found = [decide(deciding.mean_interval(sample.tolist())) for sample in samples]
    return {outcome: found.count(outcome) / DRAWS for outcome in (HOLDS, CONTRADICTED, INCONCLUSIVE)}


@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_the_interval_is_scipys(n):
    values = np.random.default_rng(n).normal(3, 2, n)
    found = deciding.mean_interval(values.tolist())
    low, high = stats.t.interval(0.9, n - 1, values.mean(), stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)
    assert (found.mean, found.sd, found.n) == pytest.approx((values.mean(), values.std(ddof=1), n))


@pytest.mark.parametrize("hits, cases", [(0, 5), (1, 5), (5, 5), (293, 500), (0, 500), (500, 500), (0, 1), (1, 1)])
def test_the_interval_of_a_share_is_scipys(hits, cases):
    found = deciding.share_interval(hits, cases)
    exact = stats.binomtest(hits, cases).proportion_ci(0.9, method="exact")
    assert (found.low, found.high) == pytest.approx((100 * exact.low, 100 * exact.high), abs=1e-9)
    assert found.mean == 100 * hits / cases


def test_one_value_decides_nothing_and_equal_ones_everything():
    assert deciding.decide_effect(deciding.mean_interval([5.0]), 1) == INCONCLUSIVE
    assert deciding.decide_within(deciding.mean_interval([5.0]), 5, 1) == INCONCLUSIVE
    assert deciding.decide_effect(deciding.mean_interval([5.0] * 3), 1) == HOLDS
    assert deciding.decide_effect(deciding.mean_interval([0.5] * 3), 1) == CONTRADICTED
    for wrong in ([], [1.0, math.inf], [math.nan]):
        with pytest.raises(ValueError, match="finite values"):
            deciding.mean_interval(wrong)


@pytest.mark.parametrize(
    "low, high, least, most, outcome",
    [
        (0.1, 3, 1, math.inf, HOLDS),
        (0.1, 0.9, 1, math.inf, CONTRADICTED),  # sure, but too small to be what is claimed
        (-1, 0.9, 1, math.inf, CONTRADICTED),
        (-3, -1, 1, math.inf, CONTRADICTED),
        (-1, 1, 1, math.inf, INCONCLUSIVE),
        (1, 3, 1, 4, HOLDS),
        (1, 5, 1, 4, INCONCLUSIVE),
        (40, 60, 1, 4, CONTRADICTED),  # costs 50 points where about 2 are claimed
    ],
)
def test_effects(low, high, least, most, outcome):
    assert deciding.decide_effect(Interval((low + high) / 2, low, high, 1, 3), least, most) == outcome


@pytest.mark.parametrize(
    "low, high, outcome",
    [(80.7, 81.3, HOLDS), (80.6, 81.2, INCONCLUSIVE), (81.31, 82, CONTRADICTED), (79, 83, INCONCLUSIVE)],
)
def test_numbers(low, high, outcome):
    assert deciding.decide_within(Interval((low + high) / 2, low, high, 1, 3), 81.0, 0.3) == outcome


@pytest.mark.parametrize("n", [3, 5, 20])
def test_wrong_decisions_are_as_rare_as_they_should_be(n):
    """At no effect, and at the smallest one of interest, at most 5 % are decided the wrong way; so at the margins."""
    effect = lambda found: deciding.decide_effect(found, least=1)  # noqa: E731
    assert outcomes(0, 1, n, effect)[HOLDS] <= 0.05 + ERROR
    assert outcomes(1, 1, n, effect)[CONTRADICTED] <= 0.05 + ERROR
    within = lambda found: deciding.decide_within(found, 0, 1)  # noqa: E731
    assert outcomes(1, 0.3, n, within)[HOLDS] <= 0.05 + ERROR
    assert outcomes(0, 0.3, n, within)[CONTRADICTED] == 0
    assert outcomes(1, 0.3, n, within)[CONTRADICTED] <= 0.05 + ERROR


def test_power_at_the_papers_effect_is_the_t_tests():
    """At an effect of two standard deviations, five seeds tell in most cases, as the noncentral t says."""
    found = outcomes(2, 1, 5, lambda interval: deciding.decide_effect(interval, least=1))
    expected = 1 - stats.nct.cdf(stats.t.ppf(0.95, 4), 4, 2 * math.sqrt(5))
    assert found[HOLDS] == pytest.approx(expected, abs=0.03) and expected > 0.95


@pytest.mark.parametrize("sd, width", [(1, 1), (0.1, 1), (3, 0.7), (1, 0.1)])
def test_with_the_values_needed_every_sample_of_that_spread_is_decided(sd, width):
    n = deciding.values_needed(sd, width)
    assert 2 * deciding.half_width(sd, n) < width
    assert n == 2 or 2 * deciding.half_width(sd, n - 1) >= width
    for mean in np.linspace(-width, 2 * width, 61):
        half = deciding.half_width(sd, n)
        interval = Interval(mean, mean - half, mean + half, sd, n)
        assert deciding.decide_effect(interval, least=width) != INCONCLUSIVE


def test_nothing_is_said_of_how_many_are_needed_where_nobody_would_run_them():
    assert deciding.values_needed(1, 0.001) is None and deciding.values_needed(math.nan, 1) is None
    assert deciding.values_needed(1, 0) is None and deciding.values_needed(0, 1) == 2
