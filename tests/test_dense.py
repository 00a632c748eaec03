"""Dense probes: composed scenes, published layouts, linear segmentation, TokenCut against scipy, colours.

Stored runs, too.
"""

import dataclasses
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy import ndimage

import standin
from rounding import roundoff
from skiplab.companion import runs
from skiplab.errors import InputError
from skiplab.training import dense, dino, loop
from skiplab.training.dense import IGNORE, Backbone, DenseConfig, Scene, compose, token_cut
from test_dino import TINY

DATA = loop.dataset(TINY)
SMALL = DenseConfig(
    data="fashion_mnist",
    train_images=200,
    test_images=100,
    initial="",
    seed=0,
    size=84,
    train_scenes=6,
    test_scenes=4,
    epochs=2,
)


def backbone(**changes):
    vit = dino.build_vit(dataclasses.replace(TINY, **changes)).eval().requires_grad_(False)
    return Backbone(vit, DATA.mean, DATA.std)


# --- Scenes -----------------------------------------------------------------------------------------------------------


def scenes(count=12, size=91, **arguments):
    return next(compose(DATA.train.pixels, DATA.train.labels, count, size=size, **arguments).batches(count))


def test_composed_scenes_hold_real_pixels_exact_masks_and_boxes():
    pixels, labels = DATA.train.pixels[:, 0].numpy(), DATA.train.labels.numpy()
    for scene in scenes():
        assert scene.image.shape == (1, 91, 91) and scene.mask.shape == (91, 91) and scene.boxes.shape == (3, 4)
        assert not scene.image[0][scene.mask == 0].any()  # what is not black belongs to a garment
        covered = np.zeros((91, 91), bool)
        for left, top, right, bottom in scene.boxes:
            part = scene.mask[top:bottom, left:right] > 0
            assert part.any(axis=0)[[0, -1]].all() and part.any(axis=1)[[0, -1]].all()  # tight
            covered[top:bottom, left:right] = True
            window = scene.image[0, top:bottom, left:right]
            label = scene.mask[top:bottom, left:right].max() - 1
            assert any(
                (garment[rows][:, columns] == window).all()
                for garment in pixels[labels == label]
                for rows, columns in [spans(garment)]
                if garment[rows][:, columns].shape == window.shape
            )
        assert covered[scene.mask > 0].all()


def spans(garment):
    shape = ndimage.binary_fill_holes(garment > 0)
    (top, bottom), (left, right) = (np.flatnonzero(shape.any(axis=axis))[[0, -1]] for axis in (1, 0))
    return slice(top, bottom + 1), slice(left, right + 1)


def test_composed_scenes_are_the_same_each_time_and_differ_by_seed_and_place():
    one, same, other = scenes(3), scenes(3), scenes(3, seed=1)
    assert all((a.image == b.image).all() and (a.mask == b.mask).all() for a, b in zip(one, same))
    assert (one[0].image != other[0].image).any() and (one[0].image != one[1].image).any()
    assert (scenes(5)[2].image == one[2].image).all()  # whatever the count


def test_composed_needs_room_and_grey_images():
    with pytest.raises(
        InputError, match="3 garments of 28 pixels do not fit on a canvas of 30: it must be at least 56"
    ):
        compose(DATA.train.pixels, DATA.train.labels, 1, size=30)
    assert len(dense.load("composed", "train", data=DATA, size=84)) == 200
    with pytest.raises(InputError, match="needs small grey images"):
        dense.load("composed", "train", data=dataclasses.replace(DATA, train=object()), size=84)
    train, test = (
        next(dense.load("composed", split, data=DATA, size=84, count=1).batches()) for split in ("train", "test")
    )
    assert (train[0].image != test[0].image).any()


# --- Published sets ---------------------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path, monkeypatch):
    for name in dense.SETS:
        standin.make_dense(name, tmp_path / name)
        monkeypatch.setenv(f"COMPANION_{name.upper()}", str(tmp_path / name))
    return tmp_path


@pytest.mark.parametrize(
    "name, split", [("voc2012", "train"), ("voc2012", "test"), ("ade20k", "train"), ("coco_stuff", "test")]
)
def test_published_masks_are_read_in_their_layout(published, name, split):
    found = dense.load(name, split, data=DATA, size=32)
    assert found.classes == {"voc2012": 21, "ade20k": 150, "coco_stuff": 182}[name] and len(found) == 3
    for scene in next(found.batches()):
        assert scene.image.shape == (3, 32, 32) and scene.image.dtype == np.uint8
        assert set(np.unique(scene.mask)) <= {*range(found.classes), IGNORE} and IGNORE in scene.mask
        assert (scene.mask[16:, 16:] == (3 - (name == "ade20k"))).all()  # the stand-in's class 3 fills a quarter
    grey = next(dense.load(name, split, data=DATA, size=32, channels=1, count=2).batches())
    assert len(grey) == 2 and grey[0].image.shape == (1, 32, 32)


@pytest.mark.parametrize("name", ["voc2012", "coco20k"])
def test_published_boxes_are_scaled_with_the_image(published, name):
    for scene in next(dense.load(name, "discovery", data=DATA, size=32).batches()):
        assert scene.mask is None and np.allclose(scene.boxes, [[16, 16, 32, 32]])  # the lower right quarter


def test_parquet_files_with_images_masks_and_boxes(tmp_path):
    standin.make_dense_parquet(tmp_path)
    found = dense.load(str(tmp_path), "train", data=DATA, size=32)
    scene = next(found.batches())[0]
    assert found.classes == 4 and (scene.mask[16:, 16:] == 3).all() and np.allclose(scene.boxes, [[16, 16, 32, 32]])
    with pytest.raises(InputError, match=r"no file test-\*.parquet"):
        dense.load(str(tmp_path), "test", data=DATA, size=32)


def test_what_is_not_there_is_said_with_the_ways_out(published, monkeypatch, tmp_path):
    with pytest.raises(InputError, match="did you mean 'voc2012'"):
        dense.load("voc2021", "train", data=DATA, size=32)
    with pytest.raises(InputError, match="ade20k has no split 'discovery'"):
        dense.load("ade20k", "discovery", data=DATA, size=32)
    (published / "voc2012" / "SegmentationClass" / "picture_1.png").unlink()
    with pytest.raises(InputError, match="picture_1.png is missing; voc2012 must be VOCdevkit/VOC2012"):
        dense.load("voc2012", "train", data=DATA, size=32)
    (published / "coco20k" / "coco_20k_filenames.txt").unlink()
    with pytest.raises(InputError, match="coco_20k_filenames.txt is missing"):
        dense.load("coco20k", "discovery", data=DATA, size=32)
    monkeypatch.setenv("COMPANION_VOC2012", "nowhere")
    with pytest.raises(InputError, match="COMPANION_VOC2012='nowhere' is not a folder"):
        dense.load("voc2012", "train", data=DATA, size=32)
    monkeypatch.delenv("COMPANION_VOC2012")
    with pytest.raises(
        InputError, match="voc2012 is not here; download it once and set COMPANION_VOC2012 .* or use 'composed'"
    ):
        dense.load("voc2012", "train", data=DATA, size=32)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no parquet files"):
        dense.load(str(tmp_path / "empty"), "train", data=DATA, size=32)


def test_the_files_digest_follows_names_and_sizes(published):
    before = dense.files_digest("ade20k")
    assert before == dense.files_digest("ade20k") and dense.files_digest("composed") == ""
    (published / "ade20k" / "more.txt").write_text("x")
    assert dense.files_digest("ade20k") != before


# --- Features ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_features_are_the_normed_patch_tokens_of_the_last_blocks():
    model, images = backbone(), torch.randn(2, 1, 56, 56)
    tokens = model.vit.forward_features(images)[:, 1:]  # normed
    maps = model.features(images)
    assert maps.shape == (2, 16, 8, 8) and torch.allclose(maps.flatten(2).mT, tokens, atol=1e-5)
    both = model.features(images, layers=2, scales=(1.0, 0.5))
    assert both.shape == (2, 64, 8, 8) and torch.allclose(both[:, 16:32], maps, atol=1e-6)


@torch.no_grad()
def test_keys_are_the_last_blocks():
    model, images = backbone(), torch.randn(2, 1, 28, 28)
    kept = []
    hook = model.vit.blocks[-1].norm1.register_forward_hook(lambda module, inputs, output: kept.append(output))
    keys = model.keys(images)
    hook.remove()
    weight, bias = model.vit.blocks[-1].attn.qkv.weight[16:32], model.vit.blocks[-1].attn.qkv.bias[16:32]
    assert torch.allclose(keys, (kept[0] @ weight.mT + bias)[:, 1:], atol=1e-6)
    assert not model.vit.blocks[-1].attn.qkv._forward_hooks


# --- Linear segmentation ----------------------------------------------------------------------------------------------


def test_class_shares_count_pixels_and_leave_out_the_ignored():
    masks = torch.tensor([[[0, 0, 1, 1], [0, 2, 1, IGNORE], [2, 2, 2, 2], [2, 2, 2, 2]]])
    shares = dense.class_shares(masks, 2, 3)
    assert shares.shape == (1, 3, 2, 2)
    assert shares[0, :, 0, 0].tolist() == [0.75, 0, 0.25] and shares[0, :, 0, 1].tolist() == [0, 0.75, 0]
    assert shares[0, :, 1, 0].tolist() == [0, 0, 1]


def test_the_probe_finds_a_linear_rule_and_takes_features_as_they_come():
    generator = torch.Generator().manual_seed(0)
    features = 50 + 10 * torch.randn(40, 5, 6, 6, generator=generator) * torch.tensor([1, 0.01, 1, 1, 1])[:, None, None]
    masks = (features[:, 1] > 50).long()  # decided by the smallest channel
    layer, loss = dense.fit_linear(features, dense.class_shares(masks, 1, 2), epochs=60, seed=0)
    right = dense.segment(layer, features, 6) == masks
    assert right.float().mean() > 0.97 and loss < 0.35
    again, _ = dense.fit_linear(features, dense.class_shares(masks, 1, 2), epochs=60, seed=0)
    assert torch.equal(layer.weight, again.weight)


def test_a_constant_channel_does_no_harm():
    layer, loss = dense.fit_linear(
        torch.zeros(4, 2, 3, 3), dense.class_shares(torch.zeros(4, 3, 3).long(), 1, 2), epochs=1, seed=0
    )
    assert math.isfinite(loss) and layer.weight.isfinite().all()


def test_miou_is_the_mean_over_classes_by_hand(monkeypatch):
    truth = np.array([[0, 0, 1, 1], [0, 0, 1, IGNORE], [0, 0, 0, 0], [2, 2, 2, 2]])
    said = torch.tensor([[[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0], [0, 2, 2, 2]]])
    test = dense.DenseSet([lambda: Scene(np.zeros((1, 4, 4), np.uint8), truth, np.zeros((0, 4)))], 3)
    monkeypatch.setattr(dense, "segment", lambda *inputs: said)
    model = backbone(img_size=28)
    monkeypatch.setattr(Backbone, "features", lambda self, images, *rest: torch.zeros(len(images), 2, 4, 4))
    monkeypatch.setattr(Backbone, "patch", 1)
    score, _, _ = dense.linear_segmentation(model, test, test, layers=1, scales=(1.0,), epochs=1, seed=0)
    assert score == pytest.approx(100 * np.mean([7 / 9, 3 / 4, 3 / 4]))


def test_a_set_without_masks_cannot_be_segmented():
    with pytest.raises(InputError, match="no masks"):
        dense.linear_segmentation(
            backbone(), dense.DenseSet([]), dense.DenseSet([]), layers=1, scales=(1.0,), epochs=1, seed=0
        )


# --- TokenCut ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, d", [(4, 2), (25, 8), (60, 4)])
def test_the_eigenvector_is_scipys(n, d):
    tokens = torch.randn(n, d, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    unit = tokens.numpy() / np.linalg.norm(tokens.numpy(), axis=1, keepdims=True)
    edges = np.where(unit @ unit.T > 0.2, 1.0, float(np.float32(1e-5)))  # the weak edge is a float32
    degree = np.diag(edges.sum(axis=1))
    values, vectors = scipy.linalg.eigh(degree - edges, degree)
    found = dense.second_eigenvector(tokens).numpy()
    allowed = roundoff(torch.float64, n, n)  # a product with the vector, in each of the two solvers
    gap = min(values[2] - values[1], values[1] - values[0])
    if gap > 1e-9:  # else it is not unique
        expected = vectors[:, 1] * np.sign(vectors[:, 1] @ degree @ found)  # either sign is an eigenvector
        assert np.allclose(found, expected, rtol=0, atol=allowed / gap * np.abs(expected).max())
    assert found.max() == np.abs(found).max()  # where two entries of opposite signs have one size, either may be it
    assert np.allclose((degree - edges) @ found, values[1] * degree @ found, rtol=0, atol=allowed * degree.max())
    assert found @ degree @ found == pytest.approx(1, rel=allowed)


def test_token_cut_finds_the_odd_piece_and_only_the_piece_around_the_seed():
    tokens = torch.tensor([1.0, 0.0, 0.0]).repeat(8, 8, 1)
    tokens[2:5, 1:4] = torch.tensor([0.0, 1.0, 0.0])
    found = token_cut(tokens)
    assert found[2:5, 1:4].all() and found.sum() == 9
    tokens[7, 7] = torch.tensor([0.0, 1.0, 0.0])  # looks alike, lies elsewhere
    again = token_cut(tokens)
    assert again.sum() in (1, 9) and ndimage.label(again)[1] == 1


@pytest.mark.parametrize("tokens", [torch.ones(3, 3, 4), torch.zeros(3, 3, 4), torch.randn(1, 2, 4)])
def test_token_cut_on_degenerate_tokens_gives_some_box(tokens):
    found = token_cut(tokens)
    assert found.any() and found.shape == tokens.shape[:2] and dense._box(found).shape == (4,)


def test_token_cut_needs_two_patches():
    with pytest.raises(InputError, match="at least 2 patches; saw 1×1"):
        token_cut(torch.ones(1, 1, 3))


def test_overlap_by_hand():
    box = np.array([0, 0, 2, 2])
    assert dense.overlap(box, np.array([[0, 0, 2, 2], [1, 1, 3, 3], [2, 2, 4, 4]])).tolist() == [1, 1 / 7, 0]


def test_corloc_counts_images_with_half_of_an_object(monkeypatch):
    boxes = np.array([[0.0, 0, 10, 10], [50, 50, 60, 60]])
    data = dense.DenseSet(
        [lambda boxes=boxes: Scene(np.zeros((1, 84, 84), np.uint8), None, boxes)] * 3
        + [lambda: Scene(np.zeros((1, 84, 84), np.uint8), None, np.zeros((0, 4)))]
    )
    found = [np.array(box) for box in ([0, 0, 10, 5], [50, 50, 60, 61], [20, 20, 30, 30], [0, 0, 5, 5])]
    monkeypatch.setattr(dense, "discover", lambda *inputs: found)
    assert dense.corloc(backbone(), data) == 50.0  # exactly half counts, an image without objects does not


# --- Colours ----------------------------------------------------------------------------------------------------------


def test_pca_colours_are_the_main_components():
    maps = (
        torch.randn(3, 6, 5, 5, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1, 9, 1, 5, 1, 3.0])[:, None, None]
    )
    colours = dense.pca_rgb(maps)
    assert colours.shape == (3, 5, 5, 3) and colours.min() == 0 and colours.max() == 1
    flat = maps.movedim(1, -1).flatten(0, 2).numpy()
    _, _, main = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    expected = (flat - flat.mean(axis=0)) @ main[:3].T
    for channel in range(3):
        inside = (colours[..., channel].flatten() > 0) & (colours[..., channel].flatten() < 1)
        assert np.corrcoef(colours[..., channel].flatten()[inside], expected[inside, channel])[
            0, 1
        ] ** 2 == pytest.approx(1, abs=1e-5)
    assert torch.allclose(dense.pca_rgb(3 * maps + 1), colours, atol=1e-5)
    with pytest.raises(InputError, match="at least 3 channels"):
        dense.pca_rgb(torch.randn(1, 2, 5, 5))
    assert dense.pca_rgb(torch.zeros(1, 3, 2, 2)).isfinite().all()


# --- Runs -------------------------------------------------------------------------------------------------------------


def test_an_evaluation_is_stored_and_repeats_itself(store):
    (trained,) = runs.load_or_run(dino.distil, [dataclasses.replace(TINY, epochs=1)], workers=0)
    config = dataclasses.replace(SMALL, initial=f"distil/{trained.hash}")
    (whole,) = runs.load_or_run(dense.evaluate, [config], workers=0)
    scores = [whole.result[name] for name in ("miou_single", "miou_multi", "corloc")]
    assert all(0 <= score <= 100 for score in scores) and abs(whole.result["similarity"]) <= 1 + 1e-9
    parts = [
        runs.load_or_run(dense.evaluate, [dataclasses.replace(config, **{left_out: "none"})], workers=0)[0].result
        for left_out in ("dense", "discovery")
    ]
    assert parts[0]["corloc"] == scores[2] and "miou_single" not in parts[0]
    assert [parts[1]["miou_single"], parts[1]["miou_multi"]] == scores[:2] and "corloc" not in parts[1]
    assert "final_loss" not in parts[0] and parts[1]["final_loss"] == whole.result["final_loss"]


def test_bad_settings_are_named(store):
    for changes, message in (
        ({"epochs": 0}, "epochs is 0"),
        ({"threshold": 2}, "threshold is 2"),
        ({"size": 0}, "size is 0"),
    ):
        with pytest.raises(InputError, match=message):
            dataclasses.replace(SMALL, **changes)
    (trained,) = runs.load_or_run(dino.distil, [dataclasses.replace(TINY, epochs=1)], workers=0)
    with pytest.raises(InputError, match="size 90 is not divisible by the model's patch size 7 .nearest: 84 or 91"):
        runs.load_or_run(
            dense.evaluate, [dataclasses.replace(SMALL, initial=f"distil/{trained.hash}", size=90)], workers=0
        )
