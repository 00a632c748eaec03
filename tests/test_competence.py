"""What claims need of runs: each need at its edges, with what was found in words."""

import math

import numpy as np
import pandas
import pytest

from skiplab.companion import claims, competence, deciding
from skiplab.companion.judging import Need

HALF = deciding.half_width(1.0, 3)  # of three values that lie 1 apart


def three(middle):
    return [middle - 1, middle, middle + 1]


@pytest.mark.parametrize(
    "top1, met", [([46, 56], True), ([46, 55.9], False), ([51], True), ([50.9], False), ([51, math.nan], False)]
)
def test_learnt_is_half_of_the_way_from_chance_to_what_a_longer_run_reaches(top1, met):
    assert competence.learnt(top1, chance=10, reference=92).met == met


def test_learnt_says_what_was_reached():
    assert competence.learnt([40, 42], 10, 92) == Need(False, "the baseline reaches 41.0 % of the 51.0 % asked for")


@pytest.mark.parametrize(
    "arms, met",
    [
        ({"none": three(20.01 + HALF)}, True),
        ({"none": three(19.99 + HALF)}, False),  # the mean is above twice chance, the interval is not
        ({"none": [10, 10, 10], "no_ffn": three(40)}, True),  # one arm is enough
        ({"none": [math.nan, 10, 10], "no_ffn": three(40)}, True),
        ({"none": [math.nan, 80, 80]}, False),
        ({"none": [90]}, False),  # one seed has no interval
        ({"none": []}, False),
    ],
)
def test_off_floor_is_one_arm_whose_whole_interval_lies_above_twice_chance(arms, met):
    found = competence.off_floor(arms, chance=10)
    assert found.met == met and any(found.found.startswith(f"{name} is the best arm") for name in arms)


@pytest.mark.parametrize("epochs, met", [(30, True), (29, False)])
def test_long_enough_is_until_the_event(epochs, met):
    assert competence.long_enough(epochs, 30) == Need(met, f"{epochs} epochs of 30")


@pytest.mark.parametrize(
    "log_kappas, met",
    [([1, 2, math.inf], True), ([1, math.inf], False), ([math.nan, math.inf, 3], False), ([], False)],
)
def test_full_rank_is_a_finite_condition_number_in_more_than_half_of_the_images(log_kappas, met):
    assert competence.full_rank(log_kappas).met == met
    assert competence.full_rank(pandas.Series(log_kappas, dtype=float)).met == met


@pytest.mark.parametrize(
    "trained, untrained, sign, met",
    [
        (three(5 + HALF), [4.99] * 3, 1, True),
        (three(5 + HALF), [5.01] * 3, 1, False),
        ([1, 2, 3], [0.5, 1.5, 2.5], 1, True),  # paired: far less spread than either has alone
        ([1, 2, 3], [0.5, 1.5, 2.5], -1, False),
        ([-2, -2.1, -2.2], [-1, -1, -1], -1, True),
        ([100, 100, 100], [100, 100, 100], 1, False),  # what the untrained show too, training does not show
        ([5], [1], 1, False),
        ([5, 5, math.inf], [1, 1, 1], 1, False),
        ([5, 5, 5], [1, 1, math.nan], 1, False),
    ],
)
def test_beyond_untrained_is_a_paired_difference_on_the_claimed_side(trained, untrained, sign, met):
    assert competence.beyond(trained, untrained, sign=sign).met == met


def test_beyond_untrained_says_what_training_adds_and_wants_pairs():
    assert competence.beyond([-2, -3], [-1, -1], sign=-1).found == "untrained -1, training adds -1.5"
    with pytest.raises(ValueError):
        competence.beyond([1, 2], [1])


@pytest.mark.parametrize("sizes, met", [([0.005, 0.015], True), ([0.005, 0.0149], False), ([math.nan], False)])
def test_active_is_a_mean_size_of_one_percent(sizes, met):
    assert competence.active(sizes).met == met


@pytest.mark.parametrize(
    "after, met", [(three(30.01 + HALF), True), (three(29.99 + HALF), False), ([31, 31, math.nan], False)]
)
def test_pretraining_raises_the_neighbours_top1_with_the_whole_interval(after, met):
    assert competence.improved(after, [30, 30, 30]).met == met


def test_of_several_needs_all_must_be_met_and_the_unmet_are_told():
    met, one, other = Need(True, "a"), Need(False, "b"), Need(False, "c")
    assert competence.both(met, met) == Need(True, "a; a")
    assert competence.both(met, one, other) == Need(False, "b; c")
    assert not competence.both().met  # nothing was measured


def test_answers_are_plain_truth_values_whatever_numbers_come_in():
    values = np.float32([90, 91, 92])
    for need in (
        competence.learnt(values, np.float64(10), 92),
        competence.off_floor({"a": values}, np.float64(10)),
        competence.beyond(values, np.float32([1, 1, 1])),
        competence.active(values),
    ):
        assert type(need.met) is bool and need.met


def test_every_need_of_the_claims_has_a_function_here_or_in_the_study_it_speaks_of():
    own = {"beyond_untrained": "beyond", "pretrained": "improved"}
    assert {name for name in claims.needs() if not hasattr(competence, own.get(name, name))} == {"dominance"}
