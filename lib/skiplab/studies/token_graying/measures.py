"""What notebook 02 measures without training: Token Graying on photographs, and what it does in models."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy
import pandas
import torch
from matplotlib.figure import Figure
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from skiplab.companion.judging import Measurement
from skiplab.companion.runs import Run
from skiplab.companion.timing import one_thread
from skiplab.models import probe, zoo
from skiplab.theory.conditioning import condition_number, singular_values
from skiplab.training.loop import dataset
from skiplab.training.photographs import photographs
from skiplab.transforms.graying import METHODS, TokenGraying, patchify

TOKENISATIONS = {
    "196 × 768 (224 px, patch 16)": (224, 16),
    "3136 × 48 (224 px, patch 4)": (224, 4),
    "64 × 48 (32 px, patch 4)": (32, 4),
}  # (side, patch) of ViT-B, Swin, and a ViT on CIFAR-10


FORMS = ("svd", "dct")


def images(side: int = 224) -> tuple[list[str], Tensor]:
    """Return the photographs' names and pixels, normalised as ImageNet's usually are, float32 (8, 3, side, side)."""
    pictures = photographs(side)
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    return list(pictures), (torch.stack(list(pictures.values())) / 255 - mean) / std


def relative_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return ‖a − b‖/‖b‖ of the last two axes, in percent and in float64."""
    a, b = a.double(), b.double()
    return 100 * (a - b).norm(dim=(-2, -1)) / b.norm(dim=(-2, -1))


@one_thread()
def picture_grid(name: str, epsilons: Sequence[float], patch_size: int = 16) -> Figure:
    """Show one photograph grayed by both forms, a column for each ε; what leaves the range of pixels is clipped."""
    names, batch = images()
    image = batch[names.index(name)]
    figure, axes = plt.subplots(2, len(epsilons), figsize=(2.1 * len(epsilons), 4.6), squeeze=False)
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    for row, method in enumerate(FORMS):
        for axis, epsilon in zip(axes[row], epsilons):
            grayed = TokenGraying(method, epsilon, patch_size)(image)
            axis.imshow((grayed * std + mean).clamp(0, 1).permute(1, 2, 0).numpy())
            axis.set(xticks=[], yticks=[], title=f"ε = {epsilon:g}, ln κ = {_log_kappa(grayed, patch_size):.1f}")
        axes[row, 0].set_ylabel(f"{method.upper()} form")
    return figure


def _log_kappa(image: Tensor, patch_size: int) -> float:
    return float(condition_number(patchify(image, patch_size).double()).log())


@one_thread()
def spectra(epsilons: Sequence[float], patch_size: int = 16) -> pandas.DataFrame:
    """Return `sigma`, σ_i/σ_max of every grayed photograph's tokens: a row per photograph, form, ε and index from 1."""
    names, batch = images()
    tokens, rows = patchify(batch, patch_size), []
    for method in FORMS:
        for epsilon in epsilons:
            values = singular_values(METHODS[method](tokens, epsilon))
            for name, value in zip(names, values / values[:, :1]):
                rows += [
                    {"photograph": name, "form": method.upper(), "ε": epsilon, "index": index, "sigma": share}
                    for index, share in enumerate(value.tolist(), start=1)
                ]
    return pandas.DataFrame(rows)


@one_thread()
def compare_forms(epsilons: Sequence[float]) -> pandas.DataFrame:
    """Compare both forms on every photograph, tokenisation and ε.

    `distance` is the relative Frobenius distance in percent after scaling the DCT form to fit the SVD form best;
    `kappa` is κ of the tokens, `target` its power ε, `svd` and `dct` are κ of the grayed tokens.
    """
    rows = []
    for label, (side, patch_size) in TOKENISATIONS.items():
        names, batch = images(side)
        tokens = patchify(batch, patch_size)
        kappa = condition_number(tokens.double())
        for epsilon in epsilons:
            svd, dct = (METHODS[method](tokens, epsilon).double() for method in FORMS)
            scale = (svd * dct).sum((-2, -1), keepdim=True) / (dct * dct).sum((-2, -1), keepdim=True)
            columns = {
                "photograph": names,
                "distance": relative_distance(scale * dct, svd).tolist(),
                "kappa": kappa.tolist(),
                "target": (kappa**epsilon).tolist(),
                "svd": condition_number(svd).tolist(),
                "dct": condition_number(dct).tolist(),
            }
            rows.append(pandas.DataFrame(columns).assign(tokens=label, epsilon=epsilon))
    return pandas.concat(rows, ignore_index=True)


@one_thread()
def dct_flip_distances(epsilon: float = 0.5, patch_size: int = 16) -> Tensor:
    """Return, in percent and for each photograph, how far graying the flipped image is from flipping the grayed one."""
    _, batch = images()
    gray = TokenGraying("dct", epsilon, patch_size)
    return relative_distance(gray(batch.flip(-1)).flatten(1, 2), gray(batch).flip(-1).flatten(1, 2))


@one_thread()
def dct_order_distances(epsilon: float = 0.5, patch_size: int = 16) -> Tensor:
    """Return, in percent for each photograph, how far (row, column, c) order of a patch is from (c, row, column)."""
    _, batch = images()
    tokens = patchify(batch, patch_size)
    order = torch.arange(tokens.shape[-1]).view(3, -1).T.flatten()
    return relative_distance(
        METHODS["dct"](tokens[..., order], epsilon)[..., order.argsort()], METHODS["dct"](tokens, epsilon)
    )


@one_thread()
def svd_cases(cases: int = 200, seed: int = 0) -> dict[str, Measurement]:
    """Count violations of the two statements about the SVD form, on crops of the photographs and generated tokens.

    Crops are float32 as a model sees them, generated tokens (any scale, κ up to 1e4) float64; ε is from (0.05, 1).
    """
    chance, (_, batch) = numpy.random.default_rng(seed), images()
    exact, flips = [], []
    while len(exact) < cases or len(flips) < cases:
        epsilon, patch = float(chance.uniform(0.05, 1)), int(chance.choice([4, 8, 16]))
        side = patch * int(chance.integers(2, 7))
        top, left = chance.integers(0, 224 - side, 2)
        image = batch[chance.integers(len(batch)), :, top : top + side, left : left + side]
        gray = TokenGraying("svd", epsilon, patch)
        flips.append(
            float(relative_distance(gray(image.flip(-1)).flatten(0, 1), gray(image).flip(-1).flatten(0, 1))) / 100
        )
        for tokens in (patchify(image, patch), _generated(chance)):
            kappa = condition_number(tokens.double())
            if kappa <= 1e4:
                after = condition_number(METHODS["svd"](tokens, epsilon).double())
                exact.append(float((after / kappa**epsilon - 1).abs()))
    worst = {"asa.tg.svd_exact": (exact, 1e-3), "asa.tg.svd_flips": (flips, 2e-5)}
    return {
        name: Measurement(
            violations=sum(error > limit for error in errors),
            cases=len(errors),
            note=f"largest error {max(errors):.1e}",
        )
        for name, (errors, limit) in worst.items()
    }


def _generated(chance: numpy.random.Generator) -> Tensor:
    """Return float64 tokens of random shape and scale with κ up to 1e4."""
    n, d = chance.integers(2, 65, 2)
    u, _, v = numpy.linalg.svd(chance.standard_normal((n, d)), full_matrices=False)
    sigma = 10.0 ** (chance.uniform(-8, 8) - numpy.sort(chance.uniform(0, chance.uniform(0, 4), min(n, d))))
    return torch.from_numpy(u * sigma @ v)


@one_thread()
@torch.no_grad()
def model_kappas(run: Run, count: int, patch_size: int) -> pandas.DataFrame:
    """Measure κ of patches, embedded tokens and SAB outputs (without their input) of a trained model on test images.

    A row per image, place and block (0 where there is none). `images` says whether they were grayed as in training
    ("as trained": plain where training was) or not ("plain"). In float64, as in `loop.branch_kappas`. `patch_size` is
    that of the patches, whose κ is also measured where training was plain.
    """
    config = run.config
    pictures, _ = dataset(config).test.first(count)
    model, rows, grayed = run.load_model().double(), [], pictures
    described = {"hash": run.hash, "seed": config.seed, "graying": config.graying, "epsilon": config.epsilon}
    if config.graying != "none" and not config.graying_blocks:
        grayed = TokenGraying(
            config.graying,
            config.epsilon,
            config.graying_patch_size,
            rescale=config.graying_rescale,
            at_evaluation=True,
        )(pictures)
    for kind, batch in (("as trained", grayed), ("plain", pictures)):
        places = {
            ("patches", 0): patchify(batch, patch_size),
            ("embedded tokens", 0): probe.embeddings(model, batch.double()),
        }
        for block, trace in enumerate(probe.branch_outputs(model, batch.double()), start=1):
            places["SAB output", block] = trace.sab
        for (place, block), tokens in places.items():
            row = described | {"images": kind, "place": place, "block": block}
            rows += [row | {"log_kappa": value} for value in condition_number(tokens).log().tolist()]
    return pandas.DataFrame(rows)


@torch.no_grad()
def block_graying_top1(run: Run, grayed: bool) -> float:
    """Score a stored model on the test split, in percent, with or without graying the tokens where its training did.

    The weights are those of the best epoch, the ones that are stored.
    """
    config, model, right = run.config, run.load_model(), 0
    for index in config.graying_blocks if grayed else []:

        def gray(block: nn.Module, inputs: tuple) -> tuple:
            return METHODS[config.graying](inputs[0], config.epsilon, rescale=config.graying_rescale), *inputs[1:]

        zoo.blocks(model)[index][1].register_forward_pre_hook(gray)
    for pictures, labels in dataset(config).test.batches(500, device="cpu", train=False):
        right += int((model(pictures).argmax(1) == labels).sum())
    return 100 * right / len(dataset(config).test)
