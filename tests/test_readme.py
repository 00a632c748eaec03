"""Every command of the README works: each is run here, long ones as far as they can be without computing for hours."""

import os
import re
import subprocess
import sys

import pytest

from skiplab.files import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines() if line]
SMOKE = "-f notebooks/presets/smoke/01_skip_removal.yaml"
SHORT = f".venv/bin/papermill notebooks/01_skip_removal.ipynb {os.devnull} {SMOKE}"

# How each command is run here. A make target is expanded; what it would start is run by the tests of the workflow.
RUN = {
    "make reproduce": "make --dry-run reproduce",
    "make replicate": "make --dry-run replicate",
    "make test": "make --dry-run test",
    "make pretrained": "make --dry-run pretrained",
    "make app": "make --dry-run app && .venv/bin/voila --version",  # test_browser.py opens the page
    "make site": "make --dry-run site && .venv/bin/python -m workflow.site PICTURES-site",
    "make lab": "make --dry-run lab && .venv/bin/jupyter lab --version",
    ".venv/bin/papermill notebooks/01_skip_removal.ipynb out.ipynb -p epochs 2 -p depth 4": (
        f"{SHORT} -p epochs 2 -p depth 4"
    ),
    ".venv/bin/papermill notebooks/01_skip_removal.ipynb out.ipynb -p data path/to/pictures": (
        f"{SHORT} -p data PICTURES -p train_images 0 -p kappa_images 8"
    ),
    ".venv/bin/papermill notebooks/01_skip_removal.ipynb out.ipynb -f notebooks/presets/gpu/01_skip_removal.yaml": (
        ".venv/bin/papermill --help-notebook notebooks/01_skip_removal.ipynb"
    ),
    "make plan PRESET=gpu": "make plan PRESET=gpu",
    "make batch PRESET=gpu": (
        "make --dry-run batch PRESET=gpu && .venv/bin/snakemake --cores all --config preset=gpu --dry-run"
    ),
    "make cluster PRESET=gpu": "make --dry-run cluster PRESET=gpu",  # run by test_slurm
    "make report PRESET=gpu": "make --dry-run report PRESET=gpu",
    "make gpu-check": "make --dry-run gpu-check && .venv/bin/python -m workflow.gpu_check --help",
    "make plan": "make plan",
    "make batch": "make --dry-run batch",
    "make cluster": "make --dry-run cluster",
    "make report": "make --dry-run report",
    "make test-fast": "make --dry-run test-fast",
    "make nightly": "make --dry-run nightly",
    "make check": "make --dry-run check",
    "make test-cpus": "make --dry-run test-cpus && .venv/bin/python -m workflow.cpus --help",
    "make test-browser": (
        "make --dry-run test-browser && .venv/bin/python -m pytest --collect-only -q tests/test_browser.py"
    ),
    "make benchmark": "make --dry-run benchmark && .venv/bin/python -m benchmarks.loop --pairs 1",
}


def test_every_command_of_the_readme_is_run_here():
    inline = re.findall(r"`(make [a-z-]+|\.venv/bin/[^`]+)`", re.sub(r"<!--.*?-->", "", README))
    assert set(COMMANDS + inline) == set(RUN)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    import standin

    folder = tmp_path_factory.mktemp("pictures")
    standin.make_folder(
        folder, {f"train/{name}": 40 for name in ("cat", "dog")} | {"test/cat": 5, "test/dog": 5}, size=(28, 28)
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_it_works(command, pictures, store):
    line = RUN[command].replace("PICTURES", str(pictures)).replace(".venv/bin/", f"{os.path.dirname(sys.executable)}/")
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_notebook_and_picture_it_shows_exists():
    assert all((ROOT / path).exists() for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README))
    named = set(re.findall(r"^\| `(\d\d_\w+)` \|", README, re.M))
    assert named == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
