"""Load a data set, by name or from a folder, in three splits that come in normalised batches."""

import functools
import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from skiplab.errors import InputError, unknown
from skiplab.training import rows, sources
from skiplab.training.ambient import isolated
from skiplab.training.decode import Decoder, decoded_bytes
from skiplab.training.layout import TEST_SPLITS, TRAIN_SPLIT, count
from skiplab.training.rows import Rows, spread, take
from skiplab.training.sources import SPECS, Spec, variable
from skiplab.training.splits import Resident, Split, Streaming

FLAT_TEST_SHARE = 0.2  # of a folder without a test split
STATISTICS_IMAGES = 512  # mean and std of a streamed data set come from so many training images


@dataclass(frozen=True)
class ImageData:
    """A data set in three splits.

    The validation split is carved from the training split: stratified, the same for every seed, and disjoint from it.
    Whatever is chosen (hyperparameters, epochs, early stopping) is chosen there; `test` is for the final number only.

    Attributes:
        source: Where the images came from, in words.
        classes: Names, in the order of the labels.
        mean, std: For each channel, of the training split, in [0, 1] (of 512 of its images where it is streamed).
        digest: SHA-256 of the pixels and labels in use, the class names and the settings. A streamed data set is
            represented by its labels and the names and sizes of its files, and its revision on the hub.
    """

    name: str
    source: str
    train: Split
    validation: Split
    test: Split
    classes: tuple[str, ...]
    channels: int
    img_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digest: str

    @property
    def num_classes(self) -> int:
        return len(self.classes)


def load(
    name_or_path: str | Path,
    *,
    img_size: int | None = None,
    channels: int | None = None,
    validation: float = 0.1,
    train_images: int | None = None,
    test_images: int | None = None,
) -> ImageData:
    """Load a data set and split it; the same arguments return the same object for as long as the process lives.

    A folder holds either parquet files named after their split as on the hub (`train-00000-of-00001.parquet`; columns
    `image` or `img`, and `label`), or images as `train/class/x.png` and `test/class/y.png` (or validation, valid, val),
    or just `class/x.png`. Links are followed, images are turned as their EXIF data say, and transparency is laid on
    white; `source` says what is not used. Without a test split a fifth of the images, stratified, becomes one. An
    environment variable, for instance COMPANION_CIFAR10 for "cifar10", makes a name of the hub stand for such a folder.

    Args:
        name_or_path: "fashion_mnist" (embedded), "cifar10", "tiny-imagenet", "imagenet-1k", or a folder.
        img_size: Pixels. Images of another size are resized (shorter side, bicubic) and cropped at the centre, but
            Fashion-MNIST at 32 is padded with zeros. None keeps the size, which must be one and square.
        channels: 1 or 3, converting where needed; None keeps what the images have, which must be the same for all.
        validation: Share of the training images that becomes the validation split, in [0, 0.5].
        train_images: Use only so many training images, stratified; the validation split is carved from these.
        test_images: Use only so many test images, stratified.

    Raises InputError for an unknown name, data out of reach, and unusable files or settings; it says what to do.
    """
    _check_settings(img_size, channels, validation, train_images, test_images)
    name = str(name_or_path)
    local = None
    if name in SPECS:
        local = os.environ.get(variable(name)) if SPECS[name].repo else None
        if local and not Path(local).is_dir():
            raise InputError(f"{variable(name)}={local!r} is not a folder")
    elif (folder := Path(name).expanduser()).is_dir():
        name = str(folder.resolve())
    else:
        raise unknown("data set", name, [*SPECS, "an existing folder"])
    return _load(name, local, img_size, channels, validation, train_images, test_images)


@functools.lru_cache(maxsize=8)
@isolated()
def _load(name, local, img_size, channels, validation, train_images, test_images):
    spec = SPECS.get(name, Spec())
    spec = replace(spec, img_size=img_size or spec.img_size, channels=channels or spec.channels)
    folder, source = sources.locate(name, spec, local)
    with sources.quiet():
        found, classes, files, unused = rows.read(folder)
        train, test = _train_and_test(found, classes, spec, folder)
        if name not in SPECS:
            left = [f"the split {split!r}" for split in found if split not in (train.split, test.split)]
            source += "".join(f"; not used: {what}" for what in [*left, unused] if what)
        train = take(train, train_images, "train_images")
        test = take(test, test_images, "test_images")
        in_validation = _in_validation(train, validation)
        settings = [spec.img_size, spec.channels, spec.crop, spec.pad, validation, train_images, test_images, classes]
        decoder = Decoder(spec.img_size, spec.channels, spec.crop, spec.pad)
        if spec.streams or decoded_bytes(train, test, decoder) > rows.RESIDENT_BYTES:
            build = functools.partial(_streaming, files=[None if local else spec.revision, files])
        else:
            build = _resident
        return ImageData(
            name=name if name in SPECS else folder.name,
            source=source,
            classes=tuple(classes),
            **build(train, test, in_validation, decoder, settings=settings),
        )


def _in_validation(train: Rows, share: float) -> np.ndarray:
    """Return which training images make up the validation split, stratified: bool (N,)."""
    chosen = np.zeros(len(train.labels), bool)
    if share:
        chosen[spread(train.labels, max(1, round(share * len(chosen))))] = True
    if chosen.all():
        raise InputError(
            "a single training image leaves none to train on beside the validation split; at least 2 are needed"
        )
    return chosen


def _resident(train, test, in_validation, decoder, *, settings):
    pixels = decoder.arrays([train, test])
    train_pixels, test_pixels = pixels[: len(train.labels)], pixels[len(train.labels) :]
    parts = [
        (train_pixels[~in_validation], train.labels[~in_validation]),
        (train_pixels[in_validation], train.labels[in_validation]),
        (test_pixels, test.labels),
    ]
    digest = hashlib.sha256(json.dumps(settings).encode())
    for part in parts:
        for array in part:
            digest.update(np.ascontiguousarray(array))
    mean, std = _statistics(parts[0][0])
    splits = [Resident(torch.from_numpy(images), torch.from_numpy(labels), mean, std) for images, labels in parts]
    return _fields(splits, pixels.shape, mean, std, digest)


def _streaming(train, test, in_validation, decoder, *, settings, files):
    if decoder.img_size is None:
        raise InputError("this data set is too large to keep in memory; pass img_size, so that it can be streamed")
    decoder = replace(decoder, channels=decoder.channels or 3)
    parts = [train.select(np.flatnonzero(~in_validation)), train.select(np.flatnonzero(in_validation)), test]
    digest = hashlib.sha256(json.dumps([settings, files]).encode())
    for part in parts:
        digest.update(part.labels)
    count = min(STATISTICS_IMAGES, len(parts[0].labels))
    sample = decoder.arrays([parts[0].select(spread(parts[0].labels, count))])
    mean, std = _statistics(sample)
    splits = [Streaming(part, decoder, mean, std) for part in parts]
    return _fields(splits, sample.shape, mean, std, digest)


def _fields(splits, shape, mean, std, digest):
    train, validation, test = splits
    return {
        "train": train,
        "validation": validation,
        "test": test,
        "channels": shape[1],
        "img_size": shape[-1],
        "mean": mean,
        "std": std,
        "digest": digest.hexdigest(),
    }


def _statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of uint8 (N, C, H, W) images, in [0, 1]."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in torch.from_numpy(images).unbind(1):
        share = channel.flatten().bincount(minlength=256).double() / channel.numel()
        mean.append((share @ levels).item())
        std.append(max((share @ (levels - mean[-1]) ** 2).sqrt().item(), 1 / 255))  # constant images: no zero
    return tuple(mean), tuple(std)


def _check_settings(img_size, channels, validation, train_images, test_images):
    counts = {"img_size": img_size, "train_images": train_images, "test_images": test_images}
    for setting, value in counts.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InputError(f"{setting} is {value!r} (allowed: an integer of at least 1)")
    if channels not in (None, 1, 3):
        raise InputError(f"channels is {channels!r} (allowed: 1, 3)")
    if not isinstance(validation, int | float) or not 0 <= validation <= 0.5:
        raise InputError(f"validation is {validation!r} (allowed: a share from 0 to 0.5)")


def _train_and_test(found: dict[str, Rows], classes: list[str], spec: Spec, folder: Path) -> tuple[Rows, Rows]:
    if TRAIN_SPLIT not in found:
        raise InputError(f"{folder} has no split {TRAIN_SPLIT!r}, only {', '.join(map(repr, found))}")
    train = found[TRAIN_SPLIT]
    test = next((found[split] for split in (spec.test_split, *TEST_SPLITS) if split in found), None)
    for part in [train] if test is None else [train, test]:
        unlabelled = np.flatnonzero((part.labels < 0) | (part.labels >= len(classes)))
        if len(unlabelled):
            names = [part.name(place) for place in unlabelled[:3]]
            raise InputError(f"{count(names, len(unlabelled))} without a valid label (needed: 0 to {len(classes) - 1})")
    filled = set(train.labels).union([] if test is None else test.labels)
    empty = [name for label, name in enumerate(classes) if label not in filled]
    if empty:
        raise InputError(f"{count(empty, noun='class name')} without an image in {folder}; remove empty classes")
    if len(set(train.labels)) < 2:
        raise InputError(
            f"{folder} has a single class in its split {TRAIN_SPLIT!r}, {classes[train.labels[0]]!r}; "
            "at least 2 are needed"
        )
    if test is None:
        held_out = spread(train.labels, max(1, round(FLAT_TEST_SHARE * len(train.labels))))
        return train.select(np.delete(np.arange(len(train.labels)), held_out)), train.select(held_out)
    untrained = [classes[label] for label in sorted(set(test.labels) - set(train.labels))]
    if untrained:
        raise InputError(
            f"{len(untrained)} classes of the split {test.split!r} have no training images: {', '.join(untrained[:3])}"
        )
    return train, test
