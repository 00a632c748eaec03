"""Typed notebook parameters and their presets.

A notebook declares its parameters in one cell tagged `parameters`, a line each:

    epochs: int = 6  # passes over the training set

so that papermill can list and replace them. The next cell calls `validate`, which reads the declarations from the
history of executed cells, coerces what YAML spells differently, and refuses what it does not know: papermill only
warns about a misspelt name.
"""

import ast
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from types import SimpleNamespace

import yaml
from IPython import get_ipython

from skiplab import files
from skiplab.companion.fingerprint import COMPUTED, PRESETS, notebook_code_cells, preset_path
from skiplab.errors import InputError, check_plain, unknown

PRESET_VARIABLE = "COMPANION_PRESET"
WORKFLOW_VARIABLE = "COMPANION_WORKFLOW"  # set where the workflow runs a notebook: only its quick and replicate count
SEED_SHIFT = 1000  # what the preset replicate adds to every seed
EXECUTION_ONLY = ("device", "workers")  # parameters that do not make a run another experiment

Rule = Callable[[str, object], None]


class Parameters(SimpleNamespace):
    """The validated parameters as attributes, `notebook`, and the `preset` that they amount to.

    `preset` is smoke, gpu or paper if the values are exactly that preset's of the notebook as it is stored, quick or
    replicate if moreover the workflow runs it (their results are the committed ones), else custom.
    """

    def experiment(self) -> dict:
        """Return the parameters that decide numbers."""
        return {
            name: value for name, value in vars(self).items() if name not in ("notebook", "preset", *EXECUTION_ONLY)
        }


@dataclass(frozen=True)
class Declaration:
    """One line of the parameters cell."""

    type: str
    default: object


def validate(notebook: str, **rules: Rule) -> Parameters:
    """Check the parameters of the notebook that is running and return them.

    Call it in the cell after the parameters cell. `rules` maps parameter names to `between`
    or `choice`. The environment variable COMPANION_PRESET applies a preset where parameters cannot be injected (nbval).
    Raises InputError naming the parameter, its value, what is allowed and the nearest valid name.
    """
    namespace = get_ipython().user_ns
    history = namespace["In"]
    position = _parameters_cell(history)
    if position is None:  # nbval keeps no history, and cannot inject
        declared, injected = stored_declarations(notebook), set()
    else:
        declared = declarations(history[position])
        injected = _injected(history[position + 1 :], declared)
    if not set(declared) <= set(namespace):
        raise InputError(
            "no parameters cell has been executed: run the cell tagged 'parameters' first, each line "
            "'name: type = literal'"
        )
    values = {name: namespace[name] for name in declared}
    if preset := os.environ.get(PRESET_VARIABLE):
        values |= {
            name: value for name, value in preset_values(notebook, preset, declared).items() if name not in injected
        }
    checked = check(values, declared, rules)
    return Parameters(notebook=notebook, preset=_preset_of(checked, notebook, rules), **checked)


def check(values: dict, declared: dict[str, Declaration], rules: dict[str, Rule]) -> dict:
    """Return `values` coerced to their declared types, after applying the rules.

    Raises InputError for an unknown name, a wrong type or a value that breaks a rule.
    """
    for name in values:
        if name not in declared:
            raise unknown("parameter", name, declared)
    for name in rules:
        if name not in declared:
            raise unknown("parameter in the rules", name, declared)
    checked = {name: _coerce(name, value, declared[name].type) for name, value in values.items()}
    for name, rule in rules.items():
        if checked.get(name) is not None:
            rule(name, checked[name])
    return checked


def declarations(cell: str) -> dict[str, Declaration]:
    """Read the parameters cell: the type and the default of each name."""
    declared = {}
    for node in ast.parse(cell).body:
        if not isinstance(node, ast.AnnAssign) or node.value is None:
            raise InputError(f"parameters cell, line {node.lineno}: write 'name: type = literal  # help'")
        try:
            default = ast.literal_eval(node.value)
        except ValueError:
            raise InputError(
                f"parameters cell, line {node.lineno}: {node.target.id} must be a literal such as 3, "
                f"'text' or [1, 2], not {ast.unparse(node.value)}"
            ) from None
        declared[node.target.id] = Declaration(ast.unparse(node.annotation), default)
    return declared


def stored_declarations(notebook: str) -> dict[str, Declaration]:
    """Return the declarations of the notebook as it is stored."""
    (cell,) = (source for source, tags in notebook_code_cells(notebook) if "parameters" in tags)
    return declarations(cell)


def preset_values(notebook: str, preset: str, declared: dict[str, Declaration]) -> dict:
    """Return what a preset changes.

    Nothing for quick, the seeds for replicate, else the content of notebooks/presets/<preset>/<notebook>.yaml.
    """
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    if preset in COMPUTED:
        return other_seeds(declared) if preset == "replicate" else {}
    path = preset_path(notebook, preset)
    if not path.exists():
        raise InputError(f"{notebook} has no preset {preset!r}: {path.relative_to(files.ROOT)} does not exist")
    shown = path.relative_to(files.ROOT) if path.is_relative_to(files.ROOT) else path
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{shown} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError(f"{shown} holds {values!r:.60}; it must hold lines 'name: value'")
    for name in values:
        if name not in declared:
            raise unknown(f"parameter in {shown}:", name, declared)
    return values


def other_seeds(declared: dict[str, Declaration]) -> dict:
    """Return every parameter of seeds (`seed`, `seeds`, or a name that ends in one of these) with other seeds.

    Raises InputError where one would be a seed that the defaults use too.
    """
    defaults = {
        name: declaration.default for name, declaration in declared.items() if re.fullmatch(r"(\w+_)?seeds?", name)
    }
    shifted = {
        name: [seed + SEED_SHIFT for seed in default] if isinstance(default, list) else default + SEED_SHIFT
        for name, default in defaults.items()
    }
    used, new = ({seed for value in values.values() for seed in _each(value)} for values in (defaults, shifted))
    for seed in sorted(used & new):
        raise InputError(
            f"preset replicate adds {SEED_SHIFT} to every seed, and {seed} is one already; use seeds that "
            f"are less than {SEED_SHIFT} apart, such as {seed - 1}"
        )
    return shifted


def settings(kind: type, *decided: str, needed: tuple[str, ...] = ()) -> Rule:
    """Allow a dict of fields of the dataclass `kind` with values that it accepts; `decided` are those set elsewhere."""

    def rule(name: str, value: dict) -> None:
        _check_keys(name, value, [field.name for field in fields(kind)], decided, needed)
        required = {
            field.name: field.type(1) for field in fields(kind) if field.default is field.default_factory is MISSING
        }
        if "accumulation" in value:  # it must divide the batch, which may be a parameter of its own
            required["batch_size"] = value["accumulation"]
        try:
            kind(**required | value)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None

    return rule


def arguments(*decided: str, needed: tuple[str, ...] = ()) -> Rule:
    """Allow a dict of a model's arguments, but none that the data or another parameter decides."""
    apart = (*decided, "num_classes", "img_size", "in_chans", "skip", "init")
    return lambda name, value: _check_keys(name, value, None, apart, needed)


def entries(**types: type) -> Rule:
    """Allow an empty dict, or one of exactly these entries, each of its type."""

    def rule(name: str, value: dict) -> None:
        _check_keys(name, value, types, (), tuple(types) if value else ())
        for key, item in value.items():
            if type(item) is not types[key]:
                raise InputError(f"{name}: {key} is {item!r}; it must be of type {types[key].__name__}")

    return rule


def mapping(keys: Iterable[str], values: Rule) -> Rule:
    """Allow a dict of these keys, each with a value that keeps the rule `values`."""

    def rule(name: str, value: dict) -> None:
        _check_keys(name, value, keys, (), ())
        for key, item in value.items():
            values(f"{name}: {key}", item)

    return rule


def _check_keys(
    name: str, value: dict, allowed: Iterable[str] | None, decided: Iterable[str], needed: Iterable[str]
) -> None:
    for key in value:
        if key in decided:
            raise InputError(f"{name} sets {key!r}, which the data or another parameter decides; leave it out")
        if allowed is not None and key not in allowed:
            raise unknown(f"entry of {name}:", key, set(allowed) - set(decided))
    for key in needed:
        if key not in value:
            raise InputError(f"{name} lacks {key!r}; it needs {', '.join(needed)}")


def between(low: float, high: float = float("inf")) -> Rule:
    """Allow numbers from `low` to `high`, both included; for a list, each of its numbers."""

    def rule(name: str, value: object) -> None:
        for number in _each(value):
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise InputError(f"{name} is {number!r}, a {type(number).__name__}; it must be a number")
            if not low <= number <= high:
                limit = f"at least {low}" if high == float("inf") else f"from {low} to {high}"
                raise InputError(f"{name} is {number}; allowed: {limit}, nearest: {min(max(low, number), high)}")

    return rule


def choice(*allowed: object) -> Rule:
    """Allow only the given values; for a list, each of its items."""

    def rule(name: str, value: object) -> None:
        for item in _each(value):
            if item not in allowed:
                raise unknown(name, item, allowed)

    return rule


def device(name: str) -> str:
    """Turn 'auto' into the GPU if there is one, else the CPU. Raises InputError where a GPU is asked for in vain."""
    import torch  # the workflow imports this module for each of its jobs, and does not need torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device is 'cuda', but this machine shows no GPU to torch; use 'cpu' or 'auto'")
    return name


def _each(value: object) -> list:
    return value if isinstance(value, list) else [value]


def _coerce(name: str, value: object, kind: str) -> object:
    """Convert `value` to the declared type where nothing is lost; refuse it in words otherwise."""
    if isinstance(value, str) and (kind == "dict" or kind.startswith("list[")):
        try:
            value = yaml.safe_load(value)  # papermill -p passes lists and dicts as text
        except yaml.YAMLError as error:
            raise InputError(f"{name} is {value!r}, which is no {kind} in YAML, such as [0, 1] or {{a: 1}}") from error
    if isinstance(value, str) and kind == "float" and re.fullmatch(r"[-+]?\d+\.?\d*[eE][-+]?\d+", value):
        value = float(value)  # YAML reads 3e-4 as a string
    check_plain(name, value)
    if kind.startswith("list["):
        if not isinstance(value, list):
            raise InputError(f"{name} is {value!r}; it must be a list: {kind}")
        if not value:
            raise InputError(f"{name} is empty; give at least one value")
        items = [_coerce(f"{name}[{index}]", item, kind[5:-1]) for index, item in enumerate(value)]
        if len(set(map(repr, items))) < len(items):
            raise InputError(f"{name} is {value!r}; each value may occur only once")
        return items
    if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind == "str" and isinstance(value, bool):
        raise InputError(f"{name} is {value}; YAML reads yes, no, on and off as true and false: put it in quotes")
    types = {"int": int, "str": str, "bool": bool, "dict": dict}
    if kind in types and type(value) is types[kind]:
        return value
    raise InputError(f"{name} is {value!r}, a {type(value).__name__}; it must be of type {kind}")


def _parameters_cell(history: list[str]) -> int | None:
    """Return the position of the latest executed cell that consists of declarations, None where there is none."""
    for position in range(len(history) - 1, -1, -1):
        try:
            body = ast.parse(history[position]).body
        except SyntaxError:  # a cell with an IPython magic
            continue
        if body and all(isinstance(node, ast.AnnAssign) for node in body):
            return position
    return None


def _injected(later_cells: list[str], declared: dict[str, Declaration]) -> set[str]:
    """Return the names that papermill injected, refusing one that nobody declared; its cell opens with '# Parameters'.

    The cell's source is read, not the namespace, so that re-running cells by hand never trips.
    """
    names = {
        node.targets[0].id
        for cell in later_cells
        if cell.lstrip().startswith("# Parameters")
        for node in ast.parse(cell).body
    }
    for name in sorted(names - set(declared)):
        raise unknown("parameter", name, declared)
    return names


def _preset_of(checked: dict, notebook: str, rules: dict[str, Rule]) -> str:
    """Name the preset of the stored notebook whose values these are; custom where they are nobody's."""

    def experiment(values: dict) -> dict:
        return {name: value for name, value in values.items() if name not in EXECUTION_ONLY}

    declared = stored_declarations(notebook)
    defaults = {name: declaration.default for name, declaration in declared.items()}
    for preset in PRESETS:
        if preset in COMPUTED and WORKFLOW_VARIABLE not in os.environ:
            continue
        if preset in COMPUTED or preset_path(notebook, preset).exists():
            expected = check(defaults | preset_values(notebook, preset, declared), declared, rules)
            if experiment(expected) == experiment(checked):
                return preset
    return "custom"
