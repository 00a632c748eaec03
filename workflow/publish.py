"""Put results where readers look (notebooks, README, benchmarks), and say which of them are missing or stale."""

import hashlib
import json
import os
import subprocess
import sys

import nbformat

from skiplab import files
from skiplab.companion import fingerprint, ledger, replication, tables
from skiplab.companion.fingerprint import notebook_path
from skiplab.errors import InputError
from workflow.jobs import BUILD

README, LEDGER_PAGE = files.ROOT / "README.md", files.ROOT / "LEDGER.md"
LEDGER_WORDS = """Written by `make reproduce`. Each claim with the value claimed beside the measured one: the mean, and
in brackets its interval at 90 %. `data/claims.yaml` holds the claims, their sources, and the rules that decide them."""
BENCHMARKS = files.ROOT / "benchmarks"
LEDGER_START, LEDGER_END = "<!-- ledger: written by `make reproduce` -->\n", "<!-- end of ledger -->\n"
RERUN_START, RERUN_END = "<!-- rerun: written by `make reproduce` and `make replicate` -->\n", "<!-- end of rerun -->\n"
# Benchmarks whose stored results the README shows, each between two comments.
SHOWN = {
    "cpus": ("<!-- processors: written by `make reproduce` -->\n", "<!-- end of processors -->\n"),
    "loop": ("<!-- training loop: written by `make reproduce` -->\n", "<!-- end of training loop -->\n"),
    "reliability": ("<!-- reliability: written by `make reproduce` -->\n", "<!-- end of reliability -->\n"),
}


def publish() -> str:
    """Put the executed quick notebooks and the ledger where readers look; return what to tell the user."""
    for notebook in fingerprint.notebooks():
        _publish_notebook(notebook)
    files.write(README, _current_readme())
    files.write(LEDGER_PAGE, _current_ledger())
    count = len(list((files.ROOT / "figures").glob("*.png")))
    return f"{tables.counts()}\n{count} figures in figures/, executed notebooks in notebooks/, every claim in LEDGER.md"


def compare() -> str:
    """Show in the README, and return, how the run with other seeds compares. Raises InputError where it contradicts."""
    pairs = replication.compare()
    files.write(README, _current_readme())
    if contradictions := replication.contradictions(pairs):
        print(replication.report(pairs))
        raise InputError(contradictions)
    return replication.report(pairs)


def check() -> list[str]:
    """Return a line for every committed notebook, figure, ledger file or README table that is missing or stale."""
    return [problem for notebook in fingerprint.notebooks() for problem in _problems(notebook)] + _readme_problems()


def _publish_notebook(notebook: str) -> None:
    """Copy the outputs of the executed notebook into the committed one, free of times and paths."""
    output = BUILD / "quick" / f"{notebook}.ipynb"
    executed = nbformat.read(output, as_version=4)
    committed = nbformat.read(notebook_path(notebook), as_version=4)
    inputs = fingerprint.inputs_fingerprint(notebook, "quick")
    if executed.metadata.get("companion", {}).get("inputs") != inputs:
        output.unlink()
        raise InputError(f"{notebook} was executed with other code, rules, data or versions: run make reproduce again")
    code = [[cell for cell in book.cells if cell.cell_type == "code"] for book in (executed, committed)]
    for source, target in zip(*code, strict=True):
        target.outputs, target.execution_count = source.outputs, source.execution_count
    figures = [
        path.stem
        for path in (files.ROOT / "figures").glob("*.json")
        if json.loads(path.read_text(encoding="utf-8"))["notebook"] == notebook
    ]
    committed.metadata["companion"] = {"inputs": inputs, "figures": sorted(figures), "ledger": _ledger_digest(notebook)}
    files.write(notebook_path(notebook), nbformat.writes(committed) + "\n")


def _ledger_digest(notebook: str) -> str | None:
    path = ledger.LEDGER / "quick" / f"{notebook}.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def _problems(notebook: str) -> list[str]:
    inputs = fingerprint.inputs_fingerprint(notebook, "quick")
    stored = nbformat.read(notebook_path(notebook), as_version=4).metadata.get("companion", {})
    problems = []
    if stored.get("inputs") != inputs:
        problems.append(f"notebooks/{notebook}.ipynb is stale: its code, rules, data or versions changed")
    if stored.get("ledger") != _ledger_digest(notebook):
        problems.append(f"data/ledger/quick/{notebook}.json is not what the notebook recorded")
    for name in stored.get("figures", []):
        picture, sidecar = (files.ROOT / "figures" / f"{name}{suffix}" for suffix in (".png", ".json"))
        if not picture.exists() or not sidecar.exists():
            problems.append(f"figures/{name}.png or its sidecar is missing")
            continue
        content = json.loads(sidecar.read_text(encoding="utf-8"))
        if content["inputs"] != inputs:
            problems.append(f"figures/{name}.png is stale")
        if content["sha256"] != hashlib.sha256(picture.read_bytes()).hexdigest():
            problems.append(f"figures/{name}.png is not the picture its sidecar describes")
    return problems


def benchmark(name: str) -> str:
    """Run benchmarks/NAME.py on one thread and store what it prints, with what it ran on; return that."""
    from skiplab.companion import provenance  # it needs torch, which checking and publishing can do without

    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}"],
        cwd=files.ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        encoding="utf-8",
    )
    if done.returncode:
        raise InputError(f"benchmarks/{name}.py failed: {done.stderr.strip().splitlines()[-1]}")
    machine, versions, git = provenance.machine("cpu"), provenance.versions(), provenance.git_state()
    commit = (git["commit"] or "unknown")[:8]
    text = (
        f"`python -m benchmarks.{name}` with torch {versions['torch']} on one thread of {machine['cores']} cores "
        f"({machine['device_name']}), commit {commit}{' and changes' if git['dirty'] else ''}:\n\n"
    )
    files.write(BENCHMARKS / "results" / f"{name}.md", text + done.stdout)
    return text + done.stdout


def _current_ledger() -> str:
    """Return LEDGER.md: every claim with what was measured."""
    return f"# The ledger\n\n{LEDGER_WORDS}\n\n{tables.markdown()}"


def _current_readme() -> str:
    """Return README.md with the ledger, the rerun and the benchmarks as they are stored."""
    text = README.read_text(encoding="utf-8")
    blocks = [(LEDGER_START, LEDGER_END, tables.counts()), (RERUN_START, RERUN_END, replication.section())]
    for name, (start, end) in SHOWN.items():
        stored = BENCHMARKS / "results" / f"{name}.md"
        if stored.exists():
            blocks.append((start, end, stored.read_text(encoding="utf-8")))
    for start, end, content in blocks:
        before, _, rest = text.partition(start)
        text = before + start + content + end + rest.partition(end)[2]
    return text


def _readme_problems() -> list[str]:
    try:
        pages = {README: _current_readme(), LEDGER_PAGE: _current_ledger()}
        stale = [
            path.name for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
        return [f"{name} does not show the results as they are stored" for name in stale]
    except InputError as error:
        return [f"ledger: {error}"]
