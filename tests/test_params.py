"""Parameters: what is declared, coerced, refused, and which preset it amounts to."""

import json

import pytest

from skiplab.companion import fingerprint, params
from skiplab.errors import InputError
from skiplab.models.skipless import SkiplessInit
from skiplab.training import loop

CELL = """epochs: int = 6  # passes over the training set
learning_rate: float = 1e-3  # peak
seeds: list[int] = [0, 1, 2]  # one run each
rates: list[float] = [0.1]
skip: str = "both"  # which skips
limit: int = 0  # images, 0: all
model_args: dict = {"depth": 6}
compile: bool = False
device: str = "cpu"
"""
DECLARED = params.declarations(CELL)
DEFAULTS = {name: declaration.default for name, declaration in DECLARED.items()}
RULES = {
    "epochs": params.between(1),
    "learning_rate": params.between(1e-6, 1.0),
    "seeds": params.between(0),
    "skip": params.choice("both", "none", "no_sab"),
}


def checked(**changes):
    return params.check(DEFAULTS | changes, DECLARED, RULES)


def test_defaults_pass_unchanged():
    assert checked() == DEFAULTS


@pytest.mark.parametrize(
    "given, value",
    [
        ({"learning_rate": "3e-4"}, 3e-4),
        ({"learning_rate": "1E-2"}, 0.01),
        ({"learning_rate": 1}, 1.0),
        ({"rates": [1, "2e-1"]}, [1.0, 0.2]),
        ({"limit": 5}, 5),
        ({"seeds": "[3, 4]"}, [3, 4]),
        ({"model_args": "{depth: 2}"}, {"depth": 2}),
    ],
)
def test_what_yaml_spells_differently_is_coerced(given, value):
    ((name, _),) = given.items()
    result = checked(**given)[name]
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"epoch": 3}, "unknown parameter 'epoch'; did you mean 'epochs'?"),
        ({"epochs": 0}, "epochs is 0; allowed: at least 1, nearest: 1"),
        ({"seeds": "[0, 1"}, "seeds is '[0, 1', which is no list[int] in YAML, such as [0, 1]"),
        ({"epochs": 2.5}, "epochs is 2.5, a float; it must be of type int"),
        ({"epochs": True}, "epochs is True, a bool; it must be of type int"),
        ({"epochs": "3"}, "epochs is '3', a str; it must be of type int"),
        ({"epochs": None}, "epochs is None, a NoneType; it must be of type int"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; it must be a finite number"),
        ({"rates": [0.1, "1e999"]}, "rates[1] is inf; it must be a finite number"),
        ({"rates": [0.1, 10**400]}, "rates[1] is a whole number of 401 digits; it must be at most 1.8e+308"),
        ({"limit": -(10**5000)}, "limit is a whole number of 5001 digits; it must be at least -1.8e+308"),
        ({"model_args": {"rate": float("inf")}}, "model_args['rate'] is inf; it must be a finite number"),
        ({"model_args": "{rates: [1, .nan]}"}, "model_args['rates'][1] is nan; it must be a finite number"),
        ({"model_args": "{since: 2024-01-01}"}, "model_args['since'] is datetime.date(2024, 1, 1), a date; it must be"),
        ({"model_args": "{1: 2}"}, "model_args has the entry 1, an int; names must be words"),
        ({"learning_rate": 5}, "learning_rate is 5.0; allowed: from 1e-06 to 1.0, nearest: 1.0"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast', a str; it must be of type float"),
        ({"learning_rate": True}, "learning_rate is True, a bool; it must be of type float"),
        ({"seeds": []}, "seeds is empty; give at least one value"),
        ({"seeds": 0}, "seeds is 0; it must be a list: list[int]"),
        ({"seeds": [0, 1, 0]}, "seeds is [0, 1, 0]; each value may occur only once"),
        ({"seeds": "0"}, "seeds is 0; it must be a list: list[int]"),
        ({"seeds": [0, "1"]}, "seeds[1] is '1', a str; it must be of type int"),
        ({"seeds": [0, -1]}, "seeds is -1; allowed: at least 0, nearest: 0"),
        ({"skip": "no_sap"}, "unknown skip 'no_sap'; did you mean 'no_sab'? (allowed: both, no_sab, none)"),
        ({"skip": False}, "skip is False; YAML reads yes, no, on and off as true and false: put it in quotes"),
        ({"limit": "all"}, "limit is 'all', a str; it must be of type int"),
        ({"model_args": 3}, "model_args is 3, a int; it must be of type dict"),
    ],
)
def test_bad_values_are_refused_in_one_line(given, message):
    with pytest.raises(InputError) as error:
        checked(**given)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_rule_for_a_name_that_is_not_declared_is_refused():
    with pytest.raises(InputError, match="unknown parameter in the rules 'epoch'"):
        params.check(DEFAULTS, DECLARED, {"epoch": params.between(1)})


APART = ("seed", "model_args")


@pytest.mark.parametrize(
    "rule, value, message",
    [
        (
            params.settings(loop.TrainConfig, *APART),
            {"mixupp": 0.2},
            "unknown entry of x: 'mixupp'; did you mean 'mixup'?",
        ),
        (
            params.settings(loop.TrainConfig, *APART),
            {"seed": 2},
            "x sets 'seed', which the data or another parameter decides",
        ),
        (params.settings(loop.TrainConfig), {"mixup": -1}, "x: mixup is -1; it must be at least 0"),
        (params.settings(loop.TrainConfig), {"mixup": "0.2"}, "x: mixup is '0.2', a str; it must be of type float"),
        (params.settings(loop.TrainConfig), {"clip": -1}, "x: clip is -1; it must be positive"),
        (params.settings(loop.TrainConfig), {"ema": 2}, "x: ema is 2; it must be at least 0 and below 1"),
        (
            params.settings(loop.TrainConfig),
            {"accumulation": 4, "batch_size": 6},
            "x: accumulation 4 does not divide batch_size 6",
        ),
        (params.settings(SkiplessInit, needed=("alpha",)), {"beta": 1.0}, "x lacks 'alpha'; it needs alpha"),
        (
            params.arguments("depth"),
            {"depth": 1},
            "x sets 'depth', which the data or another parameter decides; leave it out",
        ),
        (params.arguments("depth"), {"num_classes": 1}, "x sets 'num_classes'"),
        (
            params.entries(model=str, patch=int),
            {"modell": "swin", "patch": 4},
            "unknown entry of x: 'modell'; did you mean 'model'?",
        ),
        (params.entries(model=str, patch=int), {"model": "swin"}, "x lacks 'patch'; it needs model, patch"),
        (
            params.entries(model=str, patch=int),
            {"model": "swin", "patch": "4"},
            "x: patch is '4'; it must be of type int",
        ),
        (
            params.mapping(("svd", "dct"), params.between(0, 1)),
            {"svt": 1},
            "unknown entry of x: 'svt'; did you mean 'svd'?",
        ),
        (
            params.mapping(("svd", "dct"), params.between(0, 1)),
            {"svd": 2},
            "x: svd is 2; allowed: from 0 to 1, nearest: 1",
        ),
        (
            params.mapping(("svd", "dct"), params.between(0, 1)),
            {"svd": "a"},
            "x: svd is 'a', a str; it must be a number",
        ),
    ],
)
def test_what_is_wrong_within_a_dict_is_refused(rule, value, message):
    with pytest.raises(InputError) as error:
        rule("x", value)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_what_is_right_within_a_dict_passes():
    params.settings(loop.TrainConfig, "seed")("x", {"mixup": 0.8, "accumulation": 3})
    params.entries(model=str)("x", {})
    params.arguments("depth")("x", {"embed_dim": 8})


@pytest.mark.parametrize("notebook", fingerprint.notebooks())
def test_every_dict_of_a_notebook_has_a_rule(notebook):
    """Or is checked against the controls of its explorer, in notebook 07."""
    cells = fingerprint.notebook_code_cells(notebook)
    (place,) = (place for place, (_, tags) in enumerate(cells) if "parameters" in tags)
    checks = "\n".join(source for source, _ in cells[: place + 2])
    for name, declaration in params.declarations(cells[place][0]).items():
        if declaration.type == "dict" and not (notebook == "07_playground" and name != "vit_args"):
            assert f"{name}=params." in checks or f'"{name}"' in checks, name


@pytest.mark.parametrize(
    "cell, message",
    [
        ("epochs: int = 2 * 3", "epochs must be a literal such as .*, not 2 \\* 3"),
        ("s: list[int] = list(range(5))", "s must be a literal"),
    ],
)
def test_a_default_must_be_a_literal(cell, message):
    with pytest.raises(InputError, match=message):
        params.declarations(cell)


@pytest.mark.parametrize("cell", ["epochs = 3", "print(1)", "epochs: int"])
def test_a_parameters_cell_must_declare(cell):
    with pytest.raises(InputError, match="line 1: write 'name: type = literal"):
        params.declarations(cell)


class Shell:
    """A notebook that has executed some cells."""

    def __init__(self, *cells):
        self.user_ns = {"In": [""]}
        for cell in cells:
            self.run(cell)

    def run(self, cell):
        self.user_ns["In"].append(cell)
        exec(cell, self.user_ns)


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """Notebook 01_x with presets smoke and gpu; returns a function that executes cells and validates."""
    monkeypatch.setattr("skiplab.companion.fingerprint.ROOT", tmp_path)
    monkeypatch.setattr("skiplab.files.ROOT", tmp_path)
    monkeypatch.delenv(params.PRESET_VARIABLE, raising=False)
    monkeypatch.setenv(params.WORKFLOW_VARIABLE, "1")
    cell = {"cell_type": "code", "source": CELL, "metadata": {"tags": ["parameters"]}}
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01_x.ipynb").write_text(json.dumps({"cells": [cell]}))
    for preset, text in {"smoke": "epochs: 1\nseeds: [0]\n", "gpu": "epochs: 100\ndevice: cuda\n"}.items():
        path = tmp_path / "notebooks" / "presets" / preset / "01_x.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)

    def validate(*cells, shell=None):
        shell = shell or Shell(CELL, *cells)
        monkeypatch.setattr(params, "get_ipython", lambda: shell)
        return params.validate("01_x", **RULES)

    return validate


@pytest.mark.parametrize(
    "cells, preset",
    [
        ((), "quick"),
        (("# Parameters\nepochs = 100\n",), "gpu"),
        (("# Parameters\nepochs = 1\nseeds = [0]",), "smoke"),
        (("# Parameters\nepochs = 2",), "custom"),
        (("# Parameters\ndevice = 'cuda'",), "quick"),
        (("epochs = 7",), "custom"),
    ],
)
def test_the_preset_is_what_the_values_amount_to(notebook, cells, preset):
    result = notebook(*cells)
    assert result.preset == preset and result.notebook == "01_x"


def test_only_the_workflow_publishes_quick_results(notebook, monkeypatch):
    monkeypatch.delenv(params.WORKFLOW_VARIABLE)
    assert notebook().preset == "custom"
    assert notebook("# Parameters\nepochs = 100\n").preset == "gpu"


def test_a_parameters_cell_edited_by_hand_is_no_preset(notebook):
    shell = Shell(CELL.replace("epochs: int = 6", "epochs: int = 1"))
    assert notebook(shell=shell).preset == "custom"


def test_what_is_injected_wins_over_the_variable(notebook, monkeypatch):
    monkeypatch.setenv(params.PRESET_VARIABLE, "smoke")
    result = notebook("# Parameters\nepochs = 3\n")
    assert (result.epochs, result.seeds, result.preset) == (3, [0], "custom")


def test_a_misspelt_injected_name_is_refused(notebook):
    with pytest.raises(InputError, match="unknown parameter 'epoch'; did you mean 'epochs'"):
        notebook("# Parameters\nepoch = 2")


def test_running_the_parameters_cell_again_returns_to_its_values(notebook):
    shell = Shell(CELL, "# Parameters\nepochs = 100\n")
    assert notebook(shell=shell).epochs == 100
    shell.run(CELL)
    assert notebook(shell=shell).epochs == 6


def test_stray_names_of_the_namespace_never_trip(notebook):
    assert notebook("epoch = 3", "helper = 1").preset == "quick"


def test_the_variable_applies_a_preset(notebook, monkeypatch):
    monkeypatch.setenv(params.PRESET_VARIABLE, "smoke")
    result = notebook()
    assert (result.epochs, result.seeds, result.preset) == (1, [0], "smoke")
    monkeypatch.setenv(params.PRESET_VARIABLE, "smok")
    with pytest.raises(InputError, match="unknown preset 'smok'; did you mean 'smoke'"):
        notebook()
    monkeypatch.setenv(params.PRESET_VARIABLE, "paper")
    with pytest.raises(InputError, match="01_x has no preset 'paper'"):
        notebook()


def test_without_a_parameters_cell_it_says_what_to_do(notebook):
    with pytest.raises(InputError, match="run the cell tagged 'parameters' first"):
        notebook(shell=Shell("x = 1", "def f(): pass"))


def test_without_a_history_the_stored_declarations_count(notebook, monkeypatch):
    """nbval executes cells without keeping them."""
    monkeypatch.setenv(params.PRESET_VARIABLE, "smoke")
    shell = Shell(CELL)
    shell.user_ns["In"] = [""]
    assert notebook(shell=shell).preset == "smoke"


def test_asking_for_a_gpu_in_vain_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert params.device("auto") == "cpu"
    with pytest.raises(InputError, match="shows no GPU to torch; use 'cpu' or 'auto'"):
        params.device("cuda")


def test_an_input_error_shows_in_one_line():
    assert InputError("what")._render_traceback_() == ["InputError: what"]
