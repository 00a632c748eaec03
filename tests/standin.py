"""Write tiny stand-ins for real data sets, in the layouts that `lib.training.data` meets: the hub's, image folders."""

import io
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet
from PIL import Image

# Name → (parquet file of each split, image column, classes, format, (width, height) of the images by turns).
HUB_LAYOUTS = {
    "cifar10": ({"train": "plain_text/train-00000-of-00001", "test": "plain_text/test-00000-of-00001"},
                "img", 10, "PNG", [(32, 32)]),
    "tiny-imagenet": ({"train": "data/train-00000-of-00001-1359597a978bc4fa",
                       "valid": "data/valid-00000-of-00001-70d52db3c749a935"}, "image", 200, "JPEG", [(64, 64)]),
    "imagenet-1k": ({"train": "data/train-00000-of-00001", "validation": "data/validation-00000-of-00001",
                     "test": "data/test-00000-of-00001"}, "image", 1000, "JPEG", [(50, 40), (40, 45)]),
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
