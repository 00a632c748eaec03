"""The GPU check without a GPU: its table agrees with itself, notices what is off, and keeps to its own entries."""

import dataclasses
import itertools
import json

import pandas
import pytest
import torch

from skiplab.companion import claims, judging, ledger
from skiplab.errors import InputError
from skiplab.training import loop
from workflow import costs, gpu_check

CPU = torch.device("cpu")
SKIPS = {"both": 92.0, "no_ffn": 90.0, "no_sab": 70.0, "none": 60.0}


def found(svd=6.0, epochs=60, data="cifar10"):
    """Return what a check on a GPU finds, as far as the ledger is concerned."""
    ways = {"torch.linalg.svd": svd, "ours": 1.2, "ours, products only": 1.1, "DCT": 1.01}
    return {
        "device": {"device": "cuda", "device_name": "H200"},
        "data": data,
        "ratios": [
            {"repetition": repetition, "model": "vit_base_patch16_224", "way": way, "ratio": ratio}
            for repetition in range(3)
            for way, ratio in ways.items()
        ],
        "skip_removal": [
            {
                "skip": skip,
                "epochs": epochs,
                "test_top1": top1,
                "divergence": {"kind": "collapse", "epoch": 33} if skip == "no_sab" else None,
            }
            for skip, top1 in SKIPS.items()
        ],
    }


def recorded(folder, notebook):
    return json.loads((folder / "gpu" / f"{notebook}.json").read_text())["claims"]


def test_every_function_agrees_with_itself():
    rows = gpu_check.parity(CPU)
    assert len(rows) > 80 and {row["function"]: row["difference"] for row in rows if not row["agrees"]} == {}


def test_every_model_skip_and_scaling_has_a_row():
    cases = gpu_check.parity_cases()
    for family, skip in itertools.product(gpu_check.FAMILIES, ("both", "none")):
        assert f"{family}, skip {skip}, and gradients" in cases
        for name, kind, form in gpu_check.SCALINGS:
            assert name != family or f"{family}, skip {skip}, {kind} ({form}), and gradients" in cases


def off_by(error):
    """Return a function that is off from its second call on, as a wrong device would be."""
    calls = itertools.count()
    return lambda x: [x, x + (error if next(calls) else 0)]


def left_behind():
    calls = itertools.count()

    def function(x):
        if next(calls):
            raise RuntimeError("Expected all tensors to be on the same device\nand more")
        return x

    return function


def test_what_differs_or_fails_is_reported(monkeypatch):
    x = torch.ones(3)
    monkeypatch.setattr(
        gpu_check,
        "parity_cases",
        lambda: {
            "wrong": (off_by(1e-3), (x,), 1e-4),
            "near": (off_by(1e-5), (x,), 1e-4),
            "nan": (off_by(float("nan")), (x,), 1e-4),
            "failing": (left_behind(), (x,), 1e-4),
        },
    )
    rows = {row["function"]: row for row in gpu_check.parity(CPU)}
    assert {name: row["agrees"] for name, row in rows.items()} == {
        "wrong": False,
        "near": True,
        "nan": False,
        "failing": False,
    }
    assert rows["failing"]["difference"] == "Expected all tensors to be on the same device"


def test_a_check_with_a_difference_ends_in_one_line_that_names_it(monkeypatch):
    monkeypatch.setattr(gpu_check, "parity_cases", lambda: {"wrong": (off_by(1.0), (torch.ones(3),), 1e-4)})
    for part, rows in {
        "step_times": [{"ms": 1.0}],
        "attention_times": [{"ms": 1.0}],
        "throughput": {"loop": 1.0},
        "rates": {"step": 0.1},
        "skip_removal": [{"skip": "both"}],
        "record": "recorded",
    }.items():
        monkeypatch.setattr(gpu_check, part, lambda *_, rows=rows: rows)
    monkeypatch.setattr(gpu_check, "step_ratios", lambda *_, **__: pandas.DataFrame(found()["ratios"]))
    with pytest.raises(InputError, match="on this GPU wrong differ from the CPU by more than allowed"):
        gpu_check.check(CPU, 1.0)


def test_a_second_check_replaces_the_first(tmp_path):
    gpu_check.record(found(svd=9.0), tmp_path)
    said = gpu_check.record(found(), tmp_path)
    assert "asa.time.svd.ratio: holds on 1 of 1 processor (6 ×; H200: holds; gpu-check, H200)" in said
    times = recorded(tmp_path, "02_token_graying")
    assert times["asa.time.svd.ratio"]["by_processor"] == {"H200": {"values": [6.0] * 3, "verdict": "holds"}}
    assert times["asa.time.gpu.ours"]["note"] == "gpu-check, H200, ours, products only"


def test_whole_trainings_are_recorded_but_decide_nothing(tmp_path):
    gpu_check.record(found(), tmp_path)
    entries = recorded(tmp_path, "01_skip_removal")
    values = {name.removeprefix("asa.skip."): entry.get("values") for name, entry in entries.items()}
    assert values == {
        "both": [92.0],
        "no_ffn": [90.0],
        "no_sab": [70.0],
        "drop_no_ffn": [-2.0],
        "drop_no_sab": [-22.0],
        "asymmetry": [-20.0],
        "none_worst": [-10.0],
        "diverges": None,
        "divergence_epoch": [33.0],
    }
    assert (entries["asa.skip.diverges"]["violations"], entries["asa.skip.diverges"]["cases"]) == (1, 1)
    assert {name: need["met"] for entry in entries.values() for name, need in entry.get("needs", {}).items()} == {
        "learnt": True,
        "off_floor": False,  # one seed has no interval
        "long_enough": True,
    }
    assert {entry["verdict"] for entry in entries.values()} == {judging.NOT_RUN}
    assert len(ledger.verdicts(tmp_path)) == len(claims.claims())


@pytest.mark.parametrize("shorter", [{"epochs": 59}, {"data": "fashion_mnist"}])
def test_other_trainings_than_the_notebooks_are_not_recorded(tmp_path, shorter):
    assert "skip removal: not recorded, 60 epochs on cifar10 would be needed" in gpu_check.record(
        found(**shorter), tmp_path
    )
    assert [path.name for path in (tmp_path / "gpu").iterdir()] == ["02_token_graying.json"]


@pytest.mark.parametrize(
    "notebook, claim", [("01_skip_removal", "asa.skip.both"), ("02_token_graying", "asa.time.svd.ratio")]
)
def test_what_a_notebook_recorded_is_kept(tmp_path, notebook, claim):
    ledger.record({claim: judging.Measurement((5.0, 5.1, 5.2))}, notebook=notebook, preset="gpu", folder=tmp_path)
    before = recorded(tmp_path, notebook)
    for _ in range(2):
        assert f"{notebook}: not recorded, the notebook has been run on a GPU" in gpu_check.record(found(), tmp_path)
    assert recorded(tmp_path, notebook) == before
    assert len(list((tmp_path / "gpu").iterdir())) == 2


def test_without_a_gpu_nothing_is_recorded(tmp_path):
    assert "no GPU" in gpu_check.record(found() | {"device": {"device": "cpu"}}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_rates_of_a_device_are_found_from_two_steps():
    small = gpu_check.recipe(CPU, "fashion_mnist", epochs=1)
    large = dataclasses.replace(small, model="deit_tiny_patch16_224", model_args={}, img_size=224, channels=3)
    seconds = [
        count * costs.image_flops(loop.train, config) / 5e13 + 0.04 for count, config in ((128, large), (256, small))
    ]
    steps = [{"step": "plain, compiled"}, {"step": "plain", "model": large.model, "batch": 128, "ms": 1e3 * seconds[0]}]
    found = gpu_check.rates(steps, {"loop": 256 / seconds[1]}, CPU, "fashion_mnist")
    assert found == {"teraflops": pytest.approx(50), "step": pytest.approx(0.04)}
