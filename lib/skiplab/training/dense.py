"""Dense tasks on frozen features: linear segmentation, object discovery by TokenCut, and features as colours.

What Cutting the Skip (arXiv 2510.00345) asks of a ViT pre-trained by DINO. Three probes of its patch tokens:

* **Linear segmentation.** A linear layer on standardised patch tokens names each patch's classes; scored by mIoU over
  pixels. *Single layer*: the last block's tokens. *Multi-scale*, defined by us, since our sources do not: those of the
  last four blocks, each of the image at its own and at half its size, side by side.
* **Object discovery.** TokenCut (Wang et al., CVPR 2022, arXiv 2202.11539), from its description; scored by CorLoc.
* **PCA.** The three main components of all patches of some images, as red, green and blue.

Images come from a DenseSet: "composed" puts garments of the embedded Fashion-MNIST on one canvas (real pixels, exact
masks and boxes); "voc2012", "ade20k", "coco_stuff" and "coco20k" are read from local folders in their published layout,
named by an environment variable, for instance COMPANION_VOC2012, or given as a folder of parquet files.
"""

import hashlib
import json
import math
import os
import time
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy import ndimage
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassJaccardIndex

from skiplab.errors import InputError, indivisible, unknown
from skiplab.theory.spectral import token_similarity
from skiplab.training import checkpoint, dino, loop
from skiplab.training.data import ImageData
from skiplab.transforms.augment import normalise

IGNORE = 255  # of a mask: no class, and not scored
BATCH = 64  # images
LAYERS, SCALES = 4, (1.0, 0.5)  # of the multi-scale probe: the last so many blocks, and sizes of the image

# --- Images with masks and boxes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """One image as uint8 (C, S, S), its class of each pixel (S, S) or None, and its objects' boxes (k, 4).

    A box is (left, top, right, bottom) in pixels, right and bottom excluded.
    """

    image: np.ndarray
    mask: np.ndarray | None
    boxes: np.ndarray


@dataclass(frozen=True)
class DenseSet:
    """A list of scenes, made when asked for; `classes` counts those of the masks, 0 where there are none."""

    scenes: list[Callable[[], Scene]]
    classes: int = 0

    def __len__(self) -> int:
        return len(self.scenes)

    def batches(self, size: int = BATCH) -> Iterator[list[Scene]]:
        for start in range(0, len(self), size):
            yield [make() for make in self.scenes[start : start + size]]


def compose(pixels: Tensor, labels: Tensor, count: int, *, size: int, garments: int = 3, seed: int = 0) -> DenseSet:
    """Put `garments` images side by side on each of `count` black canvases (size, size), at random places.

    `pixels` is uint8 (N, 1, h, w), `labels` (N,). A garment is what is not black, holes filled: class label + 1; the
    rest is class 0. Places do not overlap. The same arguments give the same scenes. Raises InputError where the
    garments do not fit.
    """
    side = pixels.shape[-1]
    cells = (size // side) ** 2
    if cells < garments:
        raise InputError(
            f"{garments} garments of {side} pixels do not fit on a canvas of {size}: it must be at least "
            f"{side * math.ceil(math.sqrt(garments))}"
        )
    scenes = [partial(_composed, pixels, labels, index, size, garments, seed) for index in range(count)]
    return DenseSet(scenes, int(labels.max()) + 2)


def _composed(pixels: Tensor, labels: Tensor, index: int, size: int, garments: int, seed: int) -> Scene:
    chance, side = np.random.default_rng([seed, index]), pixels.shape[-1]
    per_row = size // side
    slack = size - per_row * side
    canvas, mask, boxes = np.zeros((1, size, size), np.uint8), np.zeros((size, size), np.int64), []
    shift = chance.integers(0, slack + 1, 2)
    for cell, chosen in zip(chance.permutation(per_row**2)[:garments], chance.integers(len(pixels), size=garments)):
        top, left = (cell // per_row) * side + shift[0], (cell % per_row) * side + shift[1]
        garment = pixels[chosen, 0].numpy()
        shape = ndimage.binary_fill_holes(garment > 0)
        canvas[0, top : top + side, left : left + side] = garment
        mask[top : top + side, left : left + side][shape] = int(labels[chosen]) + 1
        boxes.append(_box(shape) + np.array([left, top, left, top]))
    return Scene(canvas, mask, np.stack(boxes))


def _box(mask: np.ndarray) -> np.ndarray:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])


# --- Published data sets ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where a published data set keeps images and masks: each split's list or folders, and the masks' `classes`."""

    about: str
    classes: int = 0
    shift: int = 0  # subtracted from the masks' numbers; what falls below 0 is ignored
    images: dict[str, str] = field(default_factory=dict)  # split → folder of images, beside …
    masks: dict[str, str] = field(default_factory=dict)  # … that of masks
    list_file: dict[str, str] = field(default_factory=dict)  # split → list of names; else all images of the folder
    boxes: str = ""  # "voc" or "coco"


SETS = {
    "voc2012": Layout(
        "VOCdevkit/VOC2012 with JPEGImages, SegmentationClass, Annotations and ImageSets",
        21,
        0,
        dict.fromkeys(("train", "test", "discovery"), "JPEGImages"),
        dict.fromkeys(("train", "test"), "SegmentationClass"),
        {
            "train": "ImageSets/Segmentation/train.txt",
            "test": "ImageSets/Segmentation/val.txt",
            "discovery": "ImageSets/Main/trainval.txt",
        },
        "voc",
    ),
    "ade20k": Layout(
        "ADEChallengeData2016 with images/{training,validation} and annotations/{training,validation}",
        150,
        1,
        {"train": "images/training", "test": "images/validation"},
        {"train": "annotations/training", "test": "annotations/validation"},
    ),
    "coco_stuff": Layout(
        "images/{train2017,val2017} and annotations/{train2017,val2017} of stuffthingmaps",
        182,
        0,
        {"train": "images/train2017", "test": "images/val2017"},
        {"train": "annotations/train2017", "test": "annotations/val2017"},
    ),
    "coco20k": Layout(
        "train2014, annotations/instances_train2014.json and coco_20k_filenames.txt",
        0,
        0,
        {"discovery": "train2014"},
        {},
        {"discovery": "coco_20k_filenames.txt"},
        "coco",
    ),
}
COMPOSED = "composed"
COMPOSED_SEEDS = {"train": 0, "test": 1, "discovery": 1}


def load(name: str, split: str, *, data: ImageData, size: int, count: int = 0, channels: int = 3) -> DenseSet:
    """Load a split ("train", "test" or "discovery") of a dense set, images stretched to (size, size).

    `data` is the pre-training set, from whose splits "composed" takes its garments; `channels` are 1 or 3. `count` is
    how many images to use, evenly spread, 0 for all; "composed" needs it. Boxes are scaled with the image, which leaves
    their overlaps as they are. Raises InputError for an unknown name, a folder that is out of reach or not as
    published, and a task that the set has no labels for.
    """
    if name == COMPOSED:
        part = data.train if split == "train" else data.test
        if not hasattr(part, "pixels") or part.pixels.shape[1] != 1:
            raise InputError(f"{COMPOSED!r} needs small grey images with a black background, such as fashion_mnist")
        return compose(part.pixels, part.labels, count or 200, size=size, seed=COMPOSED_SEEDS[split])
    folder = find(name)
    tables = sorted(folder.rglob("*.parquet"))
    found, classes = (
        _parquet(tables, split, size, channels) if tables else _published(name, folder, split, size, channels)
    )
    if count and count < len(found):
        found = [found[(2 * place + 1) * len(found) // (2 * count)] for place in range(count)]
    return DenseSet(found, classes)


def find(name: str) -> Path:
    """Return the folder of a published set. Raises InputError, naming the ways out, where it is not to be had."""
    if name not in SETS:
        if Path(name).is_dir():
            return Path(name)
        raise unknown("dense set", name, [COMPOSED, *SETS, "an existing folder"])
    variable = f"COMPANION_{name.upper()}"
    folder = os.environ.get(variable, "")
    if not folder:
        raise InputError(
            f"{name} is not here; download it once and set {variable} to its folder ({SETS[name].about}), or "
            f"to one of parquet files with the columns image, mask and boxes; or use {COMPOSED!r}"
        )
    if not Path(folder).is_dir():
        raise InputError(f"{variable}={folder!r} is not a folder; it must be {SETS[name].about}")
    return Path(folder)


def files_digest(name: str) -> str:
    """Return a digest of a set's file names and sizes; empty for "composed", which the pre-training data decide."""
    if name == COMPOSED:
        return ""
    folder = find(name)
    listing = [
        (path.relative_to(folder).as_posix(), path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]


def _published(name: str, folder: Path, split: str, size: int, channels: int) -> tuple[list[Callable[[], Scene]], int]:
    if name not in SETS:
        raise InputError(f"{folder} holds no parquet files")
    layout = SETS[name]
    if split not in layout.images:
        raise InputError(f"{name} has no split {split!r} (allowed: {', '.join(sorted(layout.images))})")
    pictures = folder / layout.images[split]
    if split in layout.list_file:
        listed = folder / layout.list_file[split]
        if not listed.exists():
            raise InputError(f"{listed} is missing; {name} must be {layout.about}")
        names = [line.split()[0] for line in listed.read_text(encoding="utf-8").splitlines() if line.strip()]
        images = [pictures / (Path(line).name if Path(line).suffix else f"{line}.jpg") for line in names]
    else:
        images = sorted(pictures.glob("*.jpg"))
    if not images:
        raise InputError(f"{pictures} holds no images; {name} must be {layout.about}")
    boxes = _coco_boxes(folder) if layout.boxes == "coco" else None
    masks = folder / layout.masks[split] if split in layout.masks else None
    scenes = []
    for image in images:
        mask = masks / f"{image.stem}.png" if masks else None
        note = folder / "Annotations" / f"{image.stem}.xml" if layout.boxes == "voc" and split == "discovery" else None
        for file in (image, mask, note):
            if file and not file.exists():
                raise InputError(f"{file} is missing; {name} must be {layout.about}")
        where = boxes.get(image.name) if boxes else partial(_voc_boxes, note) if note else None
        scenes.append(partial(_read, image, mask, where, size, channels, layout.shift))
    return scenes, layout.classes


def _parquet(files: list[Path], split: str, size: int, channels: int) -> tuple[list[Callable[[], Scene]], int]:
    """Read parquet files named after their split, columns image, mask (an image) and boxes ([[l, t, r, b], …])."""
    import datasets

    wanted = [str(file) for file in files if file.stem.partition("-")[0] == split]
    if not wanted:
        raise InputError(f"no file {split}-*.parquet among {', '.join(file.name for file in files[:3])}")
    rows = datasets.load_dataset("parquet", data_files=wanted, split="train")
    if "image" not in rows.column_names or not {"mask", "boxes"} & set(rows.column_names):
        raise InputError(
            f"{Path(wanted[0]).name} has the columns {', '.join(rows.column_names)}; needed are image, and mask "
            "or boxes"
        )
    classes = 0
    if "mask" in rows.column_names:
        found = [np.unique(np.array(mask)) for mask in rows["mask"]]
        classes = int(max(values[values != IGNORE].max(initial=0) for values in found)) + 1
    return [partial(_row, rows, place, size, channels) for place in range(len(rows))], classes


def _row(rows, place: int, size: int, channels: int) -> Scene:
    row = rows[place]
    return _scene(row["image"], row.get("mask"), row.get("boxes") or [], size, channels, 0)


def _read(image: Path, mask: Path | None, boxes, size: int, channels: int, shift: int) -> Scene:
    with Image.open(image) as picture:
        if mask is None:
            return _scene(picture, None, boxes() if callable(boxes) else boxes or [], size, channels, shift)
        with Image.open(mask) as classes:
            return _scene(picture, classes, [], size, channels, shift)


def _scene(picture: Image.Image, mask: Image.Image | None, boxes: list, size: int, channels: int, shift: int) -> Scene:
    scale = size / np.array([picture.width, picture.height] * 2)
    image = np.array(picture.convert("RGB" if channels == 3 else "L").resize((size, size), Image.Resampling.BICUBIC))
    if mask is not None:
        mask = np.array(mask.resize((size, size), Image.Resampling.NEAREST)).astype(np.int64)
        mask = np.where((mask == IGNORE) | (mask < shift), IGNORE, mask - shift)
    return Scene(image.reshape(size, size, -1).transpose(2, 0, 1), mask, np.array(boxes, float).reshape(-1, 4) * scale)


def _voc_boxes(file: Path) -> list[list[float]]:
    """Return the boxes of a VOC annotation, whose pixels count from 1 and whose ends are included."""
    boxes = []
    for box in xml.etree.ElementTree.parse(file).iter("bndbox"):
        left, top, right, bottom = (float(box.findtext(side)) for side in ("xmin", "ymin", "xmax", "ymax"))
        boxes.append([left - 1, top - 1, right, bottom])
    return boxes


def _coco_boxes(folder: Path) -> dict[str, list[list[float]]]:
    file = folder / "annotations" / "instances_train2014.json"
    if not file.exists():
        raise InputError(f"{file} is missing; coco20k must be {SETS['coco20k'].about}")
    content = json.loads(file.read_text(encoding="utf-8"))
    names, boxes = {image["id"]: image["file_name"] for image in content["images"]}, {}
    for note in content["annotations"]:
        left, top, width, height = note["bbox"]
        if not note.get("iscrowd"):
            boxes.setdefault(names[note["image_id"]], []).append([left, top, left + width, top + height])
    return boxes


# --- Features ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backbone:
    """A frozen ViT and the normalisation of the data that it was trained on."""

    vit: VisionTransformer
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def patch(self) -> int:
        return self.vit.patch_embed.patch_size[0]

    def images(self, scenes: list[Scene]) -> Tensor:
        """Return the scenes' images as the ViT takes them, (B, C, S, S), on its device."""
        device = next(self.vit.parameters()).device
        pixels = torch.from_numpy(np.stack([scene.image for scene in scenes])).to(device)
        return normalise(pixels, *torch.tensor([self.mean, self.std], device=device))

    @torch.no_grad()
    def features(self, images: Tensor, layers: int = 1, scales: tuple[float, ...] = (1.0,)) -> Tensor:
        """Return normalised patch tokens as maps (B, d·layers·scales, S/patch, S/patch), the last blocks' side by side.

        At a scale s the image is resized to s times its size (a multiple of the patch), and its map back.
        """
        maps, grid = [], images.shape[-1] // self.patch
        for scale in scales:
            side = max(1, round(scale * grid)) * self.patch
            scaled = (
                images
                if side == images.shape[-1]
                else functional.interpolate(images, size=(side, side), mode="bicubic", antialias=True)
            )
            for found in self.vit.forward_intermediates(scaled, indices=layers, norm=True, intermediates_only=True):
                maps.append(
                    found
                    if found.shape[-1] == grid
                    else functional.interpolate(found, size=(grid, grid), mode="bilinear")
                )
        return torch.cat(maps, dim=1)

    @torch.no_grad()
    def keys(self, images: Tensor) -> Tensor:
        """Return the last block's keys of the patches, all heads side by side: (B, n, d)."""
        attention, kept = self.vit.blocks[-1].attn, []
        hook = attention.qkv.register_forward_hook(
            lambda module, inputs, output: kept.append(output.chunk(3, dim=-1)[1])
        )
        try:
            self.vit.forward_features(images)
        finally:
            hook.remove()
        return kept[0][:, self.vit.num_prefix_tokens :]


# --- Linear segmentation ----------------------------------------------------------------------------------------------


def class_shares(masks: Tensor, patch: int, classes: int) -> Tensor:
    """Return what share of each patch's pixels has each class, from masks (B, S, S): (B, classes, S/patch, S/patch).

    Ignored pixels have no class, so the shares of a patch sum to less than 1 where it has some.
    """
    valid = masks != IGNORE
    one_hot = functional.one_hot(torch.where(valid, masks, 0), classes) * valid[..., None]
    return functional.avg_pool2d(one_hot.movedim(-1, 1).float(), patch)


def fit_linear(
    features: Tensor, shares: Tensor, *, epochs: int, seed: int, learning_rate: float = 1e-2, batch_size: int = 8
) -> tuple[nn.Conv2d, float]:
    """Fit a linear classifier of patches, by AdamW and a cosine, to maps (N, d, h, w) and `class_shares`.

    The loss is the cross-entropy of every pixel with the prediction for its patch. Returns the layer, which takes
    features as they come (their standardisation is folded into its weights), and the last epoch's mean loss.
    """
    torch.manual_seed(seed)
    mean = features.float().mean(dim=(0, 2, 3))
    std = features.float().std(dim=(0, 2, 3)).clamp(min=1e-6)
    layer = nn.Conv2d(features.shape[1], shares.shape[1], 1).to(shares.device)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=learning_rate, weight_decay=1e-4)
    steps = epochs * math.ceil(len(features) / batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        losses = []
        for batch in torch.randperm(len(features)).split(batch_size):
            standard = (features[batch].float() - mean[:, None, None]) / std[:, None, None]
            target = shares[batch].float()
            loss = -(target * functional.log_softmax(layer(standard), dim=1)).sum() / target.sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
    with torch.no_grad():
        layer.weight /= std[:, None, None]
        layer.bias -= layer.weight.flatten(1) @ mean
    return layer, float(torch.stack(losses).mean())


@torch.no_grad()
def segment(layer: nn.Conv2d, features: Tensor, size: int) -> Tensor:
    """Return the likeliest class of each pixel (B, size, size): the patches' logits, enlarged bilinearly."""
    return functional.interpolate(layer(features.float()), size=(size, size), mode="bilinear").argmax(dim=1)


def linear_segmentation(
    backbone: Backbone,
    train: DenseSet,
    test: DenseSet,
    *,
    layers: int,
    scales: tuple[float, ...],
    epochs: int,
    seed: int,
) -> tuple[float, float, nn.Conv2d]:
    """Fit the linear probe on `train` and return its mIoU on `test` in percent, its training loss, and the probe.

    mIoU is the mean over classes that the test masks or predictions contain (torchmetrics' macro average). Training
    features are computed once and kept, in half precision on the CPU.
    """
    if not train.classes:
        raise InputError("this dense set has no masks to segment by")
    kept = [
        (
            backbone.features(backbone.images(batch), layers, scales).half().cpu(),
            class_shares(_masks(batch), backbone.patch, train.classes).half(),
        )
        for batch in train.batches()
    ]
    features, shares = (torch.cat(part) for part in zip(*kept))
    layer, loss = fit_linear(features, shares, epochs=epochs, seed=seed)
    score = MulticlassJaccardIndex(train.classes, average="macro", ignore_index=IGNORE)
    for batch in test.batches():
        found = backbone.features(backbone.images(batch), layers, scales).cpu()
        score.update(segment(layer, found, batch[0].image.shape[-1]), _masks(batch))
    return 100 * float(score.compute()), loss, layer


def _masks(batch: list[Scene]) -> Tensor:
    return torch.from_numpy(np.stack([scene.mask for scene in batch]))


# --- TokenCut ---------------------------------------------------------------------------------------------------------


def second_eigenvector(tokens: Tensor, threshold: float = 0.2, weak: float = 1e-5) -> Tensor:
    """Return the second smallest eigenvector y (n,) of (D − E) y = λ D y for tokens (n, d), in float64.

    Tokens are joined with weight E_ij = 1 where their cosine exceeds `threshold` and `weak` elsewhere; D holds E's row
    sums. Its signs are those that make the entry of largest size positive. Solved through D^−½ E D^−½, which is
    symmetric with eigenvalues 1 − λ.
    """
    unit = functional.normalize(tokens.double(), dim=1)
    edges = torch.where(unit @ unit.mT > threshold, 1.0, weak).double()
    root = edges.sum(dim=1).rsqrt()
    _, vectors = torch.linalg.eigh(root[:, None] * edges * root)
    y = root * vectors[:, -2]
    return y * y[y.abs().argmax()].sign()


def token_cut(tokens: Tensor, threshold: float = 0.2) -> np.ndarray:
    """Return the object (h, w) that TokenCut finds in patch tokens (h, w, d), as a mask of patches.

    Normalised cut: the eigenvector is split at its mean; the side of the entry of largest size is the foreground, and
    of it the piece around that entry (connected by edges of patches) is the object.
    """
    height, width, _ = tokens.shape
    if height * width < 2:
        raise InputError(f"TokenCut needs at least 2 patches; saw {height}×{width}")
    y = second_eigenvector(tokens.flatten(0, 1), threshold).reshape(height, width).cpu().numpy()
    seed = np.unravel_index(np.abs(y).argmax(), y.shape)
    pieces, _ = ndimage.label(y > y.mean())  # y is positive at the seed, and its weighted mean is 0
    if not pieces[seed]:  # all entries equal
        return np.ones_like(y, bool)
    return pieces == pieces[seed]


def overlap(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return the intersection over union of a box (4,) with each of `boxes` (k, 4)."""
    corners = np.concatenate([np.maximum(box[:2], boxes[:, :2]), np.minimum(box[2:], boxes[:, 2:])], axis=1)
    shared = np.prod((corners[:, 2:] - corners[:, :2]).clip(min=0), axis=1)
    areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) + np.prod(box[2:] - box[:2])
    return shared / (areas - shared)


def discover(backbone: Backbone, scenes: list[Scene], threshold: float = 0.2) -> list[np.ndarray]:
    """Return the box in pixels that TokenCut finds in each scene, on the keys of the last block."""
    images = backbone.images(scenes)
    side = images.shape[-1] // backbone.patch
    keys = backbone.keys(images).unflatten(1, (side, side)).cpu()
    return [_box(token_cut(tokens, threshold)) * backbone.patch for tokens in keys]


def corloc(backbone: Backbone, data: DenseSet, threshold: float = 0.2) -> float:
    """Return the percentage of images whose discovered box overlaps some object's box by at least half (IoU)."""
    right = [
        len(scene.boxes) > 0 and overlap(box, scene.boxes).max() >= 0.5
        for batch in data.batches()
        for scene, box in zip(batch, discover(backbone, batch, threshold))
    ]
    return float(100 * sum(right) / len(right))


# --- Features as colours ----------------------------------------------------------------------------------------------


def pca_rgb(features: Tensor) -> Tensor:
    """Return maps (B, d, h, w) as colours (B, h, w, 3): the three main components over all patches of all images.

    Each component is stretched so that its middle 96 % fill [0, 1]; its sign makes its largest loading positive.
    """
    flat = features.movedim(1, -1).flatten(0, 2).double()
    if flat.shape[1] < 3 or len(flat) < 3:
        raise InputError(f"three components need at least 3 channels and 3 patches; saw {tuple(features.shape)}")
    flat = flat - flat.mean(dim=0)
    _, vectors = torch.linalg.eigh(flat.mT @ flat)
    main = vectors[:, -3:].flip(1)
    main = main * main.gather(0, main.abs().argmax(dim=0, keepdim=True)).sign()
    colours = flat @ main
    low, high = (colours.quantile(share, dim=0) for share in (0.02, 0.98))
    colours = ((colours - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return colours.unflatten(0, (len(features), *features.shape[2:])).float()


# --- One evaluation as a run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DenseConfig:
    """Everything that decides the numbers of one evaluation of a pre-trained model (the run store hashes it).

    `initial` is the pre-training run, "distil/hash" in the same store, whose data `data` (with the settings below it)
    names. `dense` is the set to segment, `discovery` the one to find objects in, either "none" to leave out; `files`
    their digests. `size` is the images' in pixels; `train_scenes` and `test_scenes` count images, 0 for all. `seed` is
    the probe's.
    """

    data: str
    initial: str
    seed: int
    dense: str = COMPOSED
    discovery: str = COMPOSED
    files: list = field(default_factory=list)
    img_size: int | None = None
    channels: int | None = None
    train_images: int | None = None
    test_images: int | None = None
    validation: float = 0.1
    size: int = 91
    train_scenes: int = 0
    test_scenes: int = 0
    epochs: int = 20
    multiscale: bool = True
    threshold: float = 0.2
    device: str = "cpu"
    model_args: dict = field(default_factory=dict)

    def __post_init__(self):
        for name, minimum in {"size": 1, "train_scenes": 0, "test_scenes": 0, "epochs": 1, "seed": 0}.items():
            if getattr(self, name) < minimum:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {minimum}")
        if not -1 <= self.threshold <= 1:
            raise InputError(f"threshold is {self.threshold}; it must be a cosine, from -1 to 1")


def evaluate(config: DenseConfig, folder: Path, report: Callable[[list[dict]], None] | None = None) -> dict:
    """Evaluate a pre-trained teacher on dense tasks; return, where `config` asks for them:

        miou_single, miou_multi, corloc   in percent
        final_loss                        of the single-layer probe's training
        similarity                        mean cosine of different patch tokens after the last block, on test images

    The single-layer probe ends up in `folder`/model.safetensors.
    """
    start, result, layer = time.perf_counter(), {}, nn.Identity()
    backbone, data = load_backbone(folder.parent.parent / config.initial, config.device)
    if config.size % backbone.patch:
        raise indivisible("size", config.size, "the model's patch size", backbone.patch)
    take = partial(load, data=data, size=config.size, channels=data.channels)
    if config.dense != "none":
        train, test = (
            take(config.dense, "train", count=config.train_scenes),
            take(config.dense, "test", count=config.test_scenes),
        )
        probe = partial(linear_segmentation, backbone, train, test, epochs=config.epochs, seed=config.seed)
        result["miou_single"], result["final_loss"], layer = probe(layers=1, scales=(1.0,))
        if config.multiscale:
            layers = min(LAYERS, len(backbone.vit.blocks))
            result["miou_multi"], _, _ = probe(layers=layers, scales=SCALES)
    if config.discovery != "none":
        scenes = take(config.discovery, "discovery", count=config.test_scenes)
        result["corloc"] = corloc(backbone, scenes, config.threshold)
        first = backbone.features(backbone.images(next(scenes.batches())))
        result["similarity"] = float(token_similarity(first.flatten(2).mT.double()).mean())
    checkpoint.write(folder / "model.safetensors", layer.state_dict())
    history = [{"epoch": config.epochs} | result]
    return {"history": history, "seconds": [time.perf_counter() - start], "divergence": None} | result


def load_backbone(folder: Path, device: str = "cpu") -> tuple[Backbone, ImageData]:
    """Return the teacher of the pre-training run stored in `folder`, frozen, and the data it was trained on."""
    config, vit = dino.load_teacher(folder)
    data = loop.dataset(config)
    return Backbone(vit.to(device).requires_grad_(False), data.mean, data.std), data
