"""Fingerprints of what a result depends on: code, notebook, preset, rules, data and pinned versions.

A fingerprint of code covers a module and everything of `skiplab` that it imports, by the syntax trees of the files:
comments, docstrings and layout do not make a result stale, a changed expression does.
Nothing here imports torch, so that a workflow with nothing to do answers at once.
"""

import ast
import functools
import hashlib
import json
import re
from pathlib import Path

import yaml

from skiplab.files import ROOT

OVERVIEW = "00_overview"  # shows what all the others found
PRESETS = ("quick", "replicate", "smoke", "gpu", "paper")
COMPUTED = ("quick", "replicate")  # presets without files: a notebook's own defaults, and these with other seeds

# The pinned packages that decide a number or the look of a figure.
DECIDING_PACKAGES = (
    "accelerate",
    "datasets",
    "lightly",
    "matplotlib",
    "numpy",
    "pandas",
    "pytorch-optimizer",
    "scipy",
    "seaborn",
    "timm",
    "torch",
    "torchvision",
)


def digest(value: object) -> str:
    """Return 16 hexadecimal digits that identify a JSON-like value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def code_fingerprint(*modules: str) -> str:
    """Fingerprint the named `skiplab` modules and every `skiplab` module they import."""
    return digest(reached_modules(*modules))


def reached_modules(*modules: str) -> dict[str, str]:
    """Return the named `skiplab` modules and all that they import, each with what counts of its source."""
    reached: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        path = _path(name)
        if path is None or name in reached:
            continue
        source = path.read_text(encoding="utf-8")
        reached[name] = _meaning(source)
        waiting += _imports(source)
    return reached


def reached_files(*modules: str) -> list[Path]:
    """Return the files of `reached_modules`."""
    return [path for name in reached_modules(*modules) if (path := _path(name))]


def notebook_code_cells(notebook: str) -> list[tuple[str, list[str]]]:
    """Return the source and the tags of a notebook's code cells."""
    cells = json.loads(notebook_path(notebook).read_text(encoding="utf-8"))["cells"]
    return [
        ("".join(cell["source"]), cell.get("metadata", {}).get("tags", []))
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def inputs_fingerprint(notebook: str, preset: str) -> str:
    """Fingerprint all that a notebook's results depend on in a preset; where it changes, they are stale.

    The overview depends on what every other notebook does, and on all claims.
    """
    code = "\n\n".join(source for source, _ in notebook_code_cells(notebook))
    claims = _claims((ROOT / "data" / "claims.yaml").read_text(encoding="utf-8"))
    preset_file = preset_path(notebook, preset)
    return digest(
        {
            "notebook": code,
            "code": code_fingerprint(*_imports(code)),
            "preset": yaml.safe_load(preset_file.read_text(encoding="utf-8")) if preset_file.exists() else None,
            "rules": {name: claim for name, claim in claims.items() if notebook in (claim["notebook"], OVERVIEW)},
            "others": [inputs_fingerprint(other, preset) for other in notebooks() if notebook == OVERVIEW != other],
            "data": [path.read_text(encoding="utf-8") for path in sorted((ROOT / "data").glob("*/SHA256SUMS"))],
            "versions": pinned_versions(),
        }
    )


def pinned_versions() -> list[str]:
    """Return the lines of requirements.lock that pin a package which decides results."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if re.split("[=<>;[ ]", line)[0] in DECIDING_PACKAGES]


def notebooks() -> list[str]:
    """Return the names of the project's notebooks, in order."""
    return sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def notebook_path(notebook: str) -> Path:
    """Return the file of a notebook."""
    return ROOT / "notebooks" / f"{notebook}.ipynb"


def preset_path(notebook: str, preset: str) -> Path:
    """Return the file of a notebook's preset; those of COMPUTED have none."""
    return ROOT / "notebooks" / "presets" / preset / f"{notebook}.yaml"


def _path(module: str) -> Path | None:
    """Return the file of a `skiplab` module, None for anything else."""
    base = ROOT.joinpath("lib", *module.split("."))
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in candidates if module.split(".")[0] == "skiplab" and path.exists()), None)


# The same texts are asked for many times: by every notebook, and by the overview once more.
@functools.cache
def _claims(text: str) -> dict[str, dict]:
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))["claims"]


def _imports(source: str) -> list[str]:
    """Return the `skiplab` modules that a source imports, and the packages they lie in."""
    names = _imported(source)
    packages = {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}
    return sorted(name for name in names | packages if _path(name))


@functools.cache
def _imported(source: str) -> set[str]:
    """Return what a source imports from `skiplab`: modules, and names that may be modules."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "skiplab"}


@functools.cache
def _meaning(source: str) -> str:
    """Return what a source says, whatever its comments, docstrings and layout, alike in every version of Python."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _docstring(node):
            del node.body[0]
    return _tree(tree)


def _docstring(node: ast.AST) -> bool:
    first = node.body[0] if node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def _tree(value: object) -> str:
    """Return a syntax tree as text; fields without content, as new Pythons add, are left out."""
    if isinstance(value, list):
        return f"[{' '.join(map(_tree, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [
        f"{name}={_tree(content)}"
        for name, content in ast.iter_fields(value)
        if content not in (None, []) and name not in ("ctx", "kind")
    ]
    return f"{type(value).__name__}({' '.join(fields)})"
