"""The notebooks as a reader, papermill and nbval need them: executed, quiet, thin, and every line runs."""

import json
import os
import re
import subprocess
import sys
from collections import Counter

import nbformat
import pytest
import yaml

import standin
from skiplab import files
from skiplab.companion import fingerprint, params
from skiplab.models import zoo
from skiplab.training import dense
from workflow.cpus import NBVAL
from workflow.execute import execute

NOTEBOOKS = fingerprint.notebooks()
IGNORED = "nbval-ignore-output"


def cells(notebook):
    return nbformat.read(fingerprint.notebook_path(notebook), as_version=4).cells


def code_cells(notebook):
    return [cell for cell in cells(notebook) if cell.cell_type == "code" and cell.source.strip()]


def tags(cell):
    return cell.metadata.get("tags", [])


def test_every_notebook_is_tested_and_every_claim_has_its_notebook():
    assert {path.stem for path in (files.ROOT / "notebooks").glob("*.ipynb")} == set(NOTEBOOKS)
    assert NOTEBOOKS[0] == "00_overview" and len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_it_opens_with_a_question_and_declares_its_parameters_once(notebook):
    first = cells(notebook)[0]
    assert first.cell_type == "markdown" and re.match(r"# .*\?", first.source)
    (declaring,) = [cell for cell in code_cells(notebook) if "parameters" in tags(cell)]
    assert all("  # " in line for line in declaring.source.splitlines())
    params.declarations(declaring.source)


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_it_was_executed_in_order_and_is_quiet(notebook):
    found = code_cells(notebook)
    assert [cell.execution_count for cell in found] == list(range(1, len(found) + 1))
    text = json.dumps([cell.outputs for cell in found])
    assert "stderr" not in [output.get("name") for cell in found for output in cell.outputs]
    assert not re.search(r'"output_type": "error"|/(home|root|tmp|Users|work)/|object at 0x', text)
    assert fingerprint.notebook_path(notebook).stat().st_size < 2_000_000


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_it_is_thin(notebook):
    for cell in code_cells(notebook):
        if "parameters" not in tags(cell):
            assert len([line for line in cell.source.splitlines() if line.strip()]) <= 15, cell.source
        assert not re.search(r"^class |\.backward\(|\.step\(|^[%!]", cell.source, re.M), cell.source


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_nbval_compares_at_least_half_of_the_outputs(notebook):
    printing = [cell for cell in code_cells(notebook) if cell.outputs]
    compared = [cell for cell in printing if IGNORED not in tags(cell)]
    assert len(compared) >= len(printing) / 2 >= 1


@pytest.mark.parametrize("notebook", NOTEBOOKS)
@pytest.mark.parametrize("preset", ["smoke", "gpu", "paper"])
def test_every_preset_names_declared_parameters_of_the_right_type(notebook, preset):
    (declaring,) = [cell for cell in code_cells(notebook) if "parameters" in tags(cell)]
    declared = params.declarations(declaring.source)
    values = params.preset_values(notebook, preset, declared)
    defaults = {name: declaration.default for name, declaration in declared.items()}
    assert set(params.check(defaults | values, declared, {})) == set(declared)


COUNT_RUNS = """import collections, json, sys
from workflow import costs
asked = costs.configurations(sys.argv[1], "smoke").values()
print(json.dumps(collections.Counter(function.__name__ for function, _ in asked)))"""


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_nbval_in_the_smoke_preset_and_the_plan_knows_its_runs(notebook, store):
    environment = os.environ | {params.PRESET_VARIABLE: "smoke"}
    done = subprocess.run(
        [sys.executable, *NBVAL, f"notebooks/{notebook}.ipynb"],
        cwd=files.ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert f"{len(code_cells(notebook))} passed" in done.stdout
    rehearsed = subprocess.run(
        [sys.executable, "-c", COUNT_RUNS, notebook], cwd=files.ROOT, capture_output=True, text=True
    )
    computed = Counter(path.parent.parent.name for path in store.glob("*/*/result.json"))
    computed.pop("evaluate", None)  # scores of frozen features
    assert json.loads(rehearsed.stdout) == computed


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Tiny stand-ins in the layout of every data set that the presets name."""
    for name in ("cifar10", "tiny-imagenet", "imagenet-1k"):
        standin.make(name, tmp_path / name, images_per_class=8 if name == "cifar10" else 2)
        monkeypatch.setenv("COMPANION_" + name.upper().replace("-", "_"), str(tmp_path / name))
    for name in dense.SETS:
        standin.make_dense(name, tmp_path / name)
        monkeypatch.setenv(f"COMPANION_{name.upper()}", str(tmp_path / name))


FEW = {
    "epochs": 1,
    "deep_epochs": 1,
    "batch_size": 4,
    "device": "cpu",
    "workers": 0,
    "kappa_images": 4,
    "images": 2,
    "diagram_depths": [1],
    "seeds": [0],
    "diagram_seeds": [0],
    "train_images": 10,
    "test_images": 4,
    "cases": 20,
    "draws": 20,
    "search_steps": 2,
    "jacobian_tokens": 4,
    "accumulation": 1,
    "peer_epochs": 1,
    "peer_images": 10,
    "mae_epochs": 1,
    "mae_finetune_epochs": 1,
    "mae_batch_size": 4,
    "mae_images": 10,
    "timing_batch": 1,
    "timing_rounds": 1,
    "worker_images": 24,
    "depth": 2,
    "spectra_depths": [1, 2],
    "alphas": [2.0],
    "betas": [0.6],
    "cs": [3.0],
    "dino_depth": 2,
    "dino_epochs": 1,
    "dino_batch_size": 4,
    "scene_size": 32,
    "train_scenes": 2,
    "test_scenes": 2,
    "probe_epochs": 1,
    "deep": 3,
    "fine_epochs": 1,
    "factorial_depth": 2,
    "factorial_epochs": 1,
    "factorial_seeds": [0],
    "timing_images": 2,
}
NARROW = {"embed_dim": 24, "num_heads": 2}
# The size that a preset's models keep here: their patches, windows and stages, but neither width nor depth.
SHRUNK = {
    "vit_args": NARROW,
    "dino_vit_args": NARROW,
    "spectra_args": NARROW,
    "convmixer_args": {"dim": 16, "depth": 2},
    "mae_args": {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2},
    "dino_recipe": {"outputs": 64, "hidden_dim": 32, "bottleneck_dim": 16},
}

ONLY = {
    "02_token_graying": {"kappa_images": 1},  # float64 decompositions of 3,136 tokens at every layer of a Swin
    "05_anti_oversmoothing": {"epsilons": {"dct": 0.95}},
}  # one form of graying


def small(model, args):
    """Return a model's arguments, narrow, with one or two blocks a stage (a Swin's windows shift in every second)."""
    stages = len(args.get("depths", range(4)))
    staged = {"depths": [2] + [1] * (stages - 1), "num_heads": [2**stage for stage in range(stages)]}
    if model.startswith("swin"):
        return args | staged | {"embed_dim": 16}
    if model.startswith("pvt"):
        return args | staged | {"embed_dims": [8 * 2**stage for stage in range(stages)]}
    return args | NARROW | {"depth": 2}


def two_batches(notebook, values):
    """Keep a preset's families of models, its data and its recipe; only a first rate, a first seed and a few steps."""
    (declaring,) = [cell for cell in code_cells(notebook) if "parameters" in tags(cell)]
    declared = params.declarations(declaring.source)
    firsts = {name: value[:1] for name, value in values.items() if isinstance(value, list)}
    few = {name: value for name, value in FEW.items() if name in declared}
    if "recipe" in values:
        tests = {} if "test_images" in declared else {"test_images": 4}  # where it is no parameter of its own
        few["recipe"] = values["recipe"] | tests | {"accumulation": 1}
    few |= {
        name: values[name] | {"batch_size": 4, "accumulation": 1}
        for name in ("deep_recipe", "fine_recipe")
        if name in values
    }
    if (
        values.get("data") == "imagenet-1k" and notebook != "06_skipless"
    ):  # few tokens, but as many as a Swin's windows need
        few |= {
            name: side
            for name, side in (("img_size", 64), ("peer_img_size", 224), ("swin_img_size", 224))
            if name in declared
        }
    few |= {
        f"{name}_args": small(values[name], values.get(f"{name}_args", {}))
        for name in ("cait", "swin")
        if name in values
    }
    few |= {name: value | {"args": small(value["model"], value["args"])} for name, value in peers(values).items()}
    shrunk = {name: values[name] | changes for name, changes in SHRUNK.items() if name in values}
    return values | firsts | few | shrunk | ONLY.get(notebook, {})


def peers(values):
    """Return the parameters that hold a model's name beside its arguments."""
    return {name: value for name, value in values.items() if isinstance(value, dict) and "model" in value}


def models(values):
    """Return (name, arguments) of every model that a preset trains, at its full size."""
    named = [
        (values[name], values.get(f"{name}_args", {}), values.get(depth))
        for name, depth in (("vit", "depth"), ("vit", "deep"), ("dino_vit", "dino_depth"), ("cait", ""), ("swin", ""))
        if name in values
    ]
    return [(name, args | ({"depth": depth} if depth else {})) for name, args, depth in named] + [
        (peer["model"], peer["args"]) for peer in peers(values).values()
    ]


SIDES = {"cifar10": 32, "tiny-imagenet": 64, "imagenet-1k": 224}  # pixels, where a preset leaves them as they are


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["gpu", "paper"])
def test_the_models_of_the_large_presets_exist_in_full_size(preset):
    built = 0
    for notebook in NOTEBOOKS:
        values = yaml.safe_load(params.preset_path(notebook, preset).read_text()) or {}
        for model, args in models(values):
            side = values.get("img_size") or SIDES[values["data"]]
            net = zoo.create_model(model, num_classes=10, img_size=side, **args)
            blocks = sum(args["depths"]) if "depths" in args else args.get("depth", 1)
            assert len(zoo.blocks(net)) >= blocks
            built += 1
    assert built >= 12


@pytest.mark.slow
@pytest.mark.parametrize("notebook", [name for name in NOTEBOOKS if name != "00_overview"])
@pytest.mark.parametrize("preset", ["gpu", "paper"])
def test_every_large_preset_runs_for_two_batches(notebook, preset, hub, store, tmp_path, monkeypatch):
    values = yaml.safe_load(params.preset_path(notebook, preset).read_text())
    parameters = tmp_path / "few.yaml"
    parameters.write_text(yaml.safe_dump(two_batches(notebook, values)))
    monkeypatch.setattr(params, "preset_path", lambda *names: parameters)
    execute(notebook, preset, tmp_path / "out.ipynb")
    assert (tmp_path / "out.ipynb").exists()


@pytest.mark.slow
def test_a_misspelt_parameter_ends_in_one_line_and_leaves_nothing(store):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "papermill",
            "notebooks/01_skip_removal.ipynb",
            os.devnull,
            "--cwd",
            "notebooks",
            "-p",
            "epoch",
            "2",
            "--no-progress-bar",
        ],
        cwd=files.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "InputError: unknown parameter 'epoch'; did you mean 'epochs'?" in done.stderr
    assert not store.exists()
