"""The workflow's jobs: what they ask for, what they wait for, what is to be redone, and what failed and why."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from skiplab import files
from skiplab.companion import fingerprint
from skiplab.errors import InputError
from workflow import __main__ as command
from workflow import jobs


@pytest.mark.parametrize("preset", fingerprint.PRESETS)
def test_every_job_has_its_limits_and_memory_for_its_notebook(preset):
    for notebook in fingerprint.notebooks():
        need = jobs.need(preset, notebook)
        assert need.memory >= 4 and need.minutes >= 5 and (need.gpus == 0 or preset in ("gpu", "paper"))


def test_a_rerun_with_other_seeds_may_use_what_quick_may():
    for notebook in fingerprint.notebooks():
        assert jobs.need("replicate", notebook) == jobs.need("quick", notebook)


@pytest.mark.parametrize(
    "text, message",
    [
        ("quick: {default: {cores: 2}}", "quick 01_skip_removal is {'cores': 2}; it must give cores, gpus, memory"),
        ("smoke: {}", "unknown preset in workflow/resources.yaml 'quick'"),
        ("quick: {}", "quick 01_skip_removal is None"),
        ("quick: {default: {cores: 0, gpus: 0, memory: 1, disk: 1, minutes: 1, shares: 1}}", "has cores 0; it must be"),
        ("quick: {default: {cores: 1, gpus: -1, memory: 1, disk: 1, minutes: 1, shares: 1}}", "has gpus -1"),
        ("quick: {default: {cores: 1, gpus: 0, memory: lots, disk: 1, minutes: 1, shares: 1}}", "has memory 'lots'"),
    ],
)
def test_limits_that_make_no_sense_are_named(tmp_path, monkeypatch, text, message):
    (tmp_path / "resources.yaml").write_text(text)
    monkeypatch.setattr(jobs, "RESOURCES", tmp_path / "resources.yaml")
    with pytest.raises(InputError) as error:
        jobs.need("quick", "01_skip_removal")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_notebook_waits_for_its_shares_and_those_that_others_use_go_first():
    assert jobs.shares("01_skip_removal", "quick") == []
    assert jobs.shares("01_skip_removal", "gpu") == [f"shares/01_skip_removal.{share}.ipynb" for share in (1, 2, 3)]
    assert set(jobs.USED) <= set(fingerprint.notebooks())
    assert jobs.priority("01_skip_removal") > jobs.priority("02_token_graying") == jobs.priority("00_overview")


def executed(path, **companion):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"metadata": {"companion": companion}}))


def test_the_plan_counts_what_is_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "BUILD", tmp_path)
    done, stale, failed = "01_skip_removal", "03_low_pass", "04_bounds"
    executed(tmp_path / "gpu" / f"{done}.ipynb", inputs=fingerprint.inputs_fingerprint(done, "gpu"), seconds=90.0)
    executed(tmp_path / "gpu" / f"{stale}.ipynb", inputs="something else", seconds=30.0)
    executed(tmp_path / "gpu" / f"{failed}.failed.ipynb")
    states = {name: jobs.state(name, "gpu") for name in fingerprint.notebooks()}
    assert (states[done], states[stale], states[failed], states["00_overview"]) == (
        "current",
        "stale",
        "failed",
        "missing",
    )
    waiting = [jobs.need("gpu", name) for name, state in states.items() if state != "current"]
    seconds = dict.fromkeys(states, 7200.0)
    text = jobs.plan("gpu", seconds, dict.fromkeys(states, 12))
    assert re.search(rf"{done} +current .* 12 +30\.0 +2880 +1\.5\n", text)  # two hours on the GPUs of four jobs
    hours = sum(2 / need.shares / max(need.gpus, need.cores if not need.gpus else 1) for need in waiting)
    assert (
        f"{hours:.1f} hours of training from an empty store (limits: {sum(need.minutes for need in waiting) / 60:.1f})"
        in text
    )
    assert (
        f"{sum(2 for need in waiting if need.gpus):.0f} GPU hours; "
        f"at most {sum(need.disk for need in waiting):g} GB of disk" in text
    )
    assert "more than its limit" in text and text.endswith(
        "more than its limit: 00_overview; give it more in workflow/resources.yaml"
    )
    assert "more than its limit" not in jobs.plan("gpu", dict.fromkeys(states, 60.0), dict.fromkeys(states, 12))


def test_a_failed_job_is_named_with_its_log_and_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "BUILD", tmp_path)
    executed(tmp_path / "gpu" / "03_low_pass.failed.ipynb")
    executed(tmp_path / "gpu" / "shares" / "01_skip_removal.2.failed.ipynb")
    (tmp_path / "gpu" / "logs").mkdir()
    (tmp_path / "gpu" / "logs" / "03_low_pass.log").write_text("one\ntwo\n\nthree\nfour: no space left\n")
    (tmp_path / "gpu" / "logs" / "04_bounds.log").write_text("killed\n")  # before its first cell
    executed(tmp_path / "gpu" / "05_anti_oversmoothing.ipynb")
    (tmp_path / "gpu" / "logs" / "05_anti_oversmoothing.log").write_text("done\n")
    unsaved, first, second = sorted(jobs.failures("gpu"), reverse=True)
    assert unsaved.startswith("04_bounds (gpu) failed") and unsaved.endswith(
        "no cell of its notebook was executed\n    killed"
    )
    assert first.startswith("03_low_pass (gpu) failed; its log is ") and "logs/03_low_pass.log" in first
    assert first.endswith("\n    two\n    three\n    four: no space left") and "one" not in first.partition("\n")[2]
    assert second.startswith("01_skip_removal.2 (gpu) failed") and second.endswith("it said nothing")


def notebook(source):
    cell = {"cell_type": "code", "id": "a", "source": source, "metadata": {}, "outputs": [], "execution_count": None}
    return json.dumps(NOTEBOOK | {"cells": [cell]})


NOTEBOOK = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
}
PROJECT = {  # notebook 01 uses skiplab.a, notebook 02 uses skiplab.b
    "lib/skiplab/__init__.py": "",
    "lib/skiplab/a.py": "A = 1\n",
    "lib/skiplab/b.py": "B = 1\n",
    "requirements.lock": "torch==2.14.1\npip==1\n",
    "data/claims.yaml": "claims: {}\n",
    "data/fashion_mnist/SHA256SUMS": "0  file\n",
    "notebooks/presets/smoke/01_one.yaml": "x: 1\n",
    "notebooks/presets/smoke/02_two.yaml": "x: 1\n",
}
CHANGES = [
    ("lib/skiplab/a.py", "A = 2\n", {"01_one", "00_overview"}),
    ("lib/skiplab/b.py", "B = 2\n", {"02_two", "00_overview"}),
    ("lib/skiplab/a.py", "A = 1  # a remark\n", set()),
    ("notebooks/presets/smoke/02_two.yaml", "x: 2\n", {"02_two", "00_overview"}),
    ("data/fashion_mnist/SHA256SUMS", "1  file\n", {"00_overview", "01_one", "02_two"}),
    ("requirements.lock", "torch==2.14.2\npip==1\n", {"00_overview", "01_one", "02_two"}),
    ("requirements.lock", "torch==2.14.1\npip==2\n", set()),
    ("notebooks/presets/smoke/01_one.yaml", "x: 2\n", {"01_one", "00_overview"}),
    ("data/claims.yaml", "claims: {one: {notebook: 02_two}}\n", {"02_two", "00_overview"}),
    ("notebooks/02_two.ipynb", notebook("from skiplab import b; b"), {"02_two", "00_overview"}),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with the real Snakefile, the real modules behind it, and notebooks that do nothing, executed once."""
    root = tmp_path_factory.mktemp("project")
    for name in (
        "Snakefile",
        "workflow/resources.yaml",
        "workflow/__init__.py",
        "workflow/jobs.py",
        "lib/skiplab/files.py",
        "lib/skiplab/errors.py",
        "lib/skiplab/companion/__init__.py",
        "lib/skiplab/companion/fingerprint.py",
    ):
        files.write(root / name, (files.ROOT / name).read_text())
    for name, text in PROJECT.items():
        files.write(root / name, text)
    for name, source in (
        ("00_overview", "1"),
        ("01_one", "from skiplab import a"),
        ("02_two", "from skiplab import b"),
    ):
        files.write(root / f"notebooks/{name}.ipynb", notebook(source))
    snakefile = (root / "Snakefile").read_text()
    files.write(
        root / "Snakefile",
        snakefile.replace(
            "PYTHONPATH={ROOT:q}/lib:{ROOT:q} {sys.executable:q} -m workflow execute", "echo {output} > {output}; echo"
        ),
    )
    assert snakemake(root) == {"00_overview", "01_one", "02_two"}
    return root


def snakemake(root, *more, status=0):
    """Run the workflow; return the notebooks whose jobs were run."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "snakemake",
            "--cores",
            "1",
            "--nolock",
            "--rerun-triggers",
            "params",
            "input",
            "mtime",
            "--config",
            "preset=smoke",
            *more,
        ],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    return {
        line.split("notebook=")[1].strip() for line in (done.stdout + done.stderr).splitlines() if "notebook=" in line
    }


@pytest.mark.slow
def test_nothing_changed_means_nothing_to_do(project):
    assert snakemake(project, "--dry-run") == set()


@pytest.mark.slow
@pytest.mark.parametrize("name, text, redone", CHANGES)
def test_a_change_redoes_what_depends_on_it_and_nothing_else(project, name, text, redone):
    before = (project / name).read_text()
    files.write(project / name, text)
    try:
        assert snakemake(project, "--dry-run") == redone
    finally:
        files.write(project / name, before)


JOB = """
echo done > $3
[ $1 != 01_one ] || [ -e mended ] || { echo no luck; exit 3; }
"""


@pytest.mark.slow
def test_a_job_that_fails_is_named_the_others_finish_and_only_it_is_done_again(project, tmp_path, monkeypatch):
    root = tmp_path / "project"
    shutil.copytree(project, root, ignore=shutil.ignore_patterns("build", ".snakemake"))
    snakefile = (root / "Snakefile").read_text()
    assert "echo {output} > {output}; echo" in snakefile
    files.write(root / "Snakefile", snakefile.replace("echo {output} > {output}; echo", "bash job.sh"))
    files.write(root / "job.sh", JOB)
    assert snakemake(root, "--keep-going", status=1) == {"01_one", "02_two"}
    assert sorted(path.name for path in (root / "build" / "smoke").glob("*.ipynb")) == ["02_two.ipynb"]
    monkeypatch.setattr(jobs, "BUILD", root / "build")
    (failure,) = jobs.failures("smoke")
    log = root / "build" / "smoke" / "logs" / "01_one.log"
    assert failure == f"01_one (smoke) failed; its log is {log}, no cell of its notebook was executed\n    no luck"
    (root / "mended").touch()
    assert snakemake(root, "--keep-going") == {"01_one", "00_overview"}
    assert jobs.failures("smoke") == []


@pytest.mark.slow
def test_clocks_that_jump_do_not_matter(project):
    for name, moment in (("lib/skiplab/a.py", 4e9), ("notebooks/01_one.ipynb", 4e9), ("lib/skiplab/b.py", 1e6)):
        os.utime(project / name, (moment, moment))
    assert snakemake(project, "--dry-run") == set()


def test_several_gpus_start_as_many_processes(monkeypatch):
    seen = {}
    monkeypatch.setenv("COMPANION_LAUNCH", "")  # restored afterwards
    monkeypatch.delenv("COMPANION_LAUNCH")
    monkeypatch.setattr(
        command, "execute", lambda *arguments: seen.update(launch=command.os.environ.get("COMPANION_LAUNCH"))
    )
    for gpus, expected in (
        (0, None),
        (1, None),
        (4, f"{shlex.quote(sys.executable)} -m torch.distributed.run --standalone --nproc-per-node 4"),
    ):
        monkeypatch.setattr(
            sys, "argv", ["workflow", "execute", "01_skip_removal", "gpu", "out.ipynb", "--gpus", str(gpus)]
        )
        assert command.main() == 0 and seen["launch"] == expected
