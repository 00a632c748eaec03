"""Portable draws: right by scipy and by LAPACK, and the same bits wherever they are drawn."""

import hashlib
import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skiplab import draws

UNIT = np.finfo(float).eps / 2


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def digest(*tensors):
    return hashlib.sha256(b"".join(np.ascontiguousarray(t).tobytes() for t in tensors)).hexdigest()[:16]


def test_the_bits_are_those_of_every_other_machine():
    """The digests were computed once; a machine or a library on which they differ is one where runs differ."""
    torch.manual_seed(0)
    assert digest(draws.uniform(1000, low=-0.3, high=0.7)) == "033515fee45f7492"
    assert digest(draws.normal(1000)) == "b67b2ed41c54873d"
    assert digest(draws.orthogonal(24, 16)) == "9637105eeeec0f94"
    assert digest(*draws.leading_factors(draws.normal(2, 24, 24), 8)) == "ddd91559979a48b2"
    with draws.Portable():
        model = timm.create_model("vit_tiny_patch16_224", embed_dim=24, depth=1, num_heads=2, img_size=32)
    assert digest(*(p.detach() for p in model.parameters())) == "276d7500b6842a49"


@given(st.floats(2.0**-54, 1 - 2.0**-53))
def test_quantiles_are_scipys(p):
    """AS 241 states 1e-16; the argument of its logarithm and its square root lose a few roundings more."""
    expected = scipy.special.ndtri(p)
    assert draws.normal_quantile(np.array([p]))[0] == pytest.approx(expected, rel=32 * UNIT, abs=32 * UNIT)


@pytest.mark.parametrize("p", [2.0**-53, 1e-12, 0.02, 0.075, 0.5, 0.925, 1 - 2.0**-53])
def test_quantiles_at_the_seams(p):
    near = np.array([np.nextafter(p, 0), p, np.nextafter(p, 1)])
    found = draws.normal_quantile(near.clip(2.0**-54, 1 - 2.0**-53))
    assert np.allclose(found, scipy.special.ndtri(near.clip(2.0**-54, 1 - 2.0**-53)), rtol=32 * UNIT, atol=32 * UNIT)


def test_a_zero_of_the_generator_is_half_of_the_next_smallest():
    assert draws.normal_quantile(np.zeros(1))[0] == draws.normal_quantile(np.array([2.0**-54]))[0] > -8.4


@given(st.floats(5e-324, 1e308))
def test_the_logarithm_is_the_libms(x):
    assert draws.log(np.array([x]))[0] == pytest.approx(math.log(x), rel=4 * UNIT, abs=4 * UNIT)


def test_draws_have_their_distribution():
    """Kolmogorov and Smirnov's test refuses a right sample of a fixed seed never again once it has passed."""
    assert scipy.stats.kstest(draws.normal(20000, generator=generator()).numpy(), "norm").pvalue > 1e-3
    assert scipy.stats.kstest(draws.uniform(20000, generator=generator()).numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 4)])
def test_shapes_and_chunks(shape, monkeypatch):
    whole = draws.normal(*shape, generator=generator())
    monkeypatch.setattr(draws, "CHUNK", 5)
    assert whole.shape == shape and whole.dtype == torch.float64
    assert torch.equal(whole, draws.normal(*shape, generator=generator()))


# ── In place of torch's ───────────────────────────────────────────────────────────────────────────────────────────────

FILLS = {
    "uniform_": (lambda: torch.empty(4000).uniform_(-2, 3), scipy.stats.uniform(-2, 5).cdf),
    "normal_": (lambda: torch.empty(4000).normal_(1, 3), scipy.stats.norm(1, 3).cdf),
    "randn": (lambda: torch.randn(4000), scipy.stats.norm().cdf),
    "rand": (lambda: torch.rand(4000), scipy.stats.uniform().cdf),
    "trunc_normal_": (lambda: timm.layers.trunc_normal_(torch.empty(4000), std=0.02), scipy.stats.norm(0, 0.02).cdf),
    "torch's trunc_normal_": (
        lambda: torch.nn.init.trunc_normal_(torch.empty(4000), std=1.0, a=-1, b=1),
        scipy.stats.truncnorm(-1, 1).cdf,
    ),
}


@pytest.mark.parametrize("name", FILLS)
def test_within_portable_torch_draws_the_same_distribution_portably(name):
    draw, cdf = FILLS[name]
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        with draws.Portable():
            drawn.append(draw())
    assert drawn[0].dtype == torch.float32 and torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert scipy.stats.kstest(drawn[0].numpy(), cdf).pvalue > 1e-3


def test_bernoulli_and_integers_work_within():
    torch.manual_seed(0)
    with draws.Portable():
        share = torch.empty(20000).bernoulli_(0.3).mean()
        assert sorted(torch.randperm(7).tolist()) == list(range(7))
    assert abs(share - 0.3) < 5 * math.sqrt(0.21 / 20000)


def test_ends_are_never_drawn():
    """timm takes the inverse of erf of a number between −1 and 1: the ends would be infinite, then clamped."""
    with draws.Portable():
        torch.manual_seed(0)
        drawn = torch.empty(3, dtype=torch.float16).uniform_(0, 6e-8)  # between the two lie no others
        assert ((drawn >= 0) & drawn.isfinite()).all()
        wide = torch.empty(1_000_000, dtype=torch.float16).uniform_(-1, 1)
    assert wide.abs().max() < 1


def test_what_it_does_not_know_is_refused_by_name():
    with draws.Portable(), pytest.raises(NotImplementedError, match="exponential.*differ between machines"):
        torch.empty(3).exponential_()


def test_a_tensor_without_memory_draws_nothing():
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    with draws.Portable():
        assert torch.nn.Linear(3, 4, device="meta").weight.is_meta
    assert torch.equal(state, torch.random.get_rng_state())


# ── Orthogonal matrices ───────────────────────────────────────────────────────────────────────────────────────────────

SIZES = [(1, 1), (1, 5), (5, 1), (7, 7), (30, 12), (12, 30), (64, 64)]


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_orthogonal_is_the_q_of_the_qr_decomposition(rows, columns, monkeypatch):
    torch.manual_seed(0)
    q = draws.orthogonal(rows, columns)
    torch.manual_seed(0)
    gaussian = draws.normal(max(rows, columns), min(rows, columns)).numpy()
    expected, r = np.linalg.qr(gaussian)
    expected *= np.sign(np.diag(r))
    few = min(rows, columns)
    gram = (q @ q.mT if rows < columns else q.mT @ q).numpy()
    assert np.abs(gram - np.eye(few)).max() < 4 * max(rows, columns) * UNIT
    # a change of u in the matrix turns Q by up to u times its condition number
    assert np.abs((q.mT if rows < columns else q).numpy() - expected).max() < 16 * UNIT * np.linalg.cond(gaussian) * few
    torch.manual_seed(0)
    monkeypatch.setattr(draws, "WIDEST", 0)
    by_lapack = draws.orthogonal(rows, columns)
    assert np.abs(q - by_lapack).max() < 16 * UNIT * np.linalg.cond(gaussian) * few


def test_orthogonal_matrices_are_haar():
    """The trace of a Haar orthogonal matrix has variance 1, an entry variance 1/d (Diaconis and Shahshahani 1994)."""
    torch.manual_seed(0)
    found = torch.stack([draws.orthogonal(5, 5) for _ in range(2000)])
    traces, entries = found.diagonal(dim1=1, dim2=2).sum(1), found[:, 0, 0]
    assert abs(traces.mean()) < 5 / math.sqrt(2000) and abs(entries.mean()) < 5 / math.sqrt(5 * 2000)
    assert abs(traces.var() - 1) < 0.2 and abs(5 * entries.var() - 1) < 0.2


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 12), st.data(), st.integers(0, 2**31), st.sampled_from(["gaussian", "shifted", "low rank", "zero"])
)
def test_leading_factors_are_the_best_approximation(d, data, seed, kind):
    rank = data.draw(st.integers(1, d))
    matrix = draws.normal(2, d, d, generator=generator(seed))
    if kind == "shifted":
        matrix = 0.1 * matrix + torch.eye(d, dtype=torch.float64)
    if kind == "low rank":
        matrix = matrix[..., :1] * matrix[..., :1, :]
    if kind == "zero":
        matrix = matrix * 0
    p, q = draws.leading_factors(matrix, rank)
    u, s, vh = np.linalg.svd(matrix.numpy())
    scale = max(s.max(), 1.0)
    best = (u[..., :rank] * s[..., None, :rank]) @ vh[..., :rank, :]
    gap = (s[..., rank - 1] - s[..., rank]).min() if rank < d else scale
    if kind in ("low rank", "zero") or gap > 1e-6 * scale:  # else which triples are the leading ones is for rounding
        tolerance = 64 * d * UNIT * scale * (1 if kind in ("low rank", "zero") else scale / gap)
        assert np.abs((p @ q.mT).numpy() - best).max() <= tolerance
    assert np.allclose(
        p.norm(dim=-2)[s[..., :rank] > 1e-3] ** 2, s[..., :rank][s[..., :rank] > 1e-3], rtol=64 * d * UNIT
    )
    assert (p.sum(dim=-2) >= -d * UNIT * scale).all()


def test_leading_factors_are_lapacks_beyond_the_widest(monkeypatch):
    matrix = draws.normal(2, 20, 20, generator=generator()) / math.sqrt(20) + torch.eye(20)
    ours = draws.leading_factors(matrix, 6)
    monkeypatch.setattr(draws, "WIDEST", 0)
    gaps = -np.diff(np.linalg.svd(matrix.numpy(), compute_uv=False)[:, :7]).max()
    for one, other in zip(ours, draws.leading_factors(matrix, 6)):
        assert (one - other).abs().max() < 1e4 * UNIT / gaps  # the Gram matrix squares the condition, gaps turn vectors
