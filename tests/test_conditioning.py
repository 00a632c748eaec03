"""Condition numbers and effective ranks against scipy in float64 and matrices with known singular values.

And every kind of bad matrix.
"""

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rounding import roundoff
from skiplab.errors import InputError
from skiplab.theory.conditioning import condition_number, effective_rank, singular_values, summarise_log_kappa

torch.set_num_threads(1)

EPS = torch.finfo(torch.float64).eps
sizes, seeds = st.integers(1, 12), st.integers(0, 2**31)
quickly = settings(max_examples=60, deadline=None)


def gaussian(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def orthogonal(seed, n):
    return torch.linalg.qr(gaussian(seed, n, n)).Q


def with_singular_values(values, n, d, seed=0):
    """Build an n × d matrix with exactly these min(n, d) singular values, up to rounding."""
    return orthogonal(seed, n)[:, : len(values)] * values @ orthogonal(seed + 1, d)[: len(values)]


@quickly
@given(sizes, sizes, seeds)
def test_agrees_with_scipy(n, d, seed):
    x = gaussian(seed, n, d)
    expected = scipy.linalg.svdvals(x.numpy())
    assert singular_values(x).dtype == torch.float64
    np.testing.assert_allclose(singular_values(x), expected, rtol=0, atol=20 * EPS * expected[0])
    kappa = expected[0] / expected[-1]
    np.testing.assert_allclose(condition_number(x), kappa, rtol=40 * EPS * kappa)


@quickly
@given(sizes, sizes, st.floats(0, 10), seeds)
def test_finds_known_singular_values(n, d, log10_kappa, seed):
    values = torch.logspace(0, -log10_kappa, min(n, d), dtype=torch.float64)
    x = with_singular_values(values, n, d, seed)
    kappa = (values[0] / values[-1]).item()
    np.testing.assert_allclose(singular_values(x), values, rtol=0, atol=40 * EPS)
    assert condition_number(x).item() == pytest.approx(kappa, rel=80 * EPS * kappa)


@quickly
@given(sizes, sizes, st.floats(-100, 100), seeds)
def test_scale_does_not_matter(n, d, log10_scale, seed):
    x = gaussian(seed, n, d)
    kappa = condition_number(x).item()
    assert condition_number(-(10**log10_scale) * x).item() == pytest.approx(kappa, rel=80 * EPS * kappa)


@quickly
@given(sizes, sizes, seeds)
def test_rotation_does_not_matter(n, d, seed):
    x = gaussian(seed, n, d)
    kappa = condition_number(x).item()
    rotated = orthogonal(seed + 1, n) @ x @ orthogonal(seed + 2, d)
    assert condition_number(rotated).item() == pytest.approx(kappa, rel=200 * EPS * kappa)
    assert condition_number(x.mT).item() == pytest.approx(kappa, rel=80 * EPS * kappa)


@quickly
@given(st.integers(2, 12), st.integers(2, 12), seeds, st.sampled_from([torch.float64, torch.float32]))
def test_rank_deficient_is_infinite(n, d, seed, dtype):
    rank = min(n, d) - 1
    x = (gaussian(seed, n, rank) @ gaussian(seed + 1, rank, d)).to(dtype)
    assert condition_number(x) == torch.inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_floor_is_that_of_the_input_dtype(dtype):
    floor = 4 * torch.finfo(dtype).eps  # a power of two, so exact in every dtype
    x = torch.zeros(2, 3, 4, dtype=dtype)
    x[:, 0, 0] = x[:, 1, 1] = 1
    x[0, 2, 2], x[1, 2, 2] = floor, 2 * floor
    assert condition_number(x).tolist() == [torch.inf, 1 / (2 * floor)]


@pytest.mark.parametrize("scale", [1e20, 1e-20, 1e30, 1e-30])
def test_huge_and_tiny_float32(scale):
    x = gaussian(3, 5, 17, 64).float()
    scaled = x * scale
    assert scaled.isfinite().all()
    torch.testing.assert_close(condition_number(scaled), condition_number(x), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1e300, 1e-300])
def test_huge_and_tiny_float64(scale):
    x = gaussian(3, 5, 17, 64)
    torch.testing.assert_close(condition_number(x * scale), condition_number(x), rtol=1e-12, atol=0)


def test_ill_conditioned_tokens_keep_their_digits():
    """Through the Gram matrix this one would be lost: (1e-10)² is below float64's rounding."""
    x = with_singular_values(torch.tensor([1.0, 0.5, 1e-10], dtype=torch.float64), 3, 7)
    assert condition_number(x).item() == pytest.approx(1e10, rel=1e-5)


def test_zero_is_infinite_and_one_row_is_one():
    assert condition_number(torch.zeros(3, 5)) == torch.inf
    assert condition_number(torch.zeros(1, 5)) == torch.inf
    assert condition_number(torch.zeros(1, 1)) == torch.inf
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert condition_number(gaussian(0, 1, 300).to(dtype)) == 1
        assert condition_number(gaussian(0, 300, 1).to(dtype)) == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_entry_spoils_its_own_matrix_only(bad):
    x = gaussian(0, 2, 3, 4, 6)
    expected = condition_number(x)
    x[1, 2, 3, 5] = bad
    kappa = condition_number(x)
    assert kappa[1, 2].isnan() and singular_values(x)[1, 2].isnan().all()
    kappa[1, 2] = expected[1, 2]
    assert torch.equal(kappa, expected)


def test_views_and_half_precision_equal_their_copies():
    x = gaussian(0, 4, 9, 6, 2)
    view = x[::2, :, :, 1].transpose(-1, -2)
    assert not view.is_contiguous()
    assert torch.equal(condition_number(view), condition_number(view.contiguous()))
    for dtype in (torch.float16, torch.bfloat16):
        half = x[..., 0].to(dtype)
        assert torch.equal(singular_values(half), singular_values(half.double()))


def test_leaves_no_trace_on_its_input():
    x = gaussian(0, 4, 6).requires_grad_()
    before = x.detach().clone()
    assert not condition_number(x).requires_grad
    assert torch.equal(x, before)


def test_empty_batches_stay_empty():
    assert condition_number(torch.zeros(0, 3, 4)).shape == (0,)
    assert condition_number(torch.zeros(2, 0, 3, 4)).shape == (2, 0)
    assert singular_values(torch.zeros(0, 3, 4)).shape == (0, 3)


@pytest.mark.parametrize("x", [torch.zeros(3), torch.zeros(2, 0, 3), torch.ones(3, 3).long(), torch.eye(2).cfloat()])
def test_bad_input_is_one_clear_line(x):
    with pytest.raises(InputError, match="expected real floating-point matrices"):
        condition_number(x)
    with pytest.raises(InputError, match="expected real floating-point matrices"):
        effective_rank(x)


# --- Effective rank ---------------------------------------------------------------------------------------------------


def scipy_effective_rank(x):
    values = scipy.linalg.svdvals(x.double().numpy())
    return np.exp(scipy.stats.entropy(values))  # normalises them, and 0 ln 0 = 0


@quickly
@given(sizes, sizes, st.floats(0, 10), st.floats(-100, 100), seeds)
def test_effective_rank_agrees_with_scipy_at_any_scale(n, d, log10_kappa, log10_scale, seed):
    x = gaussian(seed, n, d) * torch.logspace(0, -log10_kappa, d, dtype=torch.float64)
    rank = effective_rank(x)
    assert rank.dtype == torch.float64 and rank.shape == ()
    assert 1 <= rank <= min(n, d) * (1 + 20 * EPS)
    assert rank.item() == pytest.approx(scipy_effective_rank(x), rel=1e-13)
    assert effective_rank(-(10**log10_scale) * x).item() == pytest.approx(rank.item(), rel=1e-12)
    assert effective_rank(orthogonal(seed + 1, n) @ x).item() == pytest.approx(rank.item(), rel=1e-12)
    assert effective_rank(x.mT).item() == pytest.approx(rank.item(), rel=1e-12)


@quickly
@given(sizes, sizes, seeds)
def test_effective_rank_counts_equal_singular_values(n, d, seed):
    for rank in range(1, min(n, d) + 1):
        x = with_singular_values(torch.ones(rank, dtype=torch.float64), n, d, seed)
        assert effective_rank(x).item() == pytest.approx(rank, rel=1e-11)
    with_a_third = with_singular_values(torch.tensor([1, 1, 1e-9][: min(n, d)], dtype=torch.float64), n, d, seed)
    assert effective_rank(with_a_third).item() == pytest.approx(
        min(n, d, 2), rel=1e-7
    )  # barely used directions barely count


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_effective_rank_at_its_edges(dtype):
    assert effective_rank(torch.zeros(2, 3, 5, dtype=dtype)).tolist() == [0, 0]
    assert effective_rank(torch.zeros(1, 1, dtype=dtype)) == 0
    for shape in ((1, 300), (300, 1), (1, 1)):
        assert effective_rank(gaussian(0, *shape).to(dtype)) == 1
    assert effective_rank(torch.eye(7, dtype=dtype)).item() == pytest.approx(7, rel=1e-14)
    assert effective_rank(torch.ones(6, 4, dtype=dtype)).item() == pytest.approx(1, rel=1e-13)
    x = gaussian(0, 4, 9, 6, 2).to(dtype)
    view = x[::2, :, :, 1].transpose(-1, -2)
    assert not view.is_contiguous() and effective_rank(view).shape == (2,)
    assert torch.equal(effective_rank(view), effective_rank(view.contiguous()))
    assert torch.equal(effective_rank(view), effective_rank(view.double()))
    assert effective_rank(torch.zeros(2, 0, 3, 4, dtype=dtype)).shape == (2, 0)


@pytest.mark.parametrize("scale", [1e300, 1e-300])
def test_effective_rank_of_huge_and_tiny(scale):
    x = gaussian(3, 5, 400, 64)
    torch.testing.assert_close(effective_rank(x * scale), effective_rank(x), rtol=1e-12, atol=0)
    entropy = 39 * math.log(1 / EPS) * roundoff(torch.float64, 50)  # of the 39 singular values that only rounding makes
    assert effective_rank(torch.full((50, 40), 1e306, dtype=torch.float64)).item() == pytest.approx(1, rel=entropy)
    assert effective_rank(4e306 * orthogonal(0, 60)).item() == pytest.approx(60, rel=1e-12)  # their sum is infinite


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_entry_spoils_its_own_effective_rank_only(bad):
    x = gaussian(0, 2, 3, 4, 6)
    expected = effective_rank(x)
    x[1, 2, 3, 5] = bad
    rank = effective_rank(x.requires_grad_())
    assert rank[1, 2].isnan() and not rank.requires_grad
    rank[1, 2] = expected[1, 2]
    assert torch.equal(rank, expected)


def test_summary_counts_what_it_leaves_out():
    kappa = torch.tensor([[1.0, np.e, np.e**3], [np.e**4, torch.inf, torch.nan]], dtype=torch.float64)
    summary = summarise_log_kappa(kappa)
    assert summary == {"median_log_kappa": pytest.approx(2.0, abs=1e-12), "n_inf": 1, "n_nan": 1, "n": 6}
    none = summarise_log_kappa(torch.tensor([torch.inf]))
    assert np.isnan(none.pop("median_log_kappa")) and none == {"n_inf": 1, "n_nan": 0, "n": 1}
    assert summarise_log_kappa(torch.zeros(0))["n"] == 0
