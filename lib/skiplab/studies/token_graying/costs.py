"""What Token Graying costs: beside a training step, by itself, and in a data loader's workers."""

import statistics
import time
from collections.abc import Callable, Sequence

import pandas
import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from skiplab.companion.runs import on_device
from skiplab.companion.timing import interleaved, median_ratio, one_thread
from skiplab.studies.token_graying.measures import FORMS, TOKENISATIONS, images, relative_distance
from skiplab.training.photographs import photographs
from skiplab.transforms.graying import METHODS, TokenGraying, patchify


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

    With a batch of one, a way grays eight photographs one after the other, as a data-loader worker does.
    `milliseconds` an image, and `faster`: how many times faster than `torch.linalg.svd`; medians over `rounds`.
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
