"""Write the embedded data set: the first 6,000 training and 2,000 test images of Fashion-MNIST as parquet.

Reads Debian's package `dataset-fashion-mnist`. The PNGs are stored uncompressed and the parquet file compresses them
(smaller in all, faster to decode). Run it from anywhere: `python data/build_fashion_mnist.py`.
"""

import gzip
import hashlib
import io
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet
from PIL import Image

SOURCE = Path("/usr/share/datasets/fashion-mnist")
FOLDER = Path(__file__).parent / "fashion_mnist"
CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


def read_idx(kind: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `count` images (count, 28, 28) uint8 and labels of `kind`, "train" or "t10k"."""
    images = gzip.decompress((SOURCE / f"{kind}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((SOURCE / f"{kind}-labels-idx1-ubyte.gz").read_bytes())
    return (
        np.frombuffer(images, np.uint8, count * 28 * 28, offset=16).reshape(count, 28, 28),
        np.frombuffer(labels, np.uint8, count, offset=8),
    )


def png(image: np.ndarray) -> bytes:
    """Encode one grey image (28, 28) without loss."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


def main() -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
    sums = []
    for split, kind, count in [("train", "train", 6000), ("test", "t10k", 2000)]:
        images, labels = read_idx(kind, count)
        rows = {"image": [{"bytes": png(image), "path": None} for image in images], "label": labels.tolist()}
        table = datasets.Dataset.from_dict(rows, features=features).with_format("arrow")[:]
        file = FOLDER / f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(table, file, compression="zstd", compression_level=19)
        sums.append(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n")
    (FOLDER / "SHA256SUMS").write_text("".join(sums))


if __name__ == "__main__":
    main()
