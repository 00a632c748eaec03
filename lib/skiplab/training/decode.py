"""Turn stored images into pixels: one mode, one size, uint8 (C, H, W)."""

import io
from collections import Counter
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

from skiplab.errors import InputError
from skiplab.training import pictures
from skiplab.training.layout import count
from skiplab.training.pictures import Undecodable
from skiplab.training.rows import Rows

# What a PIL mode is taken for; deeper images are refused, since PIL would clip them.
MODE_CHANNELS = {"1": 1, "L": 1, "LA": 1, "P": 3, "PA": 3, "RGB": 3, "RGBA": 3, "CMYK": 3, "YCbCr": 3}
CHANNEL_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Decoder:
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

    def arrays(self, parts: list[Rows]) -> np.ndarray:
        """Return all images, uint8 (N, C, H, W). Raises InputError where some cannot be decoded or do not fit."""
        images, origins, unusable, reasons = [], [], [], []
        for rows in parts:
            records = (record for batch in rows.records.iter(1000) for record in batch["image"])
            for place, record in enumerate(records):
                try:
                    images.append(self.array(record))
                    origins.append((rows, place))
                except Undecodable as error:
                    unusable.append(rows.name(place))
                    reasons.append(error)
        if unusable:
            raise undecodable(unusable, reasons[0])
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


def undecodable(names: list[str], reason: Undecodable) -> InputError:
    """Build the error for images that cannot be used, and why the first of them cannot."""
    first, them = (", of which the first", "them") if len(names) > 1 else ("", "it")
    return InputError(f"{count(names)}{first} {' '.join(str(reason).split())}; mend or remove {them}")


def decoded_bytes(train: Rows, test: Rows, decoder: Decoder) -> int:
    """Return about how much memory the decoded images take."""
    size = (decoder.channels or 3) * (decoder.img_size or 0) ** 2
    if not size:
        try:
            size = decoder.array(train.records[0]["image"]).size
        except Undecodable:
            pass  # reported with the others when all are decoded
    return size * (len(train.labels) + len(test.labels))
