"""Load a data set, by name or from a folder, and serve it in normalised batches.

Everything is read through Hugging Face `datasets`: the embedded set, the hub's at a pinned revision, or a local folder.
What fits in memory lives on the device as uint8 (`Resident`); what does not goes through workers (`Streaming`).
"""

import contextlib
import functools
import glob
import hashlib
import io
import itertools
import json
import logging
import os
import random
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from PIL import Image, ImageOps
from torch import Tensor

from skiplab.errors import InputError, unknown
from skiplab.files import ROOT
from skiplab.training import layout, pictures
from skiplab.training.ambient import isolated
from skiplab.training.layout import TEST_SPLITS, TRAIN_SPLIT, count
from skiplab.training.pictures import Undecodable
from skiplab.transforms.augment import RECIPES, crop_flip, draw_crop_flip, imagenet_transform, normalise, share

if TYPE_CHECKING:
    import datasets  # it takes half a second to import, so it is imported where it is used

RESIDENT_BYTES = 4e9  # a larger data set, decoded, is streamed

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMN = "label"
FLAT_TEST_SHARE = 0.2  # of a folder without a test split

# What a PIL mode is taken for; deeper images are refused, since PIL would clip them.
MODE_CHANNELS = {"1": 1, "L": 1, "LA": 1, "P": 3, "PA": 3, "RGB": 3, "RGBA": 3, "CMYK": 3, "YCbCr": 3}
CHANNEL_MODES = {1: "L", 3: "RGB"}
MOST_WORKERS = 16
STATISTICS_IMAGES = 512  # mean and std of a streamed data set come from so many training images


@dataclass(frozen=True)
class Spec:
    """What is known about a named data set. The defaults hold for a local folder."""

    repo: str | None = None  # on the hub
    revision: str | None = None
    sha256: dict[str, str] = field(default_factory=dict)  # file → hash, checked at each load
    test_split: str = TEST_SPLITS[0]  # the hub's split with labels that plays the test split
    channels: int | None = None
    img_size: int | None = None
    crop: float = 1.0  # resized so that the centre crop keeps this share of the shorter side
    pad: int = 0  # zero border that is added where it leads to img_size
    streams: bool = False  # whatever its size
    gated: bool = False  # needs a token


SPECS = {
    "fashion_mnist": Spec(pad=2),  # columns image, label
    "cifar10": Spec(  # columns img, label
        repo="uoft-cs/cifar10",
        revision="0b2714987fa478483af9968de7c934580d0bb9a2",
        sha256={
            "plain_text/train-00000-of-00001.parquet": "8428b53a88a11ac374111006708df514"
            "69e315a22ac6d66470afd9c78d2ae883",
            "plain_text/test-00000-of-00001.parquet": "841389e6f2d64f28bf17310e430aebac"
            "20ec3ba611a3c5e231dc93c645ce84de",
        },
    ),
    "tiny-imagenet": Spec(  # columns image, label; a few images are grey
        repo="zh-plus/tiny-imagenet",
        revision="5a77092c28e51558c5586e9c5eb71a7e17a5e43f",
        test_split="valid",
        channels=3,
    ),
    "imagenet-1k": Spec(  # columns image, label; the labels of its own test split are secret
        repo="ILSVRC/imagenet-1k",
        revision="49e2ee26f3810fb5a7536bbf732a7b07389a47b5",
        test_split="validation",
        channels=3,
        img_size=224,
        crop=224 / 256,
        streams=True,
        gated=True,
    ),
}
EMBEDDED = ROOT / "data" / "fashion_mnist"


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
        world = shard[1]
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
        if train and world > 1 and (batch_size % world or not drop_last):
            raise InputError(
                f"training on {world} processes needs drop_last and a batch_size that {world} divides, not {batch_size}"
            )

        order = torch.arange(self.num_images)
        if train:
            order = torch.randperm(self.num_images, generator=_generator(seed, epoch))
        places = [share(batch, shard) for batch in order.split(batch_size) if len(batch) == batch_size or not drop_last]
        places = [batch for batch in places if len(batch)]
        return self._serve(places, torch.device(device), augment if train else "none", (seed, epoch), shard, transform)

    def _serve(self, places, device, augment, key, shard, transform):
        mean, std = torch.tensor([self.mean, self.std], device=device)
        padding = max(1, self.img_size // 8)
        # Drawn for every image of the epoch, so that it does not matter how many processes share the batches.
        draws = draw_crop_flip(self.num_images, padding=padding, generator=_generator(*key, 1))
        for batch, (images, labels) in zip(places, self._fetch(places, device, augment, key, shard, transform)):
            if augment == "crop_flip":
                images = crop_flip(images, draws[batch], padding=padding)
            yield images if images.is_floating_point() else normalise(images, mean, std), labels


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

    def __init__(self, rows: "_Rows", decoder: "_Decoder", mean: tuple[float, ...], std: tuple[float, ...]):
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

    rows: "_Rows"
    decoder: "_Decoder"
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
            return _undecodable([self.rows.name(place)], error)
        return image, int(self.rows.labels[place])


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

    Raises:
        InputError: Unknown name, data out of reach, unusable files or settings; one line says which and what to do.
    """
    _check_settings(img_size, channels, validation, train_images, test_images)
    name = str(name_or_path)
    local = None
    if name in SPECS:
        variable = _variable(name)
        if SPECS[name].repo and (local := os.environ.get(variable)) and not Path(local).is_dir():
            raise InputError(f"{variable}={local!r} is not a folder")
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
    if local:
        folder, source = Path(local), f"local copy in place of {spec.repo} ({_variable(name)}), not bit-exact"
    elif spec.repo:
        folder, source = _hub_folder(name, spec), f"{spec.repo} at revision {spec.revision}"
    elif name in SPECS:
        folder, source = EMBEDDED, "embedded: the first 6,000 training and 2,000 test images of Fashion-MNIST (MIT)"
        sums = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
        _check_hashes(
            folder,
            dict(reversed(line.split()) for line in sums),
            f"repair it with `git checkout -- {folder.relative_to(ROOT)}`",
        )
    else:
        folder, source = Path(name), f"local folder {name}"

    with _quiet():
        rows, classes, files, unused = _read(folder)
        train, test = _train_and_test(rows, classes, spec, folder)
        if name not in SPECS:
            left = [f"the split {split!r}" for split in rows if split not in (train.split, test.split)]
            source += "".join(f"; not used: {what}" for what in [*left, unused] if what)
        train = _take(train, train_images, "train_images")
        test = _take(test, test_images, "test_images")
        in_validation = np.zeros(len(train.labels), bool)
        if validation:
            in_validation[_spread(train.labels, max(1, round(validation * len(in_validation))))] = True
        if in_validation.all():
            raise InputError(
                "a single training image leaves none to train on beside the validation split; at least 2 are needed"
            )

        settings = [spec.img_size, spec.channels, spec.crop, spec.pad, validation, train_images, test_images, classes]
        decoder = _Decoder(spec.img_size, spec.channels, spec.crop, spec.pad)
        if spec.streams or _decoded_bytes(train, test, decoder) > RESIDENT_BYTES:
            build = functools.partial(_streaming, files=[None if local else spec.revision, files])
        else:
            build = _resident
        return ImageData(
            name=name if name in SPECS else folder.name,
            source=source,
            classes=tuple(classes),
            **build(train, test, in_validation, decoder, settings=settings),
        )


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
    sample = decoder.arrays([parts[0].select(_spread(parts[0].labels, count))])
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


# ── Settings ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_settings(img_size, channels, validation, train_images, test_images):
    counts = {"img_size": img_size, "train_images": train_images, "test_images": test_images}
    for setting, value in counts.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InputError(f"{setting} is {value!r} (allowed: an integer of at least 1)")
    if channels not in (None, 1, 3):
        raise InputError(f"channels is {channels!r} (allowed: 1, 3)")
    if not isinstance(validation, int | float) or not 0 <= validation <= 0.5:
        raise InputError(f"validation is {validation!r} (allowed: a share from 0 to 0.5)")


def _variable(name: str) -> str:
    return "COMPANION_" + name.upper().replace("-", "_")


# ── Finding the files ─────────────────────────────────────────────────────────────────────────────────────────────────


def _hub_folder(name: str, spec: Spec) -> Path:
    """Return the folder of a data set of the hub, from the cache or downloaded."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

    fetch = functools.partial(
        snapshot_download, spec.repo, repo_type="dataset", revision=spec.revision, allow_patterns="*.parquet"
    )
    with _quiet():
        try:
            folder = fetch(local_files_only=True)
        except LocalEntryNotFoundError:
            try:
                HfApi().dataset_info(spec.repo, revision=spec.revision, timeout=5)  # a download retries for 25 s
                folder = fetch()
            except GatedRepoError as error:
                raise InputError(
                    f"{name} is gated: accept its terms at https://huggingface.co/datasets/{spec.repo} "
                    "and give your token (HF_TOKEN, or `hf auth login`)"
                ) from error
            except Exception as error:  # whatever the network says, the ways out are the same
                reason = str(error).strip().partition("\n")[0]
                token = " with a token for this gated set (HF_TOKEN)" * spec.gated
                raise InputError(
                    f"{name} is not in the cache and cannot be fetched from the hub ({reason}); three ways out: "
                    f"connect to the network once{token}; set HF_HOME to a cache that holds {spec.repo} at "
                    f"{spec.revision[:7]}; or use local data (a folder, {_variable(name)}=folder, or the embedded "
                    "'fashion_mnist')"
                ) from error
    _check_hashes(Path(folder), spec.sha256, "delete the file and load again")
    return Path(folder)


def _check_hashes(folder: Path, sha256: dict[str, str], repair: str) -> None:
    for file, expected in sha256.items():
        path = folder / file
        if not path.is_file():
            raise InputError(f"{path} is missing; {repair}")
        with open(path, "rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != expected:
                raise InputError(f"{path} does not have the expected SHA-256; {repair}")


# ── Reading rows ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Rows:
    """Images as they are stored, {"bytes", "path"}, and their labels."""

    split: str
    records: "datasets.Dataset"  # one column, "image"
    labels: np.ndarray  # int64; negative where missing
    places: np.ndarray  # rows of the split

    def select(self, chosen: np.ndarray) -> "_Rows":
        """Return the rows with these indices."""
        return _Rows(self.split, self.records.select(chosen), self.labels[chosen], self.places[chosen])

    def name(self, place: int) -> str:
        return (self.records[place]["image"] or {}).get("path") or f"row {self.places[place]} of {self.split}"


def _read(folder: Path) -> tuple[dict[str, _Rows], list[str], list, str]:
    """Return the rows of each split, the names of the classes, name and size of each file, and what is not used."""
    visible = layout.walk(folder)
    if tables := layout.tables(folder, visible):
        used = [path for path, _ in tables]
        rows, classes = _read_parquet(tables)
    elif any(map(layout.is_image, visible)):
        images = layout.images(folder, visible)
        used = [path for path, _, _ in images]
        rows, classes = _read_images(images)
    else:
        raise InputError(f"{folder} holds no images ({', '.join(layout.IMAGE_SUFFIXES)}) and no parquet files")
    files = [[path.relative_to(folder).as_posix(), path.stat().st_size] for path in used]
    return rows, classes, files, layout.unused(visible, used)


def _read_images(images: list[tuple[Path, str, str]]) -> tuple[dict[str, _Rows], list[str]]:
    import datasets

    names = {split: sorted({name for _, part, name in images if part == split}) for _, split, _ in images}
    same = {name: form for split, own in names.items() for name, form in zip(own, _composed(own, split))}
    classes = sorted(set(same.values()))
    number = {name: classes.index(form) for name, form in same.items()}
    rows = {}
    for split in dict.fromkeys(split for _, split, _ in images):
        chosen = [(str(path), number[name]) for path, part, name in images if part == split]
        records = datasets.Dataset.from_dict(
            {"image": [{"bytes": None, "path": path} for path, _ in chosen]},
            features=datasets.Features(image=datasets.Image(decode=False)),
        )
        rows[split] = _Rows(split, records, np.array([label for _, label in chosen]), np.arange(len(chosen)))
    return rows, classes


def _composed(names: list[str], split: str) -> list[str]:
    """Return names of classes composed (NFC): file systems and people spell one name in two forms of Unicode."""
    forms: dict[str, str] = {}
    for name in names:
        form = unicodedata.normalize("NFC", name)
        if form in forms:
            raise InputError(
                f"the split {split!r} has the classes {ascii(forms[form])} and {ascii(name)}, one name in two forms of "
                "Unicode; join or rename them"
            )
        forms[form] = name
    return list(forms)


def _read_parquet(tables: list[tuple[Path, str]]) -> tuple[dict[str, _Rows], list[str]]:
    rows, names = {}, {}
    for split in dict.fromkeys(split for _, split in tables):
        rows[split], names[split] = _read_split(split, [path for path, part in tables if part == split])
    named = [split for split in (TRAIN_SPLIT, *rows) if names.get(split)]
    if not named:
        return rows, _numbered(np.unique(np.concatenate([part.labels for part in rows.values()])))
    classes = names[named[0]]
    for split in named:
        if names[split] != classes:
            numbers = _numbers_in(classes, names[split], split, named[0])
            labels = rows[split].labels
            valid = (labels >= 0) & (labels < len(numbers))
            rows[split] = replace(rows[split], labels=np.where(valid, numbers[np.where(valid, labels, 0)], -1))
    return rows, classes


def _numbered(labels: np.ndarray) -> list[str]:
    """Return the classes of sorted labels without names. Raises InputError where a number is left out."""
    present = labels[labels >= 0]
    if len(present) and present[-1] >= len(present):
        taken = set(present.tolist())
        gaps = (number for number in itertools.count() if number not in taken)
        lacking = int(present[-1]) + 1 - len(present)
        shown = ", ".join(map(str, itertools.islice(gaps, min(3, lacking)))) + ", …" * (lacking > 3)
        raise InputError(
            f"no image has the label{'s' * (lacking > 1)} {shown}: labels without names count the classes from 0 "
            f"without gaps, here 0 to {len(present) - 1}; number them anew, for instance with "
            "numpy.unique(labels, return_inverse=True), or store their names (a ClassLabel)"
        )
    return [str(label) for label in range(len(present))]


def _numbers_in(classes: list[str], names: list[str], split: str, first: str) -> np.ndarray:
    """Return each name's number among the classes of the `first` split, which may count them in another order."""
    for name in names:
        if name not in classes:
            raise unknown(f"class of the split {split!r}, which the split {first!r} lacks:", name, classes)
    return np.array([classes.index(name) for name in names])


def _read_split(split: str, files: list[Path]) -> tuple[_Rows, list[str] | None]:
    """Return the rows of a split, and the names of its classes if its files carry them."""
    columns = [_image_column(file) for file in files]
    names = [_class_names(file) for file in files]
    for file, column, own in zip(files, columns, names):
        if column != columns[0]:
            raise InputError(
                f"{file} has its images in the column {column!r}, {files[0]} in {columns[0]!r}; rename one of the two"
            )
        if own != names[0]:
            raise InputError(
                f"{file} and {files[0]} name their classes differently; write them anew with the same names"
            )
    labels = np.concatenate([_labels(file) for file in files])
    if not len(labels):
        raise InputError(f"the split {split!r} has no rows ({', '.join(map(str, files[:3]))})")
    records = _records(files, columns[0])
    if columns[0] != "image":
        records = records.rename_column(columns[0], "image")
    return _Rows(split, records, labels, np.arange(len(labels))), names[0] and _composed(names[0], split)


def _labels(file: Path) -> np.ndarray:
    with _readable(file):
        column = pyarrow.parquet.ParquetFile(file).read([LABEL_COLUMN]).column(LABEL_COLUMN)
    return column.cast(pa.int64(), safe=False).fill_null(-1).to_numpy()


def _records(files: list[Path], column: str) -> "datasets.Dataset":
    """Return the stored images of some files: in memory, or of large files mapped from a copy made once in HF_HOME."""
    import datasets

    image = datasets.Image(decode=False)
    if sum(map(os.path.getsize, files)) < RESIDENT_BYTES:
        parts = []
        for file in files:
            with _readable(file):
                table = pyarrow.parquet.ParquetFile(file).read([column]).replace_schema_metadata()
            parts.append(datasets.Dataset(table).cast_column(column, image))
        return datasets.concatenate_datasets(parts)
    if "::" in str(files[0]):
        raise InputError(f"{files[0]} has '::' in its path, which Hugging Face takes for a chain of files; rename that")
    with _readable(f"{files[0]}{f' or one of {len(files) - 1} more' * (len(files) > 1)}"):
        return datasets.load_dataset(
            "parquet",
            data_files=[glob.escape(str(file)) for file in files],
            columns=[column],
            features=datasets.Features({column: image}),
            split="train",
        )


@contextlib.contextmanager
def _readable(file: Path | str) -> Iterator[None]:
    """Turn what readers of parquet raise into one line that names `file`."""
    import datasets

    try:
        yield
    except (OSError, pa.ArrowException, datasets.exceptions.DatasetGenerationError) as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0].rstrip(".")
        raise InputError(f"{file} is not a readable parquet file ({reason})") from error


def _class_names(file: Path) -> list[str] | None:
    """Return the names of the classes in a file's metadata of Hugging Face, None where it has none."""
    import datasets

    metadata = (pyarrow.parquet.read_schema(file).metadata or {}).get(b"huggingface")
    try:  # the label's alone: features of other columns may be of types that this version does not know
        label = ((json.loads(metadata).get("info") or {}).get("features") or {}).get(LABEL_COLUMN) if metadata else None
        return label and getattr(datasets.Features.from_dict({LABEL_COLUMN: label})[LABEL_COLUMN], "names", None)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        reason = " ".join(str(error).split())[:80]
        raise InputError(
            f"{file} says of its labels what datasets {datasets.__version__} does not know ({reason}); write it anew "
            "with a ClassLabel, or without the metadata 'huggingface'"
        ) from error


def _image_column(file: Path) -> str:
    """Return the column with a parquet file's images. Raises InputError where it or the labels are missing."""
    with _readable(file):
        schema = pyarrow.parquet.read_schema(file)
    images = [name for name in schema.names if name in IMAGE_COLUMNS and pa.types.is_struct(schema.field(name).type)]
    labels = [name for name in schema.names if name == LABEL_COLUMN and pa.types.is_integer(schema.field(name).type)]
    if not images or not labels:
        seen = ", ".join(f"{name} ({schema.field(name).type})" for name in schema.names)
        raise InputError(
            f"{file} has the columns {seen}; needed are {' or '.join(IMAGE_COLUMNS)} (struct of bytes and "
            f"path) and {LABEL_COLUMN} (integer)"
        )
    return min(images, key=IMAGE_COLUMNS.index)


# ── Choosing rows ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _train_and_test(rows: dict[str, _Rows], classes: list[str], spec: Spec, folder: Path) -> tuple[_Rows, _Rows]:
    if TRAIN_SPLIT not in rows:
        raise InputError(f"{folder} has no split {TRAIN_SPLIT!r}, only {', '.join(map(repr, rows))}")
    train = rows[TRAIN_SPLIT]
    test = next((rows[split] for split in (spec.test_split, *TEST_SPLITS) if split in rows), None)
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
        held_out = _spread(train.labels, max(1, round(FLAT_TEST_SHARE * len(train.labels))))
        return train.select(np.delete(np.arange(len(train.labels)), held_out)), train.select(held_out)
    untrained = [classes[label] for label in sorted(set(test.labels) - set(train.labels))]
    if untrained:
        raise InputError(
            f"{len(untrained)} classes of the split {test.split!r} have no training images: {', '.join(untrained[:3])}"
        )
    return train, test


def _take(rows: _Rows, count: int | None, setting: str) -> _Rows:
    if count is None:
        return rows
    if count > len(rows.labels):
        raise InputError(f"{setting} is {count}, but the split {rows.split!r} has {len(rows.labels)} images")
    return rows.select(_spread(rows.labels, count))


def _spread(labels: np.ndarray, count: int) -> np.ndarray:
    """Return `count` places, evenly spaced through the images sorted by class: stratified, and without chance."""
    by_class = np.argsort(labels, kind="stable")
    return np.sort(by_class[(2 * np.arange(count) + 1) * len(labels) // (2 * count)])


# ── Decoding ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Decoder:
    """How a stored image becomes pixels."""

    img_size: int | None
    channels: int | None
    crop: float
    pad: int

    def picture(self, record: dict) -> Image.Image:
        """Return the whole image, grey or RGB. Raises Undecodable."""
        content, path = (record or {}).get("bytes"), (record or {}).get("path")
        if not content and path is None:
            raise Undecodable("is missing")
        image, _ = pictures.read(path if content is None else io.BytesIO(content))
        if image.mode in pictures.DEEP_MODES:
            raise Undecodable(
                f"has more than 8 bits a channel (mode {image.mode}); convert all images to 8 bits by one scale"
            )
        if image.mode not in MODE_CHANNELS:
            raise Undecodable(f"has the mode {image.mode}; convert it to RGB or L")
        channels = self.channels or MODE_CHANNELS[image.mode]
        return (pictures.on_white(image) if pictures.is_transparent(image) else image).convert(CHANNEL_MODES[channels])

    def array(self, record: dict) -> np.ndarray:
        """Return the image in its final size, uint8 (C, H, W). Raises Undecodable."""
        image = self.picture(record)
        size, (width, height) = self.img_size, image.size
        if size and width + 2 * self.pad == size == height + 2 * self.pad:
            image = ImageOps.expand(image, self.pad)
        elif size and (width, height) != (size, size):
            scale = size / self.crop / min(width, height)
            image = image.resize(
                (max(size, round(scale * width)), max(size, round(scale * height))), Image.Resampling.BICUBIC
            )
            left, top = (image.width - size) // 2, (image.height - size) // 2
            image = image.crop((left, top, left + size, top + size))
        return np.array(image).reshape(image.height, image.width, -1).transpose(2, 0, 1)

    def arrays(self, parts: list[_Rows]) -> np.ndarray:
        """Return all images, uint8 (N, C, H, W). Raises InputError where some cannot be decoded or do not fit."""
        images, origins, undecodable, reasons = [], [], [], []
        for rows in parts:
            records = (record for batch in rows.records.iter(1000) for record in batch["image"])
            for place, record in enumerate(records):
                try:
                    images.append(self.array(record))
                    origins.append((rows, place))
                except Undecodable as error:
                    undecodable.append(rows.name(place))
                    reasons.append(error)
        if undecodable:
            raise _undecodable(undecodable, reasons[0])
        grey = [stored for image, stored in zip(images, origins) if len(image) == 1]
        if 0 < len(grey) < len(images):
            names = [rows.name(place) for rows, place in grey[:3]]
            raise InputError(
                f"greyscale among RGB: {count(names, len(grey))} of {len(images)}; pass channels=3 or channels=1"
            )
        sizes = Counter(image.shape[1:] for image in images)
        if len(sizes) > 1 or len(set(*sizes)) > 1:
            seen = ", ".join(f"{count} of {width}×{height}" for (height, width), count in sizes.most_common(3))
            raise InputError(
                f"the images are not all of one square size: {seen}{', …' * (len(sizes) > 3)}; pass img_size"
            )
        return np.stack(images)


def _undecodable(names: list[str], reason: Undecodable) -> InputError:
    """Build the error for images that cannot be used, and why the first of them cannot."""
    first, them = (", of which the first", "them") if len(names) > 1 else ("", "it")
    return InputError(f"{count(names)}{first} {' '.join(str(reason).split())}; mend or remove {them}")


def _decoded_bytes(train: _Rows, test: _Rows, decoder: _Decoder) -> int:
    """Return about how much memory the decoded images take."""
    size = (decoder.channels or 3) * (decoder.img_size or 0) ** 2
    if not size:
        try:
            size = decoder.array(train.records[0]["image"]).size
        except Undecodable:
            pass  # reported with the others when all are decoded
    return size * (len(train.labels) + len(test.labels))


# ── Small things ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _seed(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def _generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(_seed(*key))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _quiet():
    """Keep Hugging Face's progress bars and log lines, and warnings, off the screen for a while."""
    import datasets
    import huggingface_hub.utils as hub

    logger = logging.getLogger("huggingface_hub")
    level, bars = logger.level, [library for library in (datasets, hub) if not library.are_progress_bars_disabled()]
    logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in bars:
            library.disable_progress_bars()
        try:
            yield
        finally:
            for library in bars:
                library.enable_progress_bars()
            logger.setLevel(level)
