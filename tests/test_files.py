"""Writes are whole or not at all, and say what is wrong where they fail."""

import errno
import os
import platform
import subprocess
import sys

import pytest

from skiplab import files


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
    with pytest.raises(
        files.StorageError, match=r"cannot write .*file\.txt: No space left on device; free space there"
    ):
        files.write(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]


def test_a_disk_that_is_full_or_read_only_keeps_the_old_file_and_says_so(disk):
    folder = disk("size=64k")
    path, more = folder / "file.txt", folder / "more"
    files.write(path, "old")
    assert refusal(path, b"x" * 100_000).startswith(f"cannot write {path}: No space left on device; free space there")
    assert path.read_text() == "old" and os.listdir(folder) == ["file.txt"]
    disk("ro")
    assert refusal(path, "new").startswith(f"cannot write {path}: Read-only file system; ")
    assert refusal(more / "file.txt", "new").startswith(f"cannot write {more}: Read-only file system; ")
    assert path.read_text() == "old"
    disk("rw,size=1m")
    files.write(path, "new")
    assert path.read_text() == "new" and os.listdir(folder) == ["file.txt"]


def test_a_folder_without_permission_keeps_the_old_file_and_says_so(as_nobody):
    path, more = as_nobody / "kept" / "file.txt", as_nobody / "kept" / "more"
    assert os.geteuid()
    assert refusal(path, "new").startswith(f"cannot write {path}: Permission denied; ")
    assert refusal(more / "file.txt", "new").startswith(f"cannot write {more}: Permission denied; ")
    assert path.read_text() == "old" and os.listdir(path.parent) == ["file.txt"]


def refusal(path, content):
    """Return the one line that says why `path` cannot be written."""
    with pytest.raises(files.StorageError) as error:
        files.write(path, content)
    (line,) = str(error.value).splitlines()
    return line


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
    names = {
        f".a.json.{host}.{dead.pid}.tmp": False,
        f".a.json.{host}.{os.getppid()}.tmp": True,
        f".b.json.{host}.{dead.pid}.tmp": True,
        f".a.json.elsewhere.{dead.pid}.tmp": True,
        f".a.json.{host}.x.tmp": True,
    }
    for name in names:
        (tmp_path / name).write_text("part")
    files.write(tmp_path / "a.json", "whole")
    assert {name for name in names if (tmp_path / name).exists()} == {name for name, stays in names.items() if stays}
