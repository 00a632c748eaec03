"""The jobs of the workflow: what each may use, what it waits for, what a preset would cost, and what failed.

A job executes one notebook in one preset. `workflow/resources.yaml` holds what it may use. Nothing here imports torch.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from skiplab import files
from skiplab.companion import fingerprint
from skiplab.errors import InputError, unknown

BUILD = files.ROOT / "build"
RESOURCES = files.ROOT / "workflow" / "resources.yaml"
# Notebooks whose runs others use: they go first. Not an input of the others: Snakemake would then not look at what else
# changed, and a run that is being computed elsewhere is waited for anyway.
USED = ("01_skip_removal",)
LAST_LINES = 3


@dataclass(frozen=True)
class Need:
    """What a job may use: cores, GPUs, GB of memory and disk, minutes; and how many jobs share its runs."""

    cores: int
    gpus: int
    memory: float
    disk: float
    minutes: int
    shares: int


def need(preset: str, notebook: str) -> Need:
    """Return what `workflow/resources.yaml` grants. Raises InputError where an entry is missing or makes no sense."""
    presets = yaml.safe_load(RESOURCES.read_text(encoding="utf-8"))
    if preset not in presets:
        raise unknown("preset in workflow/resources.yaml", preset, presets)
    entry = presets[preset].get(notebook) or presets[preset].get("default")
    names = [field.name for field in fields(Need)]
    if not isinstance(entry, dict) or sorted(entry) != sorted(names):
        raise InputError(f"workflow/resources.yaml: {preset} {notebook} is {entry!r}; it must give {', '.join(names)}")
    for name, value in entry.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value < (name in ("cores", "minutes", "shares"))
        ):
            raise InputError(
                f"workflow/resources.yaml: {preset} {notebook} has {name} {value!r}; it must be a number "
                "from 0 on, and from 1 for cores, minutes and shares"
            )
    return Need(**entry)


def shares(notebook: str, preset: str) -> list[str]:
    """Return the files under build/PRESET of the jobs that share a notebook's runs with its own."""
    return [f"shares/{notebook}.{share}.ipynb" for share in range(1, need(preset, notebook).shares)]


def priority(notebook: str) -> int:
    """Return how early a notebook's job goes among those that could: the highest number first."""
    return int(notebook in USED)


def state(notebook: str, preset: str) -> str:
    """Return whether a job's output is "current", "stale", "failed" or "missing"."""
    path = BUILD / preset / f"{notebook}.ipynb"
    if path.exists():
        made_of = _metadata(path).get("companion", {}).get("inputs")
        return "current" if made_of == fingerprint.inputs_fingerprint(notebook, preset) else "stale"
    return "failed" if path.with_suffix(".failed.ipynb").exists() else "missing"


def plan(preset: str, seconds: Mapping[str, float], runs: Mapping[str, int]) -> str:
    """Return a table of a preset's jobs: state, what each asks for, how long it should take, the sum of what is to do.

    `seconds` says how long each notebook's `runs` take one after the other on one device (a GPU, or a core where a job
    has none). A job's runs go side by side on its devices and those of the jobs that share them.
    """
    rows, hours, limit, gpu_hours, disk, tight = [], 0.0, 0.0, 0.0, 0.0, []
    for notebook in fingerprint.notebooks():
        asked, now = need(preset, notebook), state(notebook, preset)
        minutes = seconds[notebook] / 60 / asked.shares / (asked.gpus or asked.cores)
        path = BUILD / preset / f"{notebook}.ipynb"
        took = _metadata(path).get("companion", {}).get("seconds") if path.exists() else None
        rows.append(
            {
                "notebook": notebook,
                "state": now,
                "jobs": asked.shares,
                "cores": asked.cores,
                "GPUs": asked.gpus,
                "memory (GB)": f"{asked.memory:g}",
                "disk (GB)": f"{asked.disk:g}",
                "runs": runs[notebook],
                "training (min)": f"{minutes:.1f}",
                "limit (min)": asked.minutes,
                "took (min)": "" if took is None else f"{took / 60:.1f}",
            }
        )
        if minutes > asked.minutes:
            tight.append(notebook)
        if now != "current":
            hours, limit, disk = hours + minutes / 60, limit + asked.minutes / 60, disk + asked.disk
            gpu_hours += seconds[notebook] / 3600 if asked.gpus else 0
    lines = [
        f"to do in {preset}: {hours:.1f} hours of training from an empty store (limits: {limit:.1f}), "
        f"one notebook after the other; {gpu_hours:.0f} GPU hours; at most {disk:g} GB of disk"
    ]
    if tight:
        lines.append(f"more than its limit: {', '.join(tight)}; give it more in workflow/resources.yaml")
    return "\n".join([_columns([tuple(rows[0]), *(tuple(row.values()) for row in rows)]), *lines])


def failures(preset: str) -> list[str]:
    """Return a paragraph for every job of a preset that failed: its name, its log and the last lines of it."""
    logs, found = BUILD / preset / "logs", []
    outputs = {path.with_name(path.name.replace(".failed", "")) for path in (BUILD / preset).glob("**/*.failed.ipynb")}
    started = [logs.parent / ("shares" if "." in log.stem else "") / f"{log.stem}.ipynb" for log in logs.glob("*.log")]
    outputs |= {output for output in started if not output.exists()}  # a job's output is removed when it starts
    for output in sorted(outputs):
        name, unfinished = output.stem, output.with_suffix(".failed.ipynb")
        log = logs / f"{name}.log"
        said = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()] if log.exists() else []
        last = "".join(f"\n    {line}" for line in said[-LAST_LINES:]) or "\n    it said nothing"
        left = (
            f"the notebook so far {_relative(unfinished)}"
            if unfinished.exists()
            else "no cell of its notebook was executed"
        )
        found.append(f"{name} ({preset}) failed; its log is {_relative(log)}, {left}{last}")
    return found


def finished(started: float, inputs: str) -> dict:
    """Return the metadata of a notebook that was executed: what it was made of and how many seconds it took."""
    return {"inputs": inputs, "seconds": round(time.monotonic() - started, 1)}


def _metadata(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["metadata"]
    except (ValueError, KeyError):
        return {}


def _columns(rows: list[tuple]) -> str:
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _relative(path: Path) -> Path:
    return path.relative_to(files.ROOT) if path.is_relative_to(files.ROOT) else path
