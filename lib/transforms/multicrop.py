"""Multi-crop views for DINO, drawn for whole batches on their device.

"Emerging Properties in Self-Supervised Vision Transformers" (Caron et al., ICCV 2021, arXiv 2104.14294), with its
published settings: a few large crops of 40 to 100 % of an image and many small ones of 5 to 40 %, mirrored, with
jittered colours, some grey, blurred or solarised. Here a crop is cut from the image as it was loaded, sampled bilinearly,
hue turns around the grey axis, and the blur's width grows with the crop (0.1 to 2 pixels at 224). A CPU generator draws
everything, so that a CPU and a GPU see the same views.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}  # of 1, and of a full turn
JITTERED, GREY, SOLARISED = 0.8, 0.2, 0.2  # shares of the views
BLURRED = {"first": 1.0, "second": 0.1, "local": 0.5}
LUMA = (0.299, 0.587, 0.114)


def multi_crop(images: Tensor, mean: Tensor, std: Tensor, *, size: int, local_size: int, local_crops: int,
               scale: tuple[float, float], local_scale: tuple[float, float]) -> tuple[list[Tensor], list[Tensor]]:
    """Return two large views (B, C, size, size) and `local_crops` small ones of normalised images (B, C, H, W).

    `mean` and `std` (C,) are those of the normalisation; scales are ranges of the share of the image's area.
    """
    views = [_view(images, mean, std, size, scale, kind) for kind in ("first", "second")]
    return views, [_view(images, mean, std, local_size, local_scale, "local") for _ in range(local_crops)]


def random_crop(images: Tensor, size: int, scale: tuple[float, float]) -> Tensor:
    """Cut from each image (B, C, H, W) a box of a random share of its area, aspect 3/4 to 4/3; mirror half of them."""
    count = len(images)
    area = torch.empty(count).uniform_(*scale)
    aspect = torch.empty(count).uniform_(math.log(3 / 4), math.log(4 / 3)).exp()
    width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    x, y = ((1 - side) * (2 * torch.rand(count) - 1) for side in (width, height))
    mirror = 1 - 2 * torch.randint(2, (count,))
    zero = torch.zeros(count)
    affine = torch.stack([torch.stack([width * mirror, zero, x], 1), torch.stack([zero, height, y], 1)], 1)
    grid = functional.affine_grid(affine.to(images), [count, images.shape[1], size, size], align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _view(images: Tensor, mean: Tensor, std: Tensor, size: int, scale: tuple[float, float], kind: str) -> Tensor:
    mean, std = mean[:, None, None], std[:, None, None]
    pixels = (random_crop(images, size, scale) * std + mean).clamp(0, 1)
    pixels = _some(pixels, JITTERED, _jitter(pixels))
    if pixels.shape[1] == 3:
        pixels = _some(pixels, GREY, _luma(pixels).expand_as(pixels))
    pixels = _some(pixels, BLURRED[kind], _blur(pixels))
    if kind == "second":
        pixels = _some(pixels, SOLARISED, torch.where(pixels >= 0.5, 1 - pixels, pixels))
    return (pixels - mean) / std


def _some(pixels: Tensor, share: float, changed: Tensor) -> Tensor:
    """Return `changed` for a random share of the images, and `pixels` for the others."""
    return torch.where(torch.rand(len(pixels), 1, 1, 1).to(pixels.device) < share, changed, pixels)


def _factors(pixels: Tensor, name: str) -> Tensor:
    return (1 + JITTER[name] * (2 * torch.rand(len(pixels), 1, 1, 1) - 1)).to(pixels)


def _luma(pixels: Tensor) -> Tensor:
    if pixels.shape[1] == 1:
        return pixels
    return (pixels * torch.tensor(LUMA).to(pixels)[:, None, None]).sum(dim=1, keepdim=True)


def _jitter(pixels: Tensor) -> Tensor:
    """Change brightness, contrast and, of colour images, saturation and hue."""
    pixels = (pixels * _factors(pixels, "brightness")).clamp(0, 1)
    level = _luma(pixels).mean(dim=(2, 3), keepdim=True)
    pixels = (level + (pixels - level) * _factors(pixels, "contrast")).clamp(0, 1)
    if pixels.shape[1] == 1:
        return pixels
    grey = _luma(pixels)
    colour = (pixels - grey) * _factors(pixels, "saturation")
    angle = 2 * math.pi * (_factors(pixels, "hue") - 1)
    axis = torch.full_like(colour, 1 / math.sqrt(3))
    turned = (colour * angle.cos() + torch.linalg.cross(axis, colour, dim=1) * angle.sin()
              + axis * (axis * colour).sum(dim=1, keepdim=True) * (1 - angle.cos()))  # Rodrigues' formula
    return (grey + turned).clamp(0, 1)


def _blur(pixels: Tensor) -> Tensor:
    """Blur each image with a Gaussian of its own width, mirrored at the border."""
    count, channels, size = pixels.shape[:3]
    sigma = torch.empty(count, 1).uniform_(0.1, 2.0) * size / 224
    reach = min(size - 1, math.ceil(3 * 2.0 * size / 224))
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    kernel = (kernel / kernel.sum(dim=1, keepdim=True)).repeat_interleave(channels, dim=0).to(pixels)
    flat = functional.pad(pixels.reshape(1, -1, size, size), [reach] * 4, mode="reflect")
    rows = functional.conv2d(flat, kernel[:, None, :, None], groups=len(kernel))
    return functional.conv2d(rows, kernel[:, None, None, :], groups=len(kernel)).view_as(pixels)
