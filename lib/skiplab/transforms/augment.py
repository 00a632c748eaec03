"""Augment and normalise whole batches on their device, share them among processes, name timm's ImageNet recipes.

`crop_flip` is the usual CIFAR augmentation (He et al. 2016, section 4.2). `RECIPES` are for timm's `create_transform`:
"imagenet" is DeiT's (Touvron et al. 2021, table 9), "resized_crop" the masked autoencoder's (He et al. 2022, table 8).
"""

from collections.abc import Callable

import torch
from timm.data import create_transform
from torch import Tensor

RECIPES = {
    "imagenet": {
        "interpolation": "bicubic",
        "auto_augment": "rand-m9-mstd0.5-inc1",  # RandAugment
        "re_prob": 0.25,  # random erasing, filled with noise
        "re_mode": "pixel",
    },
    "resized_crop": {"interpolation": "bicubic", "scale": (0.2, 1.0), "color_jitter": None},  # and mirrored
}


def share(batch: Tensor, shard: tuple[int, int]) -> Tensor:
    """Return the rows of a batch (B, …) that process `shard` = (rank, world) works on: of `world`, every world-th.

    Where that comes out even they are counted from both ends, so that the first row is with the last, the second with
    the last but one: the pairs that mixup mixes. What is random in a batch is drawn for all of it and then shared, so
    that the number of processes does not matter.
    """
    (rank, world), half = shard, len(batch) // 2
    if len(batch) % (2 * world):
        return batch[rank::world]
    return torch.cat([batch[rank:half:world], batch[half - 1 - rank + world :: world]])


def draw_crop_flip(count: int, *, padding: int, generator: torch.Generator) -> Tensor:
    """Draw for `count` images how far down and right to cut, 0 to 2·`padding`, and whether to mirror: (count, 3).

    A CPU generator, so that a CPU and a GPU draw the same.
    """
    shifts = torch.randint(2 * padding + 1, (count, 2), generator=generator)
    return torch.cat([shifts, torch.randint(2, (count, 1), generator=generator)], dim=1)


def crop_flip(images: Tensor, draws: Tensor, *, padding: int) -> Tensor:
    """Shift each image by up to `padding` pixels over a zero border and mirror it, as drawn by `draw_crop_flip`.

    `images` is uint8 (B, C, H, W) on any device, `draws` (B, 3); shape, type and device are kept.
    """
    height, width = images.shape[-2:]
    top, left, mirrored = draws.to(images.device).T[:, :, None]
    columns = torch.arange(width, device=images.device)
    columns = left + torch.where(mirrored == 1, width - 1 - columns, columns)
    rows = top + torch.arange(height, device=images.device)

    padded = torch.nn.functional.pad(images, [padding] * 4)
    source = rows[:, :, None] * padded.shape[-1] + columns[:, None, :]  # (B, H, W), places in a flattened channel
    source = source.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return padded.flatten(2).gather(2, source).view(images.shape)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return float32 (pixel / 255 − mean) / std of uint8 images (B, C, H, W), with `mean` and `std` (C,) in [0, 1]."""
    scale, shift = 1 / (255 * std), -mean / std
    return images.float().mul_(scale[:, None, None]).add_(shift[:, None, None])


def imagenet_transform(
    recipe: str, img_size: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Callable[..., Tensor]:
    """Return timm's training transform with one of RECIPES, from RGB images to normalised (3, img_size, img_size)."""
    return create_transform((3, img_size, img_size), is_training=True, mean=mean, std=std, **RECIPES[recipe])
