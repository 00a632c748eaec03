"""Augmentation on batches: the same as one image at a time, and the same each time."""

import numpy as np
import pytest
import torch
from PIL import Image

from skiplab.transforms.augment import RECIPES, crop_flip, draw_crop_flip, imagenet_transform, normalise, share
from standin import picture


def batch(count=16, channels=3, height=9, width=7):
    return torch.randint(256, (count, channels, height, width), dtype=torch.uint8, generator=generator(9))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def crop_flip_one_by_one(images, draws, padding):
    """Pad, cut and mirror each image by itself in numpy."""
    height, width = images.shape[-2:]
    result = []
    for image, (y, x, mirror) in zip(images.numpy(), draws.tolist()):
        padded = np.pad(image, [(0, 0), (padding, padding), (padding, padding)])
        cut = padded[:, y : y + height, x : x + width]
        result.append(cut[:, :, ::-1] if mirror else cut)
    return torch.from_numpy(np.stack(result))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_crop_flip_equals_a_loop_over_images(channels, padding):
    images, draws = batch(channels=channels), draw_crop_flip(16, padding=padding, generator=generator())
    result = crop_flip(images, draws, padding=padding)
    assert result.dtype == torch.uint8 and result.is_contiguous()
    assert torch.equal(result, crop_flip_one_by_one(images, draws, padding))


def test_the_draws_reach_every_shift_and_both_orientations_alike():
    draws = draw_crop_flip(20_000, padding=2, generator=generator())
    assert draws.shape == (20_000, 3)
    for column, choices in ((0, 5), (1, 5), (2, 2)):
        shares = torch.bincount(draws[:, column], minlength=choices) / 20_000
        assert len(shares) == choices and (shares - 1 / choices).abs().max() < 0.02
    assert len(draws.unique(dim=0)) == 5 * 5 * 2


def test_the_draws_depend_on_the_generator_alone():
    first = draw_crop_flip(16, padding=2, generator=generator(1))
    torch.manual_seed(5)
    assert torch.equal(first, draw_crop_flip(16, padding=2, generator=generator(1)))
    assert not torch.equal(first, draw_crop_flip(16, padding=2, generator=generator(2)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_crop_flip_is_the_same_on_a_gpu():
    images, draws = batch(), draw_crop_flip(16, padding=2, generator=generator())
    assert torch.equal(crop_flip(images.cuda(), draws, padding=2).cpu(), crop_flip(images, draws, padding=2))


def test_normalise():
    images, mean, std = batch(), torch.tensor([0.2, 0.5, 0.7]), torch.tensor([0.1, 0.2, 0.3])
    expected = (images.double() / 255 - mean.double()[:, None, None]) / std.double()[:, None, None]
    result = normalise(images, mean, std)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, atol=2e-6, rtol=0)


def test_imagenet_recipe_is_deits():
    transform = imagenet_transform("imagenet", 24, (0.5,) * 3, (0.25,) * 3)
    names = [type(step).__name__ for step in transform.transforms]
    assert {"RandomResizedCropAndInterpolation", "RandAugment", "Normalize", "RandomErasing"} <= set(names)
    assert RECIPES["imagenet"]["auto_augment"] == "rand-m9-mstd0.5-inc1" and RECIPES["imagenet"]["re_prob"] == 0.25
    image = transform(picture(1, 2, (40, 30)))
    assert image.shape == (3, 24, 24) and image.dtype == torch.float32


def test_resized_crop_is_the_masked_autoencoders_and_changes_no_colour():
    transform = imagenet_transform("resized_crop", 24, (0.0,) * 3, (1.0,) * 3)
    names = [type(step).__name__ for step in transform.transforms]
    assert names[:2] == ["RandomResizedCropAndInterpolation", "RandomHorizontalFlip"] and transform.transforms[
        0
    ].scale == (0.2, 1.0)
    assert not {"RandAugment", "ColorJitter", "RandomErasing"} & set(names)
    red = Image.new("RGB", (40, 30), (200, 0, 0))
    torch.testing.assert_close(transform(red), torch.tensor([200 / 255, 0, 0])[:, None, None].expand(3, 24, 24))


@pytest.mark.parametrize("count, world", [(8, 1), (8, 2), (12, 3), (24, 4), (7, 2), (6, 2), (1, 3), (0, 2), (5, 5)])
def test_shares_make_up_the_batch_and_keep_mixups_pairs_together_where_they_come_out_even(count, world):
    parts = [share(torch.arange(count), (rank, world)).tolist() for rank in range(world)]
    assert sorted(sum(parts, [])) == list(range(count)) and all(part == sorted(part) for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if count % (2 * world) == 0:
        assert all(first + last == count - 1 for part in parts for first, last in zip(part, reversed(part)))
