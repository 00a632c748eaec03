"""What the Makefile and the Snakefile call: execute a notebook, publish the results, check that none is stale.

    python -m lib.companion.workflow execute NOTEBOOK PRESET OUTPUT
    python -m lib.companion.workflow publish
    python -m lib.companion.workflow check
"""

import argparse
import hashlib
import json
import logging
import sys
from pathlib import Path

import nbformat

from lib import files
from lib.companion import fingerprint, ledger
from lib.companion.fingerprint import notebook_path, preset_path
from lib.errors import InputError

BUILD = files.ROOT / "build"
README = files.ROOT / "README.md"
LEDGER_START, LEDGER_END = "<!-- ledger: written by `make reproduce` -->\n", "<!-- end of ledger -->\n"


def execute(notebook: str, preset: str, output: Path) -> None:
    """Run a notebook in a preset with papermill, which shows its progress; raise InputError where a cell fails."""
    import papermill
    import yaml

    path = preset_path(notebook, preset)
    if preset != "quick" and not path.exists():
        raise InputError(f"{notebook} has no preset {preset!r}: {path.relative_to(files.ROOT)} does not exist")
    parameters = yaml.safe_load(path.read_text()) if preset != "quick" else {}
    logging.basicConfig(level=logging.WARNING, format=f"{notebook} | %(message)s", stream=sys.stdout)
    logging.getLogger("papermill").setLevel(logging.INFO)
    files.make_folder(output.parent)
    unfinished = output.with_suffix(".failed.ipynb")
    try:
        papermill.execute_notebook(notebook_path(notebook), unfinished, parameters, cwd=files.ROOT / "notebooks",
                                   kernel_name="python3", log_output=True, progress_bar=False,
                                   extra_arguments=["--log-level=ERROR"])
    except papermill.PapermillExecutionError as error:
        raise InputError(f"{notebook} ({preset}) failed in cell {error.exec_count}: {error.ename}: {error.evalue} "
                         f"(the notebook so far: {unfinished.relative_to(files.ROOT)})") from None
    unfinished.replace(output)


def publish() -> str:
    """Put the executed quick notebooks and the ledger where readers look; return what to tell the user."""
    for notebook in fingerprint.notebooks():
        _publish_notebook(notebook)
    before, _, rest = README.read_text().partition(LEDGER_START)
    _, _, after = rest.partition(LEDGER_END)
    files.write(README, before + LEDGER_START + ledger.markdown() + LEDGER_END + after)
    count = len(list((files.ROOT / "figures").glob("*.png")))
    return f"{ledger.markdown()}\n{count} figures in figures/, executed notebooks in notebooks/, ledger in data/ledger/"


def check() -> list[str]:
    """Return a line for every committed notebook, figure, ledger file or README table that is missing or stale."""
    return [problem for notebook in fingerprint.notebooks() for problem in _problems(notebook)] + _readme_problems()


def _publish_notebook(notebook: str) -> None:
    """Copy the outputs of the executed notebook into the committed one, free of times and paths."""
    executed = nbformat.read(BUILD / "quick" / f"{notebook}.ipynb", as_version=4)
    committed = nbformat.read(notebook_path(notebook), as_version=4)
    for source, target in zip(executed.cells, committed.cells, strict=True):
        if source.source != target.source:
            raise InputError(f"{notebook} changed while it was executed: run make reproduce again")
        if target.cell_type == "code":
            target.outputs, target.execution_count = source.outputs, source.execution_count
    committed.metadata["companion"] = {
        "inputs": fingerprint.inputs_fingerprint(notebook, "quick"),
        "figures": sorted(path.stem for path in (files.ROOT / "figures").glob("*.json")
                          if json.loads(path.read_text())["notebook"] == notebook)}
    files.write(notebook_path(notebook), nbformat.writes(committed) + "\n")


def _problems(notebook: str) -> list[str]:
    inputs = fingerprint.inputs_fingerprint(notebook, "quick")
    stored = nbformat.read(notebook_path(notebook), as_version=4).metadata.get("companion", {})
    problems = []
    if stored.get("inputs") != inputs:
        problems.append(f"notebooks/{notebook}.ipynb is stale: its code, rules, data or versions changed")
    for name in stored.get("figures", []):
        picture, sidecar = (files.ROOT / "figures" / f"{name}{suffix}" for suffix in (".png", ".json"))
        if not picture.exists() or not sidecar.exists():
            problems.append(f"figures/{name}.png or its sidecar is missing")
            continue
        content = json.loads(sidecar.read_text())
        if content["inputs"] != inputs:
            problems.append(f"figures/{name}.png is stale")
        if content["sha256"] != hashlib.sha256(picture.read_bytes()).hexdigest():
            problems.append(f"figures/{name}.png is not the picture its sidecar describes")
    return problems


def _readme_problems() -> list[str]:
    try:
        table = ledger.markdown()
    except InputError as error:
        return [f"ledger: {error}"]
    if LEDGER_START + table + LEDGER_END in README.read_text():
        return []
    return ["README.md does not show the ledger as it is stored"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lib.companion.workflow")
    commands = parser.add_subparsers(dest="command", required=True)
    executing = commands.add_parser("execute")
    executing.add_argument("notebook")
    executing.add_argument("preset")
    executing.add_argument("output", type=Path)
    commands.add_parser("publish")
    commands.add_parser("check")
    arguments = parser.parse_args()
    try:
        if arguments.command == "execute":
            execute(arguments.notebook, arguments.preset, arguments.output.resolve())
        elif arguments.command == "publish":
            print(publish())
        else:
            problems = [f"{problem}; run: make reproduce" for problem in check()]
            print("\n".join(problems) or "every notebook, figure and ledger entry is there and current")
            return bool(problems)
    except InputError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
