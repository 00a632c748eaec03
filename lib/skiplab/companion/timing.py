"""Timings that can be compared: everything in turn in one process, medians, ratios."""

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one CPU thread: for matrices this small, several wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def interleaved(tasks: dict[str, Callable[[], None]], device: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every task in every round, after one call each to warm up.

    Every round has an order of its own: what a task leaves in caches and free memory must not always meet the same one.
    On a CPU it is the processor time of one thread, which other programs do not disturb; on a GPU the device's.
    """
    with one_thread():
        for task in tasks.values():
            task()
        times, order, chance = {name: [] for name in tasks}, list(tasks), random.Random(0)
        for _ in range(rounds):
            chance.shuffle(order)
            for name in order:
                times[name].append(_seconds(tasks[name], device))
    return times


def _seconds(task: Callable[[], None], device: str) -> float:
    if device == "cpu":
        start = time.thread_time()
        task()
        return time.thread_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    task()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators))
