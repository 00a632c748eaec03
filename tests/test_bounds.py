"""Tests that could refute each statement of the papers, or the code that checks it.

Every statement is tried on generated cases with adversarial structure; a deliberately wrong bound must be caught on
the same cases; formulas are compared with independent ones; counterexamples fail where they should and only there.
HYPOTHESIS_PROFILE=nightly runs 2,000 cases a statement instead of 200, from new seeds.
"""

import math
import os

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rounding import roundoff
from skiplab.errors import InputError
from skiplab.theory import bounds, counterexamples
from skiplab.theory.conditioning import condition_number
from skiplab.theory.spectral import hc, hc_ratio

torch.set_num_threads(1)
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
CASES = 2000 if NIGHTLY else 200
many = settings(max_examples=CASES, deadline=None, derandomize=not NIGHTLY, database=None)
EYE = torch.eye(8, dtype=torch.float64)


class Case:
    """One generated case: sizes, a scale, and tensors with a structure that is likely to break a bound."""

    def __init__(self, n, d, scale, kind, seed):
        self.n, self.d, self.scale, self.kind = n, d, 10.0**scale, kind
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def tokens(self, n=None, d=None):
        x = self.normal(n or self.n, d or self.d)
        if self.kind == "deficient":
            x[:, -1] = x[:, 0]
            x[-1] = x[0]
        elif self.kind == "one-hot":
            x = torch.zeros_like(x)
            x[torch.arange(len(x)), torch.arange(len(x)) % x.shape[1]] = 1
        elif self.kind == "nearly equal":
            x = x[:1] + 1e-6 * x
        elif self.kind == "ill-conditioned":
            x = x * torch.logspace(0, -3, x.shape[1], dtype=torch.float64)
        return self.scale * x

    def weight(self, rows, columns):
        w = self.normal(rows, columns)
        if self.kind in ("one-hot", "uniform"):
            q, _ = torch.linalg.qr(self.normal(max(rows, columns), min(rows, columns)))
            w = q if rows >= columns else q.mT
        elif self.kind == "ill-conditioned":
            w = w * torch.logspace(0, -3, columns, dtype=torch.float64)
        return w * 10 ** float(self.normal(1))

    def logits(self, *batch):
        p = self.normal(*batch, self.n, self.n)
        if self.kind == "uniform":
            return p * 1e-6 + 3
        if self.kind == "one-hot":
            return 1e3 * p
        if self.kind == "nearly identity":
            return p + 12 * torch.eye(self.n, dtype=torch.float64)
        if self.kind == "two targets":  # the worst case of corollary 2: half look at token 1, half at token 2
            targets = torch.arange(self.n) % min(self.n, 2)
            return 30.0 * torch.nn.functional.one_hot(targets, self.n).expand(*batch, -1, -1)
        return p * 10 ** float(self.normal(1))

    def attention(self, *batch):
        return torch.softmax(self.logits(*batch), dim=-1)

    def small(self, m):
        """Scale a square matrix to norm below 1."""
        return m / torch.linalg.matrix_norm(m, 2) * float(torch.rand(1, generator=self.generator)) * 0.999


KINDS = [
    "normal",
    "deficient",
    "one-hot",
    "uniform",
    "nearly identity",
    "nearly equal",
    "ill-conditioned",
    "two targets",
]


def layer(c):
    return c.tokens(), c.logits(), c.weight(c.d, 3)


def heads(c):
    return c.tokens(), c.logits(3), c.weight(c.d, 6), c.weight(6, 4)


def ffn(c):
    return c.tokens(), c.weight(c.d, 5), c.weight(5, c.d), c.normal(5)


def skip_lowers(c):
    """M of norm below 1, ill-conditioned enough for the hypothesis."""
    m = c.small(c.weight(c.d, c.d)) * 0.5
    m[:, -1] *= 1e-6
    return c.tokens(c.d + 2) if c.kind != "deficient" else c.normal(c.d + 2, c.d), m


def branch(c):
    """Tokens, a branch and exactly the rate that it has."""
    x, added = c.tokens(), c.tokens()
    rate = torch.linalg.matrix_norm(hc(added)) / torch.linalg.matrix_norm(hc(x)).clamp(min=1e-300)
    return x, added * (0.5 / max(float(rate), 1.0) if c.kind == "one-hot" else 1.0), float(rate)


def projected(c):
    """A z with πᵀz = 0 for positive attention."""
    attn = torch.softmax(c.normal(c.n, c.n), dim=-1)
    z = c.normal(c.n, c.d)
    return attn, z - bounds.stationary_distribution(attn) @ z


def similar(c):
    """An (m, m) matrix and a perturbation up to a little beyond its smallest singular value."""
    main, rest = c.weight(c.d, c.d), c.normal(c.d, c.d)
    size = torch.linalg.svdvals(main)[-1] / torch.linalg.matrix_norm(rest, 2) * 1.2
    return main, rest * size * torch.rand(1, generator=c.generator, dtype=torch.float64)


def definite(c):
    w = c.weight(c.d, c.d)
    return c.tokens(), w, w, c.weight(c.d, c.d)


def gated(c):
    return c.tokens(), c.small(c.normal(c.d, c.d)) * (1 if c.kind != "uniform" else 5)


def square(c):
    return c.tokens(c.d + c.n), c.weight(c.d, c.d), c.weight(c.d, c.d), c.weight(c.d, c.d)


def check_of(function, draw, **options):
    return lambda c: function(*draw(c), **options)


# name: (the check of a case, a wrong bound from the check and the case)
STATEMENTS = {
    "4.1": (check_of(bounds.cubic_condition, square), lambda k, c: math.sqrt(k.bound)),
    "4.1 definite": (check_of(bounds.cubic_condition, definite, form="definite"), lambda k, c: k.bound ** (1 / 3)),
    "ffn condition": (
        lambda c: bounds.ffn_condition(c.tokens(), c.weight(c.d, c.d), c.weight(c.d, c.d)),
        lambda k, c: math.sqrt(k.bound),
    ),
    "ffn condition, product": (
        lambda c: bounds.ffn_condition(c.tokens(), c.weight(c.d, 4 * c.d), c.weight(4 * c.d, c.d), form="product"),
        lambda k, c: math.sqrt(k.bound),
    ),
    "4.2": (check_of(bounds.skip_condition, gated), lambda k, c: 1 + (k.bound - 1) / 4),
    "4.2 definite": (check_of(bounds.skip_condition, gated, form="definite"), lambda k, c: 1 + (k.bound - 1) / 4),
    "4.2 lowers": (check_of(bounds.skip_condition, skip_lowers, form="lowers"), lambda k, c: 1e-6 * k.bound),
    "theorem 1": (
        lambda c: bounds.low_pass_limit(c.attention(), c.tokens() + c.scale),
        lambda k, c: 0.1 * k.bound,
    ),
    "theorem 1, floor": (check_of(bounds.low_pass_limit, projected, form="floor"), lambda k, c: k.bound / 20),
    "theorem 1, rate": (
        lambda c: bounds.low_pass_rate(c.attention(), c.tokens(), 1 + c.d % 3),
        lambda k, c: k.bound / bounds._spread(c.n) / 1.1 if c.n > 1 else k.bound,
    ),
    "corollary 2": (
        lambda c: bounds.product_low_pass(c.attention(1 + c.d % 4)),
        lambda k, c: k.bound / bounds._spread(c.n) / 1.1 if c.n > 1 else k.bound,
    ),
    "theorem 3": (check_of(bounds.attention_rate, layer), lambda k, c: k.bound / math.sqrt(c.n) / 1.1),
    "theorem 3, range": (
        check_of(bounds.attention_rate, layer, form="range"),
        lambda k, c: k.bound / math.sqrt(c.n) / 1.1,
    ),
    "theorem 3, sharp": (check_of(bounds.attention_rate, layer, form="sharp"), lambda k, c: 0.6 * k.bound),
    "heads": (check_of(bounds.multihead_rate, heads), lambda k, c: k.bound / 9 / math.sqrt(c.n)),
    "heads, root": (check_of(bounds.multihead_rate, heads, form="root"), lambda k, c: k.bound / 3 / math.sqrt(c.n)),
    "heads, whole": (check_of(bounds.multihead_rate, heads, form="whole"), lambda k, c: k.bound / 2 / math.sqrt(c.n)),
    "skip": (check_of(bounds.residual_rate, branch), lambda k, c: 0.5 * k.bound),
    "skip keeps": (check_of(bounds.residual_rate, branch, form="lower"), lambda k, c: 0.5 * k.bound),
    "ffn": (check_of(bounds.ffn_rate, ffn), lambda k, c: 0.3 * k.bound),
    "ffn, relu, skip": (check_of(bounds.ffn_rate, ffn, activation="relu", skip=True), lambda k, c: 0.5 * k.bound),
    "ffn, identity": (check_of(bounds.ffn_rate, ffn, activation="identity"), lambda k, c: 0.6 * k.bound),
    "layer norm": (lambda c: bounds.layer_norm_rate(c.tokens(), c.normal(c.d), 1e-5), lambda k, c: k.bound / 3),
    "layer norm, sharp": (
        lambda c: bounds.layer_norm_rate(c.tokens(), c.normal(c.d), form="sharp"),
        lambda k, c: k.bound / 2,
    ),
    "diffuse": (lambda c: bounds.diffuse_rows(c.logits()), lambda k, c: k.bound / 3),
    "diagonal": (
        lambda c: bounds.diagonal_rows(c.logits() + 10 * c.n * torch.rand(1, generator=c.generator) * torch.eye(c.n)),
        lambda k, c: 1 + (k.bound - 1) / 4,
    ),
    "dominant term": (check_of(bounds.dominant_term, similar), lambda k, c: 1 + (k.bound - 1) / 4),
} | {
    f"{kind} logits, {form}": (
        lambda c, kind=kind, form=form: bounds.logit_check(kind, c.tokens(), c.weight(c.d, 2), c.weight(c.d, 2), form),
        lambda k, c: 0.4 * k.bound,
    )
    for kind in bounds.LOGITS
    for form in ("paper", "half_range")
}  # fmt: skip
CASE = dict(n=st.integers(1, 7), d=st.integers(1, 6), scale=st.sampled_from([-3, 0, 3]), kind=st.sampled_from(KINDS))


@pytest.mark.parametrize("name", STATEMENTS)
def test_statement_is_never_refuted_and_mostly_says_something(name):
    verdicts = []

    @many
    @given(**CASE, seed=st.integers(0, 2**31))
    def run(**case):
        check = STATEMENTS[name][0](Case(**case))
        verdicts.append(check.holds)
        assert check.holds is not False, check
        assert (check.holds is None) == (not all(check.hypotheses.values())), check

    run()
    assert len(verdicts) >= CASES
    assert sum(v is True for v in verdicts) >= 0.3 * len(verdicts), "the hypotheses hardly ever hold: this tests little"


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_wrong_bound_is_caught(name):
    """Negative control: the same cases and the same comparison must refute a bound that is a little too good."""
    check, wrong = STATEMENTS[name]
    generator = np.random.default_rng(0)
    for seed_ in range(10 * CASES):
        n, d, scale = (int(generator.choice(values)) for values in (range(1, 8), range(1, 7), (-3, 0, 3)))
        case = Case(n, d, scale, generator.choice(KINDS), seed_)
        right = check(case)
        rounding = 1e-9 * right.measured
        if right.holds and not bounds._check(name, right.measured, wrong(right, case), {}, rounding).holds:
            return
    pytest.fail(f"a wrong bound for {name} survived {10 * CASES} cases")


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


def test_heads_forms_are_ordered_and_no_factor_of_heads_is_needed():
    for seed_ in range(50):
        case = heads(Case(5, 4, 0, "normal", seed_))
        paper, root, whole = (bounds.multihead_rate(*case, form=form).bound for form in ("paper", "root", "whole"))
        assert whole <= root * (1 + 1e-12) <= paper * (1 + 1e-9)


# --- Formulas, written again ------------------------------------------------------------------------------------------


def gain_mpmath(logits, form):
    """Theorem 3's factor with 50 digits, written with positive exponents as in the paper."""
    mpmath.mp.dps = 50
    p = [[mpmath.mpf(float(v)) for v in row] for row in logits]
    n = len(p)
    r = [max(row) - min(row) for row in p]
    if form == "paper":
        e = mpmath.exp(2 * max(abs(v) for row in p for v in row))
        return mpmath.sqrt(n * e / (e + n - 1))
    columns = mpmath.sqrt(sum(mpmath.exp(v) / (mpmath.exp(v) + n - 1) for v in r))
    if form == "range":
        return columns
    e = mpmath.exp(max(r))
    u, least = e / (e + n - 1), 1 / (1 + (n - 1) * e)
    half = mpmath.mpf(n // 2) * ((n + 1) // 2) * 2 / n
    return min(columns, mpmath.sqrt(n * (u - least) * (1 - n * least)), mpmath.sqrt(half) * mpmath.tanh(max(r) / 2))


@pytest.mark.parametrize("form", ["paper", "range", "sharp"])
@pytest.mark.parametrize("size", [0.0, 1e-9, 1e-3, 1.0, 30.0, 1e3, 1e6])
@pytest.mark.parametrize("n", [1, 2, 5, 197])
def test_attention_gain_against_fifty_digits(n, size, form):
    logits = size * torch.randn(n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    expected = float(gain_mpmath(logits, form))
    assert float(bounds.attention_gain(logits, form)) == pytest.approx(expected, rel=1e-12, abs=1e-300)


def numpy_kappa(x):
    s = np.linalg.svd(x, compute_uv=False)
    return s[0] / s[-1]


def numpy_hc(x):
    return np.linalg.norm(x - x.mean(axis=0))


def numpy_softmax(p):
    weights = np.exp(p - p.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def test_measured_and_bound_equal_numpy():
    c = Case(6, 4, 0, "normal", 3)
    x, q, k, v, o, p = (t.numpy() for t in (*square(c), c.weight(4, 4), c.normal(2, 10, 10)))
    up, down, b = (t.numpy() for t in (c.weight(4, 9), c.weight(9, 4), c.normal(9)))
    t = torch.from_numpy
    norm2 = lambda m: np.linalg.norm(m, 2)  # noqa: E731
    a = numpy_softmax(p[0])
    alpha = np.abs(p[0]).max()
    gain = np.sqrt(10 * np.exp(2 * alpha) / (np.exp(2 * alpha) + 9))
    gains = [np.sqrt(10 * np.exp(2 * np.abs(h).max()) / (np.exp(2 * np.abs(h).max()) + 9)) for h in p]
    tau = max(np.abs(a[i] - a[j]).sum() / 2 for i in range(10) for j in range(10))
    centre = np.eye(10) - 0.1
    std = x.std(axis=1)
    erf = np.vectorize(math.erf)
    gelu = lambda z: z * (1 + erf(z / np.sqrt(2))) / 2  # noqa: E731
    multi = sum(numpy_softmax(h) @ x @ v[:, s] @ o[s] for h, s in zip(p, (slice(0, 2), slice(2, 4)), strict=True))
    heads_norm = max(g * norm2(v[:, s]) for g, s in zip(gains, (slice(0, 2), slice(2, 4)), strict=True))
    row = np.ptp(p[0], axis=1)
    singular = np.linalg.svd(a, compute_uv=False)
    expected = [
        (
            bounds.cubic_condition(*map(t, (x, q, k, v))),
            numpy_kappa(x @ q @ k.T @ x.T @ x @ v),
            numpy_kappa(q) * numpy_kappa(k) * numpy_kappa(v) * numpy_kappa(x) ** 3,
        ),
        (
            bounds.ffn_condition(*map(t, (x, up, down)), "paper"),
            numpy_kappa(x @ up @ down),
            numpy_kappa(x) * numpy_kappa(up) * numpy_kappa(down),
        ),
        (
            bounds.ffn_condition(*map(t, (x, up, down)), "product"),
            numpy_kappa(x @ up @ down),
            numpy_kappa(x) * numpy_kappa(up @ down),
        ),
        (bounds.skip_condition(t(x), t(q), "paper"), numpy_kappa(x @ q + x), numpy_kappa(x @ q)),
        (
            bounds.skip_condition(t(x), t(q / norm2(q) / 2)),
            numpy_kappa(x @ q / norm2(q) / 2 + x),
            numpy_kappa(x) * 1.5 / 0.5,
        ),
        (bounds.product_low_pass(t(a)[None]), norm2(centre @ a @ centre), np.sqrt(5) * tau),
        (bounds.product_low_pass(torch.stack([t(a)] * 3)), norm2(centre @ a @ a @ a @ centre), np.sqrt(5) * tau**3),
        (bounds.low_pass_rate(t(a), t(x), 2), numpy_hc(a @ a @ x), np.sqrt(5) * tau**2 * numpy_hc(x)),
        (
            bounds.low_pass_rate(t(a), t(x), 2, "paper"),
            numpy_hc(a @ a @ x),
            sorted(np.abs(np.linalg.eigvals(a)))[-2] ** 2 * numpy_hc(x),
        ),
        (bounds.attention_rate(t(x), t(p[0]), t(v)), numpy_hc(a @ x @ v), gain * norm2(v) * numpy_hc(x)),
        (
            bounds.multihead_rate(t(x), t(p), t(v), t(o)),
            numpy_hc(multi),
            2 * heads_norm * max(norm2(o[:2]), norm2(o[2:])) * numpy_hc(x),
        ),
        (
            bounds.multihead_rate(t(x), t(p), t(v), t(o), "root"),
            numpy_hc(multi),
            np.sqrt(2) * heads_norm * norm2(o) * numpy_hc(x),
        ),
        (
            bounds.multihead_rate(t(x), t(p), t(v), t(o), "whole"),
            numpy_hc(multi),
            max(gains) * norm2(v) * norm2(o) * numpy_hc(x),
        ),
        (bounds.residual_rate(t(x), t(2 * x), 2.5), 3 * numpy_hc(x), 3.5 * numpy_hc(x)),
        (bounds.residual_rate(t(x), t(-x / 2), 0.75, "lower"), 0.25 * numpy_hc(x), 0.5 * numpy_hc(x)),
        (
            bounds.ffn_rate(t(x), t(up), t(down), t(b)),
            numpy_hc(gelu(x @ up + b) @ down),
            1.128904 * norm2(up) * norm2(down) * numpy_hc(x),
        ),
        (
            bounds.ffn_rate(t(x), t(up), t(down), activation="relu", skip=True),
            numpy_hc(x + np.maximum(x @ up, 0) @ down),
            (1 + norm2(up) * norm2(down)) * numpy_hc(x),
        ),
        (
            bounds.layer_norm_rate(t(x), t(b[:4])),
            numpy_hc((x - x.mean(1, keepdims=True)) / std[:, None] * b[:4]),
            np.abs(b[:4]).max() / std.min() * numpy_hc(x),
        ),
        (
            bounds.layer_norm_rate(t(x), form="sharp"),
            numpy_hc((x - x.mean(1, keepdims=True)) / std[:, None]),
            numpy_hc(x) / np.sqrt(np.prod(sorted(std)[:2])),
        ),
        (
            bounds.diffuse_rows(t(p[0] / 100)),
            1 / numpy_kappa(numpy_softmax(p[0] / 100)),
            np.sqrt((np.sinh(row / 200) ** 2).sum() / 10 / 9),
        ),
        (
            bounds.logit_check("dot", t(x), t(up), t(up)),
            np.abs(x @ up @ up.T @ x.T).max() / 3,
            (x**2).sum(1).max() * norm2(up @ up.T) / 3,
        ),
        (
            bounds.logit_check("l2", t(x), t(q), t(k)),
            max(((i @ q - j @ k) ** 2).sum() for i in x for j in x) / 2,
            (x**2).sum(1).max() * (norm2(q) + norm2(k)) ** 2 / 2,
        ),
    ]
    for check, measured, bound in expected:
        assert check.measured == pytest.approx(measured, rel=1e-9), check.name
        assert check.bound == pytest.approx(bound, rel=1e-6), check.name
    assert singular[0] >= 1


def test_kappa_is_the_one_of_conditioning():
    for x in (Case(5, 3, 0, kind, 0).tokens() for kind in KINDS):
        assert float(bounds._kappa(x)) == pytest.approx(float(condition_number(x)))


def test_stationary_distribution_is_invariant():
    for scale in (0.1, 1, 20):
        attn = torch.softmax(
            scale * torch.randn(9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64), -1
        )
        pi = bounds.stationary_distribution(attn)
        torch.testing.assert_close(pi @ attn, pi)
        assert float(pi.sum()) == pytest.approx(1)


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


# --- Adversarial search -----------------------------------------------------------------------------------------------


def normal(*shapes):
    return lambda generator: tuple(torch.randn(*shape, generator=generator) for shape in shapes)


LAYER, HEADS, WEIGHTS = ((6, 4), (6, 6), (4, 4)), ((6, 4), (2, 6, 6), (4, 4), (4, 4)), ((5, 4), (4, 3), (4, 3))


def gently(x, logits, w, form):
    """A layer and its skip, with half of the input's HC by theorem 3."""
    rate = 0.5 / (bounds.attention_gain(logits) * torch.linalg.matrix_norm(w, 2))
    return bounds.residual_rate(x, torch.softmax(logits, -1) @ x @ w * rate, 0.5, form)


SEARCHES = {  # name of the statement: (check, sample, least ratio that must be found)
    "4.1": (bounds.cubic_condition, normal((5, 3), (3, 3), (3, 3), (3, 3)), 0.9),
    "4.1 definite": (
        lambda x, w, v: bounds.cubic_condition(x, w, w, v, "definite"),
        normal((3, 4), (4, 4), (4, 4)),
        0.9,
    ),
    "ffn condition": (bounds.ffn_condition, normal((5, 3), (3, 3), (3, 3)), 0.9),
    "ffn condition, product": (
        lambda *a: bounds.ffn_condition(*a, form="product"),
        normal((5, 3), (3, 12), (12, 3)),
        0.9,
    ),
    "4.2": (lambda x, m: bounds.skip_condition(x, m / 10), normal((5, 3), (3, 3)), 0.9),
    "4.2 definite": (lambda x, m: bounds.skip_condition(x, m / 10, "definite"), normal((5, 3), (3, 3)), 0.9),
    "4.2 lowers": (
        lambda x, m: bounds.skip_condition(x, m / 10 * torch.logspace(0, -4, 3), "lowers"),
        normal((5, 3), (3, 3)),
        0.2,
    ),
    "theorem 1, rate": (lambda p, z: bounds.low_pass_rate(torch.softmax(p, -1), z, 2), normal((6, 6), (6, 1)), 0.8),
    "corollary 2": (lambda p: bounds.product_low_pass(torch.softmax(p, -1)), normal((1, 6, 6)), 0.9),
    "theorem 3": (bounds.attention_rate, normal(*LAYER), 0.5),
    "theorem 3, range": (lambda *a: bounds.attention_rate(*a, form="range"), normal(*LAYER), 0.5),
    "theorem 3, sharp": (lambda *a: bounds.attention_rate(*a, form="sharp"), normal(*LAYER), 0.7),
    "heads": (bounds.multihead_rate, normal(*HEADS), 0.4),
    "heads, root": (lambda *a: bounds.multihead_rate(*a, form="root"), normal(*HEADS), 0.4),
    "heads, whole": (lambda *a: bounds.multihead_rate(*a, form="whole"), normal(*HEADS), 0.5),
    "skip": (lambda *a: gently(*a, "paper"), normal(*LAYER), 0.6),
    "skip keeps": (lambda *a: gently(*a, "lower"), normal(*LAYER), 0.6),
    "ffn": (bounds.ffn_rate, normal((6, 4), (4, 8), (8, 4)), 0.8),
    "ffn, relu, skip": (
        lambda *a: bounds.ffn_rate(*a, activation="relu", skip=True),
        normal((6, 4), (4, 8), (8, 4)),
        0.8,
    ),
    "ffn, identity": (lambda *a: bounds.ffn_rate(*a, activation="identity"), normal((6, 4), (4, 8), (8, 4)), 0.9),
    "layer norm": (bounds.layer_norm_rate, normal((6, 4)), 0.8),
    "layer norm, sharp": (lambda x: bounds.layer_norm_rate(x, form="sharp"), normal((6, 4)), 0.8),
    "diffuse": (bounds.diffuse_rows, normal((5, 5)), 0.7),
    "diagonal": (lambda p: bounds.diagonal_rows(p + 6 * EYE[:5, :5]), normal((5, 5)), 0.9),
    "dominant term": (lambda a, b: bounds.dominant_term(a, b / 10), normal((4, 4), (4, 4)), 0.9),
} | {
    f"{kind} logits, {form}": (
        lambda *a, kind=kind, form=form: bounds.logit_check(kind, *a, form),
        normal(*WEIGHTS),
        0.9,
    )
    for kind in bounds.LOGITS
    for form in ("paper", "half_range")
}  # fmt: skip
# The least ratios are below what each of 20 starts reached. Of these statements one start in 20 stays below (the ascent
# ends at a local maximum, or where the hypotheses cease to hold), one in two of the last (its hypotheses fail at once).
STARTS = {"4.2 lowers": 4, "theorem 1, rate": 4, "diffuse": 4, "dominant term": 16}
# What both sides of theorem 1 are after depends on a whole number of steps; its rate is searched here and in
# test_surveys.
UNSEARCHED = {"theorem 1", "theorem 1, floor"}


def test_every_statement_is_searched():
    assert set(SEARCHES) | UNSEARCHED == set(STATEMENTS) and not set(SEARCHES) & UNSEARCHED


@pytest.mark.parametrize("name", SEARCHES)
def test_search_makes_a_true_bound_tight_and_no_more(name):
    check, sample, least = SEARCHES[name]
    found = counterexamples.adversarial_search(check, sample, restarts=STARTS.get(name, 1), steps=250)
    assert least < found.ratio <= 1 + 1e-6 and found.check.holds is True
    assert check(*found.inputs).slack == pytest.approx(found.check.slack, abs=1e-9)


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
    found = counterexamples.adversarial_search(check, sample, restarts=2, steps=100)
    assert found.ratio > 1.5 and found.check.holds is False


def test_search_does_not_count_points_where_a_hypothesis_fails():
    with pytest.raises(InputError, match="no point where all hypotheses hold"):
        counterexamples.adversarial_search(
            lambda x, m: bounds.skip_condition(x, m + 9), normal((5, 3), (3, 3)), restarts=1, steps=3
        )


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
