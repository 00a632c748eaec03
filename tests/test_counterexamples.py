"""Counterexamples fail where they should and only there; the search for worst cases makes true bounds tight."""

import math

import pytest
import torch

from rounding import roundoff
from skiplab.errors import InputError
from skiplab.theory import bounds, counterexamples
from skiplab.theory.counterexamples import adversarial_search
from skiplab.theory.spectral import hc_ratio
from statements import EYE, STATEMENTS, normal

COUNTEREXAMPLES = {
    "4.1, n < d": (bounds.cubic_condition, counterexamples.cubic_wide, {}, {"definite": True}),
    "4.1, narrow heads": (bounds.cubic_condition, counterexamples.cubic_heads, {}, {}),
    "ffn, d to 4d": (bounds.ffn_condition, counterexamples.ffn_wide, {}, {"product": True}),
    "theorem 1, mean zero": (bounds.low_pass_limit, counterexamples.stationary_mean_zero, {}, {"floor": True}),
}


@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_counterexample_refutes_the_published_form_and_not_the_repaired_one(name):
    check, build, options, others = COUNTEREXAMPLES[name]
    assert check(*build(), **options, form="paper").holds is False
    assert check(*build(), **options, form="repaired").holds is None
    for form, expected in others.items():
        assert check(*build(), **options, form=form).holds is expected


def test_counterexamples_reach_the_values_they_promise():
    for check, build in (
        (bounds.cubic_condition, counterexamples.cubic_wide),
        (bounds.cubic_condition, counterexamples.cubic_heads),
        (bounds.ffn_condition, counterexamples.ffn_wide),
    ):
        for theta in (0.1, 1.0, 1.5):
            found = check(*build(theta), form="paper")
            assert found.measured == pytest.approx(1 / math.cos(theta)) and found.bound == pytest.approx(1)


def test_skip_that_cancels():
    x, m = counterexamples.skip_cancels()
    worse = bounds.skip_condition(x, m, "paper")
    assert worse.holds is False and worse.measured == pytest.approx(7.5e6) and worse.bound == pytest.approx(5)
    assert bounds.skip_condition(x, m).holds is True
    assert bounds.skip_condition(x, m, "definite").holds is True
    assert bounds.skip_condition(x, m, "lowers").holds is None


def test_mean_zero_ratio_stays_up_also_for_doubly_stochastic_attention():
    attn = 0.7 * EYE[:4, :4] + 0.3 / 4
    z = torch.tensor([[1.0], [-1], [2], [-2]], dtype=torch.float64)
    assert bounds.low_pass_limit(attn, z, "paper").measured > 1e6
    assert bounds.low_pass_limit(attn, z + 1e-9).holds is True  # ever so little mean, and the theorem is right again


def test_second_eigenvalue_is_no_bound_from_the_first_step():
    attn, z = counterexamples.amplifying_attention(16)
    refuted = bounds.low_pass_rate(attn, z, 1, "paper")
    assert refuted.holds is False and refuted.measured > 0.99 * math.sqrt(16 / 2) * float(torch.linalg.vector_norm(z))
    assert bounds.low_pass_rate(attn, z, 1).holds is True


def test_products_that_never_smooth_and_that_smooth_with_large_coefficients():
    never = bounds.product_low_pass(counterexamples.never_smoothing())
    assert never.measured == pytest.approx(0.28878809508660)
    fast = bounds.product_low_pass(counterexamples.smoothing_despite_tau())
    assert fast.bound > 0.28 and fast.measured < roundoff(torch.float64, 48 * 4) and fast.holds is True


def test_layer_norm_raises_hc():
    x = counterexamples.layer_norm_raises()
    refuted = bounds.layer_norm_rate(x, form="paper")
    assert refuted.holds is False and refuted.measured > 1000 * refuted.bound
    for form in ("repaired", "sharp"):
        assert bounds.layer_norm_rate(x, form=form).slack == pytest.approx(0, abs=1e-9)


def test_block_with_skip_can_be_a_high_pass_filter():
    x, branch = counterexamples.skip_high_pass()
    assert hc_ratio(x) < 10 and hc_ratio(x + branch) > 1e12


# --- Adversarial search -----------------------------------------------------------------------------------------------


def test_every_statement_is_searched_but_those_that_depend_on_a_number_of_steps():
    unsearched = {name for name, statement in STATEMENTS.items() if not statement.searched}
    assert unsearched == {"theorem 1", "theorem 1, floor"}


@pytest.mark.parametrize("name", [name for name, statement in STATEMENTS.items() if statement.searched])
def test_search_makes_a_true_bound_tight_and_no_more(name):
    statement = STATEMENTS[name]
    found = adversarial_search(statement.searched, statement.sample, restarts=statement.starts, steps=250)
    assert statement.least < found.ratio <= 1 + 1e-6 and found.check.holds is True
    assert statement.searched(*found.inputs).slack == pytest.approx(found.check.slack, abs=1e-9)


@pytest.mark.parametrize(
    "check, sample",
    [
        (lambda *a: bounds.cubic_condition(*a, form="paper"), normal((3, 4), (4, 4), (4, 4), (4, 4))),
        (lambda *a: bounds.ffn_condition(*a, form="paper"), normal((5, 3), (3, 12), (12, 3))),
        (lambda *a: bounds.skip_condition(*a, form="paper"), normal((5, 3), (3, 3))),
        (lambda x: bounds.layer_norm_rate(x, form="paper"), normal((6, 4))),
    ],
)
def test_search_finds_the_counterexamples_again_from_gaussian_starts(check, sample):
    found = adversarial_search(check, sample, restarts=2, steps=100)
    assert found.ratio > 1.5 and found.check.holds is False


def test_search_does_not_count_points_where_a_hypothesis_fails():
    with pytest.raises(InputError, match="no point where all hypotheses hold"):
        adversarial_search(lambda x, m: bounds.skip_condition(x, m + 9), normal((5, 3), (3, 3)), restarts=1, steps=3)
