"""Read an image file in the one way that training and the explorers share: upright, and transparency laid on white."""

import warnings
from typing import BinaryIO

from PIL import ExifTags, Image, UnidentifiedImageError

from skiplab.errors import InputError

Turn = Image.Transpose
TURNS = {
    2: Turn.FLIP_LEFT_RIGHT,
    3: Turn.ROTATE_180,
    4: Turn.FLIP_TOP_BOTTOM,
    5: Turn.TRANSPOSE,
    6: Turn.ROTATE_270,
    7: Turn.TRANSVERSE,
    8: Turn.ROTATE_90,
}  # by EXIF's orientation; 1 is upright
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "F")  # more than 8 bits a channel


class Undecodable(InputError):
    """Say why a file is no usable image."""


def read(source: str | BinaryIO, *, draft: int | None = None) -> tuple[Image.Image, tuple[int, int]]:
    """Return the image in a file, turned as its EXIF orientation says, in its stored mode; and its stored size.

    With `draft`, a JPEG is opened at a fraction of its size, of at least so many pixels a side. Raises Undecodable.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, on large images and odd EXIF data
            with Image.open(source) as image:
                size = image.size
                if draft:
                    image.draft("RGB", (draft, draft))
                image.load()
                return _upright(image), size
    except UnidentifiedImageError:
        raise Undecodable("is not an image that can be read; take a PNG, JPEG, GIF, WebP, BMP or TIFF file") from None
    except Image.DecompressionBombError:
        raise Undecodable(
            f"has far too many pixels; at most {2 * Image.MAX_IMAGE_PIXELS / 1e6:.0f} million can be opened"
        ) from None
    except Exception as error:  # Pillow's readers raise whatever a damaged file makes them trip over
        raise Undecodable(f"is an image, but damaged or cut short ({error})") from None


def is_transparent(image: Image.Image) -> bool:
    """Return whether some of the pixels may be transparent."""
    return image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info


def on_white(image: Image.Image) -> Image.Image:
    """Return the image as RGB, laid on white where it is transparent: what a transparent pixel hides means nothing."""
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    """Return the image turned; `ImageOps.exif_transpose` writes the EXIF data anew and fails where some are damaged."""
    turn = TURNS.get(image.getexif().get(ExifTags.Base.Orientation))
    return image.copy() if turn is None else image.transpose(turn)
