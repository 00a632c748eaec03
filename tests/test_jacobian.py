"""The attention Jacobian: the Kronecker formula, autograd and the matrix-free extremes against one another."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skiplab.errors import InputError
from skiplab.theory import jacobian

torch.set_num_threads(1)


def layer(n, d, heads, seed, width=None, scale=1.0, dtype=torch.float64):
    """Tokens and weights w_q, w_k, w_v, w_o of a layer with `heads` heads of `width`."""
    generator = torch.Generator().manual_seed(seed)
    inner = heads * (width or d)

    def draw(*shape):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5).to(dtype)

    return draw(n, d) * d**0.5, scale * draw(d, inner), scale * draw(d, inner), draw(d, inner), draw(inner, d)


def attention_numpy(x, w_q, w_k, w_v, w_o, heads):
    outputs = []
    for q, k, v in zip(*(np.split(x @ w, heads, axis=1) for w in (w_q, w_k, w_v)), strict=True):
        logits = q @ k.T / np.sqrt(q.shape[1])
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        outputs.append(weights / weights.sum(axis=1, keepdims=True) @ v)
    return np.concatenate(outputs, axis=1) @ w_o


def kronecker_numpy(x, w_q, w_k, w_v, w_o):
    """(Z W_V W_O ⊗ I_n)ᵀ A' + (W_V W_O)ᵀ ⊗ A word for word, with the whole A' = ∂vec(A)/∂vec(Z), n² × n·d."""
    n, d = x.shape
    b, m = w_q @ w_k.T / np.sqrt(w_q.shape[1]), w_v @ w_o
    logits = x @ b @ x.T
    attn = np.exp(logits - logits.max(axis=1, keepdims=True))
    attn /= attn.sum(axis=1, keepdims=True)
    a_prime = np.zeros((n * n, n * d))
    for i, c in np.ndindex(n, d):
        unit = np.zeros((n, d))
        unit[i, c] = 1
        dp = unit @ b @ x.T + x @ b @ unit.T
        a_prime[:, c * n + i] = (attn * (dp - (attn * dp).sum(axis=1, keepdims=True))).flatten(order="F")
    return np.kron(x @ m, np.eye(n)).T @ a_prime, np.kron(m.T, attn)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 6), d=st.integers(1, 5), heads=st.integers(1, 3), width=st.integers(1, 4),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_formula_equals_autograd(n, d, heads, width, scale, seed):
    x, *weights = layer(n, d, heads, seed, width, scale)
    formula = jacobian.attention_jacobian(x, *weights, heads=heads)
    autograd = jacobian.autograd_jacobian(lambda z: jacobian.attention(z, *weights, heads=heads), x)
    torch.testing.assert_close(formula, autograd, atol=1e-11 * (1 + scale**2), rtol=1e-9)


def test_terms_equal_the_literal_kronecker_formula():
    arrays = layer(5, 4, 1, 0, width=3)
    for term, expected in zip(
        jacobian.jacobian_terms(*arrays), kronecker_numpy(*(a.numpy() for a in arrays)), strict=True
    ):
        np.testing.assert_allclose(term, expected, atol=1e-13)


@pytest.mark.parametrize("heads", [1, 3])
def test_formula_predicts_a_small_step_and_attention_equals_numpy(heads):
    x, *weights = layer(5, 6, heads, 1, width=2)
    step = 1e-6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    before, after = (attention_numpy(z.numpy(), *(w.numpy() for w in weights), heads) for z in (x - step, x + step))
    np.testing.assert_allclose(jacobian.attention(x - step, *weights, heads=heads), before, atol=1e-13)
    predicted = 2 * jacobian.attention_jacobian(x, *weights, heads=heads) @ step.mT.flatten()
    np.testing.assert_allclose(predicted, (after - before).flatten(order="F"), atol=1e-13)


def test_a_wrong_formula_would_be_caught():
    """Negative control: without the term through the keys, or with rows stacked, the difference is plain to see."""
    x, *weights = layer(4, 3, 1, 2)
    exact = jacobian.autograd_jacobian(lambda z: jacobian.attention(z, *weights), x)
    assert (jacobian.jacobian_terms(x, *weights)[1] - exact).abs().max() > 0.01
    rows = torch.func.jacrev(lambda z: jacobian.attention(z, *weights))(x).reshape(12, 12)
    assert (rows - jacobian.attention_jacobian(x, *weights)).abs().max() > 0.01


def test_float32_agrees_with_float64_to_one_millionth():
    arrays = layer(9, 8, 1, 3)
    single = [a.float() for a in arrays]
    exact = jacobian.attention_jacobian(*arrays)
    error = (jacobian.attention_jacobian(*single).double() - exact).abs().max() / exact.abs().max()
    assert error < 1e-6


@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("heads", [1, 2])
def test_matrix_free_extremes_equal_the_dense_ones(skip, heads):
    x, *weights = layer(16, 12, heads, 4, width=6)
    exact = jacobian.attention_jacobian(x, *weights, heads=heads) + skip * torch.eye(192, dtype=x.dtype)
    values = torch.linalg.svdvals(exact)

    def block(z):
        return skip * z + jacobian.attention(z, *weights, heads=heads)

    found = jacobian.jacobian_extremes(block, x)
    assert found.sigma_max_converged and found.sigma_max == pytest.approx(float(values[0]), rel=1e-3)
    assert found.sigma_min >= float(values[-1]) * (1 - 1e-9)
    assert not found.sigma_min_converged or found.sigma_min == pytest.approx(float(values[-1]), rel=1e-3)
    whole = jacobian.jacobian_extremes(block, x, max_steps=192, tolerance=1e-6)
    assert whole.sigma_min >= float(values[-1]) * (1 - 1e-6)
    if whole.sigma_min_converged:
        assert whole.sigma_min == pytest.approx(float(values[-1]), rel=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(size=st.integers(1, 12), seed=st.integers(0, 10**6), decades=st.sampled_from([0, 2, 6, 10]))
def test_extremes_never_claim_what_is_not_so(size, seed, decades):
    generator = torch.Generator().manual_seed(seed)
    left, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    values = 10 ** (-decades * torch.linspace(0, 1, size, dtype=torch.float64))
    k = left * values @ right
    for steps in (3, 40):
        found = jacobian.jacobian_extremes(lambda x: x @ k, torch.zeros(1, size, dtype=torch.float64), max_steps=steps)
        assert found.sigma_max <= float(values[0]) * (1 + 1e-9)
        assert found.sigma_min >= float(values[-1]) - 1e-13
        if found.sigma_max_converged:
            assert found.sigma_max == pytest.approx(float(values[0]), rel=2e-2)
        if found.sigma_min_converged and steps == 40:
            assert found.sigma_min == pytest.approx(float(values[-1]), rel=2e-2)


def test_a_far_too_small_sigma_min_is_not_claimed():
    """κ = 10⁶ spread over 200 values: 60 steps cannot find σ_min, and must say so."""
    values = torch.logspace(0, -6, 200, dtype=torch.float64)
    found = jacobian.jacobian_extremes(lambda x: x * values, torch.zeros(200, dtype=torch.float64))
    assert found.sigma_max_converged and not found.sigma_min_converged and found.sigma_min > 1e-6


def test_constant_function_has_a_zero_jacobian():
    found = jacobian.jacobian_extremes(lambda x: 0 * x, torch.ones(3, 2))
    assert found.sigma_max == 0 and found.sigma_min == 0


def test_fused_attention_can_be_differentiated():
    x = layer(6, 4, 1, 5)[0]

    def fused(z):
        return torch.nn.functional.scaled_dot_product_attention(z[None, None], z[None, None], z[None, None])[0, 0]

    values = torch.linalg.svdvals(jacobian.autograd_jacobian(fused, x))
    assert jacobian.jacobian_extremes(fused, x).sigma_max == pytest.approx(float(values[0]), rel=1e-3)


def test_layer_norm_makes_the_jacobian_singular_and_a_skip_lowers_kappa():
    x, *weights = layer(8, 6, 1, 6)
    normed = torch.nn.functional.layer_norm(x, (6,), eps=0.0)
    through = jacobian.autograd_jacobian(
        lambda z: jacobian.attention(torch.nn.functional.layer_norm(z, (6,), eps=0.0), *weights), x
    )
    values = torch.linalg.svdvals(through)
    assert int((values > 1e-10 * values[0]).sum()) <= 8 * (6 - 2)  # two directions lost per token
    bare, skipped = jacobian.jacobian_kappa(jacobian.attention_jacobian(normed, *weights))
    assert np.isfinite(bare) and skipped < bare


def test_bad_shapes_are_refused():
    x, *weights = layer(4, 6, 2, 7, width=3)
    with pytest.raises(InputError, match=r"saw 4 heads, x \(4, 6\)"):
        jacobian.attention(x, *weights, heads=4)
    with pytest.raises(InputError, match="expected x"):
        jacobian.attention_jacobian(x[None], *weights)
    big = torch.zeros(100, 100)
    for dense in (
        lambda: jacobian.attention_jacobian(big, big, big, big, big),
        lambda: jacobian.autograd_jacobian(torch.sin, big),
    ):
        with pytest.raises(InputError, match="use jacobian_extremes"):
            dense()
    with pytest.raises(InputError, match="keep the size"):
        jacobian.jacobian_extremes(lambda z: z[:2], x)
    with pytest.raises(InputError, match="to be finite"):
        jacobian.jacobian_extremes(torch.log, -torch.ones(3, 2))
    with pytest.raises(InputError, match="at least 1; saw 0"):
        jacobian.jacobian_extremes(torch.sin, x, max_steps=0)
