"""Multi-crop views: where they come from, what is drawn, and that a seed decides them."""

import pytest
import torch

from skiplab.transforms import multicrop
from skiplab.transforms.augment import share
from skiplab.transforms.multicrop import multi_crop, random_crop

MEAN, STD = torch.tensor([0.3, 0.4, 0.5]), torch.tensor([0.2, 0.25, 0.3])
SIZES = dict(size=24, local_size=8, local_crops=3, scale=(0.4, 1.0), local_scale=(0.05, 0.4))


def draw(count):
    return lambda low, high: torch.empty(count).uniform_(low, high)


def images(count=6, channels=3, side=28):
    pixels = torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(1))
    return (pixels - MEAN[:channels, None, None]) / STD[:channels, None, None]


@pytest.mark.parametrize("channels", [1, 3])
def test_the_views_have_their_sizes_and_stay_within_the_pixels_range(channels):
    large, small = multi_crop(images(channels=channels), MEAN[:channels], STD[:channels], **SIZES)
    assert [view.shape for view in large] == [(6, channels, 24, 24)] * 2
    assert [view.shape for view in small] == [(6, channels, 8, 8)] * 3
    for view in large + small:
        pixels = view * STD[:channels, None, None] + MEAN[:channels, None, None]
        assert pixels.isfinite().all() and pixels.min() > -1e-5 and pixels.max() < 1 + 1e-5
    assert not torch.equal(large[0], large[1])


def test_the_seed_decides_the_views():
    views = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        views.append(multi_crop(images(), MEAN, STD, **SIZES)[0][0])
    assert torch.equal(views[0], views[1]) and not torch.equal(views[0], views[2])


def test_the_views_of_a_share_are_those_of_the_whole_batch():
    views = []
    for shard in ((0, 1), (0, 2), (1, 2)):
        torch.manual_seed(0)
        large, small = multi_crop(share(images(8), shard), MEAN, STD, **SIZES, shard=shard)
        views.append(large + small)
    for whole, *parts in zip(*views):
        for rank, part in enumerate(parts):
            torch.testing.assert_close(part, share(whole, (rank, 2)))


def test_a_crop_is_a_box_of_the_asked_share_with_each_side_inside():
    """On an image whose pixels hold their own place, a crop's ends tell its box."""
    axis = (torch.arange(100) + 0.5) / 100
    place = torch.stack([axis.expand(100, 100), axis[:, None].expand(100, 100)])
    torch.manual_seed(0)
    crops = random_crop(place.expand(400, 2, 100, 100), 50, (0.1, 0.4), draw(400))
    width = (crops[:, 0, 0, -1] - crops[:, 0, 0, 0]) * 50 / 49
    height = (crops[:, 1, -1, 0] - crops[:, 1, 0, 0]) * 50 / 49
    assert 0.4 < (width < 0).float().mean() < 0.6 and (height > 0).all()  # mirrored left to right only
    area, aspect = width.abs() * height, width.abs() / height
    assert area.min() > 0.09 and area.max() < 0.41 and 0.2 < area.mean() < 0.3
    assert aspect.min() > 0.74 and aspect.max() < 1.35
    assert crops.min() > 0 and crops.max() < 1


def test_hue_turns_around_the_grey_axis_and_leaves_grey_grey():
    grey = torch.full((5, 3, 4, 4), 0.4)
    torch.manual_seed(0)
    turned = multicrop._jitter(grey, draw(5))
    assert torch.allclose(turned, turned[:, :1].expand_as(turned), atol=1e-6)
    colour = torch.rand(5, 3, 4, 4)
    assert not torch.allclose(multicrop._jitter(colour, draw(5)), colour, atol=1e-2)


def test_blur_keeps_constants_and_the_mean_roughly_and_smooths():
    constant = torch.full((3, 2, 20, 20), 0.7)
    assert torch.allclose(multicrop._blur(constant, draw(3)), constant, atol=1e-6)
    noise = torch.rand(3, 2, 224, 224)
    assert (multicrop._blur(noise, draw(3)).var(dim=(2, 3)) <= noise.var(dim=(2, 3)) + 1e-6).all()
