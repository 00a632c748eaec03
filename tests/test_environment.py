"""pyproject.toml, requirements.lock and environment.yml describe one environment; imports point down."""

import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from skiplab.files import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WANTED = [
    Requirement(line)
    for line in PROJECT["dependencies"]
    + [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
]
LOCKED = [Requirement(line) for line in (ROOT / "requirements.lock").read_text().splitlines() if line[:1].isalnum()]


def version(requirement):
    return str(requirement.specifier).removeprefix("==")


def test_every_line_of_the_lock_is_one_exact_version():
    assert all(re.fullmatch(r"==[^,*]+", str(requirement.specifier)) for requirement in LOCKED)


def test_the_lock_satisfies_the_project_on_every_supported_python():
    for python in ("3.11", "3.12", "3.13"):
        environment = default_environment() | {"python_version": python, "python_full_version": f"{python}.0"}
        locked = {
            requirement.name: version(requirement)
            for requirement in LOCKED
            if requirement.marker is None or requirement.marker.evaluate(environment)
        }
        for requirement in WANTED:
            assert requirement.specifier.contains(locked[requirement.name]), (python, requirement)


def test_torch_and_torchvision_are_the_pair_that_works():
    locked = {requirement.name: version(requirement) for requirement in LOCKED}
    assert (locked["torch"], locked["torchvision"]) == ("2.14.1", "0.29.1")


def test_conda_installs_the_same_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert pip == ["--requirement requirements.lock", "--editable ."]
    (python,) = [entry for entry in conda if entry.startswith("python=")]
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.removeprefix("python="))
    assert {entry.split("=")[0] for entry in conda} == {"python", "pip", "make"}


def test_what_is_installed_is_what_is_locked():
    """The tests speak about the locked environment only if they run in it."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    wrong = {}
    for requirement in LOCKED:
        if requirement.marker is None or requirement.marker.evaluate():
            try:
                found = installed(requirement.name)
            except PackageNotFoundError:
                found = None
            if found != version(requirement):
                wrong[requirement.name] = found
    assert not wrong


def test_imports_point_down_the_layers():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as f; f()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_the_code_is_as_ruff_would_have_it(command):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command.split(), "--no-cache", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_the_library_loads_no_more_than_it_needs():
    code = (
        "import sys, skiplab.companion.runs, skiplab.training.loop; "
        "print([name for name in ('papermill', 'snakemake', 'jupyterlab', 'transformers', 'sklearn') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
