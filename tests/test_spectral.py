"""The spectral quantities against independent numpy float64 formulas, and against what must hold for any input."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skiplab.errors import InputError
from skiplab.theory import spectral

torch.set_num_threads(1)
SHAPES = dict(n=st.integers(1, 9), d=st.integers(1, 6), seed=st.integers(0, 10**6))
fast = settings(max_examples=200, deadline=None, derandomize=True)


def tokens(n, d, seed, dtype=torch.float64):
    return torch.randn(2, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def maps(n, seed, scale=1.0, batch=(2, 3)):
    logits = torch.randn(*batch, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.softmax(scale * logits, dim=-1)


def dft(n):
    return np.exp(-2j * np.pi * np.outer(np.arange(n), np.arange(n)) / n) / np.sqrt(n)


@fast
@given(**SHAPES)
def test_dc_and_hc_are_what_the_dft_says(n, d, seed):
    x = tokens(n, d, seed)
    bands = dft(n) @ x.numpy()
    bands[..., 1:, :] = 0
    np.testing.assert_allclose(spectral.dc(x), (dft(n).conj().T @ bands).real, atol=1e-12)
    torch.testing.assert_close(spectral.dc(x) + spectral.hc(x), x)
    torch.testing.assert_close(spectral.hc(spectral.hc(x)), spectral.hc(x), atol=1e-12, rtol=0)


@fast
@given(**SHAPES)
def test_signal_spectrum_is_the_dft_and_splits_into_dc_and_hc(n, d, seed):
    x = tokens(n, d, seed)
    amplitude = spectral.signal_spectrum(x)
    np.testing.assert_allclose(amplitude, np.linalg.norm(dft(n) @ x.numpy(), axis=-1), atol=1e-12)
    torch.testing.assert_close(amplitude[..., 0], torch.linalg.matrix_norm(spectral.dc(x)))
    torch.testing.assert_close(
        amplitude[..., 1:].norm(dim=-1), torch.linalg.matrix_norm(spectral.hc(x)), atol=1e-12, rtol=1e-12
    )


@fast
@given(n=st.integers(1, 12), seed=st.integers(0, 10**6), scale=st.sampled_from([0.0, 1.0, 10.0, 1e3]))
def test_frequency_response_equals_the_explicit_product(n, seed, scale):
    attn = maps(n, seed, scale)
    response = dft(n) @ attn.numpy() @ dft(n).conj().T
    for side, axis in (("output", -1), ("input", -2)):
        np.testing.assert_allclose(
            spectral.frequency_response(attn, side), np.linalg.norm(response, axis=axis), atol=1e-10
        )


def test_frequency_response_of_uniform_identity_and_shift():
    n = 5
    uniform, identity = torch.full((n, n), 1 / n), torch.eye(n)
    torch.testing.assert_close(spectral.frequency_response(uniform), torch.tensor([1.0, 0, 0, 0, 0]))
    for attn in (identity, identity.roll(1, dims=0)):
        torch.testing.assert_close(spectral.frequency_response(attn), torch.ones(n))


def test_the_two_sides_differ():
    """All tokens attend to the first: the output is constant, whatever band the input was in."""
    attn = torch.zeros(4, 4, dtype=torch.float64)
    attn[:, 0] = 1
    torch.testing.assert_close(spectral.frequency_response(attn), torch.tensor([2.0, 0, 0, 0], dtype=torch.float64))
    torch.testing.assert_close(spectral.frequency_response(attn, "input"), torch.ones(4, dtype=torch.float64))


def cosines(x):
    """Mean cosine between different rows, pair by pair."""
    n = len(x)
    return np.mean(
        [x[i] @ x[j] / np.linalg.norm(x[i]) / np.linalg.norm(x[j]) for i in range(n) for j in range(n) if i != j]
    )


@fast
@given(n=st.integers(2, 7), d=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_similarities_exclude_pairs_of_a_token_with_itself(n, d, seed):
    x, attn = tokens(n, d, seed), maps(n, seed)
    np.testing.assert_allclose(spectral.token_similarity(x), [cosines(one) for one in x.numpy()], atol=1e-12)
    heads = [[cosines(head.T) for head in layer] for layer in attn.numpy()]  # columns
    np.testing.assert_allclose(spectral.attention_similarity(attn), heads, atol=1e-12)


def test_similarity_extremes():
    assert float(spectral.token_similarity(torch.ones(3, 2) * 1e-30)) == pytest.approx(1)
    assert float(spectral.token_similarity(torch.eye(3))) == pytest.approx(0)
    assert float(spectral.token_similarity(torch.tensor([[1.0], [-1.0]]))) == pytest.approx(-1)
    assert float(spectral.token_similarity(torch.zeros(3, 2))) == 0
    assert float(spectral.attention_similarity(torch.full((4, 4), 0.25))) == pytest.approx(1)


def test_hc_ratio_and_log_intensity():
    x = torch.tensor([[3.0], [1.0]], dtype=torch.float64)  # DC 2, 2 and HC 1, -1
    assert float(spectral.hc_ratio(x)) == pytest.approx(0.5)
    assert float(spectral.log_hc_intensity(x, 10 * x)) == pytest.approx(np.log(np.sqrt(2) / np.sqrt(1000)))
    assert spectral.hc_ratio(torch.tensor([[1.0], [-1.0]])) == torch.inf
    assert spectral.hc_ratio(torch.zeros(3, 2)) == 0
    assert spectral.log_hc_intensity(torch.ones(1, 2), torch.ones(1, 2)) == -torch.inf
    with pytest.raises(InputError, match="not all zero"):
        spectral.log_hc_intensity(x, 0 * x)


@pytest.mark.parametrize("dtype, accuracy", [(torch.float32, 1e-6), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)])
def test_lower_precision_agrees_with_float64(dtype, accuracy):
    x, attn = tokens(9, 4, 0), maps(9, 0)
    for function in (spectral.dc, spectral.hc, spectral.hc_ratio, spectral.signal_spectrum, spectral.token_similarity):
        result = function(x.to(dtype))
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), function(x), atol=accuracy, rtol=accuracy)
    for function in (spectral.frequency_response, spectral.attention_similarity):
        torch.testing.assert_close(function(attn.to(dtype)).double(), function(attn), atol=accuracy, rtol=accuracy)


def wrong_sum():
    attn = torch.eye(3)
    attn[1, 1] = 1.01
    return attn


@pytest.mark.parametrize(
    "attn, words",
    [
        (wrong_sum(), r"sum to 1 within 1e-05; saw 1\.0\d* in row 1"),
        (wrong_sum().double(), r"within 1e-10; saw 1\.0\d* in row 1"),
        (torch.tensor([[1.5, -0.5], [0, 1]]), r"≥ 0; saw -0\.5 at \[0, 1\]"),
        (torch.tensor([[1.0, 0], [torch.nan, 1]]), r"finite and ≥ 0; saw nan at \[1, 0\]"),
        (torch.tensor([[torch.inf, 0], [0, 1]]), r"saw inf at \[0, 0\]"),
        (torch.ones(3, 1, 2), r"square.*saw shape \(3, 1, 2\)"),
        (torch.ones(3), r"square.*saw shape \(3,\)"),
        (torch.empty(0, 4, 4), r"empty: shape \(0, 4, 4\)"),
        (torch.eye(2, dtype=torch.int64), r"torch\.int64.*allowed"),
    ],
)
@pytest.mark.parametrize(
    "function", [spectral.frequency_response, spectral.attention_similarity, spectral.check_attention]
)
def test_bad_attention_is_refused_in_one_line(attn, words, function):
    with pytest.raises(InputError, match=words) as error:
        function(attn)
    assert "\n" not in str(error.value)


def test_rows_rounded_to_half_precision_pass():
    for scale in (0, 1, 5, 1000):
        for dtype in spectral.ROW_SUM_TOLERANCE:
            spectral.check_attention(
                torch.softmax(
                    scale * torch.randn(4, 785, 785, generator=torch.Generator().manual_seed(0)).to(dtype), -1
                )
            )


@pytest.mark.parametrize("x", [torch.ones(3), torch.empty(2, 0, 3), torch.ones(2, 2, dtype=torch.int64)])
def test_bad_tokens_are_refused(x):
    for function in (spectral.dc, spectral.hc, spectral.hc_ratio, spectral.signal_spectrum, spectral.token_similarity):
        with pytest.raises(InputError, match="tokens must"):
            function(x)


def test_other_bad_input():
    with pytest.raises(InputError, match="did you mean 'output'"):
        spectral.frequency_response(torch.eye(2), "outputs")
    with pytest.raises(InputError, match="at least 2 tokens; saw 1"):
        spectral.token_similarity(torch.ones(1, 3))


@fast
@given(n=st.integers(3, 12), seed=st.integers(0, 10**6), scale=st.floats(0.01, 30))
def test_the_constant_band_nearly_always_wins(n, seed, scale):
    gains = spectral.frequency_response(maps(n, seed, scale))
    assert (gains[..., 0] >= 1 - 1e-12).all() and (gains.square().mean(dim=-1) <= 1 + 1e-12).all()
    upper = gains[..., torch.fft.fftfreq(n).abs() > 0.25].mean(dim=-1)
    for times in (1, 2):
        assert spectral.low_pass_share(gains, times) == pytest.approx(
            100 * (gains[..., 0] > times * upper).double().mean()
        )
