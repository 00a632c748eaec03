"""Writes are whole or not at all, and say what is wrong where they fail."""

import errno
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lib import files


def test_write_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "new" / "file.txt"
    files.write(path, "old")
    files.write(path, b"new")
    assert path.read_text() == "new"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_full_disk_keeps_the_old_file_and_says_so(tmp_path, monkeypatch, step):
    path = tmp_path / "file.txt"
    files.write(path, "old")

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, full)
    with pytest.raises(files.StorageError, match=r"cannot write .*file\.txt: No space left on device; free space there"):
        files.write(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]


def test_a_disk_that_is_full_or_read_only_keeps_the_old_file_and_says_so(disk):
    folder = disk("size=64k")
    path = folder / "file.txt"
    files.write(path, "old")
    with pytest.raises(files.StorageError, match=r"cannot write .*file\.txt: No space left on device"):
        files.write(path, b"x" * 100_000)
    assert path.read_text() == "old" and os.listdir(folder) == ["file.txt"]
    disk("ro")
    with pytest.raises(files.StorageError, match=r"cannot write .*file\.txt: Read-only file system"):
        files.write(path, "new")
    with pytest.raises(files.StorageError, match="cannot write .*more: Read-only file system"):
        files.write(folder / "more" / "file.txt", "new")
    disk("rw,size=1m")
    files.write(path, "new")
    assert path.read_text() == "new" and os.listdir(folder) == ["file.txt"]


def test_a_folder_without_permission_keeps_the_old_file_and_says_so(as_nobody):
    path = as_nobody / "kept" / "file.txt"
    assert os.geteuid()
    for target, named in ((path, r"file\.txt"), (path.parent / "more" / "file.txt", "more")):
        with pytest.raises(files.StorageError, match=f"cannot write .*{named}: Permission denied"):
            files.write(target, "new")
    assert path.read_text() == "old" and os.listdir(path.parent) == ["file.txt"]


@pytest.fixture
def as_nobody():
    """Be a user without privileges; return a folder with kept/file.txt that this user may read and not change."""
    with tempfile.TemporaryDirectory() as name:
        folder, me = Path(name), os.geteuid()
        files.write(folder / "kept" / "file.txt", "old")
        folder.chmod(0o755)
        (folder / "kept").chmod(0o555)
        if me == 0:
            os.seteuid(65534)
        yield folder
        os.seteuid(me)
        (folder / "kept").chmod(0o755)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(files.StorageError, match="cannot write .*file/folder: Not a directory"):
        files.write(tmp_path / "file" / "folder" / "x", "text")


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / ".metrics.jsonl.123.tmp").write_text("part")
    (tmp_path / "metrics.jsonl").write_text("whole")
    files.remove_temporaries(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_next_write_removes_what_killed_processes_left_and_nothing_of_the_living(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = platform.node()
    names = {f".a.json.{host}.{dead.pid}.tmp": False, f".a.json.{host}.{os.getppid()}.tmp": True,
             f".b.json.{host}.{dead.pid}.tmp": True, f".a.json.elsewhere.{dead.pid}.tmp": True, f".a.json.{host}.x.tmp": True}
    for name in names:
        (tmp_path / name).write_text("part")
    files.write(tmp_path / "a.json", "whole")
    assert {name for name in names if (tmp_path / name).exists()} == {name for name, stays in names.items() if stays}
