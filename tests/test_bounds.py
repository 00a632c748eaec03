"""Tests that could refute each statement of the papers, or the code that checks it.

Every statement is tried on generated cases with adversarial structure, and a deliberately wrong bound must be caught on
the same cases. HYPOTHESIS_PROFILE=nightly runs 2,000 cases a statement instead of 200, from new seeds.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skiplab.errors import InputError
from skiplab.theory import bounds
from skiplab.theory.bounds.checks import compare, kappa
from skiplab.theory.conditioning import condition_number
from statements import CASE, CASES, EYE, KINDS, NIGHTLY, STATEMENTS, Case, ffn, heads, layer

many = settings(max_examples=CASES, deadline=None, derandomize=not NIGHTLY, database=None)


@pytest.mark.parametrize("name", STATEMENTS)
def test_statement_is_never_refuted_and_mostly_says_something(name):
    verdicts = []

    @many
    @given(**CASE, seed=st.integers(0, 2**31))
    def run(**case):
        check = STATEMENTS[name].check(Case(**case))
        verdicts.append(check.holds)
        assert check.holds is not False, check
        assert (check.holds is None) == (not all(check.hypotheses.values())), check

    run()
    assert len(verdicts) >= CASES
    assert sum(v is True for v in verdicts) >= 0.3 * len(verdicts), "the hypotheses hardly ever hold: this tests little"


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_wrong_bound_is_caught(name):
    """Negative control: the same cases and the same comparison must refute a bound that is a little too good."""
    statement = STATEMENTS[name]
    generator = np.random.default_rng(0)
    for seed_ in range(10 * CASES):
        n, d, scale = (int(generator.choice(values)) for values in (range(1, 8), range(1, 7), (-3, 0, 3)))
        case = Case(n, d, scale, generator.choice(KINDS), seed_)
        right = statement.check(case)
        rounding = 1e-9 * right.measured
        if right.holds and not compare(name, right.measured, statement.wrong(right, case), {}, rounding).holds:
            return
    pytest.fail(f"a wrong bound for {name} survived {10 * CASES} cases")


def test_heads_forms_are_ordered_and_no_factor_of_heads_is_needed():
    for seed_ in range(50):
        case = heads(Case(5, 4, 0, "normal", seed_))
        paper, root, whole = (bounds.multihead_rate(*case, form=form).bound for form in ("paper", "root", "whole"))
        assert whole <= root * (1 + 1e-12) <= paper * (1 + 1e-9)


def test_kappa_is_the_one_of_conditioning():
    for x in (Case(5, 3, 0, kind, 0).tokens() for kind in KINDS):
        assert float(kappa(x)) == pytest.approx(float(condition_number(x)))


def test_stationary_distribution_is_invariant():
    for scale in (0.1, 1, 20):
        attn = torch.softmax(
            scale * torch.randn(9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64), -1
        )
        pi = bounds.stationary_distribution(attn)
        torch.testing.assert_close(pi @ attn, pi)
        assert float(pi.sum()) == pytest.approx(1)


def test_the_dobrushin_coefficient_is_the_largest_distance_of_two_rows():
    attn = torch.softmax(torch.randn(4, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=-1)
    expected = [max(float((a - b).abs().sum()) / 2 for a in one for b in one) for one in attn]
    assert bounds.dobrushin(attn).tolist() == pytest.approx(expected)


def test_theorem_1_on_nearly_the_identity_takes_many_steps():
    attn = (1 - 1e-9) * EYE[:4, :4] + 1e-9 / 4
    assert bounds.low_pass_limit(attn, torch.arange(1.0, 5)[:, None]).holds is True


def test_logits_of_a_thousand_do_not_overflow():
    x, w = torch.randn(5, 4), torch.randn(4, 4)
    logits = 1e3 * torch.randn(2, 5, 5)
    checks = [bounds.attention_rate(x, logits[0], w, form) for form in ("paper", "range", "sharp")]
    checks += [bounds.multihead_rate(x, logits, w, w), bounds.diffuse_rows(logits[0]), bounds.diagonal_rows(logits[0])]
    checks += [bounds.attention_rate(x, logits[0] * 0 + 1e3, w, form) for form in ("range", "sharp")]
    for check in checks:
        assert check.holds is not False and not math.isnan(check.measured) and not math.isnan(check.bound)
    assert checks[-1].bound == 0  # equal logits, however large: all tokens become one


@pytest.mark.parametrize("kind", KINDS)
def test_float32_input_gives_the_float64_numbers(kind):
    c = Case(6, 4, 0, kind, 1)
    for function, inputs in (
        (bounds.attention_rate, layer(c)), (bounds.multihead_rate, heads(c)), (bounds.ffn_rate, ffn(c)),
        (bounds.product_low_pass, (c.attention(2),)), (bounds.low_pass_rate, (c.attention(), c.tokens(), 2)),
        (bounds.diffuse_rows, (c.logits(),)),
    ):  # fmt: skip
        single = [value.float() if isinstance(value, torch.Tensor) else value for value in inputs]
        exact = [value.double() if isinstance(value, torch.Tensor) else value for value in single]
        low, high = function(*single), function(*exact) if "low" not in function.__name__ else function(*inputs)
        assert low.holds is high.holds is True
        assert low.measured == pytest.approx(high.measured, rel=1e-4, abs=1e-5)
        assert low.bound == pytest.approx(high.bound, rel=1e-4, abs=1e-5)


# --- Words for bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: bounds.attention_rate(EYE, EYE, EYE, "sharpest"), "did you mean 'sharp'"),
        (lambda: bounds.attention_rate(EYE, EYE[:3], EYE), r"saw \(8, 8\), \(1, 3, 8\)"),
        (lambda: bounds.multihead_rate(EYE, EYE, EYE, EYE), r"expected logits \(H, n, n\)"),
        (lambda: bounds.multihead_rate(EYE, EYE.expand(3, 8, 8), EYE, EYE), r"expected logits \(H, n, n\)"),
        (lambda: bounds.cubic_condition(EYE[:, :4], EYE, EYE, EYE), "expected weights"),
        (lambda: bounds.ffn_condition(EYE, EYE[:, :3], EYE), "expected x"),
        (lambda: bounds.skip_condition(EYE, EYE[:3]), r"m \(d, d\)"),
        (lambda: bounds.residual_rate(EYE, EYE[:3], 1.0), "one shape"),
        (lambda: bounds.product_low_pass([]), "one or more maps"),
        (lambda: bounds.product_low_pass([EYE, EYE[:3, :3]]), "one size"),
        (lambda: bounds.product_low_pass([2 * EYE]), "sum to 1"),
        (lambda: bounds.low_pass_limit(EYE[None], EYE), "one map"),
        (lambda: bounds.low_pass_limit(EYE, EYE[:2]), "the same n"),
        (lambda: bounds.diffuse_rows(EYE[:2]), "square"),
        (lambda: bounds.dominant_term(EYE, EYE[:2]), "square"),
        (lambda: bounds.diffuse_rows(EYE * torch.nan), "logits must be.*finite"),
        (lambda: bounds.ffn_rate(EYE, EYE, EYE, activation="gelo"), "did you mean 'gelu'"),
        (lambda: bounds.logit_bound("l3", 1.0, EYE, EYE), "kind of logits 'l3'"),
        (lambda: bounds.attention_logits("dots", EYE, EYE, EYE), "did you mean 'dot'"),
    ],
)
def test_bad_input_is_refused_in_one_line(call, words):
    with pytest.raises(InputError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
