"""Write tiny stand-ins for real data sets, in the layouts of the hub and of image folders."""

import io
import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet
from PIL import Image

# Name → (parquet file of each split, image column, classes, format, (width, height) of the images by turns).
HUB_LAYOUTS = {
    "cifar10": (
        {"train": "plain_text/train-00000-of-00001", "test": "plain_text/test-00000-of-00001"},
        "img",
        10,
        "PNG",
        [(32, 32)],
    ),
    "tiny-imagenet": (
        {"train": "data/train-00000-of-00001-1359597a978bc4fa", "valid": "data/valid-00000-of-00001-70d52db3c749a935"},
        "image",
        200,
        "JPEG",
        [(64, 64)],
    ),
    "imagenet-1k": (
        {
            "train": "data/train-00000-of-00001",
            "validation": "data/validation-00000-of-00001",
            "test": "data/test-00000-of-00001",
        },
        "image",
        1000,
        "JPEG",
        [(50, 40), (40, 45)],
    ),
}


def picture(label: int, number: int, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Image.Image:
    """Return a noise image, the same for the same arguments, whose brightness tells its label."""
    noise = np.random.default_rng([label, number]).integers(0, 100, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise + np.uint8(label * 37 % 156)).convert(mode)


def encode(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def make(name: str, folder: Path, *, images_per_class: int = 2) -> Path:
    """Write a stand-in for a hub data set with all its classes; one image in 20 of the ImageNets is grey."""
    files, column, classes, kind, sizes = HUB_LAYOUTS[name]
    for split, file in files.items():
        rows = {column: [], "label": []}
        for number in range(images_per_class * classes):
            label = number % classes
            grey = name != "cifar10" and number % 20 == 7
            image = picture(label, number, sizes[number % len(sizes)], "L" if grey else "RGB")
            rows[column].append({"bytes": encode(image, kind), "path": f"{split}_{number}.{kind.lower()}"})
            rows["label"].append(-1 if (name, split) == ("imagenet-1k", "test") else label)
        write_parquet(folder / f"{file}.parquet", rows, [f"class {label}" for label in range(classes)], column)
    return folder


def write_parquet(file: Path, rows: dict, classes: list[str], column: str = "image") -> None:
    """Write rows {column: [{"bytes", "path"}, …], "label": […]} with the features that the hub's files carry."""
    features = datasets.Features({column: datasets.Image(), "label": datasets.ClassLabel(names=classes)})
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(datasets.Dataset.from_dict(rows, features=features).with_format("arrow")[:], file)


def make_folder(folder: Path, counts: dict[str, int], *, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Path:
    """Write images as folder/class/number.png, for instance with `counts` {"train/cat": 5, "train/dog": 7}."""
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            picture(label, number, size, mode).save(folder / name / f"{number}.png")
    return folder


def _quarter(size: tuple[int, int]) -> Image.Image:
    """Return a mask of class 0, with class 3 in the lower right quarter and ignored pixels in the first row."""
    mask = np.zeros((size[1], size[0]), np.uint8)
    mask[size[1] // 2 :, size[0] // 2 :] = 3
    mask[: size[1] // 8] = 255
    return Image.fromarray(mask)


def make_dense(name: str, folder: Path, count: int = 3, size: tuple[int, int] = (80, 64)) -> Path:
    """Write a stand-in for a dense set in its published layout: noise with an object in the lower right quarter."""
    names = [f"picture_{number}" for number in range(count)]
    width, height = size
    places = {
        "voc2012": [("JPEGImages", "SegmentationClass")],
        "coco20k": [("train2014", None)],
        "ade20k": [(f"images/{split}", f"annotations/{split}") for split in ("training", "validation")],
        "coco_stuff": [(f"images/{split}", f"annotations/{split}") for split in ("train2017", "val2017")],
    }[name]
    for images, masks in places:
        for part in filter(None, (images, masks)):
            (folder / part).mkdir(parents=True)
        for number, stem in enumerate(names):
            picture(number, number, size).save(folder / images / f"{stem}.jpg")
            if masks:
                _quarter(size).save(folder / masks / f"{stem}.png")
    lines = "\n".join(names) + "\n"
    if name == "voc2012":
        for file in ("Segmentation/train.txt", "Segmentation/val.txt", "Main/trainval.txt"):
            (folder / "ImageSets" / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / "ImageSets" / file).write_text(lines)
        (folder / "Annotations").mkdir()
        box = f"<xmin>{width // 2 + 1}</xmin><ymin>{height // 2 + 1}</ymin><xmax>{width}</xmax><ymax>{height}</ymax>"
        for stem in names:
            (folder / "Annotations" / f"{stem}.xml").write_text(
                f"<annotation><object><bndbox>{box}</bndbox></object></annotation>"
            )
    if name == "coco20k":
        content = {
            "images": [{"id": number, "file_name": f"{stem}.jpg"} for number, stem in enumerate(names)],
            "annotations": [
                {"image_id": number, "iscrowd": crowd, "bbox": [width / 2, height / 2, width / 2, height / 2]}
                for number in range(count)
                for crowd in (0, 1)
            ],
        }
        (folder / "annotations").mkdir()
        (folder / "annotations" / "instances_train2014.json").write_text(json.dumps(content))
        (folder / "coco_20k_filenames.txt").write_text("".join(f"train2014/{stem}.jpg\n" for stem in names))
    return folder


def make_dense_parquet(folder: Path, size: tuple[int, int] = (80, 64)) -> None:
    """Write a dense set as one parquet file with the columns image, mask and boxes."""
    rows = {
        "image": [{"bytes": encode(picture(0, 0, size)), "path": "a.png"}],
        "mask": [{"bytes": encode(_quarter(size)), "path": "a_mask.png"}],
        "boxes": [[[size[0] / 2, size[1] / 2, float(size[0]), float(size[1])]]],
    }
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "mask": datasets.Image(),
            "boxes": datasets.Sequence(datasets.Sequence(datasets.Value("float64"))),
        }
    )
    pyarrow.parquet.write_table(
        datasets.Dataset.from_dict(rows, features=features).with_format("arrow")[:],
        folder / "train-00000-of-00001.parquet",
    )
