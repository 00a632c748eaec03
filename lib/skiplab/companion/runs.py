"""The run store: load a run that exists, finish one that was interrupted, start one that is missing.

`data/runs/<function>/<hash>/` holds config.json, metrics.jsonl (a line per epoch), result.json, provenance.json and
model.safetensors; while a run is unfinished also checkpoint.safetensors. The hash covers the configuration, the data,
the code the run executes and the versions of the numerical packages. result.json is written last and carries the
digests of the others, so a folder with a matching result.json is whole.

A run is computed in one process, unless the environment variable COMPANION_LAUNCH holds a launcher that starts several,
on this machine (`torchrun --nproc-per-node 4`) or on more (`srun --nodes 2 torchrun --nnodes 2 --nproc-per-node 4
--rdzv-backend c10d --rdzv-endpoint HOST:29500`). How many compute a run changes only the order of its sums (see
lib/skiplab/training/run.py for the exceptions), so the hash does not cover it; the provenance names the launcher.
"""

import concurrent.futures
import contextlib
import errno
import functools
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas
import torch
from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from skiplab import files
from skiplab.companion import fingerprint, member, provenance
from skiplab.errors import InputError
from skiplab.training import checkpoint, loop
from skiplab.training.ambient import isolated

SCHEMA = 1
LEFTOVERS = ("checkpoint.safetensors", "attention.json")  # of an unfinished run, of `loop.train` and of the replay's
SCORES = {
    "test_top1": "top-1 {:.1f} %",
    "miou_single": "mIoU {:.1f} %",
    "corloc": "CorLoc {:.1f} %",
    "final_loss": "loss {:.3f}",
}
HELD = "another process computes it; waiting for that"
QUIET_SECONDS = 15  # the longest silence before the progress of a running job is reported


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


def processors(hashes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the processors that computed the stored runs of these hashes."""
    found = [path for name in hashes for path in store().glob(f"*/{name}/provenance.json")]
    return tuple(sorted({json.loads(path.read_text(encoding="utf-8"))["machine"]["device_name"] for path in found}))


def load_or_run(
    function: Callable,
    configs: Sequence,
    *,
    workers: int = 2,
    report: Callable[[str], None] | None = None,
    test_images: int = 0,
) -> list[Run]:
    """Return a finished run for every configuration, in order, computing only what the store lacks.

    `function(config, folder, report)` is `skiplab.training.loop.train` or of its form. Missing runs are computed in
    `workers` processes of one CPU thread each (the calling process never touches a GPU); 0 computes them here.
    `report` receives one line at a time on what is loaded, running, done, or set aside because it was damaged.
    `test_images` is how many the caller will look at afterwards: fewer are refused before anything is computed.
    Raises what a run raises; whatever else was running keeps its last checkpoint.
    """
    if not configs:
        raise InputError("no runs were asked for: give at least one configuration (are the seeds empty?)")
    if _rehearsal is not None:
        return [_rehearse(function, config) for config in configs]
    report = report or (lambda line: None)
    for config in configs:
        data = loop.dataset(config)
        if len(data.test) < test_images:
            raise InputError(
                f"{test_images} test images are to be looked at after training, but {data.name} has only "
                f"{len(data.test)}; ask for so many, or add images to its test split"
            )
    names = _labels(configs)
    jobs = [_Job(function, config, *_place(function, config)) for config in configs]
    unique = {job.hash: (job, name) for job, name in zip(jobs, names)}
    missing = [(job, name) for job, name in unique.values() if job.find() is None]
    report(f"{len(unique) - len(missing)} of {len(unique)} runs loaded from the store, {len(missing)} to compute")
    if missing:
        _compute(*zip(*missing), workers, report)
    finished = {name: job.load() for name, (job, _) in unique.items()}
    return [finished[job.hash] for job in jobs]


_rehearsal: dict[str, tuple[Callable, object]] | None = None


@contextlib.contextmanager
def rehearsing() -> Iterator[dict[str, tuple[Callable, object]]]:
    """Compute nothing within: `load_or_run` enters (function, configuration) here and returns runs that score alike."""
    global _rehearsal
    _rehearsal = {}
    try:
        yield _rehearsal
    finally:
        _rehearsal = None


def _rehearse(function: Callable, config: object) -> Run:
    name = fingerprint.digest([function.__name__, asdict(config)])
    _rehearsal[name] = function, config
    scores = dict.fromkeys(("validation_top1", "test_top1", "final_test_top1", "final_loss"), 0.0)
    return Run(config, name, store() / function.__name__ / name, scores | {"divergence": None}, [])


def on_device(device: str, function: Callable, *arguments: object) -> object:
    """Return what `function` does with `arguments`: on a CPU called here, on a GPU in a process of its own.

    So the calling process, a notebook's, never holds CUDA. Function, arguments and result must be picklable; tensors
    travel from and to the CPU. Raises what the function raises, and InputError where the process was killed.
    """
    if device == "cpu":
        return function(*arguments)
    content = pickle.dumps((function, arguments))  # left to the pool, each tensor would hold a file descriptor
    others = set(multiprocessing.active_children())
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start_worker) as pool:
        try:
            return pool.submit(_call, content).result()
        except BrokenProcessPool as error:
            raise InputError(
                "the process that computes on the GPU was killed (out of memory?); run this again"
            ) from error
        except KeyboardInterrupt:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()  # or the pool would wait for it
            raise


def _call(content: bytes) -> object:
    function, arguments = pickle.loads(content)
    return function(*arguments)


def table(runs: Sequence[Run]) -> pandas.DataFrame:
    """Return a row per run: its configuration (model arguments as columns) and its final scores."""
    rows = []
    for run in runs:
        divergence = run.result["divergence"] or {}
        scores = {key: value for key, value in run.result.items() if isinstance(value, int | float)}
        rows.append(
            _flat(run.config)
            | {
                "hash": run.hash,
                "diverged": divergence.get("kind"),
                "diverged_epoch": divergence.get("epoch"),
                "diverged_step": divergence.get("step"),
            }
            | scores
        )
    return pandas.DataFrame(rows)


def history(runs: Sequence[Run]) -> pandas.DataFrame:
    """Return a row per run and epoch: the configuration and the epoch's plain numbers."""
    return pandas.DataFrame(
        [_flat(run.config) | {"hash": run.hash} | _numbers(row) for run in runs for row in run.history]
    )


def log_kappa(runs: Sequence[Run]) -> pandas.DataFrame:
    """Return a row per run, epoch, place and block: the median ln κ over images, and how many were infinite."""
    return pandas.DataFrame(
        [
            _flat(run.config) | {"hash": run.hash, "epoch": row["epoch"]} | entry
            for run in runs
            for row in run.history
            for entry in row.get("log_kappa", [])
        ]
    )


def block_gradient_norms(runs: Sequence[Run]) -> pandas.DataFrame:
    """Return a row per run, epoch and block: the gradient's norm at the epoch's last step, before clipping."""
    return pandas.DataFrame(
        [
            _flat(run.config) | {"hash": run.hash, "epoch": row["epoch"], "block": index, "gradient_norm": norm}
            for run in runs
            for row in run.history
            for index, norm in enumerate(row.get("block_gradient_norm", {}).values())
        ]
    )


@dataclass(frozen=True)
class _Job:
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


def _place(function: Callable, config: loop.TrainConfig) -> tuple[str, Path, str, str]:
    """Return a configuration's hash, its folder, the digest of its data and the fingerprint of its code."""
    data, code = loop.dataset(config), _code(function.__module__)
    versions = {name: version for name, version in provenance.versions().items() if name != "python"}
    name = fingerprint.digest({"config": asdict(config), "data": data.digest, "versions": versions, "code": code})
    return name, store() / function.__name__ / name, data.digest, code


def _compute(jobs: Sequence[_Job], names: Sequence[str], workers: int, report: Callable[[str], None]) -> None:
    """Execute the jobs and report each as it finishes."""
    if workers == 0:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a worker, for the same bits
        try:
            _compute_here(jobs, names, report)
        finally:
            torch.set_num_threads(threads)
        return
    try:
        waiting = {_pool(workers).submit(job.execute, False): index for index, job in enumerate(jobs)}
        _follow(waiting, jobs, names, report, _pool(workers))
    except BaseException as error:
        _pool(workers).shutdown(wait=False, cancel_futures=True)
        _pool.cache_clear()
        for child in multiprocessing.active_children():
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise InputError(
                "a worker process was killed (out of memory?); run this again, finished runs and the "
                "last checkpoint of the others are kept"
            ) from error
        raise


def _compute_here(jobs: Sequence[_Job], names: Sequence[str], report: Callable[[str], None]) -> None:
    """Execute the jobs one by one; those that other processes are computing are left to them, and waited for last."""
    held = []
    for job, name in zip(jobs, names):
        notes = job.execute(wait=False)
        if notes is None:
            held.append((job, name))
        for note in notes or ():
            report(note)
    for job, name in held:
        report(f"{name}: {HELD}")
        for note in job.execute():
            report(note)


@functools.cache
def _pool(workers: int) -> concurrent.futures.ProcessPoolExecutor:
    """Return this process's pool of workers, started once: a worker needs seconds to import torch."""
    return concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)


def _follow(
    waiting: dict,
    jobs: Sequence[_Job],
    names: Sequence[str],
    report: Callable[[str], None],
    pool: concurrent.futures.Executor,
) -> None:
    """Report jobs as they finish, and in long silences the epoch that running ones have reached.

    A run that another process is computing is left to it, and looked at again after all others.
    """
    total, spoken, epochs_said = len(waiting), time.monotonic(), {}
    with tqdm(total=total, disable="JPY_SESSION_NAME" not in os.environ) as bar:
        while waiting:
            done, _ = concurrent.futures.wait(waiting, timeout=1, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                index, notes = waiting.pop(future), future.result()
                if notes is None:
                    report(f"      {names[index]}: {HELD}")
                    waiting[pool.submit(jobs[index].execute)] = index
                    continue
                for note in notes:
                    report(note)
                bar.update()
                report(f"[{total - len(waiting)}/{total}] {names[index]}: {_outcome(jobs[index].load())}")
                spoken = time.monotonic()
            if time.monotonic() - spoken > QUIET_SECONDS:
                for index in waiting.values():
                    metrics = jobs[index].folder / "metrics.jsonl"
                    epoch = len(metrics.read_text(encoding="utf-8").splitlines()) - 1 if metrics.exists() else 0
                    if epoch > epochs_said.get(index, 0):
                        report(f"      {names[index]}: epoch {epoch} of {jobs[index].config.epochs}")
                        epochs_said[index], spoken = epoch, time.monotonic()


def _outcome(run: Run) -> str:
    seconds = sum(json.loads((run.folder / "provenance.json").read_text(encoding="utf-8"))["seconds_per_epoch"])
    divergence = run.result["divergence"]
    broken = f", {divergence['kind']} in epoch {divergence['epoch']}" if divergence else ""
    said = next(
        (text.format(run.result[name]) for name, text in SCORES.items() if run.result.get(name) is not None), "done"
    )
    return f"{said}{broken} ({seconds:.0f} s)"


def _start_worker() -> None:
    """Use one CPU thread, leave Ctrl-C to the parent, and end with the parent even if that is killed."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _flat(config: loop.TrainConfig) -> dict:
    """Return a configuration as one flat dict, model arguments included."""
    fields = asdict(config)
    return fields | fields.pop("model_args")


def _numbers(row: dict) -> dict:
    return {key: value for key, value in row.items() if not isinstance(value, dict | list)}


def _labels(configs: Sequence) -> list[str]:
    """Name each configuration by the fields in which the configurations differ."""
    rows = [_flat(config) for config in configs]
    names = dict.fromkeys(key for row in rows for key in row)
    varying = [key for key in names if len({repr(row.get(key)) for row in rows}) > 1] or ["model"]
    return [", ".join(f"{key} {row[key]}" for key in varying if key in row) for row in rows]


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
