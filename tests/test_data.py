"""Data sets: what is loaded, how it is split and served, and what is said about bad input."""

import gzip
import io
import json
import logging
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image, ImageOps

import standin
from skiplab.companion import widgets
from skiplab.errors import InputError
from skiplab.training import data, decode, pictures, sources, splits
from skiplab.training.data import load
from skiplab.training.splits import Resident, Streaming
from skiplab.transforms.augment import share
from skiplab.transforms.graying import TokenGraying

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


REAL_CIFAR10 = os.environ.get("COMPANION_CIFAR10")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Forget what was loaded before, and use no local copies."""
    for name in sources.SPECS:
        monkeypatch.delenv(sources.variable(name), raising=False)
    data._load.cache_clear()


@pytest.fixture
def streamed(monkeypatch):
    monkeypatch.setattr("skiplab.training.rows.RESIDENT_BYTES", 0)


@pytest.fixture
def folder(tmp_path):
    return standin.make_folder(tmp_path / "set", {"train/cat": 20, "train/dog": 10, "test/cat": 3, "test/dog": 3})


def small(**settings):
    return load("fashion_mnist", **{"train_images": 200, "test_images": 50, **settings})


def images_of(split, **settings):
    batches = list(split.batches(16, **settings))
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def message(*arguments, **settings):
    with pytest.raises(InputError) as caught:
        load(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ── The embedded data set ─────────────────────────────────────────────────────────────────────────────────────────────


def test_embedded_set():
    fashion = load("fashion_mnist")
    assert (len(fashion.train), len(fashion.validation), len(fashion.test)) == (5400, 600, 2000)
    assert (fashion.channels, fashion.img_size, fashion.num_classes) == (1, 28, 10)
    assert fashion.classes[0] == "T-shirt/top" and fashion.classes[9] == "Ankle boot"
    assert isinstance(fashion.train, Resident) and fashion.train.pixels.dtype == torch.uint8
    assert fashion is load("fashion_mnist")


def test_embedded_set_is_small_and_licensed():
    files = list(sources.EMBEDDED.iterdir())
    assert sum(file.stat().st_size for file in files) <= 4_000_000
    assert "Zalando SE" in (sources.EMBEDDED / "LICENSE").read_text()


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_embedded_images_are_debians():
    fashion = load("fashion_mnist", validation=0)
    for kind, split, count in [("train", fashion.train, 6000), ("t10k", fashion.test, 2000)]:
        raw = gzip.decompress((DEBIAN / f"{kind}-images-idx3-ubyte.gz").read_bytes())
        expected = torch.from_numpy(np.frombuffer(raw, np.uint8, count * 784, offset=16).copy()).view(count, 1, 28, 28)
        assert torch.equal(split.pixels, expected)


def test_embedded_file_that_changed_is_refused(monkeypatch, tmp_path):
    copy = shutil.copytree(sources.EMBEDDED, tmp_path / "data" / "fashion_mnist")
    monkeypatch.setattr(sources, "EMBEDDED", copy)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    file = copy / "test-00000-of-00001.parquet"
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    text = message("fashion_mnist")
    assert file.name in text and "git checkout -- data/fashion_mnist" in text
    file.unlink()
    assert f"{file} is missing" in message("fashion_mnist")


def test_padding_to_32_adds_zeros():
    plain, padded, resized = small(), small(img_size=32), small(img_size=14)
    assert torch.equal(padded.train.pixels[:, :, 2:-2, 2:-2], plain.train.pixels)
    assert padded.train.pixels.sum() == plain.train.pixels.sum() and padded.img_size == 32
    assert resized.train.pixels.shape[-2:] == (14, 14)


# ── Splits ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_validation_split_is_stratified_disjoint_and_deterministic():
    whole, split = load("fashion_mnist", validation=0), load("fashion_mnist", validation=0.25)
    assert len(whole.validation) == 0 and list(whole.validation.batches(8)) == []
    counts = np.bincount(whole.train.labels, minlength=10)
    assert np.abs(np.bincount(split.validation.labels, minlength=10) - counts / 4).max() <= 1
    parts = [[image.numpy().tobytes() for image in part.pixels] for part in (split.train, split.validation)]
    assert sorted(parts[0] + parts[1]) == sorted(image.numpy().tobytes() for image in whole.train.pixels)
    data._load.cache_clear()
    assert torch.equal(load("fashion_mnist", validation=0.25).validation.pixels, split.validation.pixels)


def test_fewer_images_are_stratified():
    fashion = small(train_images=100, test_images=40, validation=0.2)
    assert (len(fashion.train), len(fashion.validation), len(fashion.test)) == (80, 20, 40)
    assert np.ptp(np.bincount(torch.cat([fashion.train.labels, fashion.validation.labels]))) <= 2
    assert np.ptp(np.bincount(fashion.test.labels)) <= 2


def test_mean_and_std_are_the_training_splits():
    fashion = small()
    pixels = fashion.train.pixels.double() / 255
    assert fashion.mean == pytest.approx([pixels.mean().item()], abs=1e-12)
    assert fashion.std == pytest.approx([pixels.std(correction=0).item()], abs=1e-12)
    images, _ = images_of(fashion.train)
    assert abs(images.mean()) < 1e-4 and abs(images.std() - 1) < 1e-3


def test_constant_images_stay_finite(tmp_path):
    for label in "ab":
        for number in range(8):
            (tmp_path / label).mkdir(exist_ok=True)
            Image.new("L", (8, 8)).save(tmp_path / label / f"{number}.png")
    images, _ = images_of(load(tmp_path).train)
    assert images.isfinite().all()


# ── Batches ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_order_depends_on_seed_and_epoch_alone():
    split = small().train
    order = {key: images_of(split, train=True, seed=key[0], epoch=key[1])[0] for key in [(0, 0), (0, 1), (1, 0)]}
    torch.manual_seed(7)
    assert torch.equal(images_of(split, train=True, seed=0, epoch=1)[0], order[0, 1])
    assert not torch.equal(order[0, 0], order[0, 1]) and not torch.equal(order[0, 0], order[1, 0])
    for images in order.values():  # each image once
        assert torch.equal(images.flatten(1).sum(1).sort().values, order[0, 0].flatten(1).sum(1).sort().values)


def test_augmentation_depends_on_seed_and_epoch_alone():
    split = small().train
    runs = [images_of(split, train=True, augment="crop_flip", seed=3, epoch=epoch)[0] for epoch in (2, 2, 4)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], images_of(split, train=True, seed=3, epoch=2)[0])


def test_evaluation_is_in_order_and_never_augmented():
    split = small().test
    images, labels = images_of(split, seed=4, epoch=5, augment="crop_flip")
    expected = (split.pixels.double() / 255 - split.mean[0]) / split.std[0]
    torch.testing.assert_close(images.double(), expected, atol=1e-5, rtol=0)
    assert torch.equal(labels, split.labels) and labels.dtype == torch.int64


def test_more_images_than_there_are_are_refused():
    split = small().test
    assert torch.equal(split.first(7)[1], split.labels[:7])
    with pytest.raises(InputError, match="^100000000 images are asked for, but the split has only 50$"):
        split.first(100_000_000)


@pytest.mark.parametrize("drop_last", [False, True])
def test_last_batch(drop_last):
    split = small(validation=0).train
    sizes = [len(labels) for _, labels in split.batches(64, drop_last=drop_last, train=True)]
    assert sizes == ([64, 64, 64] if drop_last else [64, 64, 64, 8])
    assert len(sizes) == split.num_batches(64, drop_last=drop_last)


def test_shards_make_up_the_global_batches():
    split = small(validation=0).train
    settings = {"train": True, "seed": 1, "epoch": 2, "drop_last": True, "augment": "crop_flip"}
    whole = split.batches(16, **settings)
    parts = [split.batches(16, **settings, shard=(rank, 2)) for rank in (0, 1)]
    for batch, *halves in zip(whole, *parts, strict=True):
        for kind in (0, 1):  # images, augmented alike; labels
            for rank, half in enumerate(halves):
                assert torch.equal(half[kind], share(batch[kind], (rank, 2)))
    evaluated = [len(images_of(split, shard=(rank, 3))[1]) for rank in range(3)]
    assert sum(evaluated) == len(split)
    with pytest.raises(InputError, match="3 processes"):
        split.batches(16, **settings, shard=(0, 3))


def test_global_random_state_is_left_alone(streamed, folder):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    images_of(load(folder, img_size=8).train, train=True, augment="imagenet")
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state()[1])


def test_device_copy_is_made_once(monkeypatch):
    split = small().train
    images_of(split)
    copies = split._on_device.cache_info().misses
    images_of(split, train=True, epoch=1)
    assert copies == split._on_device.cache_info().misses == 1


def test_batches_cost_no_more_than_a_bare_loop():
    split = load("fashion_mnist").train
    scale, shift = 1 / (255 * split.std[0]), -split.mean[0] / split.std[0]

    def bare():
        for places in torch.randperm(len(split)).split(64):
            yield split.pixels[places].float() * scale + shift, split.labels[places]

    def seconds(batches):
        start = time.perf_counter()
        for _ in batches:
            pass
        return time.perf_counter() - start

    ratios = [seconds(split.batches(64, train=True, epoch=epoch)) / seconds(bare()) for epoch in range(9)]
    assert np.median(ratios) < 1.5


# ── Streaming ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_streaming_evaluates_on_the_same_batches(monkeypatch, folder):
    resident = load(folder, img_size=6)
    data._load.cache_clear()
    monkeypatch.setattr("skiplab.training.rows.RESIDENT_BYTES", 0)
    streaming = load(folder, img_size=6)
    assert isinstance(resident.train, Resident) and isinstance(streaming.train, Streaming)
    assert resident.mean == streaming.mean and resident.std == streaming.std
    for split in ["train", "validation", "test"]:
        for a, b in zip(images_of(getattr(resident, split)), images_of(getattr(streaming, split)), strict=True):
            assert torch.equal(a, b)
    for a, b in zip(
        *[images_of(d.train, train=True, seed=1, epoch=2, augment="crop_flip") for d in (resident, streaming)],
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("augment", ["crop_flip", "imagenet", "resized_crop"])
def test_workers_change_nothing(monkeypatch, streamed, folder, augment):
    split = load(folder, img_size=8).train
    runs = []
    for workers in (1, 2):
        monkeypatch.setattr(splits, "_cores", lambda workers=workers: workers)
        runs.append(images_of(split, train=True, seed=1, epoch=1, augment=augment))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    other = images_of(split, train=True, seed=1, epoch=2, augment=augment)
    assert not torch.equal(runs[0][0], other[0])


@pytest.mark.parametrize("method", ["svd", "dct"])
def test_workers_gray_as_the_device_does(streamed, folder, method):
    split, gray = load(folder, img_size=8).train, TokenGraying(method, 0.7, 4)
    settings = {"train": True, "seed": 1, "epoch": 1, "augment": "resized_crop"}
    plain, grayed = images_of(split, **settings)[0], images_of(split, **settings, transform=gray)[0]
    torch.testing.assert_close(grayed, gray(plain), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(grayed, plain, atol=1e-2)


def test_streaming_parquet_is_mapped_from_disk(monkeypatch, streamed, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("COMPANION_CIFAR10", str(standin.make("cifar10", tmp_path / "cifar10", images_per_class=4)))
    cifar = load("cifar10", img_size=32)
    assert isinstance(cifar.train, Streaming) and cifar.train._rows.records.cache_files
    assert images_of(cifar.train)[0].shape == (36, 3, 32, 32)


@pytest.mark.parametrize("name", ["set [v1]", "x*y", "what?", "[", "label=3"])
def test_streamed_parquet_in_a_folder_named_like_a_pattern(monkeypatch, streamed, tmp_path, name):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for other in ("set v", "xAy", "whatA", "label=4"):  # what the name would stand for as a pattern
        standin.write_parquet(tmp_path / other / "train.parquet", rows_of([0, 1] * 9), ["cat", "dog"])
    standin.write_parquet(tmp_path / name / "train.parquet", rows_of([0, 1] * 4), ["ant", "bee"])
    loaded = load(tmp_path / name, img_size=8, validation=0)
    assert (len(loaded.train), len(loaded.test), loaded.classes) == (6, 2, ("ant", "bee"))
    assert images_of(loaded.train)[0].shape == (6, 3, 8, 8)


def test_streamed_parquet_in_a_folder_named_like_a_chain_is_refused_and_resident_read(monkeypatch, tmp_path):
    standin.write_parquet(tmp_path / "a::b" / "train.parquet", rows_of([0, 1] * 4), ["ant", "bee"])
    assert load(tmp_path / "a::b", img_size=8).num_classes == 2
    data._load.cache_clear()
    monkeypatch.setattr("skiplab.training.rows.RESIDENT_BYTES", 0)
    assert "'::'" in message(tmp_path / "a::b", img_size=8)


def test_streaming_names_a_corrupt_image(streamed, folder):
    (folder / "test" / "dog" / "1.png").write_bytes(b"no image")
    split = load(folder, img_size=8).test
    with pytest.raises(InputError, match=r"^1 image \(.*test/dog/1\.png\) is not an image that can be read; [^\n]*$"):
        images_of(split)


def test_streaming_needs_a_size(streamed, folder):
    assert "pass img_size" in message(folder)


# ── Layouts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name, size, images", [("cifar10", 32, 18), ("tiny-imagenet", 64, 360), ("imagenet-1k", 24, 1800)]
)
def test_hub_layout_as_a_local_copy(monkeypatch, tmp_path, name, size, images):
    monkeypatch.setenv(sources.variable(name), str(standin.make(name, tmp_path)))
    loaded = load(name, img_size=24 if name == "imagenet-1k" else None)
    assert "local copy in place of" in loaded.source and "not bit-exact" in loaded.source
    assert str(tmp_path) not in loaded.source
    assert (len(loaded.train), loaded.channels, loaded.img_size, loaded.name) == (images, 3, size, name)
    assert isinstance(loaded.train, Streaming if name == "imagenet-1k" else Resident)
    batch, labels = next(loaded.test.batches(8))
    assert batch.shape == (8, 3, size, size) and labels.tolist() == list(range(8))


def test_imagenet_crop_keeps_seven_eighths():
    decoder = decode.Decoder(224, 3, sources.SPECS["imagenet-1k"].crop, pad=0)
    ramp = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 320))).convert("RGB")
    pixels = decoder.array({"bytes": standin.encode(ramp), "path": None})
    assert np.array_equal(pixels[0, :, 0], np.arange(16, 240))


@pytest.mark.skipif(not REAL_CIFAR10, reason="COMPANION_CIFAR10 is not set")
def test_cifar10_of_the_environment(monkeypatch):
    monkeypatch.setenv("COMPANION_CIFAR10", REAL_CIFAR10)
    cifar = load("cifar10", train_images=1000, test_images=500)
    assert cifar.classes[:2] == ("airplane", "automobile") and cifar.channels == 3 and cifar.img_size == 32
    assert cifar.mean == pytest.approx((0.491, 0.482, 0.447), abs=0.02)
    images, labels = images_of(cifar.train, train=True, augment="crop_flip")
    assert images.shape == (900, 3, 32, 32) and np.ptp(np.bincount(labels)) <= 2


def test_image_folder(folder):
    loaded = load(folder)
    assert loaded.classes == ("cat", "dog") and loaded.name == "set" and str(folder) in loaded.source
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (27, 3, 6)
    assert loaded.test.labels.tolist() == [0, 0, 0, 1, 1, 1]
    first = np.asarray(Image.open(folder / "test" / "cat" / "0.png")).transpose(2, 0, 1)
    assert np.array_equal(loaded.test.pixels[0], first)


def test_validation_folder_is_the_test_split(folder):
    (folder / "test").rename(folder / "val")
    assert len(load(folder).test) == 6


def test_flat_folder_is_split(tmp_path):
    standin.make_folder(tmp_path, {"cat": 20, "dog": 40})
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "0.png").write_bytes(b"")
    loaded = load(tmp_path, validation=0.25)
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (36, 12, 12)
    assert np.bincount(loaded.test.labels).tolist() == [4, 8]


def test_plain_parquet_of_integers(tmp_path):
    rows = {
        "image": [{"bytes": standin.encode(standin.picture(i % 3, i)), "path": None} for i in range(30)],
        "label": [i % 3 for i in range(30)],
    }
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "train.parquet")
    assert load(tmp_path).classes == ("0", "1", "2")


def test_mixed_images_are_resized_cropped_and_converted(folder):
    standin.picture(0, 0, (30, 20)).save(folder / "train" / "cat" / "0.png")
    standin.picture(0, 0, (8, 8), "L").save(folder / "train" / "cat" / "1.png")
    standin.picture(0, 0, (8, 8), "P").save(folder / "train" / "cat" / "2.png")
    standin.picture(0, 0, (8, 8), "RGBA").save(folder / "train" / "cat" / "3.png")
    assert load(folder, img_size=8, channels=3).train.pixels.shape[1:] == (3, 8, 8)
    assert load(folder, img_size=12, channels=1).train.pixels.shape[1:] == (1, 12, 12)


# ── Digest ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_digest_covers_the_settings():
    first = small().digest
    data._load.cache_clear()
    assert first == small().digest and len(first) == 64
    digests = {
        small(**change).digest
        for change in [
            {},
            {"img_size": 32},
            {"channels": 3},
            {"validation": 0.2},
            {"train_images": 100},
            {"test_images": 20},
        ]
    }
    assert len(digests) == 6


@pytest.mark.parametrize("limit", [0, 4e9])
def test_digest_sees_one_pixel_one_label_and_one_class_name(monkeypatch, folder, limit):
    monkeypatch.setattr("skiplab.training.rows.RESIDENT_BYTES", limit)

    def digest():
        data._load.cache_clear()
        return load(folder, img_size=8).digest

    digests = [digest(), digest()]
    assert digests[0] == digests[1]
    file = folder / "train" / "cat" / "0.png"
    image = Image.open(file)
    image.putpixel((3, 4), (1, 2, 3))
    image.save(file)
    if limit:  # a streamed set is known by the sizes of its files, not by their pixels
        digests.append(digest())
    file.rename(folder / "train" / "dog" / "zero.png")
    digests.append(digest())
    for split in ["train", "test"]:
        (folder / split / "cat").rename(folder / split / "cow")
    digests.append(digest())
    assert len(set(digests)) == len(digests) - 1


# ── Bad input ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_unknown_name():
    text = message("cifar1")
    assert "unknown data set 'cifar1'" in text and "did you mean 'cifar10'" in text and "an existing folder" in text


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"img_size": 0}, "img_size is 0"),
        ({"channels": 2}, "channels is 2 (allowed: 1, 3)"),
        ({"validation": 0.6}, "validation is 0.6"),
        ({"validation": -0.1}, "validation is -0.1"),
        ({"validation": "0.1"}, "validation is '0.1'"),
        ({"train_images": 0}, "train_images is 0"),
        ({"train_images": 6001}, "train_images is 6001, but the split 'train' has 6000 images"),
        ({"train_images": 1}, "a single training image"),
        ({"test_images": 2001}, "test_images is 2001, but the split 'test' has 2000 images"),
    ],
)
def test_bad_settings(settings, words):
    assert words in message("fashion_mnist", **settings)


def test_bad_augmentation():
    resident = small().train
    with pytest.raises(InputError, match="'imagenet' works on streamed data sets only.*allowed: none, crop_flip"):
        resident.batches(8, augment="imagenet")
    with pytest.raises(InputError, match="unknown augmentation 'cropflip'; did you mean 'crop_flip'"):
        resident.batches(8, augment="cropflip")
    with pytest.raises(InputError, match="'crop_flip' leaves the workers nothing to transform.*imagenet, resized_crop"):
        resident.batches(8, augment="crop_flip", transform=TokenGraying("svd", 0.7, 4))


def test_folder_without_images(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    assert f"{tmp_path} holds no images" in message(tmp_path)


def test_single_class(tmp_path):
    standin.make_folder(tmp_path, {"train/cat": 3, "test/cat": 3})
    assert "single class" in message(tmp_path) and "'cat'" in message(tmp_path)


def test_corrupt_and_truncated_images_are_counted_and_named(folder):
    for number in range(2):
        (folder / "train" / "cat" / f"{number}.png").write_bytes(b"no image at all")
    for number in range(2):
        file = folder / "train" / "dog" / f"{number}.png"
        file.write_bytes(file.read_bytes()[:-60])
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(folder / "test" / "cat" / "0.png")
    text = message(folder)
    assert "5 images" in text and text.count(".png") == 3 and "cat/0.png" in text and "…" in text


@pytest.mark.parametrize(
    "mode, words",
    [
        ("I;16", "has more than 8 bits a channel (mode I;16); convert all images to 8 bits by one scale"),
        ("I", "has more than 8 bits a channel (mode I); convert"),
        ("F", "has more than 8 bits a channel (mode F); convert"),
        ("LAB", "has the mode LAB; convert it to RGB or L"),
    ],
)
@pytest.mark.parametrize("limit", [0, 1e12])
def test_images_of_other_modes_are_refused_by_name(monkeypatch, folder, mode, words, limit):
    monkeypatch.setattr("skiplab.training.rows.RESIDENT_BYTES", limit)
    (folder / "test" / "cat" / "0.png").unlink()
    Image.new(mode, (8, 8)).save(folder / "test" / "cat" / "0.tiff")
    with pytest.raises(InputError) as error:
        images_of(load(folder, img_size=8).test)
    assert str(error.value).startswith("1 image (") and f"cat/0.tiff) {words}" in str(error.value)


def test_truncated_jpegs_and_parquet_rows_are_named(tmp_path):
    whole = [standin.encode(standin.picture(i % 2, i, (32, 32)), "JPEG") for i in range(8)]
    rows = {
        "image": [
            {"bytes": image[: -200 * (i == 5)] if i == 5 else image, "path": None} for i, image in enumerate(whole)
        ],
        "label": [i % 2 for i in range(8)],
    }
    standin.write_parquet(tmp_path / "train-00000-of-00001.parquet", rows, ["a", "b"])
    assert "1 image (row 5 of train)" in message(tmp_path)


def test_grey_among_rgb(folder):
    standin.picture(0, 0, mode="L").save(folder / "train" / "cat" / "7.png")
    text = message(folder)
    assert "greyscale among RGB: 1 image (" in text and "cat/7.png" in text and "channels=3" in text


def test_sizes_that_differ(folder):
    standin.picture(0, 0, (9, 7)).save(folder / "train" / "cat" / "7.png")
    text = message(folder)
    assert "35 of 8×8, 1 of 9×7" in text and "pass img_size" in text


def test_images_that_are_not_square(tmp_path):
    standin.make_folder(tmp_path, {"a": 3, "b": 3}, size=(9, 7))
    assert "6 of 9×7; pass img_size" in message(tmp_path)


def test_no_train_split(tmp_path):
    standin.make_folder(tmp_path, {"test/a": 3, "test/b": 3})
    assert "no split 'train', only 'test'" in message(tmp_path)


def test_class_without_training_images(folder):
    standin.make_folder(folder, {"test/cow": 2})
    assert "1 classes of the split 'test' have no training images: cow" in message(folder)


def test_splits_may_be_written_in_capitals(folder):
    (folder / "train").rename(folder / "Train")
    (folder / "test").rename(folder / "TEST")
    loaded = load(folder)
    assert loaded.classes == ("cat", "dog") and (len(loaded.train), len(loaded.test)) == (27, 6)


@pytest.mark.parametrize(
    "train, test, words",
    [
        ("training", "testing", "rename 'training' to 'train' (allowed: train, test, validation, valid, val)"),
        ("Trian", "Tests", "rename 'Trian' to 'train'"),
        ("train", "testing", "beside them lies 'testing'; did you mean 'test'?"),
        ("training", "test", "beside them lies 'training'; did you mean 'train'?"),
        ("train", "cow", "beside them lies 'cow' (allowed: test, train, val, valid, validation)"),
    ],
)
def test_folders_named_almost_like_splits_are_refused(folder, train, test, words):
    (folder / "train").rename(folder / train)
    (folder / "test").rename(folder / test)
    assert words in message(folder)


def test_a_folder_of_one_misspelt_split_and_a_split_twice_are_refused(folder):
    shutil.rmtree(folder / "test")
    shutil.copytree(folder / "train", folder / "TRAIN")
    assert "has the split 'train' twice" in message(folder)
    shutil.rmtree(folder / "TRAIN")
    (folder / "train").rename(folder / "training")
    assert "rename 'training' to 'train'" in message(folder)


def test_classes_named_a_little_like_splits_stay_classes(tmp_path):
    standin.make_folder(tmp_path, {"rain": 10, "brain": 10, "tent": 10})
    assert load(tmp_path).classes == ("brain", "rain", "tent")


@pytest.mark.parametrize(
    "name, words", [("training", "'training'; did you mean 'train'?"), ("cow", "'cow' (allowed: ")]
)
def test_parquet_files_are_named_after_splits(tmp_path, name, words):
    rows = {
        "image": [{"bytes": standin.encode(standin.picture(i % 2, i)), "path": None} for i in range(8)],
        "label": [i % 2 for i in range(8)],
    }
    standin.write_parquet(tmp_path / "Train-00000-of-00001.parquet", rows, ["a", "b"])
    assert load(tmp_path).classes == ("a", "b")
    data._load.cache_clear()
    standin.write_parquet(tmp_path / f"{name}-00000-of-00001.parquet", rows, ["a", "b"])
    assert words in message(tmp_path)


def test_a_split_that_is_not_used_and_files_of_other_kinds_are_named(folder):
    standin.make_folder(folder, {"val/cat": 2, "val/dog": 2})
    (folder / "train" / "cat" / "one.heic").write_bytes(b"x")
    (folder / "readme.txt").write_text("x")
    assert load(folder).source.endswith("; not used: the split 'val'; not used: 1 .heic, 1 .txt")


def test_linked_classes_and_jfif_files_are_read(tmp_path, folder):
    (folder / "train" / "cat").rename(tmp_path / "cats")
    (folder / "train" / "cat").symlink_to(tmp_path / "cats")
    for file in (folder / "train" / "dog").iterdir():
        Image.open(file).save(file.with_suffix(".jfif"), "JPEG")
        file.unlink()
    assert np.bincount(load(folder, validation=0).train.labels).tolist() == [20, 10]


def test_an_empty_class_is_refused(folder):
    (folder / "train" / "cow").mkdir()
    (folder / "train" / "cow" / "1.heic").write_bytes(b"x")
    assert f"1 folder ({folder / 'train' / 'cow'}) without an image (.png, .jpg, " in message(folder)


def test_links_that_lead_nowhere_or_round_and_names_that_are_not_utf8(folder):
    link = folder / "train" / "cat" / "gone.png"
    link.symlink_to("/nowhere.png")
    assert f"1 link ({link}) to nothing" in message(folder)
    link.unlink()
    (folder / "train" / "cat" / "round").symlink_to(folder / "train")
    assert "which it lies in; remove the link" in message(folder)
    (folder / "train" / "cat" / "round").unlink()
    (folder / "train" / "cat" / os.fsdecode(b"caf\xe9.png")).write_bytes(b"x")
    text = message(folder)
    assert "1 name (" in text and "caf\\udce9.png" in text and "UTF-8" in text and text.isprintable()


def rows_of(labels, **changes):
    images = [{"bytes": standin.encode(standin.picture(i % 2, i)), "path": f"{i}.png"} for i in range(len(labels))]
    for place, image in changes.items():
        images[int(place[1:])] = image
    return {"image": images, "label": labels}


def test_class_names_in_another_order_are_matched(tmp_path):
    standin.write_parquet(tmp_path / "train.parquet", rows_of([0, 1] * 4), ["cat", "dog"])
    standin.write_parquet(tmp_path / "test.parquet", rows_of([0, 0, 1]), ["dog", "cat"])
    loaded = load(tmp_path)
    assert loaded.classes == ("cat", "dog") and loaded.test.labels.tolist() == [1, 1, 0]


def test_class_names_that_training_lacks_are_refused(tmp_path):
    standin.write_parquet(tmp_path / "train.parquet", rows_of([0, 1] * 4), ["cat", "dog"])
    standin.write_parquet(tmp_path / "test.parquet", rows_of([0, 0, 1]), ["cat", "dogs"])
    assert "unknown class of the split 'test', which the split 'train' lacks: 'dogs'; did you mean 'dog'?" in message(
        tmp_path
    )
    standin.write_parquet(tmp_path / "test.parquet", rows_of([0, 0, 1]), ["cat", "dog"])
    standin.write_parquet(tmp_path / "train-2.parquet", rows_of([0, 1] * 4), ["dog", "cat"])
    assert "name their classes differently" in message(tmp_path)


def shard(file, columns, features=None):
    """Write a parquet file of plain columns; `features` are its metadata of Hugging Face, as a dict."""
    table = pyarrow.table(columns)
    if features is not None:
        content = json.dumps({"info": {"features": features}}) if isinstance(features, dict) else features
        table = table.replace_schema_metadata({"huggingface": content})
    pyarrow.parquet.write_table(table, file)


@pytest.mark.parametrize("limit", [0, 1e12])
def test_shards_whose_columns_differ_are_read(monkeypatch, tmp_path, limit):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("skiplab.training.rows.RESIDENT_BYTES", limit)
    rows = rows_of([0, 1] * 4)
    turned = pyarrow.array(
        [{"path": image["path"], "bytes": image["bytes"]} for image in rows["image"]],
        pyarrow.struct([("path", pyarrow.large_string()), ("bytes", pyarrow.large_binary())]),
    )
    (tmp_path / "set").mkdir()
    shard(tmp_path / "set" / "train-0.parquet", rows)
    shard(tmp_path / "set" / "train-1.parquet", {"label": pyarrow.array([0, 1] * 4, "uint8"), "image": turned})
    shard(tmp_path / "set" / "train-2.parquet", rows | {"author": ["someone"] * 8})
    loaded = load(tmp_path / "set", img_size=8, validation=0)
    assert len(loaded.train) + len(loaded.test) == 24
    images, labels = images_of(loaded.test)
    assert images.shape[1:] == (3, 8, 8) and set(labels.tolist()) == {0, 1}


def test_shards_with_images_under_two_names_are_refused(tmp_path):
    rows = rows_of([0, 1] * 4)
    shard(tmp_path / "train-0.parquet", rows)
    shard(tmp_path / "train-1.parquet", {"img": rows["image"], "label": rows["label"]})
    text = message(tmp_path)
    assert "train-1.parquet has its images in the column 'img'" in text and "'image'" in text


def test_features_of_unknown_types_beside_the_label_are_left_alone(tmp_path):
    label = {"names": ["cat", "dog"], "_type": "ClassLabel"}
    features = {"image": {"_type": "Hologram"}, "label": label, "scent": {"_type": "Scent"}}
    shard(tmp_path / "train.parquet", rows_of([0, 1] * 4) | {"scent": [1] * 8}, features)
    assert load(tmp_path).classes == ("cat", "dog")


@pytest.mark.parametrize("features", [{"label": {"_type": "FuzzyLabel"}}, "no JSON", "[1]", {"label": {"names": 3}}])
def test_a_label_of_an_unknown_type_is_refused(tmp_path, features):
    shard(tmp_path / "train.parquet", rows_of([0, 1] * 4), features)
    text = message(tmp_path)
    assert "train.parquet" in text and "does not know" in text and "write it anew" in text


@pytest.mark.parametrize("limit", [0, 1e12])
def test_damage_inside_a_parquet_file_is_named(monkeypatch, tmp_path, limit):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("skiplab.training.rows.RESIDENT_BYTES", limit)
    file = tmp_path / "set" / "train.parquet"
    standin.write_parquet(file, rows_of([0, 1] * 40), ["a", "b"])
    content = bytearray(file.read_bytes())
    content[4:400] = bytes(396)
    file.write_bytes(content)
    assert "train.parquet" in message(file.parent, img_size=8)


@pytest.mark.parametrize(
    "labels, words",
    [
        ([1, 2] * 4, "no image has the label 0: "),
        ([0, 2, 5] * 3, "no image has the labels 1, 3, 4: "),
        ([0, 2**40] * 4, "no image has the labels 1, 2, 3, …: "),
    ],
)
def test_numbers_that_leave_gaps_are_refused(tmp_path, labels, words):
    shard(tmp_path / "train.parquet", rows_of(labels))
    text = message(tmp_path)
    assert words in text and "without gaps" in text and "numpy.unique" in text


def test_named_classes_without_any_image_are_refused(tmp_path):
    standin.write_parquet(tmp_path / "train.parquet", rows_of([0, 2] * 4), ["ant", "bee", "cat", "dog"])
    text = message(tmp_path)
    assert "2 class names (bee, dog) without an image" in text and "remove empty classes" in text


@pytest.mark.parametrize("form", ["folders", "tables"])
def test_class_names_in_two_forms_of_unicode_are_one_class(tmp_path, form):
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    if form == "folders":
        counts = {f"train/{composed}": 10, "train/dog": 10, f"test/{decomposed}": 3, "test/dog": 3}
        standin.make_folder(tmp_path, counts)
    else:
        standin.write_parquet(tmp_path / "train.parquet", rows_of([0, 1] * 10), [composed, "dog"])
        standin.write_parquet(tmp_path / "test.parquet", rows_of([0, 1] * 3), ["dog", decomposed])
    loaded = load(tmp_path)
    assert loaded.classes == (composed, "dog") and sorted(loaded.test.labels.tolist()) == [0] * 3 + [1] * 3


@pytest.mark.parametrize("form", ["folders", "tables"])
def test_class_names_in_two_forms_of_unicode_in_one_split_are_refused(tmp_path, form):
    names = ["caf\u00e9", "cafe\u0301"]
    if form == "folders":
        standin.make_folder(tmp_path, {f"train/{name}": 10 for name in names})
    else:
        standin.write_parquet(tmp_path / "train.parquet", rows_of([0, 1] * 10), names)
    text = message(tmp_path)
    assert "'caf\\xe9'" in text and "'cafe\\u0301'" in text and "two forms of Unicode" in text


def test_labels_of_eight_bits(tmp_path):
    table = datasets.Dataset.from_dict(
        rows_of([0, 1] * 10), features=datasets.Features(image=datasets.Image(), label=datasets.Value("uint8"))
    ).with_format("arrow")[:]
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    assert load(tmp_path).classes == ("0", "1")


@pytest.mark.parametrize("image", [None, {"bytes": b"", "path": None}, {"bytes": None, "path": "a\0b.png"}])
def test_a_row_without_an_image_is_named(tmp_path, image):
    standin.write_parquet(tmp_path / "train.parquet", rows_of([0, 1] * 4, r3=image), ["a", "b"])
    assert message(tmp_path).startswith("1 image (") and message(tmp_path).endswith("; mend or remove it")


def test_a_table_without_rows(tmp_path):
    standin.write_parquet(tmp_path / "train.parquet", rows_of([0, 1] * 4), ["a", "b"])
    standin.write_parquet(tmp_path / "test.parquet", rows_of([]), ["a", "b"])
    assert "the split 'test' has no rows (" in message(tmp_path)


def test_an_image_of_too_many_pixels_is_named(monkeypatch, folder):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)  # refused from twice as many
    assert message(folder).startswith("36 images (") and "of which the first has far too many pixels" in message(folder)


def test_images_are_turned_as_their_exif_data_say_and_hidden_colours_stay_hidden(folder):
    turned, exif = Image.new("RGB", (8, 8), "black"), Image.Exif()
    turned.paste("white", (0, 0, 8, 4))
    exif[0x0112] = 3  # upside down
    turned.save(folder / "test" / "cat" / "0.png", exif=exif)
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(folder / "test" / "cat" / "1.png")
    Image.new("LA", (8, 8), (7, 0)).save(folder / "test" / "cat" / "2.png")
    pixels = load(folder, channels=3).test.pixels
    assert (pixels[0, :, :4] == 0).all() and (pixels[0, :, 4:] == 255).all()
    assert (pixels[1:3] == 255).all()


@pytest.mark.parametrize("turn", range(1, 9))
def test_every_orientation_is_pillows_and_holds_beside_damaged_exif_data(turn):
    image = standin.picture(0, 0, (8, 6))
    exif = Image.Exif()
    exif[0x0112] = turn
    whole, damaged = io.BytesIO(), io.BytesIO()
    image.save(whole, "png", exif=exif)
    # Little-endian, two entries: the orientation, and a description that is a fraction, which Pillow cannot write.
    entries = struct.pack("<HHII", 0x0112, 3, 1, turn) + struct.pack("<HHII", 0x010E, 5, 1, 8)
    image.save(damaged, "png", exif=b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + entries + bytes(4))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(whole)))
    assert np.array_equal(pictures.read(whole)[0], expected)
    assert np.array_equal(pictures.read(damaged)[0], expected)
    if turn > 1:  # else the damage would show nothing
        with pytest.raises(AttributeError, match="encode"):
            ImageOps.exif_transpose(Image.open(damaged))


def test_training_and_the_explorers_read_one_picture_alike(folder):
    file = folder / "train" / "cat" / "0.png"
    standin.picture(0, 0, (8, 8), "RGBA").rotate(10).save(file)
    shown, _ = widgets.read_picture("0.png", file.read_bytes(), side=8)
    assert np.array_equal(decode.Decoder(None, 3, 1.0, 0).array({"bytes": None, "path": str(file)}), shown)


def test_images_without_labels(tmp_path):
    for number in range(4):
        standin.picture(0, number).save(tmp_path / f"{number}.png")
    text = message(tmp_path)
    assert "4 images" in text and "0.png" in text and "without a label" in text


@pytest.mark.parametrize("label", [-1, None])
def test_rows_without_labels(tmp_path, label):
    rows = {
        "image": [{"bytes": standin.encode(standin.picture(0, i)), "path": f"{i}.png"} for i in range(4)],
        "label": [0, label, 1, label],
    }
    standin.write_parquet(tmp_path / "train.parquet", rows, ["a", "b"])
    assert "2 images (1.png, 3.png) without a valid label (needed: 0 to 1)" in message(tmp_path)


def test_unsupported_columns(tmp_path):
    datasets.Dataset.from_dict({"pixels": [[1, 2]], "target": [0]}).to_parquet(tmp_path / "train.parquet")
    text = message(tmp_path)
    assert "pixels (list" in text and "target (int64)" in text and "image or img" in text


def test_truncated_parquet(tmp_path):
    standin.make("cifar10", tmp_path)
    file = tmp_path / "plain_text" / "train-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    assert message(tmp_path).startswith(f"{file} is not a readable parquet file (")


def test_local_copy_that_is_not_there(monkeypatch):
    monkeypatch.setenv("COMPANION_CIFAR10", "/nowhere")
    assert message("cifar10") == "COMPANION_CIFAR10='/nowhere' is not a folder"


# ── The hub ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_out_of_reach_and_not_cached(tmp_path):
    """In a process of its own, since Hugging Face reads these variables when it is imported."""
    program = """if True:
        import time
        from skiplab.training.data import InputError, load
        start = time.time()
        try:
            load("cifar10")
        except InputError as error:
            print(error)
        print(time.time() - start)
    """
    environment = os.environ | {
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }  # nobody answers there
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=sources.ROOT
    )
    text, seconds = result.stdout.splitlines()
    assert "three ways out" in text and "HF_HOME" in text and "COMPANION_CIFAR10" in text and "fashion_mnist" in text
    assert float(seconds) < 10 and result.stderr == ""


@pytest.fixture
def hub_cache(monkeypatch, tmp_path):
    """Lay out a stand-in as the hub's cache holds it, with the network off."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def fill(name):
        spec = sources.SPECS[name]
        return standin.make(name, tmp_path / f"datasets--{spec.repo.replace('/', '--')}" / "snapshots" / spec.revision)

    return fill


def test_switched_off_and_not_cached(hub_cache):
    assert "three ways out" in message("tiny-imagenet")
    assert "with a token" in message("imagenet-1k")


def test_cached_hub_data_need_no_network(hub_cache):
    hub_cache("tiny-imagenet")
    loaded = load("tiny-imagenet")
    assert len(loaded.test) == 400 and loaded.source.endswith(sources.SPECS["tiny-imagenet"].revision)


def test_cifar10_of_the_hub_is_checked(hub_cache):
    hub_cache("cifar10")
    assert "does not have the expected SHA-256; delete the file" in message("cifar10")


def test_gated_data_need_a_token(monkeypatch, hub_cache):
    import httpx2  # what huggingface_hub speaks
    import huggingface_hub

    request = httpx2.Request("GET", "https://huggingface.co")
    refused = huggingface_hub.errors.GatedRepoError("gated", response=httpx2.Response(401, request=request))

    def refuse(*arguments, **settings):
        raise refused

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    text = message("imagenet-1k")
    assert "gated" in text and "HF_TOKEN" in text and "ILSVRC/imagenet-1k" in text


def test_nothing_is_printed_and_settings_of_hugging_face_stay(capfd, folder):
    import huggingface_hub.utils as hub

    level = logging.getLogger("huggingface_hub").level
    load(folder)
    small()
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled() and not hub.are_progress_bars_disabled()
    assert logging.getLogger("huggingface_hub").level == level
    datasets.disable_progress_bars()
    try:
        load(folder, validation=0.2)
        assert datasets.are_progress_bars_disabled()
    finally:
        datasets.enable_progress_bars()


def test_specs_are_pinned():
    for name, spec in sources.SPECS.items():
        assert name == "fashion_mnist" or len(spec.revision) == 40
    assert all(len(value) == 64 for value in sources.SPECS["cifar10"].sha256.values())
