"""One process of a run that several compute together: what a launcher starts, on one machine or on many.

    torchrun --nproc-per-node 4 -m skiplab.companion.member skiplab.training.loop:train data/runs/train/HASH

The run store calls it where the environment variable COMPANION_LAUNCH holds a launcher; see `skiplab.companion.job`.
Every process reads the run's config.json and computes; the first one writes metrics.jsonl and, at the end,
outcome.json. One that cannot go on writes why to failure.json, since launchers report only a status.
"""

import importlib
import json
import os
import sys
import typing
from pathlib import Path

from skiplab import files
from skiplab.errors import InputError, run_command
from skiplab.training.ambient import isolated

FAILURE = "failure.json"


def compute(function: str, folder: str) -> None:
    """Compute the run whose folder is given."""
    module, _, name = function.partition(":")
    target = getattr(importlib.import_module(module), name)
    path = Path(folder)
    config = typing.get_type_hints(target)["config"](**json.loads((path / "config.json").read_text(encoding="utf-8")))
    try:
        with isolated():
            result = target(config, path, lambda rows: files.write(path / "metrics.jsonl", lines(rows)))
    except InputError as error:
        files.write(path / FAILURE, json.dumps({"kind": type(error).__name__, "message": str(error)}))
        raise
    if os.environ.get("RANK", "0") == "0":
        files.write(path / "outcome.json", json.dumps(result))


def lines(rows: list[dict]) -> str:
    """Return rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    sys.exit(run_command(compute, *sys.argv[1:]))
