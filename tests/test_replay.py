"""Runs that keep their attention maps: the same numbers as without, resumable, and replayed side by side."""

import dataclasses
import json

import pytest
import torch
from test_loop import TINY

from lib.companion import replay, runs, widgets
from lib.companion.explorations import strip
from lib.errors import InputError
from lib.models import probe
from lib.training import loop


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Both arms of a tiny model."""
    patch = pytest.MonkeyPatch()
    patch.setenv("COMPANION_RUNS", str(tmp_path_factory.mktemp("runs")))
    configs = [dataclasses.replace(TINY, skip=arm) for arm in replay.ARMS]
    yield runs.load_or_run(replay.train_and_watch, configs, workers=0)
    patch.undo()


def test_watching_changes_nothing_and_keeps_a_map_for_every_epoch(found, tmp_path):
    run, plain = found[0], loop.train(TINY, tmp_path)
    assert run.history[-1]["train_loss"] == plain["history"][-1]["train_loss"]
    assert [row["epoch"] for row in run.history] == [0, 1, 2, 3]
    for row in run.history:
        maps = torch.tensor(row["attention"])
        assert maps.shape == (2, 17, 17) and maps.sum(dim=-1).numpy() == pytest.approx(1, abs=2e-4)
    image, _ = next(iter(loop.dataset(TINY).validation.batches(1, device="cpu", train=False)))
    first = probe.attention_maps(loop.build_model(TINY), image)[1][0].mean(dim=0)
    assert torch.tensor(run.history[0]["attention"][1]).numpy() == pytest.approx(first.numpy(), abs=1e-5)


class Stop(Exception):
    pass


@pytest.mark.parametrize("before_the_map", [True, False])
def test_an_interrupted_run_ends_with_the_same_maps(found, tmp_path, monkeypatch, before_the_map):
    def stop(history):
        if len(history) == 3:
            raise Stop

    if before_the_map:
        train = loop.train
        monkeypatch.setattr(loop, "train", lambda config, folder, report: train(config, folder, lambda rows: (stop(rows), report(rows))))
    with pytest.raises(Stop):
        replay.train_and_watch(TINY, tmp_path, stop)
    monkeypatch.undo()
    result = replay.train_and_watch(TINY, tmp_path)
    assert json.dumps([row["attention"] for row in result["history"]]) == json.dumps([row["attention"] for row in found[0].history])
    assert not (tmp_path / "attention.json").exists()


def test_the_explorer_scrubs_through_epochs_and_blocks(found):
    exploration = replay.exploration(found)
    explorer = widgets.Explorer(exploration)
    pictures = set()
    for name, control in exploration.controls.items():
        for value in control.grid(100):
            explorer.controls[name].value = value
            pictures.add(explorer.picture.value)
            assert not explorer.problem
    assert len(pictures) >= 5
    said = explorer.words.value
    assert f"both skips: top-1 {found[0].history[3]['validation_top1']:.1f} %" in said and "no SAB skip: top-1" in said
    assert 3 <= len(strip(exploration).subfigs) <= 5


def test_a_run_that_lost_its_weights_still_replays(found):
    broken = dataclasses.replace(found[1], history=[*found[1].history[:2]])
    broken.history[-1] = broken.history[-1] | {"attention": None, "log_kappa": [row | {"median_log_kappa": None} for row in broken.history[-1]["log_kappa"]]}
    explorer = widgets.Explorer(replay.exploration([found[0], broken]), {"epoch": 3})
    assert "infinite, no map: the weights are not finite (training had stopped)" in explorer.words.value


def test_runs_that_are_no_pair_are_refused(found):
    for wrong in (found[:1], [found[0], found[0]], [*found, found[0]]):
        with pytest.raises(InputError, match="one run for each of both, no_sab"):
            replay.exploration(wrong)
