"""The plan's numbers: which runs a preset asks for, what a training step costs, and that both are remembered."""

import dataclasses
import json

import pytest

import test_dino
import test_selfsupervised
from skiplab.companion import fingerprint, runs
from skiplab.errors import InputError
from skiplab.training import dino, loop, selfsupervised
from test_loop import TINY, but
from workflow import costs

RATE = {"teraflops": 1e-12, "step": 0.0}  # seconds are FLOPs


def flops(config, function=loop.train):
    return costs.cost(function, config, RATE)[0]


def by_hand(dim, depth, tokens, patch, channels=1, classes=10):
    """Return the FLOPs of a ViT's training step on one image: forward, twice that back but for the pixels' gradient."""
    block = 2 * (12 * tokens * dim**2 + 2 * tokens**2 * dim)
    embed = 2 * (tokens - 1) * channels * patch**2 * dim
    return 3 * (depth * block + 2 * dim * classes) + 2 * embed


def test_a_step_costs_what_its_products_do():
    assert flops(TINY) == pytest.approx(3 * 240 * (0.9 + 0.1 / 3) * by_hand(16, 2, 17, 7), rel=1e-6)


def test_a_run_costs_its_passes_its_images_and_its_steps_whatever_the_recipe():
    assert flops(but(epochs=6)) == pytest.approx(2 * flops(TINY)) == pytest.approx(flops(but(train_images=480)))
    same = [
        but(mixup=0.8, seed=7),
        but(optimizer="soap"),
        but(graying="svd", epsilon=0.5, graying_patch_size=7),
        but(skip="none"),
        but(batch_size=16),
        but(skipless={"alpha": 2.0, "beta": 0.6, "c": 3.0}),
    ]
    assert {round(flops(config)) for config in same} == {round(flops(TINY))}
    steps = costs.cost(loop.train, but(accumulation=2), {"teraflops": 1e9, "step": 1.0})[1]
    assert steps == pytest.approx(3 * 216 / 32 * 2)


def test_data_out_of_reach_are_counted_by_their_published_size():
    config = but(data="imagenet-1k", train_images=None, img_size=28, channels=3)
    assert flops(config) == pytest.approx(3 * 1_281_167 * (0.9 + 0.1 / 3) * by_hand(16, 2, 17, 7, channels=3), rel=1e-6)


def test_hiding_patches_saves_and_crops_add():
    shown, hidden = (
        flops(test_selfsupervised.but(mask_ratio=ratio), selfsupervised.pretrain) for ratio in (0.05, 0.75)
    )
    assert hidden < 0.7 * shown
    few, many = (flops(test_dino.but(local_crops=crops), dino.distil) for crops in (0, 8))
    supervised = flops(but(epochs=3, train_images=200))  # one view, no teacher, a small head
    assert many > 1.5 * few > 3 * supervised


def test_a_rehearsal_computes_nothing_and_names_every_run(store):
    with runs.rehearsing() as asked:
        first, again, other = runs.load_or_run(loop.train, [TINY, TINY, but(seed=4)])
        assert runs.table([first, other]).validation_top1.tolist() == [0.0, 0.0]
    assert first.hash == again.hash != other.hash and len(asked) == 2
    assert asked[first.hash] == (loop.train, TINY) and not store.exists()
    assert runs.load_or_run(loop.train, [but(epochs=1)], workers=0)[0].result["test_top1"] > 0  # and it is over


def test_what_was_counted_is_kept_until_something_changes(tmp_path, monkeypatch):
    counted = []
    answer = {"01_skip_removal": costs.Expected(3, 1e12, 60.0)}
    monkeypatch.setattr(costs, "_expected", lambda preset: counted.append(preset) or answer)
    monkeypatch.setattr(costs, "RATES", tmp_path / "rates.yaml")
    (tmp_path / "rates.yaml").write_text("cpu: {teraflops: 1, step: 0}\n")
    assert costs.expected("gpu", tmp_path) == costs.expected("gpu", tmp_path) == answer and counted == ["gpu"]
    (tmp_path / "rates.yaml").write_text("cpu: {teraflops: 2, step: 0}\n")
    assert costs.expected("gpu", tmp_path) == answer and len(counted) == 2
    for damaged in ("", "[]", json.dumps({"made_of": 1})):
        (tmp_path / "plan.json").write_text(damaged)
        assert costs.expected("gpu", tmp_path) == answer
    assert len(counted) == 5


def test_a_cell_that_fails_is_named_in_one_line(monkeypatch):
    cells = [("depth: int = 3  # blocks", ["parameters"]), ("1 / 0", ["rehearsed"])]
    monkeypatch.setattr(fingerprint, "notebook_code_cells", lambda notebook: cells)
    with pytest.raises(InputError, match="^01_skip_removal cannot be rehearsed: ZeroDivisionError: division by zero$"):
        costs.configurations("01_skip_removal", "smoke")


def test_only_rehearsed_cells_run_and_the_preset_applies(monkeypatch):
    monkeypatch.setenv("COMPANION_PRESET", "gpu")
    ran = costs.configurations("07_playground", "smoke")
    assert {config.model for _, config in ran.values()} == {"vit"} and len(ran) == 2
    assert costs.os.environ["COMPANION_PRESET"] == "gpu"
    assert all(dataclasses.asdict(config)["device"] == "cpu" for _, config in ran.values())
