"""Where the project keeps its files, and writes that are whole or not at all."""

import contextlib
import glob
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from skiplab.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


class StorageError(InputError):
    """Say that a file or folder cannot be written, and what to do about it."""


def write(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` so that a crash leaves the old file or the new one, never a part.

    Raises StorageError where the disk is full or the folder cannot be written.
    """
    if isinstance(content, str):
        content = content.encode()
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.tmp")
    _remove_orphans(path)
    try:
        with storage_errors(path), open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        try:
            temporary.unlink(missing_ok=True)
        except OSError:  # a read-only folder holds no temporary file either
            pass


def _remove_orphans(path: Path) -> None:
    """Delete what killed processes of this machine left of their unfinished writes of `path`."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.{glob.escape(platform.node())}.*.tmp"):
        with contextlib.suppress(OSError, ValueError):  # alive, or not ours to judge
            try:
                os.kill(int(leftover.suffixes[-2][1:]), 0)
            except ProcessLookupError:
                leftover.unlink()


def make_folder(path: Path) -> Path:
    """Create a folder and those above it, and return it. Raises StorageError where that is not possible."""
    with storage_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def remove_temporaries(folder: Path) -> None:
    """Delete what a killed process left of its unfinished writes in `folder`. Raises StorageError where it cannot."""
    for leftover in folder.glob(".*.tmp"):
        with storage_errors(leftover):
            leftover.unlink()


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's errors into one line that names `path` and what to do."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}; free space there, or set COMPANION_RUNS to a "
            "folder that can be written"
        ) from error
