"""Multi-crop views for DINO, drawn for whole batches on their device.

"Emerging Properties in Self-Supervised Vision Transformers" (Caron et al., ICCV 2021, arXiv 2104.14294), with its
published settings: a few large crops of 40 to 100 % of an image and many small ones of 5 to 40 %, mirrored, with
jittered colours, some grey, blurred or solarised. Here a crop is cut from the image as it was loaded, sampled
bilinearly, hue turns around the grey axis, and the blur's width grows with the crop (0.1 to 2 pixels at 224). The CPU's
generator draws everything, so that a CPU and a GPU see the same views.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from skiplab import draws
from skiplab.transforms.augment import share

JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}  # of 1, and of a full turn
JITTERED, GREY, SOLARISED = 0.8, 0.2, 0.2  # shares of the views
BLURRED = {"first": 1.0, "second": 0.1, "local": 0.5}
LUMA = (0.299, 0.587, 0.114)
Draw = Callable[[float, float], Tensor]  # a uniform number between two for each image, (B,)


def multi_crop(
    images: Tensor,
    mean: Tensor,
    std: Tensor,
    *,
    size: int,
    local_size: int,
    local_crops: int,
    scale: tuple[float, float],
    local_scale: tuple[float, float],
    shard: tuple[int, int] = (0, 1),
) -> tuple[list[Tensor], list[Tensor]]:
    """Return two large views (B, C, size, size) and `local_crops` small ones of normalised images (B, C, H, W).

    `mean` and `std` (C,) are those of the normalisation; scales are ranges of the share of the image's area. Where the
    images are a process's share of a batch (`shard` = rank, world), they get their views of the whole batch.
    """

    def draw(low: float, high: float) -> Tensor:
        return share(draws.uniform(len(images) * shard[1], low=low, high=high).float(), shard)

    views = [_view(images, mean, std, size, scale, kind, draw) for kind in ("first", "second")]
    return views, [_view(images, mean, std, local_size, local_scale, "local", draw) for _ in range(local_crops)]


def random_crop(images: Tensor, size: int, scale: tuple[float, float], draw: Draw) -> Tensor:
    """Cut from each image (B, C, H, W) a box of a random share of its area, aspect 3/4 to 4/3; mirror half of them."""
    count = len(images)
    area, aspect = draw(*scale), draw(math.log(3 / 4), math.log(4 / 3)).exp()
    width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    x, y = ((1 - side) * draw(-1, 1) for side in (width, height))
    mirror = torch.where(draw(0, 1) < 0.5, -1.0, 1.0)
    zero = torch.zeros(count)
    affine = torch.stack([torch.stack([width * mirror, zero, x], 1), torch.stack([zero, height, y], 1)], 1)
    grid = functional.affine_grid(affine.to(images), [count, images.shape[1], size, size], align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _view(
    images: Tensor, mean: Tensor, std: Tensor, size: int, scale: tuple[float, float], kind: str, draw: Draw
) -> Tensor:
    mean, std = mean[:, None, None], std[:, None, None]
    pixels = (random_crop(images, size, scale, draw) * std + mean).clamp(0, 1)
    pixels = _some(pixels, JITTERED, _jitter(pixels, draw), draw)
    if pixels.shape[1] == 3:
        pixels = _some(pixels, GREY, _luma(pixels).expand_as(pixels), draw)
    pixels = _some(pixels, BLURRED[kind], _blur(pixels, draw), draw)
    if kind == "second":
        pixels = _some(pixels, SOLARISED, torch.where(pixels >= 0.5, 1 - pixels, pixels), draw)
    return (pixels - mean) / std


def _some(pixels: Tensor, chance: float, changed: Tensor, draw: Draw) -> Tensor:
    """Return `changed` for some of the images, each with that chance, and `pixels` for the others."""
    return torch.where((draw(0, 1) < chance).to(pixels.device)[:, None, None, None], changed, pixels)


def _luma(pixels: Tensor) -> Tensor:
    if pixels.shape[1] == 1:
        return pixels
    return (pixels * torch.tensor(LUMA).to(pixels)[:, None, None]).sum(dim=1, keepdim=True)


def _jitter(pixels: Tensor, draw: Draw) -> Tensor:
    """Change brightness, contrast and, of colour images, saturation and hue."""

    def factor(name: str) -> Tensor:
        return draw(1 - JITTER[name], 1 + JITTER[name]).to(pixels)[:, None, None, None]

    pixels = (pixels * factor("brightness")).clamp(0, 1)
    level = _luma(pixels).mean(dim=(2, 3), keepdim=True)
    pixels = (level + (pixels - level) * factor("contrast")).clamp(0, 1)
    if pixels.shape[1] == 1:
        return pixels
    grey = _luma(pixels)
    colour = (pixels - grey) * factor("saturation")
    angle = 2 * math.pi * (factor("hue") - 1)
    axis = torch.full_like(colour, 1 / math.sqrt(3))
    turned = (
        colour * angle.cos()
        + torch.linalg.cross(axis, colour, dim=1) * angle.sin()
        + axis * (axis * colour).sum(dim=1, keepdim=True) * (1 - angle.cos())
    )  # Rodrigues' formula
    return (grey + turned).clamp(0, 1)


def _blur(pixels: Tensor, draw: Draw) -> Tensor:
    """Blur each image with a Gaussian of its own width, mirrored at the border."""
    count, channels, size = pixels.shape[:3]
    sigma = draw(0.1, 2.0)[:, None] * size / 224
    reach = min(size - 1, math.ceil(3 * 2.0 * size / 224))
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    kernel = (kernel / kernel.sum(dim=1, keepdim=True)).repeat_interleave(channels, dim=0).to(pixels)
    flat = functional.pad(pixels.reshape(1, -1, size, size), [reach] * 4, mode="reflect")
    rows = functional.conv2d(flat, kernel[:, None, :, None], groups=len(kernel))
    return functional.conv2d(rows, kernel[:, None, None, :], groups=len(kernel)).view_as(pixels)
