"""Masked-autoencoder pre-training: it learns, resumes bit for bit, is stored, and gives fine-tuning its start."""

import dataclasses
import warnings

import pytest
import torch

from interruption import equal, interrupted, weights
from skiplab.companion import runs
from skiplab.errors import InputError
from skiplab.training import checkpoint, loop, selfsupervised
from skiplab.training.selfsupervised import MaeConfig, build_model, pretrain
from skiplab.transforms.graying import patchify, unpatchify
from test_loop import TINY as SUPERVISED

TINY_PRETRAINING = dict(
    data="fashion_mnist",
    model="vit",
    model_args={"embed_dim": 16, "num_heads": 2, "patch_size": 7, "depth": 2},
    seed=3,
    epochs=3,
    learning_rate=3e-3,
    train_images=200,
    test_images=100,
    batch_size=32,
)
TINY = MaeConfig(
    **TINY_PRETRAINING,
    decoder_dim=16,
    decoder_depth=1,
    decoder_heads=2,
)


def but(**changes):
    return dataclasses.replace(TINY, **changes)


def test_it_learns_and_says_what_it_did(tmp_path):
    reported = []
    result = pretrain(but(epochs=8), tmp_path, lambda rows: reported.append(len(rows)))
    losses = [row["validation_loss"] for row in result["history"]]
    assert [row["epoch"] for row in result["history"]] == reported == list(range(1, 9))
    assert losses[-1] < losses[0] - 0.05 and result["final_loss"] == losses[-1]
    assert result["divergence"] is None and len(result["seconds"]) == 8


def test_building_and_running_it_warns_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pretrain(but(epochs=1), tmp_path)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(tmp_path):
    results = [pretrain(config, tmp_path / name) for name, config in (("a", TINY), ("b", TINY), ("c", but(seed=4)))]
    assert results[0]["history"] == results[1]["history"] != results[2]["history"]
    assert equal(weights(tmp_path / "a"), weights(tmp_path / "b"))


@pytest.mark.parametrize("graying", ["none", "svd", "dct"])
def test_a_resumed_run_ends_where_an_undisturbed_one_does(tmp_path, monkeypatch, graying):
    config = but(graying=graying, epsilon=0.7, augment="crop_flip")
    whole = pretrain(config, tmp_path / "whole")
    with interrupted(monkeypatch):
        pretrain(config, tmp_path / "parts")
    parts = pretrain(config, tmp_path / "parts")
    assert parts["history"] == whole["history"]
    assert equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    pretrain(but(epochs=1), tmp_path)
    with pytest.raises(checkpoint.CorruptFile, match="another configuration"):
        pretrain(TINY, tmp_path)


def test_graying_changes_what_the_encoder_sees_and_not_what_it_predicts(tmp_path):
    plain, grayed = (
        pretrain(but(epochs=1, graying=method, epsilon=0.5), tmp_path / method) for method in ("none", "svd")
    )
    assert plain["history"] != grayed["history"]
    model, images = build_model(TINY).eval(), torch.randn(4, 1, 28, 28)
    losses = []
    for seen in (images, 2 * images):
        torch.manual_seed(0)
        losses.append(model(seen, images))
    model.predict.weight.data.zero_()
    model.predict.bias.data.zero_()
    torch.manual_seed(0)
    predicts_the_mean = model(2 * images, images)
    assert losses[0] != losses[1]
    assert predicts_the_mean.item() == pytest.approx(
        48 / 49, abs=1e-3
    )  # variance of normalised pixels, n and not n - 1


@torch.no_grad()
def test_the_encoder_sees_the_shown_patches_alone():
    model, images = build_model(TINY).eval(), torch.randn(3, 1, 28, 28)
    torch.manual_seed(5)
    first = model(images, images)
    torch.manual_seed(5)
    keep, hidden = selfsupervised.random_masks(3, 17, TINY.mask_ratio)
    assert hidden.shape == (3, 12) and (hidden > 0).all() and (keep[:, 0] == 0).all()
    shown = patchify(images, 7).clone()
    for image, places in enumerate(hidden - 1):
        shown[image, places] = 0  # the encoder never sees these
    assert model.encoder.encode(images, idx_keep=keep).shape == (3, 5, 16)
    torch.manual_seed(5)
    again = model(unpatchify(shown, 7, 1, 28, 28), images)
    assert again.item() == pytest.approx(first.item(), rel=1e-5)


def test_bad_settings_are_named():
    with pytest.raises(InputError, match="mask_ratio is 1.0"):
        but(mask_ratio=1.0)
    with pytest.raises(InputError, match="decoder_dim is 18"):
        but(decoder_dim=18)
    with pytest.raises(InputError, match="did you mean 'dct'"):
        but(graying="dkt")
    with pytest.raises(InputError, match="epochs is 0"):
        but(epochs=0)
    with pytest.raises(InputError, match="no ViT with a class token"):
        build_model(but(model="convmixer", model_args={"dim": 16, "depth": 1, "kernel_size": 3, "patch_size": 7}))
    with pytest.raises(InputError, match="model_args sets 'in_chans'"):
        build_model(but(model_args=TINY.model_args | {"in_chans": 3}))
    with pytest.raises(InputError, match="exceeds the 180 training images"):
        pretrain(but(batch_size=500), None)


def test_a_loss_that_breaks_is_a_result_and_the_last_whole_epoch_is_kept(tmp_path, monkeypatch):
    loss = selfsupervised._Pretraining._loss
    monkeypatch.setattr(
        selfsupervised._Pretraining,
        "_loss",
        lambda self, images, count: (
            loss(self, images, count) * (float("nan") if self.epoch == 2 and self.model.training else 1)
        ),
    )
    result = pretrain(TINY, tmp_path / "broken")
    assert result["divergence"] == {"kind": "non-finite", "epoch": 2, "step": 5}
    assert len(result["history"]) == 2 and result["final_loss"] == result["history"][0]["validation_loss"]
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "broken").values())


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_fine_tuning_starts_from_a_stored_run(store, pool):
    arguments = TINY.model_args | {"global_pool": pool}
    (first,) = runs.load_or_run(pretrain, [but(model_args=arguments)], workers=0)
    assert runs.load_or_run(pretrain, [but(model_args=arguments)], workers=0) == [first]
    config = dataclasses.replace(
        SUPERVISED, model_args=arguments, initial=f"pretrain/{first.hash}", learning_rate=1e-9, epochs=1, img_size=None
    )
    (fine,) = runs.load_or_run(loop.train, [config], workers=0)
    stored, start = checkpoint.read(fine.folder / "model.safetensors"), weights(first.folder)
    assert all(torch.allclose(stored[name], start[name], atol=1e-6) for name in start)
    assert {name.split(".")[0] for name in stored.keys() - start.keys()} <= {"head", "norm", "fc_norm"}
    assert first.result["final_loss"] > 0 and runs.table([first]).final_loss[0] == first.result["final_loss"]


def test_jobs_report_their_loss(store):
    said = []
    runs.load_or_run(pretrain, [but(epochs=1)], workers=1, report=said.append)
    assert "loss " in said[-1]
