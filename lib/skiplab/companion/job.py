"""One run and its place in the store: its hash, its files, and its computation, which happens once.

`data/runs/<function>/<hash>/` holds config.json, metrics.jsonl (a line per epoch), result.json, provenance.json and
model.safetensors; while a run is unfinished also checkpoint.safetensors. The hash covers the configuration, the data,
the code the run executes and the versions of the numerical packages. result.json is written last and carries the
digests of the others, so a folder with a matching result.json is whole.

A run is computed in one process, unless the environment variable COMPANION_LAUNCH holds a launcher that starts several,
on this machine (`torchrun --nproc-per-node 4`) or on more (`srun --nodes 2 torchrun --nnodes 2 --nproc-per-node 4
--rdzv-backend c10d --rdzv-endpoint HOST:29500`). How many compute a run changes only the order of its sums (see
`skiplab.training.run` for the exceptions), so the hash does not cover it; the provenance names the launcher.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from skiplab import files
from skiplab.companion import fingerprint, member, provenance
from skiplab.errors import InputError
from skiplab.training import checkpoint, loop
from skiplab.training.ambient import isolated

SCHEMA = 1
LEFTOVERS = ("checkpoint.safetensors", "attention.json")  # of an unfinished run, of `loop.train` and of the replay's


@dataclass(frozen=True)
class Run:
    """A finished run: its configuration, result (`train`'s, without the history), history and folder."""

    config: loop.TrainConfig
    hash: str
    folder: Path
    result: dict
    history: list[dict]

    @isolated()
    def load_model(self) -> torch.nn.Module:
        """Return the trained model, on the CPU, in evaluation mode."""
        model = loop.build_model(self.config)
        model.load_state_dict(checkpoint.read(self.folder / "model.safetensors"))
        return model.eval()


def store() -> Path:
    """Return the folder of all runs: the environment variable COMPANION_RUNS, or data/runs."""
    given = os.environ.get("COMPANION_RUNS", "").strip()
    return _absolute(given) if given else files.ROOT / "data" / "runs"


@functools.cache
def _absolute(folder: str) -> Path:
    """Return a folder as this process first understood it: another working directory changes nothing."""
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError as error:
        raise InputError(f"COMPANION_RUNS is {folder!r}: {error}; give a whole path") from error


@dataclass(frozen=True)
class Job:
    """One configuration and its place in the store."""

    function: Callable
    config: loop.TrainConfig
    hash: str
    folder: Path
    data_digest: str
    code: str

    def load(self) -> Run:
        """Return the finished run. Raises CorruptFile where it is missing or damaged."""
        try:
            stored = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
            if stored["schema"] != SCHEMA:
                raise InputError(
                    f"{self.folder} has schema {stored['schema']}, this version reads {SCHEMA}; "
                    "move the folder away to compute the run again"
                )
            if stored.pop("digest") != fingerprint.digest(stored):
                raise checkpoint.CorruptFile("result.json does not match its own digest")
            for name, expected in stored["digests"].items():
                if _file_digest(self.folder / name) != expected:
                    raise checkpoint.CorruptFile(f"{name} does not match its digest")
        except InputError:
            raise
        except PermissionError as error:
            raise InputError(
                f"cannot read {error.filename}: {error.strerror}; ask its owner, or set COMPANION_RUNS to a "
                "folder of your own"
            ) from error
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise checkpoint.CorruptFile(f"{type(error).__name__}: {error}") from error
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return Run(self.config, self.hash, self.folder, stored["result"], [json.loads(line) for line in lines])

    def find(self) -> Run | None:
        """Return the finished run, None where it is missing or damaged."""
        try:
            run = self.load()
        except checkpoint.CorruptFile:
            return None
        with contextlib.suppress(OSError):  # a store that is only read
            self._remove_leftovers()
        return run

    def _remove_leftovers(self) -> None:
        """Delete what only an unfinished run needs."""
        for name in LEFTOVERS:
            (self.folder / name).unlink(missing_ok=True)

    def set_aside(self, error: Exception, report: Callable[[str], None]) -> None:
        """Rename the folder, so that the run is computed again and the damaged files can be looked at."""
        number = 1
        while (aside := self.folder.with_name(f"{self.folder.name}.damaged-{number}")).exists():
            number += 1
        with files.storage_errors(aside):
            os.replace(self.folder, aside)
        report(f"run {self.hash} is damaged ({error}); set aside as {aside.name}, computed again")

    @isolated()
    def execute(self, wait: bool = True) -> list[str] | None:
        """Compute the run unless another process has meanwhile; return what there is to say about it.

        While another process computes it: wait for that one, or return None.
        """
        if _code(self.function.__module__) != self.code:
            raise InputError("the library's code changed since this notebook started: restart the kernel and run again")
        if loop.dataset(self.config).digest != self.data_digest:
            raise InputError("the data changed since this notebook loaded them: restart the kernel and run again")
        notes: list[str] = []
        lock = _locked(files.make_folder(store() / ".locks") / f"{self.hash}.lock", wait)
        if lock is None:
            return None
        with lock:
            if (self.folder / "result.json").exists():
                try:
                    self.load()
                    return notes
                except checkpoint.CorruptFile as error:
                    self.set_aside(error, notes.append)
            self._compute(notes.append)
        return notes

    def _compute(self, report: Callable[[str], None]) -> None:
        files.make_folder(self.folder)
        files.remove_temporaries(self.folder)
        files.write(self.folder / "config.json", _json(asdict(self.config)))
        git, start = provenance.git_state(), time.perf_counter()
        try:
            result = self._launch() if _launcher() else self.function(self.config, self.folder, self._write_metrics)
        except checkpoint.CorruptFile as error:
            self.set_aside(error, report)
            return self._compute(report)
        except InputError:
            if not (self.folder / "checkpoint.safetensors").exists():
                shutil.rmtree(self.folder)  # bad input leaves nothing behind
            raise
        self._write_metrics(result.pop("history"))
        device = getattr(self.config, "device", "cpu")
        files.write(
            self.folder / "provenance.json",
            _json(
                {
                    "git": git,
                    "lock": provenance.lock_hash(),
                    "data": self.data_digest,
                    "versions": provenance.versions(),
                    "machine": provenance.machine(device),
                    "launcher": _launcher(),
                    "seed": self.config.seed,
                    "seconds": time.perf_counter() - start,
                    "seconds_per_epoch": result.pop("seconds"),
                    "process_peak_memory_bytes": _peak_memory(device),
                }
            ),
        )
        names = ("config.json", "metrics.jsonl", "provenance.json", "model.safetensors")
        digests = {name: _file_digest(self.folder / name) for name in names}
        content = {"schema": SCHEMA, "result": result, "digests": digests}
        files.write(self.folder / "result.json", _json(content | {"digest": fingerprint.digest(content)}))
        self._remove_leftovers()

    def _launch(self) -> dict:
        """Have the launcher's processes compute the run; return its result."""
        function = f"{self.function.__module__}:{self.function.__name__}"
        command = [*_launcher(), "-m", "skiplab.companion.member", function, str(self.folder)]
        failure = self.folder / member.FAILURE
        failure.unlink(missing_ok=True)
        try:
            # From this folder, since a configuration may name its data from here.
            path = os.pathsep.join(filter(None, (str(files.ROOT / "lib"), os.environ.get("PYTHONPATH"))))
            done = subprocess.run(
                command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, encoding="utf-8", errors="replace"
            )
        except OSError as error:
            raise InputError(
                f"COMPANION_LAUNCH is {shlex.join(_launcher())!r}, which cannot be started: {error}"
            ) from error
        outcome = self.folder / "outcome.json"
        if done.returncode or not outcome.exists():
            if not failure.exists():
                raise InputError(f"{shlex.join(command)} failed: {_last_words(done.stderr)}")
            said = json.loads(failure.read_text(encoding="utf-8"))
            failure.unlink()
            raise (checkpoint.CorruptFile if said["kind"] == "CorruptFile" else InputError)(said["message"])
        result = json.loads(outcome.read_text(encoding="utf-8"))
        outcome.unlink()
        return result

    def _write_metrics(self, rows: list[dict]) -> None:
        files.write(self.folder / "metrics.jsonl", member.lines(rows))


def _locked(path: Path, wait: bool) -> contextlib.AbstractContextManager | None:
    """Return the lock of a file, taken, to leave by `with`; None where another process holds it and we do not `wait`.

    Only the operating system's locks count: marker files, filelock's way out, outlive their processes.
    """
    with files.storage_errors(path):
        try:
            return FileLock(path, fallback_to_soft=False).acquire(blocking=wait)
        except Timeout:
            return None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            raise files.StorageError(
                f"cannot lock {path}: its file system has no locks ({error.strerror}); set COMPANION_RUNS to a folder "
                "on another one, such as a local disk"
            ) from error


def _last_words(text: str) -> str:
    """Return the last line that names an error, else the last that has words: launchers add reports of their own."""
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalpha, line))]
    errors = [line for line in lines if re.search(r"^(\[\w+\]: ?)?[\w.]*(Error|Exception): ", line)]
    return (errors or lines or ["it said nothing"])[-1]


def _launcher() -> list[str]:
    """Return the command before `-m` that starts a run's processes; [] for one process, this one."""
    return shlex.split(os.environ.get("COMPANION_LAUNCH", ""))


@functools.cache
def _code(module: str) -> str:
    """Return the fingerprint of the code as this process loaded it; raise where the files have changed since."""
    changed = [path.name for path in fingerprint.reached_files(module) if _LOADED.get(path) != _file_digest(path)]
    if changed:
        raise InputError(f"{', '.join(changed)} changed since this notebook started: restart the kernel and run again")
    return fingerprint.code_fingerprint(module)


def place(function: Callable, config: loop.TrainConfig) -> tuple[str, Path, str, str]:
    """Return a configuration's hash, its folder, the digest of its data and the fingerprint of its code."""
    data, code = loop.dataset(config), _code(function.__module__)
    versions = {name: version for name, version in provenance.versions().items() if name != "python"}
    name = fingerprint.digest({"config": asdict(config), "data": data.digest, "versions": versions, "code": code})
    return name, store() / function.__name__ / name, data.digest, code


def _peak_memory(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _json(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# The library as it is when this process starts, also what is imported later: an edit from here on may be loaded or not.
_LOADED = {path: _file_digest(path) for path in (files.ROOT / "lib").rglob("*.py")}
