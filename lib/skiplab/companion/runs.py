"""The run store: load a run that exists, finish one that was interrupted, start one that is missing.

`skiplab.companion.job` says what a stored run consists of, and how one is computed.
"""

import concurrent.futures
import contextlib
import functools
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict

import pandas
import torch
from tqdm.auto import tqdm

from skiplab.companion import fingerprint
from skiplab.companion.job import Job, Run, place, store
from skiplab.errors import InputError
from skiplab.training import loop

SCORES = {
    "test_top1": "top-1 {:.1f} %",
    "miou_single": "mIoU {:.1f} %",
    "corloc": "CorLoc {:.1f} %",
    "final_loss": "loss {:.3f}",
}
HELD = "another process computes it; waiting for that"
QUIET_SECONDS = 15  # the longest silence before the progress of a running job is reported


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
    jobs = [Job(function, config, *place(function, config)) for config in configs]
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


def _compute(jobs: Sequence[Job], names: Sequence[str], workers: int, report: Callable[[str], None]) -> None:
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


def _compute_here(jobs: Sequence[Job], names: Sequence[str], report: Callable[[str], None]) -> None:
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
    jobs: Sequence[Job],
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
