"""Runs that keep their attention maps: the same numbers as without, resumable, and replayed side by side."""

import dataclasses
import json
import math

import matplotlib.pyplot as plt
import pytest
import torch

from skiplab.companion import job, runs, widgets
from skiplab.companion.explorations import checked, strip
from skiplab.companion.fingerprint import notebook_code_cells
from skiplab.errors import InputError
from skiplab.models import probe
from skiplab.studies.playground import replay
from skiplab.studies.playground.explorers import replay_controls
from skiplab.training import loop
from test_loop import TINY


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
        monkeypatch.setattr(
            loop, "train", lambda config, folder, report: train(config, folder, lambda rows: (stop(rows), report(rows)))
        )
    with pytest.raises(Stop):
        replay.train_and_watch(TINY, tmp_path, stop)
    monkeypatch.undo()
    result = replay.train_and_watch(TINY, tmp_path)
    assert json.dumps([row["attention"] for row in result["history"]]) == json.dumps(
        [row["attention"] for row in found[0].history]
    )


def test_a_run_that_dies_before_its_result_is_stored_keeps_its_maps(found, store, monkeypatch):
    def stop(device):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(job.provenance, "machine", stop)
        with pytest.raises(Stop):
            runs.load_or_run(replay.train_and_watch, [TINY], workers=0)
    (run,) = runs.load_or_run(replay.train_and_watch, [TINY], workers=0)
    assert [row["attention"] for row in run.history] == [row["attention"] for row in found[0].history]


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
    broken.history[-1] = broken.history[-1] | {
        "attention": None,
        "log_kappa": [
            row | {"median_log_kappa": None, "n_nan": row["n"], "n_inf": 0} for row in broken.history[-1]["log_kappa"]
        ],
    }
    explorer = widgets.Explorer(replay.exploration([found[0], broken]), {"epoch": 3})
    assert "not defined, no map: the weights are not finite (training had stopped)" in explorer.words.value


def test_a_rank_deficient_block_is_drawn_in_the_band(found):
    """Where most outputs have no finite κ, the curve goes up into the grey band instead of ending."""
    deficient = dataclasses.replace(
        found[1],
        history=[
            row
            | {
                "log_kappa": [
                    each | ({"median_log_kappa": None, "n_inf": each["n"]} if each["block"] == 1 else {})
                    for each in row["log_kappa"]
                ]
            }
            for row in found[1].history
        ],
    )
    exploration = replay.exploration([found[0], deficient])
    state = exploration.find(epoch=3, block=2)
    assert math.isinf(state.kappas["no_sab"][1]) and math.isfinite(state.kappas["no_sab"][0])
    assert "block 2's SAB output infinite" in replay.replay_facts(state)[1]
    figure = strip(exploration)
    for row in figure.subfigs:
        axis = row.axes[1]
        low, high, words = exploration.panels[1].band
        assert [text.get_text() for text in axis.texts] == [words] == ["rank-deficient"]
        drawn = [line.get_ydata() for line in axis.lines if len(line.get_ydata()) == 2 and line.get_marker() == "o"]
        assert low < drawn[1][1] < high and max(drawn[0]) < low
    plt.close(figure)


@pytest.mark.parametrize(
    "epochs, start, rows", [(1, {}, 3), (1, {"epoch": 1}, 3), (2, {}, 4), (3, {"epoch": 3}, 4), (3, {}, 4)]
)
def test_the_strip_has_three_to_five_states_for_any_length(found, epochs, start, rows):
    short = [
        dataclasses.replace(
            run, config=dataclasses.replace(run.config, epochs=epochs), history=run.history[: epochs + 1]
        )
        for run in found
    ]
    figure = strip(replay.exploration(short), start)
    titles = [row.get_suptitle() for row in figure.subfigs]
    assert len(titles) == len(set(titles)) == rows
    plt.close(figure)


def test_the_command_trains_what_is_shown(found):
    explorer = widgets.Explorer(replay.exploration(found, {"epochs": 3, "vit_args": {"depth": 2}}), {"epoch": 3})
    assert (
        "-p training &#x27;{epoch: 3, block: 2}&#x27; -p epochs 3 -p vit_args &#x27;{depth: 2}&#x27;"
        in explorer.command.value
    )


def test_a_start_is_checked_before_anything_is_trained(found):
    assert replay.exploration(found).controls == replay_controls(3, 2)
    with pytest.raises(InputError, match="epoch is 9; allowed: a number from 0 to 3"):
        checked("training", replay_controls(3, 2), {"epoch": 9})
    source = next(source for source, _ in notebook_code_cells("07_playground") if "params.validate" in source)
    assert "p.training" in source


def test_runs_that_are_no_pair_are_refused(found):
    for wrong in (found[:1], [found[0], found[0]], [*found, found[0]]):
        with pytest.raises(InputError, match="one run for each of both, no_sab"):
            replay.exploration(wrong)
