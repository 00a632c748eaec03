"""Training in several processes: the same curves as in one, up to the order in which gradients are summed."""

import dataclasses
import json
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import test_dino
import test_selfsupervised
from interruption import interrupted, weights
from skiplab.companion import job, runs
from skiplab.errors import InputError
from skiplab.studies.playground import replay
from skiplab.training import dino, loop, selfsupervised
from test_loop import TINY

TWO = f"{shlex.quote(sys.executable)} -m torch.distributed.run --standalone --nproc-per-node 2"
pytestmark = pytest.mark.slow


def but(**changes):
    return dataclasses.replace(TINY, **changes)


def compute(monkeypatch, folder, launcher, configs, function=loop.train):
    monkeypatch.setenv("COMPANION_RUNS", str(folder))
    monkeypatch.setenv("COMPANION_LAUNCH", launcher)
    return runs.load_or_run(function, configs, workers=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation": 2, "augment": "crop_flip", "label_smoothing": 0.1},
        {"optimizer": "soap", "epochs": 2},
        {"ema": 0.9, "graying": "svd", "epsilon": 0.7, "graying_patch_size": 7},
        {
            "mixup": 0.8,
            "cutmix": 1.0,
            "label_smoothing": 0.1,
            "accumulation": 2,
            "model_args": TINY.model_args | {"drop_path_rate": 0.3},
        },
    ],
)
def test_two_processes_train_as_one_does(tmp_path, monkeypatch, changes):
    config = but(test_images=99, **changes)  # an odd number: the processes' shares of the evaluation differ
    # In directions where gradients vanish, rounding decides SOAP's eigenbasis and the sign of its steps: weights go
    # apart there (by 60 % of their way in 14 steps), the loss by less than 1e-3, and an image may change sides.
    exact, images = (1e-3, 1) if config.optimizer == "soap" else (1e-5, 0)
    (one,) = compute(monkeypatch, tmp_path / "one", "", [config])
    (two,) = compute(monkeypatch, tmp_path / "two", TWO, [config])
    assert one.hash == two.hash
    for row, other in zip(one.history[1:], two.history[1:], strict=True):
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=exact)
        assert row["validation_loss"] == pytest.approx(other["validation_loss"], rel=exact)
        assert row["validation_top1"] == pytest.approx(other["validation_top1"], rel=0, abs=1.001 * images * 100 / 24)
        assert row["learning_rate"] == other["learning_rate"]
    assert one.result["test_loss"] == pytest.approx(two.result["test_loss"], rel=exact)
    assert one.result["test_top1"] == pytest.approx(two.result["test_top1"], rel=0, abs=1.001 * images * 100 / 99)
    mine, other = weights(one.folder), weights(two.folder)
    if config.optimizer != "soap":
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, other[name], rtol=1e-3, atol=2 * exact)
    provenance = [json.loads((run.folder / "provenance.json").read_text())["launcher"] for run in (one, two)]
    assert provenance == [[], shlex.split(TWO)]
    assert sorted(path.name for path in two.folder.iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "provenance.json",
        "result.json",
    ]


@pytest.mark.parametrize(
    "function, config, loss",
    [
        (
            selfsupervised.pretrain,
            test_selfsupervised.but(augment="crop_flip", accumulation=2, epochs=2),
            "validation_loss",
        ),
        (dino.distil, test_dino.but(epochs=2), "train_loss"),
    ],
    ids=["masked autoencoder", "DINO"],
)
def test_two_processes_mask_and_crop_as_one_does(tmp_path, monkeypatch, function, config, loss):
    (one,) = compute(monkeypatch, tmp_path / "one", "", [config], function)
    (two,) = compute(monkeypatch, tmp_path / "two", TWO, [config], function)
    for row, other in zip(one.history, two.history, strict=True):
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)
        assert row[loss] == pytest.approx(other[loss], rel=1e-5)


MEMBER = """
import os, sys
from pathlib import Path
from skiplab import files
from skiplab.companion import member
write = files.write
def noted(path, content):
    with open(Path(__file__).with_name("writes"), "a") as file:
        file.write(f"{os.environ['RANK']} {path.name}\\n")
    write(path, content)
files.write = noted
member.compute(*sys.argv[3:])
"""


def test_two_processes_train_as_one_does_and_the_first_keeps_the_attention_maps(tmp_path, monkeypatch):
    (tmp_path / "member.py").write_text(MEMBER)
    (one,) = compute(monkeypatch, tmp_path / "one", "", [TINY], replay.train_and_watch)
    (two,) = compute(monkeypatch, tmp_path / "two", f"{TWO} {tmp_path}/member.py", [TINY], replay.train_and_watch)
    assert len(one.history) == TINY.epochs + 1
    for row, other in zip(one.history, two.history, strict=True):
        if row["epoch"]:
            assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)
        assert row["validation_loss"] == pytest.approx(other["validation_loss"], rel=1e-5)
        assert row["validation_top1"] == other["validation_top1"] and row["learning_rate"] == other["learning_rate"]
        torch.testing.assert_close(torch.tensor(row["attention"]), torch.tensor(other["attention"]), rtol=0, atol=2e-5)
    assert Counter((tmp_path / "writes").read_text().splitlines()) == {
        "0 checkpoint.safetensors": TINY.epochs,
        "0 attention.json": TINY.epochs,
        "0 metrics.jsonl": TINY.epochs,
        "0 model.safetensors": 1,
        "0 outcome.json": 1,
    }
    assert sorted(path.name for path in two.folder.iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "provenance.json",
        "result.json",
    ]


BREAKING = """
import os, sys
sys.path.append({tests!r})
import torch
from test_loop import breaking
from skiplab.companion import member
from skiplab.training import loop
if os.environ["RANK"] == "1":
    loop.build_model = breaking(loop.build_model, 4, lambda logits: {logits})
member.compute(*sys.argv[3:])
"""


@pytest.mark.parametrize(
    "logits, divergence",
    [
        ("logits * float('nan')", {"kind": "non-finite", "epoch": 1, "step": 3}),
        ("logits + 1000 * torch.eye(10)[0]", {"kind": "explosion", "epoch": 1, "step": 5}),
    ],
)  # looked at where the epoch ends
def test_a_run_that_breaks_in_one_process_breaks_in_all(tmp_path, monkeypatch, logits, divergence):
    tests = str(Path(__file__).parent)
    (tmp_path / "member.py").write_text(BREAKING.format(tests=tests, logits=logits))
    (run,) = compute(monkeypatch, tmp_path / "runs", f"{TWO} {tmp_path}/member.py", [but(epochs=2)])
    assert run.result["divergence"] == divergence
    assert len(run.history) == (2 if divergence["kind"] == "non-finite" else 3)


def test_an_interrupted_run_may_go_on_in_more_processes(tmp_path, monkeypatch):
    (whole,) = compute(monkeypatch, tmp_path / "whole", "", [TINY])
    with interrupted(monkeypatch):
        compute(monkeypatch, tmp_path / "parts", "", [TINY])
    (parts,) = compute(monkeypatch, tmp_path / "parts", TWO, [TINY])
    assert [row["train_loss"] for row in parts.history[1:]] == pytest.approx(
        [row["train_loss"] for row in whole.history[1:]], rel=1e-5
    )
    assert parts.history[1] == whole.history[1]


@pytest.mark.parametrize(
    "launcher, changes, message",
    [
        (
            "no-such-launcher --processes 2",
            {},
            "COMPANION_LAUNCH is 'no-such-launcher --processes 2', which cannot be started",
        ),
        (
            TWO,
            {"batch_size": 31, "accumulation": 1},
            "training on 2 processes needs drop_last and a batch_size that 2 divides",
        ),
    ],
)
def test_what_cannot_be_launched_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, launcher, changes, message):
    with pytest.raises(InputError) as error:
        compute(monkeypatch, tmp_path / "runs", launcher, [but(**changes)])
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not list((tmp_path / "runs" / "train").iterdir())


def test_a_damaged_checkpoint_is_set_aside_by_all_processes(tmp_path, monkeypatch):
    folder = tmp_path / "train" / job.place(loop.train, TINY)[0]
    folder.mkdir(parents=True)
    (folder / "checkpoint.safetensors").write_bytes(b"no checkpoint")
    (run,) = compute(monkeypatch, tmp_path, TWO, [TINY])
    assert run.result["test_top1"] > 0 and (folder.parent / f"{folder.name}.damaged-1").exists()
