"""A fingerprint changes with what results depend on, and with nothing else."""

import json
import os
import subprocess

import pytest

from skiplab.companion import fingerprint, provenance

SOURCE = '''"""What this is for."""
from skiplab.b import f  # why
TEXT = "# no comment"


def g(x):
    """Explain."""
    return f(x)  # more
'''


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with notebook 01 -> skiplab.a -> skiplab.b, and skiplab.c that nobody imports."""
    contents = {
        "lib/skiplab/__init__.py": "",
        "lib/skiplab/sub/__init__.py": "Z = 1\n",
        "lib/skiplab/sub/d.py": "D = 1\n",
        "lib/skiplab/a.py": SOURCE,
        "lib/skiplab/b.py": "from skiplab.sub import d\ndef f(x):\n    return x\n",
        "lib/skiplab/c.py": "Y = 1\n",
        "notebooks/01_x.ipynb": json.dumps(
            {
                "cells": [
                    {"cell_type": "markdown", "source": ["prose"]},
                    {"cell_type": "code", "source": ["from skiplab import a\n", "a.g(1)"], "outputs": []},
                ]
            }
        ),
        "notebooks/presets/gpu/01_x.yaml": "epochs: 3\n",
        "data/claims.yaml": "claims:\n  one: {notebook: 01_x, value: 1}\n  two: {notebook: 02_y, value: 2}\n",
        "data/fashion_mnist/SHA256SUMS": "0  file\n",
        "requirements.lock": "pip==1\ntorch==2.14.1\ntorch-geometry==1\n"
        + "".join(f"{package}==1\n" for package in fingerprint.DECIDING_PACKAGES if package != "torch"),
    }
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(fingerprint, "ROOT", tmp_path)
    return tmp_path


CHANGES = [
    # file, before, after, quick is stale, gpu is stale
    ("lib/skiplab/a.py", "return f(x)", "return f(x) + 0", True, True),
    ("lib/skiplab/b.py", "return x", "return -x", True, True),
    ("lib/skiplab/a.py", '"# no comment"', '"# no remark"', True, True),
    ("lib/skiplab/c.py", "1", "2", False, False),
    ("lib/skiplab/sub/d.py", "1", "2", True, True),
    ("lib/skiplab/sub/__init__.py", "1", "2", True, True),  # importing a module runs the packages it lies in
    ("lib/skiplab/a.py", "Explain.", "Explain better.\n\n    At length.", False, False),
    ("lib/skiplab/a.py", "# why", "# because", False, False),
    ("notebooks/01_x.ipynb", "prose", "better prose", False, False),
    ("notebooks/01_x.ipynb", '"outputs": []', '"outputs": [1]', False, False),
    ("notebooks/01_x.ipynb", "a.g(1)", "a.g(2)", True, True),
    ("notebooks/presets/gpu/01_x.yaml", "3", "4", False, True),
    ("data/claims.yaml", "value: 1", "value: 9", True, True),
    ("data/claims.yaml", "value: 2", "value: 9", False, False),
    ("data/fashion_mnist/SHA256SUMS", "0", "1", True, True),
    ("requirements.lock", "torch==2.14.1", "torch==2.14.2", True, True),
    *(
        ("requirements.lock", f"{package}==1", f"{package}==2", True, True)
        for package in fingerprint.DECIDING_PACKAGES
        if package != "torch"
    ),
    ("requirements.lock", "pip==1", "pip==2", False, False),
    ("requirements.lock", "torch-geometry==1", "torch-geometry==2", False, False),
]


@pytest.mark.parametrize("name, before, after, quick, gpu", CHANGES)
def test_what_makes_a_notebook_stale(project, name, before, after, quick, gpu):
    old = {preset: fingerprint.inputs_fingerprint("01_x", preset) for preset in ("quick", "gpu")}
    text = (project / name).read_text()
    assert before in text
    (project / name).write_text(text.replace(before, after))
    new = {preset: fingerprint.inputs_fingerprint("01_x", preset) for preset in ("quick", "gpu")}
    assert (new["quick"] != old["quick"], new["gpu"] != old["gpu"]) == (quick, gpu)


def test_the_overview_is_stale_where_any_notebook_or_claim_is(project):
    (project / "notebooks/00_overview.ipynb").write_text(json.dumps({"cells": []}))
    seen = {fingerprint.inputs_fingerprint("00_overview", "quick")}
    for name, before, after in (
        ("lib/skiplab/b.py", "return x", "return -x"),
        ("notebooks/01_x.ipynb", "a.g(1)", "a.g(2)"),
        ("data/claims.yaml", "value: 2", "value: 9"),
    ):
        (project / name).write_text((project / name).read_text().replace(before, after))
        seen.add(fingerprint.inputs_fingerprint("00_overview", "quick"))
    assert len(seen) == 4


def test_the_loop_reaches_the_layers_below_it():
    """The fingerprint of the loop covers the layers below it, and none of the companion above it."""
    reached = fingerprint.reached_modules("skiplab.training.loop")
    assert {
        "skiplab.training.data",
        "skiplab.models.zoo",
        "skiplab.models.residual",
        "skiplab.theory.conditioning",
    } <= set(reached)
    assert not [name for name in reached if name.startswith("skiplab.companion")]


def test_what_decides_numbers_decides_staleness():
    assert set(provenance.NUMERICAL_PACKAGES) < set(fingerprint.DECIDING_PACKAGES)
    pinned = [line.split("==")[0] for line in fingerprint.pinned_versions()]
    assert sorted(set(pinned)) == sorted(fingerprint.DECIDING_PACKAGES)


def test_a_digest_is_long_enough_never_to_meet_another():
    assert len(fingerprint.digest({"a": 1})) == 16 and int(fingerprint.digest({"a": 1}), 16)
    assert len({fingerprint.digest(number) for number in range(20_000)}) == 20_000


def test_a_processor_is_named_with_what_tells_it_from_others_of_that_name(tmp_path, monkeypatch):
    cores = "processor\t: {}\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) Processor\nflags\t: a b\n"
    texts = {
        "Intel(R) Xeon(R) Processor (family 6, model 143)": "\n".join(cores.format(core) for core in (0, 1)),
        "Virtual": "model name : Virtual\n",
        provenance.platform.machine(): "processor\t: 0\nBogoMIPS\t: 50.00\n",
    }
    for name, text in texts.items():
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(provenance, "Path", lambda _: tmp_path / "cpuinfo")
        assert provenance.machine("cpu")["device_name"] == name


def test_the_commit_is_that_of_this_checkout_alone(tmp_path, monkeypatch):
    """Not of a repository that a hook's GIT_DIR names, nor of one around a copy that has none."""
    environment = {f"GIT_{who}_{what}": "a" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "other"]):
        subprocess.run(["git", "-C", tmp_path, *command], env=os.environ | environment, check=True)
    (tmp_path / "copy").mkdir()
    expected = provenance.git_state()
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    other = provenance.git_state()
    assert other["commit"] and other != expected
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "copy")
    assert provenance.git_state() == {"commit": None, "dirty": None}
    monkeypatch.undo()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert provenance.git_state() == expected
