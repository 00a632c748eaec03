"""Serve a split of a data set in normalised batches, the same whatever the number of workers and processes.

What fits in memory lives on the device as uint8 (`Resident`); what does not goes through workers (`Streaming`).
"""

import functools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skiplab.errors import InputError, unknown
from skiplab.training.decode import Decoder, undecodable
from skiplab.training.pictures import Undecodable
from skiplab.training.rows import Rows
from skiplab.transforms.augment import RECIPES, crop_flip, draw_crop_flip, imagenet_transform, normalise, share

MOST_WORKERS = 16


class Split:
    """Images with labels, served in batches. `len(split)` and `num_images` count images."""

    augmentations = ("none", "crop_flip")

    def __init__(self, labels: Tensor, img_size: int, mean: tuple[float, ...], std: tuple[float, ...]):
        self.labels, self.img_size, self.mean, self.std = labels, img_size, mean, std
        self.num_images = len(labels)

    def __len__(self) -> int:
        return self.num_images

    def num_batches(self, batch_size: int, *, drop_last: bool = False) -> int:
        """Return how many batches `batches` yields."""
        return self.num_images // batch_size if drop_last else -(-self.num_images // batch_size)

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the first `count` images and their labels, on the CPU. Raises InputError where there are fewer."""
        if count > self.num_images:
            raise InputError(f"{count} images are asked for, but the split has only {self.num_images}")
        return next(self.batches(count))

    def batches(
        self,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        epoch: int = 0,
        augment: str = "none",
        drop_last: bool = False,
        train: bool = False,
        shard: tuple[int, int] = (0, 1),
        transform: Callable[[Tensor], Tensor] | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels): normalised float32 (B, C, H, W) and int64 (B,), both on `device`.

        With `train`, order and augmentation depend on (`seed`, `epoch`) alone, so a resumed run sees the same batches;
        without it, the images come in their order and are never augmented.

        Args:
            batch_size: Images in a batch, over all processes.
            augment: "none", "crop_flip" (shift by up to an eighth of the image, mirror) or, for a streamed data set
                only, "imagenet" (random resized crop, RandAugment, random erasing) or "resized_crop" (that and mirror).
            drop_last: Leave out the last batch if it is not full.
            shard: (rank, world): this process gets its share (`skiplab.transforms.augment.share`) of each batch.
            transform: What workers do last to each training image (C, H, W); needs one of the last two augmentations.

        Raises:
            InputError: `augment` or `transform` does not work here, or processes would get unequal training batches.
        """
        self._check(augment, transform)
        if train:
            _check_shares(shard[1], batch_size, drop_last)
        order = torch.arange(self.num_images)
        if train:
            order = torch.randperm(self.num_images, generator=_generator(seed, epoch))
        places = [share(batch, shard) for batch in order.split(batch_size) if len(batch) == batch_size or not drop_last]
        places = [batch for batch in places if len(batch)]
        return self._serve(places, torch.device(device), augment if train else "none", (seed, epoch), shard, transform)

    def _check(self, augment: str, transform: Callable | None) -> None:
        if augment not in Streaming.augmentations:
            raise unknown("augmentation", augment, Streaming.augmentations)
        if augment not in self.augmentations:
            raise InputError(
                f"augmentation {augment!r} works on streamed data sets only, and this one is held in "
                f"memory (allowed: {', '.join(self.augmentations)})"
            )
        if transform and augment not in RECIPES:
            raise InputError(
                f"augmentation {augment!r} leaves the workers nothing to transform (allowed: "
                f"{', '.join(RECIPES)}, on a streamed data set)"
            )

    def _serve(self, places, device, augment, key, shard, transform):
        mean, std = torch.tensor([self.mean, self.std], device=device)
        padding = max(1, self.img_size // 8)
        # Drawn for every image of the epoch, so that it does not matter how many processes share the batches.
        draws = draw_crop_flip(self.num_images, padding=padding, generator=_generator(*key, 1))
        for batch, (images, labels) in zip(places, self._fetch(places, device, augment, key, shard, transform)):
            if augment == "crop_flip":
                images = crop_flip(images, draws[batch], padding=padding)
            yield images if images.is_floating_point() else normalise(images, mean, std), labels


def _check_shares(world: int, batch_size: int, drop_last: bool) -> None:
    if world > 1 and (batch_size % world or not drop_last):
        raise InputError(
            f"training on {world} processes needs drop_last and a batch_size that {world} divides, not {batch_size}"
        )


class Resident(Split):
    """A split that fits in memory: uint8 (N, C, H, W), copied to a device once."""

    def __init__(self, pixels: Tensor, labels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]):
        super().__init__(labels, pixels.shape[-1], mean, std)
        self.pixels = pixels
        self._on_device = functools.cache(lambda device: (pixels.to(device), labels.to(device)))

    def _fetch(self, places, device, augment, key, shard, transform):
        pixels, labels = self._on_device(device)
        for batch in places:
            batch = batch.to(device, non_blocking=True)
            yield pixels.index_select(0, batch), labels.index_select(0, batch)


class Streaming(Split):
    """A split that does not fit in memory: workers decode it and, with one of RECIPES, augment it."""

    augmentations = ("none", "crop_flip", *RECIPES)

    def __init__(self, rows: Rows, decoder: Decoder, mean: tuple[float, ...], std: tuple[float, ...]):
        super().__init__(torch.from_numpy(rows.labels), decoder.img_size, mean, std)
        self._rows, self._decoder = rows, decoder

    def _fetch(self, places, device, augment, key, shard, transform):
        steps = []
        if augment in RECIPES:
            steps = [imagenet_transform(augment, self.img_size, self.mean, self.std), *filter(None, [transform])]
        loader = torch.utils.data.DataLoader(
            _Images(self._rows, self._decoder, steps, key),
            batch_sampler=[batch.tolist() for batch in places],
            collate_fn=_collate,
            num_workers=max(1, min(MOST_WORKERS, _cores() // shard[1])),
            pin_memory=device.type == "cuda",
            generator=_generator(*key),  # else it would draw from torch's global generator
        )
        for batch in loader:
            if isinstance(batch, InputError):
                raise batch
            images, labels = batch
            yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def _collate(items: list) -> list[Tensor] | InputError:
    """Return a batch, or the first error among its images: raised in a worker, torch would hide it in a traceback."""
    error = next((item for item in items if isinstance(item, InputError)), None)
    return error or torch.utils.data.default_collate(items)


@dataclass(frozen=True)
class _Images(torch.utils.data.Dataset):
    """What a worker does. Each image has its own seed, so the number of workers changes nothing."""

    rows: Rows
    decoder: Decoder
    steps: Sequence[Callable]  # from a PIL image on
    key: tuple[int, int]  # seed, epoch

    def __getitem__(self, place: int) -> tuple[Tensor, int] | InputError:
        record = self.rows.records[place]["image"]
        try:
            if not self.steps:
                image = torch.from_numpy(self.decoder.array(record))
            else:
                seed = _seed(*self.key, place)
                random.seed(seed)
                np.random.seed(seed)
                torch.manual_seed(seed)
                image = self.decoder.picture(record)
                for step in self.steps:
                    image = step(image)
        except Undecodable as error:
            return undecodable([self.rows.name(place)], error)
        return image, int(self.rows.labels[place])


def _seed(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def _generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(_seed(*key))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
