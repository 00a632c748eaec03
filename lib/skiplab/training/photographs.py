"""The embedded photographs: natural images on which spectra and condition numbers mean something."""

import hashlib

import numpy
import torch
from PIL import Image

from skiplab.errors import InputError
from skiplab.files import ROOT

FOLDER = ROOT / "data" / "photographs"


def photographs(side: int = 224) -> dict[str, torch.Tensor]:
    """Return the eight photographs by name, uint8 (3, side, side), scaled down from 224 pixels where asked.

    Raises InputError for a side outside 1 to 224 and for a file that does not match its hash.
    """
    if not 1 <= side <= 224:
        raise InputError(f"side is {side}; the photographs have 224 pixels, allowed: 1 to 224")
    images = {}
    for line in (FOLDER / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        if hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() != digest:
            raise InputError(f"data/photographs/{name} does not match SHA256SUMS; repair it with git checkout")
        with Image.open(FOLDER / name) as image:
            scaled = image.resize((side, side), Image.Resampling.BICUBIC) if side < 224 else image
            images[name.removesuffix(".png")] = torch.from_numpy(numpy.array(scaled)).permute(2, 0, 1)
    return images
