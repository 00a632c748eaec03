"""Reruns that survive: killed anywhere, with clocks that jump, many at once, and without growing.

COMPANION_KILLS says at how many random moments to kill (5; `make nightly`: 50).
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from skiplab import files
from skiplab.companion import claims, ledger, runs
from skiplab.companion.judging import Measurement, Need
from skiplab.training import checkpoint, loop
from test_loop import TINY, but

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("COMPANION_KILLS", 5))

# A small experiment that writes all that a notebook writes: runs, a figure with its sidecar, the ledger.
SCRIPT = """
import sys
from pathlib import Path
from test_loop import but
from skiplab import files
from skiplab.companion import figures, fingerprint, ledger, params, runs
from skiplab.training import loop

out = Path(sys.argv[1])
fingerprint.inputs_fingerprint = lambda *names: "inputs"
files.ROOT = out  # figures go there
print("READY", flush=True)
for seed in range(4):
    config = but(epochs=3, seed=seed, train_images=2000)
    run, = runs.load_or_run(loop.train, [config], workers=0)
    figure, axis = figures.plt.subplots()
    axis.plot([row["validation_loss"] for row in run.history])
    parameters = params.Parameters(notebook="01_skip_removal", preset="custom", seed=seed)
    figures.save(figure, f"seed_{seed}", parameters, [run.hash])
    ledger.record({"asa.skip.both": ledger.Measurement((run.result["test_top1"],), (run.hash,))},
                  notebook="01_skip_removal", preset="quick", folder=out / "ledger")
print("DONE", flush=True)
"""


def start(folder):
    folder.mkdir(exist_ok=True)
    environment = os.environ | {
        "COMPANION_RUNS": str(folder / "runs"),
        "PYTHONPATH": os.path.dirname(__file__),
        "COMPANION_FASHION_MNIST": str(files.ROOT / "data" / "fashion_mnist"),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        env=environment,
        text=True,
        cwd=files.ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = process.stdout.readline()
    assert said == "READY\n", said + process.stdout.read()
    return process


def finish(folder):
    said = start(folder).communicate(timeout=300)[0]
    assert "DONE" in said, said


def contents(folder):
    """Return all files that must not depend on interruptions, by path; times and machines stand in provenance alone."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("provenance.json", "result.json") and ".locks" not in path.parts
    }


def assert_whole(folder):
    """Every file that a reader may open is whole, whenever the writer was killed."""
    for path in folder.rglob("*"):
        if path.name.endswith(".tmp") or not path.is_file():
            continue
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            assert all(json.loads(line) for line in path.read_text().splitlines())
        elif path.suffix == ".safetensors":
            checkpoint.read(path)
        elif path.suffix == ".png":
            assert path.read_bytes()[-8:-4] == b"IEND"


def test_killed_at_random_moments_whatever_it_writes(tmp_path):
    undisturbed = start(tmp_path / "whole")
    begin = time.monotonic()
    assert "DONE" in undisturbed.communicate(timeout=300)[0]
    duration = time.monotonic() - begin
    expected, chance = contents(tmp_path / "whole"), random.Random(0)
    folder = tmp_path / "parts"
    for number in range(KILLS):
        process = start(folder)
        time.sleep(chance.random() * duration / 2)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert_whole(folder)
        if number % 5 == 4:  # now and then from the beginning, so that every stage is met
            finish(folder)
            assert contents(folder) == expected
            subprocess.run(["rm", "-r", str(folder)], check=True)
    finish(folder)
    assert contents(folder) == expected


def record_once(folder, number):
    ledger.record(
        {"asa.skip.both": Measurement((float(number),))}, notebook="01_skip_removal", preset="quick", folder=folder
    )
    ledger.record(
        {"anti.similarity.features": Measurement((0.1, 0.2, 0.3))},
        {name: Need(True, "so") for name in ("learnt", "beyond_untrained")},
        notebook="03_low_pass",
        preset="quick",
        folder=folder,
    )


def test_a_ledger_written_by_many_jobs_at_once_is_always_whole(tmp_path):
    with ProcessPoolExecutor(4, get_context("spawn")) as pool:
        waiting = [pool.submit(record_once, tmp_path, number) for number in range(40)]
        record_once(tmp_path, 0)
        while not all(future.done() for future in waiting):
            assert len(ledger.verdicts(tmp_path)) == len(claims.claims())
        for future in waiting:
            future.result()
    assert sorted(path.name for path in (tmp_path / "quick").iterdir()) == ["01_skip_removal.json", "03_low_pass.json"]


def test_a_clock_that_jumps_changes_nothing(store, monkeypatch):
    (first,) = runs.load_or_run(loop.train, [TINY], workers=0)
    for moment in (1e6, 4e9):  # 1970, 2096
        for path in store.rglob("*"):
            os.utime(path, (moment, moment))
        assert runs.load_or_run(loop.train, [TINY], workers=0) == [first]
    clock = iter(range(10**6, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))  # runs backwards
    (second,) = runs.load_or_run(loop.train, [but(seed=9)], workers=0)
    assert second.result["test_top1"] > 0


def test_ten_experiments_in_one_process_do_not_grow(tmp_path):
    """The most memory that the process ever held is at most 5 % above what it was after the second experiment."""
    script = (
        "import resource, sys; from pathlib import Path; from test_loop import but; from skiplab.training import loop\n"
        "for seed in range(10):\n"
        "    loop.train(but(seed=seed, epochs=2), Path(sys.argv[1]) / str(seed))\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=files.ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    sizes = [int(size) for size in done.stdout.split()]
    assert len(sizes) == 10 and sizes[-1] <= 1.05 * sizes[1], sizes
