"""Token Graying against float64 numpy and scipy, on photograph-like, degenerate and random tokens."""

import copy
import io
import math
import pathlib

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from skiplab.errors import InputError
from skiplab.training.photographs import photographs as embedded_photographs
from skiplab.transforms import graying
from skiplab.transforms.graying import TokenGraying, gray_dct, gray_svd, gray_svd_fast, patchify, unpatchify

EPSILONS = [0.1, 0.5, 0.7, 0.9, 0.95]
METHODS = {"svd": gray_svd, "svd_fast": gray_svd_fast, "dct": gray_dct}
EMBEDDED = pathlib.Path(__file__).parents[1] / "data" / "fashion_mnist"


def photographs(count, size, seed=0):
    """1/f spectra, channels alike, 8 bits, clipped (some areas black or white), normalised."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.fftfreq(size)[None])
    frequency[0, 0] = 1
    fields = np.fft.ifft2(np.fft.fft2(rng.standard_normal((count, 4, size, size))) / frequency**1.5).real
    channels = fields[:, 3:] + 0.2 * fields[:, :3]
    channels = channels / channels.std((-2, -1), keepdims=True) * 0.3 + 0.45
    return torch.tensor((np.round(np.clip(channels, 0, 1) * 255) / 255 - 0.45) / 0.225, dtype=torch.float32)


def special_images(size):
    generator = torch.Generator().manual_seed(0)
    half = torch.zeros(3, size, size)
    half[..., size // 2 :] = 1
    rank_one = torch.rand(3, 1, size, generator=generator).expand(3, size, size).contiguous()
    return {
        "constant": torch.full((3, size, size), 0.3),
        "black": torch.zeros(3, size, size),
        "half-black": half,
        "half-black, normalised": (half - 0.45) / 0.225,
        "same rows": rank_one,
        "Gaussian": torch.randn(3, size, size, generator=generator),
    }


def reference_svd(tokens, epsilon, rescale=True, cutoff=1e-6):
    u, sigma, vh = np.linalg.svd(tokens.double().numpy(), full_matrices=False)
    top = sigma[..., :1]
    ratio = sigma / np.where(top > 0, top, 1)
    grayed = np.where(ratio > cutoff, ratio**epsilon, 0)
    return torch.from_numpy((u * (grayed * (top if rescale else 1))[..., None, :]) @ vh)


def reference_dct(tokens, epsilon, rescale=True):
    c = scipy.fft.dctn(tokens.double().numpy(), axes=(-2, -1), norm="ortho")
    top = np.abs(c).max((-2, -1), keepdims=True)
    ratio = c / np.where(top > 0, top, 1)
    grayed = np.sign(ratio) * np.where(np.abs(ratio) > 1e-12, np.abs(ratio), 0) ** epsilon
    return torch.from_numpy(scipy.fft.idctn(grayed * (top if rescale else 1), axes=(-2, -1), norm="ortho"))


def relative_error(result, reference):
    """Largest relative Frobenius error over the batch; a zero reference must be met exactly."""
    assert result.shape == reference.shape
    size = reference.norm(dim=(-2, -1))
    error = (result.double() - reference).norm(dim=(-2, -1))
    return (error / size.where(size > 0, 1e-300)).max().item()


PHOTOGRAPHS = {
    "196×768": patchify(photographs(3, 224), 16),
    "64×48": patchify(photographs(40, 32), 4),
    "3136×48": patchify(photographs(2, 224, seed=1), 4),
}
SPECIAL = {
    f"{name}, patch {patch}": patchify(image[None], patch)
    for size, patch in [(224, 16), (32, 4)]
    for name, image in special_images(size).items()
}
TOKENS = PHOTOGRAPHS | SPECIAL


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("name", TOKENS)
def test_exact_against_numpy(name, epsilon):
    assert relative_error(gray_svd(TOKENS[name], epsilon), reference_svd(TOKENS[name], epsilon)) <= 5e-6
    normalised = gray_svd(TOKENS[name], epsilon, rescale=False)
    assert relative_error(normalised, reference_svd(TOKENS[name], epsilon, rescale=False)) <= 5e-6


@pytest.mark.parametrize("epsilon", [1e-3, 0.37, 0.5, 0.9])
@pytest.mark.parametrize("name", TOKENS)
def test_fast_against_numpy(name, epsilon):
    assert relative_error(gray_svd_fast(TOKENS[name], epsilon), reference_svd(TOKENS[name], epsilon)) <= 2e-5
    normalised = gray_svd_fast(TOKENS[name], epsilon, rescale=False)
    assert relative_error(normalised, reference_svd(TOKENS[name], epsilon, rescale=False)) <= 2e-5


@pytest.mark.parametrize("width", [1e-3, 1e-2, 3e-2, 0.1])
def test_fast_where_the_largest_singular_values_crowd(width):
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((2, n, 96)))[0] for n in (96, 120))
    tokens = torch.from_numpy((left * np.linspace(1, 1 - width, 96)) @ right.swapaxes(-2, -1))
    for rescale in (True, False):
        expected = reference_svd(tokens, 0.1, rescale)
        assert relative_error(gray_svd_fast(tokens, 0.1, rescale=rescale), expected) <= 2e-4


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("name", TOKENS)
def test_dct_against_scipy(name, epsilon):
    assert relative_error(gray_dct(TOKENS[name], epsilon), reference_dct(TOKENS[name], epsilon)) <= 1e-6
    normalised = gray_dct(TOKENS[name], epsilon, rescale=False)
    assert relative_error(normalised, reference_dct(TOKENS[name], epsilon, rescale=False)) <= 1e-6
    double = gray_dct(TOKENS[name].double(), epsilon)
    assert relative_error(double, reference_dct(TOKENS[name], epsilon)) <= 1e-11


def test_embedded_pictures():
    files = sorted(EMBEDDED.glob("*test*.parquet"))
    import pyarrow.parquet
    from PIL import Image

    column = pyarrow.parquet.read_table(files[0]).slice(0, 100)["image"].to_pylist()
    pixels = np.stack([np.array(Image.open(io.BytesIO(cell["bytes"]))) for cell in column])
    images = torch.from_numpy(pixels)[:, None].float() / 255
    for patch in (4, 7):  # at 7 half of them are rank-deficient
        tokens = patchify(images, patch)
        for epsilon in EPSILONS:
            assert relative_error(gray_svd(tokens, epsilon), reference_svd(tokens, epsilon)) <= 2e-5
            assert relative_error(gray_dct(tokens, epsilon), reference_dct(tokens, epsilon)) <= 1e-6


@pytest.mark.parametrize("epsilon", [0.5, 0.9])
@pytest.mark.parametrize("side, patch", [(224, 16), (224, 4), (32, 4)])
def test_real_photographs(side, patch, epsilon):
    """The embedded ones, some with even black areas, normalised as ImageNet's usually are."""
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    tokens = patchify((torch.stack(list(embedded_photographs(side).values())) / 255 - mean) / std, patch)
    assert len(tokens) == 8 and tokens.dtype == torch.float32
    result = gray_svd(tokens, epsilon)
    assert relative_error(result, reference_svd(tokens, epsilon)) <= 2e-5
    before, after = (np.linalg.cond(x.double().numpy()) for x in (tokens, result))
    chosen = before <= 1e4
    assert chosen.any() and np.allclose(after[chosen], before[chosen] ** epsilon, rtol=1e-3, atol=0)


def test_float64_keeps_its_accuracy():
    for name, tolerance in [("Gaussian, patch 4", 1e-13), ("64×48", 1e-8), ("half-black, patch 4", 1e-13)]:
        tokens = TOKENS[name].double()
        result = gray_svd(tokens, 0.5)
        assert result.dtype == torch.float64
        assert relative_error(result, reference_svd(tokens, 0.5)) <= tolerance


@pytest.mark.parametrize("method", ["svd", "svd_fast"])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_kappa_becomes_its_power(method, epsilon):
    for name, tokens in (PHOTOGRAPHS | {"Gaussian": SPECIAL["Gaussian, patch 4"]}).items():
        before, after = (np.linalg.cond(x.double().numpy()) for x in (tokens, METHODS[method](tokens, epsilon)))
        # Output in float32 rounds the smallest singular value by about 1e-7·κ: 1e-3 holds up to κ = 1e4.
        chosen = before <= 1e4
        assert chosen.any(), name
        assert np.allclose(after[chosen], before[chosen] ** epsilon, rtol=1e-3, atol=0), name


@pytest.mark.parametrize("method", METHODS)
def test_epsilon_one(method):
    tokens = torch.cat([TOKENS["64×48"], TOKENS["constant, patch 4"]])
    assert torch.equal(METHODS[method](tokens, 1), tokens)
    assert METHODS[method](tokens, 1).data_ptr() != tokens.data_ptr()
    if method == "dct":
        top = np.abs(scipy.fft.dctn(tokens.double().numpy(), axes=(-2, -1), norm="ortho")).max((-2, -1))
    else:
        top = np.linalg.svd(tokens.double().numpy(), compute_uv=False)[..., 0]
    expected = tokens.double() / torch.from_numpy(top)[..., None, None]
    assert relative_error(METHODS[method](tokens, 1, rescale=False), expected) <= 2e-6


def test_zero_singular_values_stay_zero():
    generator = torch.Generator().manual_seed(1)
    for n, d in [(64, 48), (30, 90)]:
        tokens = (torch.randn(5, n, 7, generator=generator, dtype=torch.float64)
                  @ torch.randn(5, 7, d, generator=generator, dtype=torch.float64))  # fmt: skip
        for method in (gray_svd, gray_svd_fast):
            sigma = torch.linalg.svdvals(method(tokens, 0.3))
            assert (sigma[:, 6] > 1e-3 * sigma[:, 0]).all()
            assert (sigma[:, 7:] <= 1e-6 * sigma[:, :1]).all()


def test_cutoff():
    generator = torch.Generator().manual_seed(2)
    u, v = (torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    tokens = u @ torch.diag(torch.tensor([1, 0.1, 1e-2, 1e-3, 1e-4, 3e-6], dtype=torch.float64)) @ v
    for cutoff, rank in [(1e-6, 6), (1e-5, 5), (5e-3, 3), (0.5, 1)]:
        assert torch.linalg.matrix_rank(gray_svd(tokens, 0.5, cutoff=cutoff)).item() == rank
        assert relative_error(gray_svd(tokens, 0.5, cutoff=cutoff), reference_svd(tokens, 0.5, cutoff=cutoff)) < 1e-6
    assert gray_svd(torch.zeros(4, 4), 0.5, cutoff=0).eq(0).all()
    assert gray_svd(TOKENS["constant, patch 4"], 0.5, cutoff=0).isfinite().all()


def test_svd_commutes_with_flips_and_dct_does_not():
    images = photographs(4, 224, seed=3)
    for method in ("svd", "svd_fast"):
        gray = TokenGraying(method, 0.5, 16)
        assert relative_error(gray(images.flip(-1)), gray(images).flip(-1).double()) <= 1e-5
    gray = TokenGraying("dct", 0.5, 16)
    assert relative_error(gray(images.flip(-1)), gray(images).flip(-1).double()) > 1e-2


shapes = st.tuples(st.integers(1, 24), st.integers(1, 24))


@settings(max_examples=150, deadline=None)
@given(
    shape=shapes,
    rank=st.integers(1, 24),
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    exponent=st.floats(-20, 20),
    epsilon=st.floats(0.01, 1),
    rescale=st.booleans(),
    double=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_rank_scale_epsilon(shape, rank, batch, exponent, epsilon, rescale, double, seed):
    n, d = shape
    rank = min(rank, n, d)
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.standard_normal((*batch, n, rank)))[0]
    right = np.linalg.qr(rng.standard_normal((*batch, d, rank)))[0]
    sigma = np.geomspace(1, 10 ** -rng.uniform(0, 3.5), rank)  # clear of both 0 and the cutoff
    tokens = torch.from_numpy((left * sigma) @ right.swapaxes(-2, -1) * 10**exponent)
    tokens = tokens if double else tokens.float()
    # In float32 the zero singular values are rounding, at most 1e-7·σ_max·√…: lift the cutoff above them.
    cutoff = 1e-6 if double else 1e-5
    expected = reference_svd(tokens, epsilon, rescale, cutoff)
    assert relative_error(gray_svd(tokens, epsilon, rescale=rescale, cutoff=cutoff), expected) <= 5e-6
    if rank == min(n, d):
        expected = reference_svd(tokens, epsilon, rescale, 0)
        assert relative_error(gray_svd_fast(tokens, epsilon, rescale=rescale), expected) <= 2e-4
    expected = reference_dct(tokens, epsilon, rescale)
    assert relative_error(gray_dct(tokens, epsilon, rescale=rescale), expected) <= 5e-6


@pytest.mark.parametrize("method", METHODS)
def test_extreme_float64_and_float32_scales(method):
    tokens = TOKENS["64×48"].double()[:3]
    expected = METHODS[method](tokens, 0.5)
    for scale in (1e-200, 1e200):
        assert relative_error(METHODS[method](tokens * scale, 0.5) / scale, expected) <= 1e-10
    for scale in (1e-30, 1e30):
        assert relative_error(METHODS[method]((tokens * scale).float(), 0.5).double() / scale, expected) <= 5e-5
        normalised = METHODS[method]((tokens * scale).float(), 0.5, rescale=False)
        assert relative_error(normalised, METHODS[method](tokens, 0.5, rescale=False)) <= 5e-5


@pytest.mark.parametrize("dtype,tolerance", [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("method", METHODS)
def test_half_precision_is_rounded_only_at_the_end(method, dtype, tolerance):
    tokens = TOKENS["196×768"].to(dtype)
    result = METHODS[method](tokens, 0.7)
    assert result.dtype == dtype
    expected = METHODS[method](tokens.double(), 0.7)
    assert relative_error(result, expected) <= tolerance / 2
    assert (result.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("method", METHODS)
def test_autocast_and_low_matmul_precision_change_nothing(method):
    tokens = TOKENS["196×768"]
    expected = METHODS[method](tokens.double(), 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(METHODS[method](tokens, 0.5), expected) <= 5e-6
    torch.set_float32_matmul_precision("medium")
    try:
        assert relative_error(METHODS[method](tokens, 0.5), expected) <= 5e-6
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("method", METHODS)
def test_layouts_and_edge_shapes(method):
    gray = METHODS[method]
    tokens = TOKENS["64×48"][:4]
    expected = gray(tokens, 0.6)
    strided = tokens.mT.contiguous().mT
    assert not strided.is_contiguous()
    assert relative_error(gray(strided, 0.6), expected.double()) <= 1e-6
    assert relative_error(gray(tokens.repeat_interleave(2, -1)[..., ::2], 0.6), expected.double()) <= 1e-6
    assert relative_error(gray(tokens[:1].expand(3, -1, -1), 0.6)[2:], expected[:1].double()) <= 1e-6
    assert relative_error(gray(tokens.view(2, 1, 2, 64, 48), 0.6).flatten(0, 2), expected.double()) <= 1e-6
    assert relative_error(gray(tokens[0], 0.6), expected[0].double()) <= 1e-6
    if method != "dct":  # the two orientations are one map
        assert relative_error(gray(tokens.mT, 0.6).mT, expected.double()) <= 1e-5
    for shape in [(0, 5, 3), (2, 0, 5, 3), (2, 0, 3), (2, 5, 0)]:
        assert gray(torch.zeros(shape), 0.6).shape == shape
    for shape in [(1, 5), (5, 1), (1, 1)]:  # one row: rank one, which SVD-TG leaves alone
        row = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
        if method != "dct":
            assert torch.allclose(gray(row, 0.3), row, rtol=2e-5)
            assert torch.allclose(gray(row, 0.3, rescale=False), row / row.norm(), rtol=5e-5)
        else:
            assert relative_error(gray(row, 0.3), reference_dct(row, 0.3)) <= 1e-6
    before = tokens.clone()
    gray(tokens, 0.6)
    assert torch.equal(tokens, before)


@pytest.mark.parametrize("n", [1, 2, 3, 48, 65, 196, 256, 257, 300, 3136])
def test_every_dct_route_is_scipys(n):
    x = torch.from_numpy(np.random.default_rng(n).standard_normal((3, n)))
    forward, inverse = (torch.from_numpy(f(x.numpy(), norm="ortho")) for f in (scipy.fft.dct, scipy.fft.idct))
    for limit in (0, 10_000):  # FFT, dense
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(graying.DENSE_DCT, "cpu", limit)
            if n * limit > 1000 * 10_000:
                continue
            assert (graying._dct_axis(x, False) - forward).abs().max() <= 1e-11
            assert (graying._dct_axis(x, True) - inverse).abs().max() <= 1e-11


@pytest.mark.parametrize("shape", [(64, 48), (196, 768), (3136, 48), (300, 20)])
def test_device_dct_equals_the_cpu_one(shape, monkeypatch):
    """The route a GPU takes, run here: dense up to 256, FFT beyond."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, *shape)))
    for inverse in (False, True):
        expected = graying._Dct.apply(x, inverse)
        monkeypatch.setitem(graying.DENSE_DCT, "cpu", 256)
        device = graying._dct_axis(graying._dct_axis(x, inverse).mT, inverse).mT
        monkeypatch.undo()
        assert (device - expected).abs().max() <= 1e-11
        assert (graying._Dct.apply(expected, not inverse) - x).abs().max() <= 1e-11


def separated(n, d, count=2):
    rng = np.random.default_rng(n * d)
    m = min(n, d)
    left = np.linalg.qr(rng.standard_normal((count, n, m)))[0]
    right = np.linalg.qr(rng.standard_normal((count, d, m)))[0]
    return torch.tensor((left * np.geomspace(1, 0.05, m)) @ right.swapaxes(-2, -1) * 3, requires_grad=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (1, 3)])
def test_gradients_are_finite_differences(method, rescale, shape):
    tokens = separated(*shape)
    # The fast map is a polynomial within 1e-5 of the true one; its own derivative is tested, as it is.
    tolerance = 1e-3 if method == "svd_fast" else 1e-6
    assert torch.autograd.gradcheck(
        lambda x: METHODS[method](x, 0.6, rescale=rescale), tokens, eps=1e-6, atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (1, 3)])
def test_forward_and_batched_derivatives_are_the_gradients(method, rescale, shape):
    def gray(tokens):
        return METHODS[method](tokens, 0.6, rescale=rescale)

    tolerance = 1e-3 if method == "svd_fast" else 1e-6
    options = {"eps": 1e-6, "atol": tolerance, "rtol": tolerance, "check_batched_grad": True}
    tokens = separated(*shape)
    assert torch.autograd.gradcheck(gray, tokens, check_forward_ad=True, check_batched_forward_grad=True, **options)
    tokens = tokens.detach()
    forward, backward = (mode(gray)(tokens[0]) for mode in (torch.func.jacfwd, torch.func.jacrev))
    torch.testing.assert_close(forward, backward, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_maps_over_a_batch_are_the_batch(method):
    tokens = separated(6, 4, 3).detach()

    def loss(tokens):
        return METHODS[method](tokens, 0.6).square().sum()

    grayed = METHODS[method](tokens, 0.6)
    for place in range(3):
        mapped = torch.vmap(lambda x: METHODS[method](x, 0.6), in_dims=place)(tokens.movedim(0, place))
        torch.testing.assert_close(mapped, grayed, rtol=1e-12, atol=1e-12)
    tokens.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(tokens), tokens)
    for found in (torch.func.grad(loss)(tokens), torch.vmap(torch.func.grad(loss))(tokens)):
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)
    module = TokenGraying(method, 0.5, 2)
    images = torch.rand(3, 3, 4, 4)
    torch.testing.assert_close(torch.vmap(module)(images), module(images))


def test_forward_derivatives_at_repeated_singular_values_are_finite():
    tokens = torch.cat([2 * torch.eye(4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64)])
    direction = torch.from_numpy(np.random.default_rng(0).standard_normal((6, 4)))
    _, change = torch.func.jvp(lambda x: gray_svd(x, 0.4), (tokens,), (direction,))
    gradients = torch.func.jacrev(lambda x: gray_svd(x, 0.4))(tokens)
    torch.testing.assert_close(change, (gradients * direction).sum((-2, -1)), rtol=1e-9, atol=1e-9)


def test_the_dcts_second_derivative_is_its_finite_difference():
    assert torch.autograd.gradgradcheck(lambda x: gray_dct(x, 0.6), separated(6, 4))


@pytest.mark.parametrize("method", ["svd", "svd_fast"])
def test_a_second_derivative_of_the_svd_is_refused(method):
    tokens = separated(6, 4)

    def loss(tokens):
        return METHODS[method](tokens, 0.6).square().sum()

    (gradient,) = torch.autograd.grad(loss(tokens), tokens, create_graph=True)
    assert gradient.isfinite().all()
    with pytest.raises(InputError, match="one derivative, and a second is asked for; the method 'dct' has both"):
        gradient.square().sum().backward()
    functions = [torch.func.hessian(loss), torch.func.jacfwd(torch.func.jacfwd(loss))]
    functions.append(torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum()))
    for second in functions:
        with pytest.raises(InputError, match="a second is asked for"):
            second(tokens.detach()[0])
    with forward_ad.dual_level(), pytest.raises(InputError, match="a second is asked for"):
        dual = forward_ad.make_dual(tokens, torch.ones_like(tokens))
        torch.autograd.grad(loss(dual), dual)


@pytest.mark.parametrize("method", ["svd", "dct"])  # dynamo would trace the fast one's least squares
def test_compiled_code_grays_alike(method):
    torch._dynamo.reset()
    tokens = torch.rand(4, 6, 8)
    compiled = torch.compile(lambda x: METHODS[method](2 * x, 0.6), backend="eager")
    assert torch.equal(compiled(tokens), METHODS[method](2 * tokens, 0.6))


@pytest.mark.parametrize("method", METHODS)
def test_exporting_is_refused_where_it_grays_and_leaves_nothing_behind(method):
    module, images = TokenGraying(method, 0.5, 2), torch.rand(3, 3, 4, 4)
    graying._dct_matrix.cache_clear()
    with pytest.raises(InputError, match="cannot be exported; it belongs to training: export in eval"):
        torch.export.export(module, (images,))
    assert module(images).isfinite().all()
    assert torch.equal(torch.export.export(module.eval(), (images,)).module()(images), images)


def test_gradients_at_repeated_singular_values():
    """At an orthogonal matrix X, SVD-TG with ε → along a direction E has a derivative we can difference."""
    rng = np.random.default_rng(5)
    x = torch.tensor(np.linalg.qr(rng.standard_normal((6, 6)))[0] * 2)
    x = torch.cat([x, 1e-3 * torch.from_numpy(rng.standard_normal((2, 6)))])
    x[:, :] = torch.linalg.svd(x, full_matrices=False)[0] @ torch.diag(torch.tensor([5, 2, 2, 2, 2, 1.0]).double())
    direction, probe = (torch.from_numpy(rng.standard_normal((8, 6))) for _ in range(2))
    x.requires_grad_()
    (gradient,) = torch.autograd.grad((gray_svd(x, 0.4) * probe).sum(), x)
    step = 1e-5
    with torch.no_grad():
        above, below = (gray_svd(x + sign * step * direction, 0.4) for sign in (1, -1))
    difference = ((above - below) * probe).sum() / (2 * step)
    assert abs((gradient * direction).sum() - difference) <= 1e-6 * abs(difference)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("epsilon", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("rescale", [True, False])
def test_gradients_are_finite_everywhere(method, epsilon, rescale):
    for name, tokens in TOKENS.items():
        if "3136" in name or (method == "svd_fast" and tokens.shape[-1] > 48):
            continue
        tokens = tokens[:2].clone().requires_grad_()
        METHODS[method](tokens, epsilon, rescale=rescale).square().sum().backward()
        assert tokens.grad.isfinite().all(), name
        assert tokens.grad.dtype == tokens.dtype


@pytest.mark.parametrize("shape", [(5, 4), (4, 5)])
@pytest.mark.parametrize("rank", [1, 3])
def test_gradient_with_zero_singular_values_is_that_at_fixed_rank(shape, rank):
    rng = np.random.default_rng(rank)
    a, b, da, db = (torch.from_numpy(rng.standard_normal((n, rank))) for n in shape * 2)
    probe = torch.from_numpy(rng.standard_normal(shape))
    tokens = (a @ b.mT).requires_grad_()
    (gradient,) = torch.autograd.grad((gray_svd(tokens, 0.5) * probe).sum(), tokens)
    above, below = (gray_svd((a + h * da) @ (b + h * db).mT, 0.5) for h in (1e-5, -1e-5))
    difference = ((above - below) * probe).sum() / 2e-5
    assert abs((gradient * (da @ b.mT + a @ db.mT)).sum() - difference) <= 1e-6 * abs(difference)


def test_float16_gradient():
    tokens = TOKENS["64×48"][:1].half().requires_grad_()
    gray_svd(tokens, 0.9).sum().backward()
    assert tokens.grad.dtype == torch.float16 and tokens.grad.isfinite().all()


def test_patch_order_is_channel_row_column():
    images = torch.arange(2 * 3 * 6 * 8.0).view(2, 3, 6, 8)
    tokens = patchify(images, 2)
    assert tokens.shape == (2, 12, 12)
    for b in range(2):
        for i in range(3):
            for j in range(4):
                flat = [images[b, c, 2 * i + y, 2 * j + x] for c in range(3) for y in range(2) for x in range(2)]
                assert tokens[b, 4 * i + j].tolist() == flat
    assert torch.equal(unpatchify(tokens, 2, 3, 6, 8), images)
    assert torch.equal(patchify(images[0], 2), tokens[0])
    assert torch.equal(unpatchify(tokens[0], 2, 3, 6, 8), images[0])
    assert patchify(images[:0], 2).shape == (0, 12, 12)
    convolution = torch.nn.Conv2d(3, 5, 2, stride=2, bias=False)
    embedded = convolution(images).flatten(2).mT
    assert torch.allclose(tokens @ convolution.weight.flatten(1).T, embedded, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size,patch", [(32, 4), (224, 16)])
def test_worker_equals_batch(method, size, patch):
    gray = TokenGraying(method, 0.7, patch)
    images = photographs(5, size, seed=7)
    batched = gray(images)
    assert batched.shape == images.shape and batched.dtype == images.dtype
    single = torch.stack([copy.deepcopy(gray)(image) for image in images])
    assert relative_error(single, batched.double()) <= 2e-6
    assert relative_error(patchify(batched, patch), METHODS[method](patchify(images, patch), 0.7).double()) == 0


def test_one_bad_neighbour_changes_no_image():
    images = photographs(3, 32)
    mixed = torch.stack([images[0], torch.zeros(3, 32, 32), 1e15 * images[1], torch.full((3, 32, 32), 0.5)])
    for method in METHODS:
        gray = TokenGraying(method, 0.5, 4)
        assert relative_error(gray(mixed)[:1], gray(images[:1]).double()) <= 2e-6


def test_training_and_evaluation():
    images = photographs(2, 32)
    gray = TokenGraying("svd", 0.5, 4)
    assert not torch.equal(gray(images), images)
    assert gray.eval()(images) is images
    assert torch.equal(TokenGraying("svd", 0.5, 4, at_evaluation=True).eval()(images), gray.train()(images))
    assert list(gray.state_dict()) == []
    assert "'svd', epsilon=0.5, patch_size=4" in repr(gray)
    normalised = TokenGraying("svd", 0.5, 4, rescale=False)(images)
    assert torch.linalg.svdvals(patchify(normalised, 4))[:, 0].sub(1).abs().max() < 1e-5


def test_fast_coefficients_hold_for_every_epsilon():
    x = np.geomspace(graying.FAST_KAPPA**-2, 1, 20_011)
    for epsilon in [1e-6, 0.05, 0.2, 0.5, 0.63, 0.9, 0.999]:
        zeroth, first, third, *doubling = graying._fast_coefficients(epsilon)
        y = power = 1 - x
        total = zeroth + first * y + third * y**3
        for coefficient in doubling:
            power = power * power
            total = total + coefficient * power
        assert np.abs(total * x ** ((1 - epsilon) / 2) - 1).max() <= 2e-5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("epsilon", [0, -0.5, 1.0001, math.nan, math.inf, True, "0.9", None, 0.5j])
def test_bad_epsilon(method, epsilon):
    with pytest.raises(InputError, match=r"epsilon is .*\(0, 1\]"):
        METHODS[method](torch.ones(3, 4), epsilon)
    with pytest.raises(InputError, match="epsilon is"):
        TokenGraying(method, epsilon, 4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_tokens(method, value):
    tokens = torch.ones(2, 3, 4)
    tokens[1, 2, :2] = value
    for x in (tokens, tokens.double(), tokens.half(), tokens.mT):
        with pytest.raises(InputError, match="2 of 24 token entries are NaN or infinite"):
            METHODS[method](x, 0.5)
    with pytest.raises(InputError, match="2 of 24"):
        METHODS[method](tokens.clone().requires_grad_(), 0.5)


@pytest.mark.parametrize("method", ["svd_fast", "dct"])
def test_on_a_device_non_finite_tokens_spoil_only_their_image(method, monkeypatch):
    monkeypatch.setattr(graying, "_check_finite", lambda *_: None)  # a device skips it, so as not to wait
    tokens = TOKENS["64×48"][:3].clone()
    expected = METHODS[method](tokens, 0.5)
    tokens[1, 2, 3] = math.nan
    result = METHODS[method](tokens, 0.5)
    assert result[1].isnan().any()
    assert torch.equal(result[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("method", METHODS)
def test_bad_tokens(method):
    with pytest.raises(InputError, match=r"tokens are torch.uint8; convert to float"):
        METHODS[method](torch.ones(3, 4, dtype=torch.uint8), 0.5)
    with pytest.raises(InputError, match=r"tokens are torch.complex64; convert to float"):
        METHODS[method](torch.ones(3, 4, dtype=torch.complex64), 0.5)
    with pytest.raises(InputError, match="tokens are ndarray"):
        METHODS[method](np.ones((3, 4)), 0.5)
    with pytest.raises(InputError, match=r"shape \(4,\); expected \(…, n, d\)"):
        METHODS[method](torch.ones(4), 0.5)
    with pytest.raises(InputError, match="convert to float"):
        TokenGraying(method, 0.5, 4)(torch.zeros(3, 32, 32, dtype=torch.uint8))


def test_other_errors():
    with pytest.raises(InputError, match=r"unknown Token Graying method 'svd-fast'; did you mean 'svd_fast'"):
        TokenGraying("svd-fast", 0.5, 4)
    with pytest.raises(InputError, match=r"height 30 is not divisible by patch_size 4 \(nearest: 28 or 32\)"):
        TokenGraying("svd", 0.5, 4)(torch.zeros(3, 30, 32))
    with pytest.raises(InputError, match=r"width 3 is not divisible by patch_size 4 \(nearest: 4\)"):
        patchify(torch.zeros(3, 32, 3), 4)
    with pytest.raises(InputError, match=r"expected \(…, C, H, W\)"):
        patchify(torch.zeros(32, 32), 4)
    for patch_size in (0, -4, 4.0, True, "4"):
        with pytest.raises(InputError, match="patch_size is"):
            TokenGraying("svd", 0.5, patch_size)
    with pytest.raises(InputError, match=r"need \(…, 64, 48\)"):
        unpatchify(torch.zeros(2, 64, 47), 4, 3, 32, 32)
    for cutoff in (-1e-6, 1, math.nan):
        with pytest.raises(InputError, match="cutoff is"):
            gray_svd(torch.ones(3, 4), 0.5, cutoff=cutoff)
