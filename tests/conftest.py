"""Settings of every test: one CPU thread, a run store of its own, no network."""

import os
import subprocess
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", OMP_NUM_THREADS="1")

import pytest
import torch
from hypothesis import settings

from skiplab import files

torch.set_num_threads(1)
settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def disk(tmp_path):
    """Return a function that gives a folder file system of its own, in memory, or mounts it anew with other options."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        again = "remount," if folder.is_mount() else ""
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", again + options, "tmpfs", folder], capture_output=True, text=True
        )
        if done.returncode:
            refuse = pytest.fail if os.environ.get("COMPANION_REQUIRE_MOUNT") else pytest.skip
            refuse(f"file systems cannot be mounted here: {done.stderr.strip()}")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty run store."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("COMPANION_RUNS", str(folder))
    return folder


@pytest.fixture
def as_nobody():
    """Be a user without privileges; return a folder with kept/file.txt, which this user may read and not change, and
    others, which this user may not even read."""
    with tempfile.TemporaryDirectory() as name:
        folder, me = Path(name), os.geteuid()
        files.write(folder / "kept" / "file.txt", "old")
        folder.chmod(0o755)
        (folder / "kept").chmod(0o555)
        (folder / "others").mkdir(0o000)
        if me == 0:
            os.seteuid(65534)
        yield folder
        os.seteuid(me)
        (folder / "kept").chmod(0o755)
