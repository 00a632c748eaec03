"""What the workflow costs beside bare papermill: seconds a job, and a run with nothing to do.

    python -m benchmarks.workflow [--rounds 5]

Both execute the overview, they take turns, and medians are reported. A third row is what a run loses that is killed and
resumed: the share of an epoch that its checkpoint costs, since it resumes at the last epoch's end.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from skiplab import files
from skiplab.companion import fingerprint
from skiplab.training import loop

CONFIG = loop.TrainConfig(
    data="fashion_mnist",
    model="vit",
    seed=0,
    epochs=1,
    learning_rate=1e-3,
    model_args={"embed_dim": 48, "depth": 8, "num_heads": 3, "patch_size": 7},
)


def seconds(*command: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", *command], cwd=files.ROOT, check=True, capture_output=True)
    return time.perf_counter() - start


def workflow(folder: Path, *more: str) -> float:
    return seconds(
        "snakemake",
        "--snakefile",
        "Snakefile",
        "--directory",
        str(folder),
        "--cores",
        "all",
        "--nolock",
        "--rerun-triggers",
        "params",
        "input",
        *more,
        "--config",
        "preset=smoke",
        "--",
        f"build/smoke/{fingerprint.OVERVIEW}.ipynb",
    )


def checkpoint_share() -> float:
    """Return what writing a checkpoint costs, as a share of an epoch."""
    with tempfile.TemporaryDirectory() as folder:
        run = loop._Run(CONFIG, Path(folder))
        start = time.perf_counter()
        run.advance()
        middle = time.perf_counter()
        run.save()
        return (time.perf_counter() - middle) / (middle - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    overheads, nothing = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for notebook in fingerprint.notebooks():  # what the overview waits for is there
            files.write(folder / "build" / "smoke" / f"{notebook}.ipynb", "")
        for _ in range(arguments.rounds):
            bare = seconds(
                "papermill", f"notebooks/{fingerprint.OVERVIEW}.ipynb", f"{name}/out.ipynb", "--cwd", "notebooks"
            )
            overheads.append(workflow(folder, "--force") - bare)
            nothing.append(workflow(folder))
    print(f"| measured | median of {arguments.rounds} | wanted |\n|---|---|---|")
    print(f"| workflow over bare papermill, a job (s) | {statistics.median(overheads):.1f} | ≤ 3 |")
    print(f"| a run with nothing to do (s) | {statistics.median(nothing):.1f} | ≤ 10 |")
    print(f"| writing a checkpoint / an epoch | {checkpoint_share():.4f} | |")


if __name__ == "__main__":
    main()
