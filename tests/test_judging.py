"""Verdicts: each kind of rule at its edges, at its tier and below, and how often chance alone decides."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from skiplab.companion import claims, deciding, judging
from skiplab.companion.judging import Measurement, Need
from skiplab.errors import InputError


def make(kind, tier="gpu", value=10.0, tolerance=2.0, needs=(), unit="points", **rule):
    """Build a claim by hand."""
    rule = claims.Rule(kind, **{"seeds": 3, **rule})
    return claims.Claim(
        "asa.x", "asa", "here", "it is so", "01_x", tier, rule, value, unit, tolerance, "so", needs=tuple(needs)
    )


def verdict(claim, values, preset="gpu"):
    return judging.judge(claim, Measurement(tuple(values)), preset).verdict


FALLS = make("effect", value=-2.0, test=claims.Test("below", 0.0, least=1.0))
ABOUT = make("number", value=-2.0, tolerance=1.0, lower=claims.Test("below", 0.0, least=1.0, most=4.0, seeds=3))
SAME = make("equivalence", value=0.0, tolerance=1.0, lower=claims.Test("within", 3.0, seeds=3))
MANY = make("effect", value=None, test=claims.Test("above", 90.0))
NUMBER = make("number")
HALF = deciding.half_width(1.0, 3)  # of three values that lie 1 apart


def three(middle):
    return (middle - 1, middle, middle + 1)


@pytest.mark.parametrize(
    ("claim", "preset", "values", "expected"),
    [
        (NUMBER, "gpu", (12, 12, 12), "reproduced"),  # the edge belongs to the tolerance
        (NUMBER, "paper", (8, 8, 8), "reproduced"),
        (NUMBER, "gpu", (12.01, 12.01, 12.01), "not reproduced"),
        (make("number", value=81.0, tolerance=0.3), "gpu", (81.3,) * 3, "reproduced"),  # 81.3 - 81.0 > 0.3 in binary
        (NUMBER, "gpu", three(12 - HALF), "reproduced"),
        (NUMBER, "gpu", three(12.01 - HALF), "inconclusive"),  # the mean is near, the interval reaches out
        (NUMBER, "gpu", three(11.99 + HALF), "inconclusive"),
        (NUMBER, "gpu", three(12.01 + HALF), "not reproduced"),
        (NUMBER, "gpu", (10, 10), "not run"),
        (NUMBER, "gpu", (), "not run"),
        (NUMBER, "gpu", (10, 10, math.nan), "not testable here"),
        (NUMBER, "gpu", (10, 10, math.inf), "not testable here"),
        (NUMBER, "quick", (10, 10, 10), "not run"),  # no test below its tier
        (FALLS, "gpu", three(-0.01 - HALF), "reproduced"),
        (FALLS, "gpu", three(0.01 - HALF), "inconclusive"),
        (FALLS, "gpu", three(-0.99 + HALF), "not reproduced"),  # short of the smallest effect of interest
        (FALLS, "gpu", (-0.5, -0.51, -0.52), "not reproduced"),  # surely below 0, and too small
        (FALLS, "gpu", (1, 2, 3), "not reproduced"),
        (FALLS, "gpu", (-1, -2, -math.inf), "not testable here"),
        (FALLS, "quick", three(-0.01 - HALF), "direction only"),
        (FALLS, "quick", (-0.5, -0.51, -0.52), "direction only"),  # below the tier only the side counts
        (FALLS, "quick", three(0.01 + HALF), "opposite here"),
        (FALLS, "quick", three(-0.01 + HALF), "inconclusive"),
        (FALLS, "quick", (-1, -2), "not run"),
        (ABOUT, "gpu", (-2, -2, -2.1), "reproduced"),
        (ABOUT, "gpu", (-4, -4, -4.1), "not reproduced"),
        (ABOUT, "quick", (-1, -1.1, -1.2), "direction only"),
        (ABOUT, "quick", (-50, -51, -52), "opposite here"),  # far more than what is claimed as little
        (ABOUT, "quick", (-3, -4, -5), "inconclusive"),
        (ABOUT, "custom", (2, 2.1, 2.2), "opposite here"),
        (SAME, "gpu", three(0), "inconclusive"),
        (SAME, "gpu", (-0.1, 0.0, 0.1), "reproduced"),
        (SAME, "gpu", (2.0, 2.1, 2.2), "not reproduced"),
        (SAME, "quick", three(0), "direction only"),
        (SAME, "quick", three(8), "opposite here"),
        (MANY, "gpu", (100, 100, 100), "reproduced"),
        (MANY, "gpu", (90, 90, 90), "inconclusive"),  # at the threshold
        (MANY, "quick", (89, 89, 89), "opposite here"),
    ],
)
def test_intervals_at_their_edges(claim, preset, values, expected):
    assert verdict(claim, values, preset) == expected


@pytest.mark.parametrize(
    ("value", "test", "measured", "expected"),
    [
        (None, claims.Test("above", 2.0), 2.01, "reproduced"),
        (None, claims.Test("above", 2.0), 2.0, "not reproduced"),
        (100.0, claims.Test("below", 100.0), 99.0, "reproduced"),
        (28.9, None, 28.95, "reproduced"),
        (28.9, None, 29.1, "not reproduced"),
        (28.9, None, math.inf, "not testable here"),
        (None, claims.Test("above", 2.0), None, "not run"),
    ],
)
def test_one_number_without_chance_is_compared_as_it_is(value, test, measured, expected):
    claim = make("exact", value=value, tolerance=0.1, test=test)
    assert verdict(claim, () if measured is None else (measured,)) == expected


@pytest.mark.parametrize(
    ("test", "hits", "cases", "preset", "expected"),
    [
        (claims.Test("above", 50.0), 5, 5, "gpu", "reproduced"),  # 5 of 5 come of 54.9 % or more
        (claims.Test("above", 50.0), 4, 5, "gpu", "inconclusive"),
        (claims.Test("above", 50.0), 0, 5, "gpu", "not reproduced"),
        (claims.Test("above", 50.0), 5, 5, "quick", "direction only"),
        (claims.Test("above", 50.0), 0, 5, "quick", "opposite here"),
        (claims.Test("above", 50.0), 4, 4, "gpu", "not run"),
        (claims.Test("below", 1.0), 0, 298, "gpu", "inconclusive"),  # 1 - 0.05^(1/298) is just above 1 %
        (claims.Test("below", 1.0), 0, 299, "gpu", "reproduced"),
        (claims.Test("above", 0.0, least=1.0), 1, 300, "gpu", "reproduced"),
        (claims.Test("above", 0.0, least=1.0), 0, 300, "gpu", "not reproduced"),
    ],
)
def test_shares_at_their_edges(test, hits, cases, preset, expected):
    claim = make("share", value=None, cases=5, test=test, unit="% of seeds")
    found = judging.judge(claim, Measurement(violations=hits, cases=cases), preset)
    assert found.verdict == expected and "seeds would" not in found.detail


@pytest.mark.parametrize(
    ("tier", "preset", "violations", "cases", "expected"),
    [
        ("quick", "smoke", 0, 200, "reproduced"),  # mathematics needs no GPU
        ("quick", "quick", 0, 199, "not run"),
        ("quick", "quick", 1, 200, "false in the form our sources give"),
        ("quick", "quick", 1, 1, "false in the form our sources give"),  # one counterexample is enough
        ("gpu", "quick", 0, 200, "direction only"),
        ("gpu", "quick", 1, 200, "opposite here"),
        ("gpu", "gpu", 0, 200, "reproduced"),
    ],
)
def test_statements_are_decided_by_counting(tier, preset, violations, cases, expected):
    claim = make("statement", tier=tier, cases=200)
    measured = Measurement(violations=violations, cases=cases, note="X = 0" if violations else "")
    found = judging.judge(claim, measured, preset)
    assert found.verdict == expected and ("X = 0" in found.detail) == bool(violations)
    ours = judging.judge(dataclasses.replace(claim, whose="ours"), measured, preset)
    assert ours.in_words == ("false" if violations and tier == preset else expected)


# --- Needs and words --------------------------------------------------------------------------------------------------

MET, UNMET = Need(True, "90 %"), Need(False, "12 % of 50 %")


@pytest.mark.parametrize(
    ("needs", "values", "expected", "detail"),
    [
        ({"learnt": MET, "active": MET}, (-2, -2, -2), "reproduced", ""),
        ({"learnt": MET, "active": UNMET}, (-2, -2, -2), "not testable here", "needs active: 12 % of 50 %"),
        ({"learnt": UNMET, "active": MET}, (5, 5, 5), "not testable here", "needs learnt: 12 % of 50 %"),
        ({"learnt": MET}, (-2, -2, -2), "not testable here", "needs active: nothing is said of it"),
        ({"learnt": MET, "active": MET, "more": UNMET}, (-2, -2, -2), "reproduced", ""),  # no need of this claim
        ({"learnt": UNMET, "active": UNMET}, (-2, -2), "not run", "2 of 3 seeds"),
    ],
)
def test_a_claim_is_decided_only_where_its_needs_are_met(needs, values, expected, detail):
    claim = dataclasses.replace(FALLS, needs=("learnt", "active"))
    found = judging.judge(claim, Measurement(values, needs=needs), "gpu")
    assert (found.verdict, found.detail) == (expected, detail)


def test_even_a_counterexample_needs_what_the_statement_needs():
    claim = make("statement", cases=4, needs=["learnt"])
    counted = Measurement(violations=1, cases=9, note="at depth 2", needs={"learnt": UNMET})
    assert judging.judge(claim, counted, "gpu").verdict == "not testable here"


def test_numpys_numbers_and_truth_values_are_taken():
    values = np.array([-1.0, -2.0, -3.0], dtype="float32")
    assert Measurement(values).values == (-1.0, -2.0, -3.0)
    assert Measurement(violations=np.int64(0), cases=np.int64(9)) == Measurement(violations=0, cases=9)
    assert Need(np.float64(2) > 1, "so") == Need(True, "so") and type(Need(np.bool_(False), "").met) is bool


@pytest.mark.parametrize("values", ["80", ("eighty",), 80.0, (None,), ((1, 2),)])
def test_a_measurement_takes_numbers_only(values):
    with pytest.raises(InputError, match="numbers as values"):
        Measurement(values)


@pytest.mark.parametrize("met, found", [("True", "so"), (None, "so"), (0.5, "so"), (True, None)])
def test_a_need_is_met_or_not(met, found):
    with pytest.raises(InputError, match="a need is met or not, and says what was found"):
        Need(met, found)


@pytest.mark.parametrize(
    ("claim", "preset", "values", "detail"),
    [
        (FALLS, "gpu", (-2, -2, -2), ""),
        (FALLS, "gpu", (2, 2, 2), ""),
        (FALLS, "gpu", (-0.5, -0.5, -0.5), "any effect is smaller than 1, the least of interest"),
        (FALLS, "quick", (-0.1, 0.0, 0.1), "any effect is smaller than 1, the least of interest"),
        (FALLS, "gpu", three(-1), "about 13 seeds would decide"),
        (FALLS, "gpu", (-100, 0, 100), ""),  # more seeds than anyone would run
        (ABOUT, "quick", (-9, -9, -9), "beyond 4, the most that is claimed"),
        (MANY, "gpu", (89, 90, 92), ""),  # no smallest effect, no number of seeds
        (NUMBER, "quick", (10, 10, 10), "a number to compare from preset gpu on"),
        (NUMBER, "gpu", (10,), "1 of 3 seeds"),
        (NUMBER, "gpu", three(12), "about 5 seeds would decide"),
    ],
)
def test_a_detail_says_why_nothing_was_decided_or_not_for_the_claim(claim, preset, values, detail):
    assert judging.judge(claim, Measurement(values), preset).detail == detail


def test_the_seeds_that_would_decide_are_those_of_an_interval_narrower_than_the_least_of_interest():
    n = int(judging.judge(FALLS, Measurement(three(-1)), "gpu").detail.split()[1])
    width = lambda count: 2 * stats.t.ppf(0.95, count - 1) / math.sqrt(count)  # noqa: E731  of values with sd 1
    assert width(n) < FALLS.rule.test.least <= width(n - 1)


def test_what_was_measured_in_words():
    words = lambda claim, *values: judging.judge(claim, Measurement(values), "gpu").measured  # noqa: E731
    assert words(NUMBER, 1.0, 2.0, 3.0) == "+2.0 (+0.3 to +3.7) points"
    assert words(NUMBER, 1.0) == "+1.0 points" and words(NUMBER) == ""
    assert words(NUMBER, 1.0, math.inf, 1.0) == "1 of 3 values not finite"
    counted = Measurement(violations=5, cases=5)
    share = make("share", cases=5, test=claims.Test("above", 50.0), unit="% of seeds")
    assert judging.judge(share, counted, "gpu").measured == "100.0 (54.9 to 100.0) % of seeds"
    assert judging.judge(make("statement", cases=5), counted, "gpu").measured == "5 of 5 violate it"


def test_a_measurement_is_compared_with_what_each_source_gives():
    disagree = make("fixed", verdict="sources disagree", evidence="why", value=(10.0, 20.0))
    said = lambda claim, *values: judging.judge(claim, Measurement(values), "gpu")  # noqa: E731
    assert said(disagree, 19.0).detail == "measured value agrees with +20.0; why"
    assert said(disagree, 15.0).detail == "measured value agrees with none of the values given; why"
    assert {said(disagree, *values).verdict for values in ((), (10.0,), (math.nan,))} == {"sources disagree"}
    vague = make("fixed", verdict="vague", evidence="why", tolerance=0.0)
    assert said(vague, 10.0).detail == "why"  # no tolerance, no comparison


# --- Properties -------------------------------------------------------------------------------------------------------

finite = st.floats(-1e6, 1e6)
several = st.lists(finite, min_size=3, max_size=6)


@given(several, finite, st.floats(0, 1e3), st.sampled_from(["quick", "gpu"]))
def test_a_claim_and_its_mirror_image_have_the_same_verdict(values, threshold, least, preset):
    above = make("effect", value=None, test=claims.Test("above", threshold, least))
    below = make("effect", value=None, test=claims.Test("below", -threshold, least))
    assert verdict(above, values, preset) == verdict(below, [-value for value in values], preset)


@given(several, finite, st.floats(0, 1e3))
def test_two_opposite_claims_never_both_hold_and_one_holds_where_the_other_is_opposite(values, threshold, least):
    above, below = (make("effect", value=None, test=claims.Test(op, threshold, least)) for op in ("above", "below"))
    both = {verdict(above, values, "quick"), verdict(below, values, "quick")}
    assert both in ({"direction only", "opposite here"}, {"inconclusive"})
    assert [verdict(claim, values) for claim in (above, below)].count("reproduced") <= 1


@given(several, finite, st.floats(0, 1e3), st.floats(0, 1e3))
def test_more_of_an_effect_never_speaks_against_it_and_a_tier_only_asks_for_more(values, threshold, least, step):
    claim = make("effect", value=None, test=claims.Test("above", threshold, least))
    order = ["not reproduced", "inconclusive", "reproduced"]
    before, after = (order.index(verdict(claim, [value + shift for value in values])) for shift in (0.0, step))
    assume(step == 0 or step > 1e-3)  # a smaller shift drowns in rounding
    assert after >= before
    if order[before] == "reproduced":
        assert verdict(claim, values, "quick") == "direction only"
    if verdict(claim, values, "quick") == "opposite here":
        assert order[before] == "not reproduced"


@given(several, finite, st.floats(0, 1e3), st.floats(0, 1e3))
def test_a_wider_tolerance_never_turns_a_number_away(values, value, tolerance, more):
    order = ["not reproduced", "inconclusive", "reproduced"]
    narrow, wide = (make("number", value=value, tolerance=width) for width in (tolerance, tolerance + more))
    assert order.index(verdict(wide, values)) >= order.index(verdict(narrow, values))


@given(
    st.lists(st.floats(), max_size=5),
    st.sampled_from(sorted(judging.RANK)),
    st.sampled_from([one for one in claims.claims().values() if one.rule.kind not in ("statement", "share")]),
    st.booleans(),
)
def test_any_numbers_give_a_verdict_in_one_line(values, preset, claim, met):
    if all(not math.isfinite(value) or abs(value) < 1e100 for value in values):
        measured = Measurement(tuple(values), needs=dict.fromkeys(claim.needs, Need(met, "so")))
        found = judging.judge(claim, measured, preset)
        assert found.group in judging.VERDICTS and "\n" not in str(found)


@given(
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from([one for one in claims.claims().values() if one.rule.kind in ("statement", "share")]),
    st.sampled_from(sorted(judging.RANK)),
)
def test_any_counts_give_a_verdict_in_one_line(violations, more, claim, preset):
    counted = Measurement(violations=violations, cases=violations + more, note="x")
    found = judging.judge(claim, counted, preset)
    assert found.group in judging.VERDICTS and "\n" not in str(found)


# --- Chance -----------------------------------------------------------------------------------------------------------

DRAWS = 1500
ERROR = 3 * math.sqrt(0.05 * 0.95 / DRAWS)  # three standard errors of a share of 5 %


def verdicts(claim, mean, sd, n, preset, seed):
    """Return the share of each verdict over DRAWS samples of n values."""
    claim = dataclasses.replace(claim, rule=dataclasses.replace(claim.rule, seeds=n))
    samples = np.random.default_rng(seed).normal(mean, sd, (DRAWS, n))
    found = [verdict(claim, sample, preset) for sample in samples]
    return {word: found.count(word) / DRAWS for word in judging.VERDICTS}


@pytest.mark.parametrize("n", [2, 3, 8, 30])
@pytest.mark.parametrize("preset", ["quick", "gpu"])
def test_where_there_is_no_effect_at_most_one_claim_in_twenty_is_decided_for_it(n, preset):
    for sd in (0.3, 3):
        found = verdicts(FALLS, 0.0, sd, n, preset, n)
        assert found["reproduced"] + found["direction only"] <= 0.05 + ERROR
        assert found["opposite here"] <= 0.05 + ERROR


@pytest.mark.parametrize("n", [2, 3, 8, 30])
def test_where_the_effect_is_of_interest_at_most_one_claim_in_twenty_is_decided_against_it(n):
    assert verdicts(FALLS, -FALLS.rule.test.least, 1, n, "gpu", n)["not reproduced"] <= 0.05 + ERROR
    assert verdicts(FALLS, 0.0, 1, n, "quick", n)["opposite here"] <= 0.05 + ERROR


@pytest.mark.parametrize("sd, n", [(1, 3), (1, 5), (2, 8), (3, 30)])
def test_at_the_papers_effect_power_is_the_t_tests(sd, n):
    found = verdicts(FALLS, FALLS.value, sd, n, "gpu", n)
    power = 1 - stats.nct.cdf(stats.t.ppf(0.95, n - 1), n - 1, abs(FALLS.value) / sd * math.sqrt(n))
    short = verdicts(FALLS, FALLS.value, sd, n, "gpu", n)["not reproduced"]  # sure and too small: it costs power
    assert power - 0.05 - ERROR <= found["reproduced"] <= power + 0.04 and short <= 0.05 + ERROR


@pytest.mark.parametrize("n", [3, 8])
def test_a_number_at_the_edge_of_its_tolerance_is_decided_wrongly_in_one_run_of_twenty(n):
    for mean in (8.0, 12.0):
        found = verdicts(NUMBER, mean, 0.5, n, "gpu", n)
        assert found["reproduced"] <= 0.05 + ERROR and found["not reproduced"] <= 0.05 + ERROR


@pytest.mark.parametrize("cases", [5, 30])
def test_a_share_at_its_threshold_is_decided_in_one_run_of_twenty_on_either_side(cases):
    claim = make("share", value=None, cases=5, test=claims.Test("above", 50.0), unit="%")
    chances = {word: 0.0 for word in judging.VERDICTS}
    for hits in range(cases + 1):
        word = judging.judge(claim, Measurement(violations=hits, cases=cases), "gpu").verdict
        chances[word] += stats.binom.pmf(hits, cases, 0.5)
    assert 0 < chances["reproduced"] <= 0.05 and 0 < chances["not reproduced"] <= 0.05


# --- Times ------------------------------------------------------------------------------------------------------------

SPEED = make("timing", value=2.2, repetitions=3, test=claims.Test("above", 2.0), lower=claims.Test("above", 1.0))
NEAR = make("timing", value=2.0, repetitions=3, test=claims.Test("within", 0.5))


@pytest.mark.parametrize(
    ("claim", "preset", "values", "expected", "there"),
    [
        (SPEED, "gpu", (2.1, 2.5, 9), "holds on 1 of 1 processor", "holds"),
        (SPEED, "gpu", (2.0, 2.5, 9), "holds on 0 of 1 processor", "undecided"),  # the edge is not above
        (SPEED, "gpu", (1.1, 1.5, 1.9), "holds on 0 of 1 processor", "does not hold"),
        (SPEED, "quick", (1.1, 1.5, 1.9), "direction holds on 1 of 1 processor", "holds"),
        (SPEED, "gpu", (9, 9), "not run", "2 of 3 repetitions"),
        (SPEED, "gpu", (9, 9, math.inf), "holds on 0 of 1 processor", "does not hold"),
        (SPEED, "gpu", (), "not run", "0 of 3 repetitions"),
        (NEAR, "gpu", (1.5, 2.0, 2.5), "holds on 1 of 1 processor", "holds"),  # both edges belong to it
        (NEAR, "gpu", (1.4, 2.0, 2.1), "holds on 0 of 1 processor", "undecided"),
        (NEAR, "gpu", (1.0, 2.0, 3.0), "holds on 0 of 1 processor", "undecided"),  # on both sides of the value
        (NEAR, "gpu", (2.6, 2.7, 2.8), "holds on 0 of 1 processor", "does not hold"),
    ],
)
def test_the_whole_range_of_times_decides(claim, preset, values, expected, there):
    found = judging.judge(claim, Measurement(values, processors=("A",)), preset)
    assert (found.verdict, found.detail) == (expected, f"A: {there}" if values else there)


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=6), st.sampled_from([SPEED, NEAR]))
def test_times_hold_or_fail_only_where_every_repetition_agrees(values, claim):
    word = judging.on_one(claim, tuple(values), "gpu")
    each = {judging.on_one(claim, (value,), "gpu") for value in values}
    assert word == judging.UNDECIDED or each == {word}
