"""What notebook 02 measures without training: Token Graying on photographs, in low precision, in time, and in models."""

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import matplotlib.pyplot as plt
import numpy
import pandas
import timm
import torch
from matplotlib.figure import Figure
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from skiplab.companion.ledger import Measurement
from skiplab.companion.runs import Run, on_device
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


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one CPU thread: for matrices this small, several wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def images(side: int = 224) -> tuple[list[str], Tensor]:
    """Return the photographs' names and pixels, normalised as ImageNet's usually are, float32 (8, 3, side, side)."""
    pictures = photographs(side)
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    return list(pictures), (torch.stack(list(pictures.values())) / 255 - mean) / std


def relative_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return ‖a − b‖/‖b‖ of the last two axes, in percent and in float64."""
    a, b = a.double(), b.double()
    return 100 * (a - b).norm(dim=(-2, -1)) / b.norm(dim=(-2, -1))


# --- What it does to photographs --------------------------------------------------------------------------------------


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
    """Return, in percent and for each photograph, how far (row, column, c) order of a patch is from (c, row, column)."""
    _, batch = images()
    tokens = patchify(batch, patch_size)
    order = torch.arange(tokens.shape[-1]).view(3, -1).T.flatten()
    return relative_distance(
        METHODS["dct"](tokens[..., order], epsilon)[..., order.argsort()], METHODS["dct"](tokens, epsilon)
    )


@one_thread()
def svd_cases(cases: int = 200, seed: int = 0) -> dict[str, Measurement]:
    """Count violations of the two statements about the SVD form, on crops of the photographs and generated tokens.

    Crops are float32 as a model sees them, generated tokens (any scale, κ up to 1e4) float64; ε is uniform in (0.05, 1).
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


# --- Low precision ----------------------------------------------------------------------------------------------------


def gram_gray(tokens: Tensor, epsilon: float) -> Tensor:
    """Gray as one would without thinking of precision: the Gram matrix in whatever type autocast gives."""
    gram = tokens @ tokens.mT
    values, q = torch.linalg.eigh(gram.to(torch.promote_types(gram.dtype, torch.float32)))
    ratio = (values / values[..., -1:]).clamp_min(0).sqrt()
    weight = torch.where(ratio > 1e-6, ratio.clamp_min(1e-6) ** (epsilon - 1), 0.0)
    return (q * weight[..., None, :]) @ q.mT @ tokens


def dense_dct_gray(tokens: Tensor, epsilon: float) -> Tensor:
    """Gray by the DCT as dense products in whatever type autocast gives."""
    rows, columns = (_dct_matrix(size).to(tokens) for size in tokens.shape[-2:])
    c = rows @ tokens @ columns.mT
    top = c.abs().amax((-2, -1), keepdim=True)
    return rows.mT @ (c.sign() * (c.abs() / top) ** epsilon * top) @ columns


def _dct_matrix(size: int) -> Tensor:
    k = torch.arange(size, dtype=torch.float64)
    matrix = (torch.pi / size * (k[None] + 0.5) * k[:, None]).cos() * (2 / size) ** 0.5
    matrix[0] /= 2**0.5
    return matrix


@one_thread()
def low_precision(epsilons: Sequence[float], patch_size: int = 16) -> pandas.DataFrame:
    """Gray photographs in float32, float16 and bfloat16, and compare with float64.

    A row per photograph, type, ε and way: "SVD" and "DCT" are this library's, tokens rounded to the type before and
    after; the other two run under autocast to it. `error` is the relative Frobenius error in percent, `kappa` that of
    the result, `kappa_error` its distance from the κ that the form has in float64, in percent (NaN where that is
    infinite: two of the photographs have patches without full rank).
    """
    names, batch = images()
    tokens, rows = patchify(batch, patch_size), []
    for epsilon in epsilons:
        exact = {form: METHODS[form](tokens.double(), epsilon) for form in FORMS}
        kappas = {form: condition_number(exact[form]) for form in FORMS}
        known = {form: kappa.where(kappa.isfinite(), torch.nan) for form, kappa in kappas.items()}
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for way, form, gray in (
                ("SVD", "svd", METHODS["svd"]),
                ("DCT", "dct", METHODS["dct"]),
                ("SVD, Gram matrix by autocast", "svd", gram_gray),
                ("DCT, products by autocast", "dct", dense_dct_gray),
            ):
                with torch.autocast("cpu", dtype, enabled="autocast" in way and dtype != torch.float32):
                    grayed = gray(tokens if "autocast" in way else tokens.to(dtype), epsilon)
                kappa = condition_number(grayed.double())
                columns = {
                    "photograph": names,
                    "error": relative_distance(grayed, exact[form]).tolist(),
                    "kappa": kappa.tolist(),
                    "kappa_error": (100 * (kappa / known[form] - 1).abs()).tolist(),
                }
                rows.append(
                    pandas.DataFrame(columns).assign(dtype=str(dtype).removeprefix("torch."), way=way, epsilon=epsilon)
                )
    return pandas.concat(rows, ignore_index=True)


# --- Cost -------------------------------------------------------------------------------------------------------------


def gray_lapack(tokens: Tensor, epsilon: float) -> Tensor:
    """Gray by `torch.linalg.svd`, as the paper's text reads."""
    u, sigma, vh = torch.linalg.svd(tokens, full_matrices=False)
    top = sigma[..., :1]
    ratio = sigma / top
    return (u * (torch.where(ratio > 1e-6, ratio, 0.0) ** epsilon * top)[..., None, :]) @ vh


def ways(device: str) -> dict[str, Callable]:
    """Return the ways to gray that are timed; the products-only path is made for GPUs, a CPU leaves it out."""
    fast = {"ours, products only": METHODS["svd_fast"]} if device != "cpu" else {}
    return {"torch.linalg.svd": gray_lapack, "ours": METHODS["svd"], **fast, "DCT": METHODS["dct"]}


def graying_times(device: str, rounds: int, batch: int = 1, epsilon: float = 0.5) -> pandas.DataFrame:
    """Time every way on every tokenisation, in turn: a row per repetition (3), tokenisation and way.

    With a batch of one, a way grays eight photographs one after the other, as a data-loader worker does. `milliseconds` an image, and `faster`: how many times faster than `torch.linalg.svd`; medians over `rounds`.
    """
    return on_device(device, _graying_times, device, rounds, batch, epsilon)


def _graying_times(device: str, rounds: int, batch: int, epsilon: float) -> pandas.DataFrame:
    rows = []
    for label, (side, patch_size) in TOKENISATIONS.items():
        calls, count = _tokens(images(side)[1], patch_size, device, batch)
        tasks = {way: _graying(gray, calls, epsilon) for way, gray in ways(device).items()}
        for repetition in range(3):
            times = interleaved(tasks, device, rounds)
            for way in tasks:
                rows.append(
                    {
                        "repetition": repetition,
                        "tokens": label,
                        "way": way,
                        "milliseconds": 1e3 * statistics.median(times[way]) / count,
                        "faster": median_ratio(times["torch.linalg.svd"], times[way]),
                    }
                )
    return pandas.DataFrame(rows)


def step_ratios(model: str, device: str, rounds: int, batch: int = 1, epsilon: float = 0.5) -> pandas.DataFrame:
    """Time a training step of a timm model and, in turn, every way to gray its batch: a row per repetition (3) and way.

    `ratio` is (step + graying)/step, as Token Graying comes before the step and on the same device; medians over
    `rounds`. The step is forward and backward of 224 px images, in bfloat16 on a GPU.
    """
    return on_device(device, _step_ratios, model, device, rounds, batch, epsilon)


def _step_ratios(model: str, device: str, rounds: int, batch: int, epsilon: float) -> pandas.DataFrame:
    _, pictures = images()
    (calls, count), rows = _tokens(pictures, 16, device, batch), []
    repeated = _batch(pictures, batch).to(device)
    tasks = {"step": _training_step(timm.create_model(model, num_classes=1000).to(device), repeated)}
    tasks |= {way: _graying(gray, calls, epsilon) for way, gray in ways(device).items()}
    for repetition in range(3):
        times = interleaved(tasks, device, rounds)
        rows += [
            {
                "repetition": repetition,
                "model": model,
                "way": way,
                "step_seconds": statistics.median(times["step"]),
                "ratio": 1 + median_ratio(times[way], times["step"]) * batch / count,
            }
            for way in ways(device)
        ]
    return pandas.DataFrame(rows)


def interleaved(tasks: dict[str, Callable[[], None]], device: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every task in every round, after one call each to warm up.

    Every round has an order of its own: what a task leaves in caches and free memory must not always meet the same one.
    On a CPU it is the processor time of one thread, which other programs do not disturb; on a GPU the device's.
    """
    with one_thread():
        for task in tasks.values():
            task()
        times, order, chance = {name: [] for name in tasks}, list(tasks), random.Random(0)
        for _ in range(rounds):
            chance.shuffle(order)
            for name in order:
                times[name].append(_seconds(tasks[name], device))
    return times


def _seconds(task: Callable[[], None], device: str) -> float:
    if device == "cpu":
        start = time.thread_time()
        task()
        return time.thread_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    task()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _batch(pictures: Tensor, batch: int) -> Tensor:
    return pictures.repeat(-(-batch // len(pictures)), 1, 1, 1)[:batch]


def _tokens(pictures: Tensor, patch_size: int, device: str, batch: int) -> tuple[list[Tensor], int]:
    """Return the tokens of each call, (n, d) of every picture or (B, n, d) of a batch, and how many images they are."""
    tokens = patchify(pictures if batch == 1 else _batch(pictures, batch), patch_size).to(device)
    return list(tokens) if batch == 1 else [tokens], len(tokens)


def _graying(gray: Callable, calls: Sequence[Tensor], epsilon: float) -> Callable[[], None]:
    def task() -> None:
        for tokens in calls:
            gray(tokens, epsilon)

    return task


def _training_step(model: nn.Module, pictures: Tensor) -> Callable[[], None]:
    device = pictures.device.type

    def step() -> None:
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss = model(pictures).square().mean()
        loss.backward()

    return step


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators))


class _Worker(torch.utils.data.Dataset):
    """What a data-loader worker does: random crop, flip, colour jitter and normalisation, then Token Graying."""

    def __init__(self, count: int, graying: nn.Module):
        self.pictures = [to_pil_image(picture) for picture in photographs().values()]
        self.transform = create_transform(
            (3, 224, 224), is_training=True, mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD
        )
        self.count, self.graying = count, graying

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return self.graying(self.transform(self.pictures[index % len(self.pictures)]))


def worker_rates(count: int, workers: int = 2, epsilon: float = 0.5) -> pandas.DataFrame:
    """Return how many 224 px images a second `workers` data-loader workers prepare, with and without Token Graying."""
    rows = []
    for way, graying in (
        ("no Token Graying", nn.Identity()),
        ("SVD", TokenGraying("svd", epsilon, 16)),
        ("DCT", TokenGraying("dct", epsilon, 16)),
    ):
        loader = torch.utils.data.DataLoader(_Worker(count, graying), batch_size=8, num_workers=workers)
        batches = iter(loader)
        next(batches)  # the workers are up
        start = time.perf_counter()
        arrived = sum(len(batch) for batch in batches)
        rows.append({"in the workers": way, "images a second": arrived / (time.perf_counter() - start)})
    return pandas.DataFrame(rows)


@one_thread()
def worker_agrees(epsilon: float = 0.5, tolerance: float = 1e-5) -> bool:
    """Tell whether a worker, image by image, and a batch give the same to a relative `tolerance`, for both forms."""
    _, batch = images()
    for method in FORMS:
        gray = TokenGraying(method, epsilon, 16)
        single = torch.stack([gray(image) for image in batch])
        if relative_distance(single.flatten(1, 2), gray(batch).flatten(1, 2)).max() > 100 * tolerance:
            return False
    return True


# --- Trained models ---------------------------------------------------------------------------------------------------


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
    model, rows = run.load_model().double(), []
    grayed = pictures
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
            rows += [
                {
                    "hash": run.hash,
                    "seed": config.seed,
                    "graying": config.graying,
                    "epsilon": config.epsilon,
                    "images": kind,
                    "place": place,
                    "block": block,
                    "log_kappa": value,
                }
                for value in condition_number(tokens).log().tolist()
            ]
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
