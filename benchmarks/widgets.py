"""Time what a learner waits for: from a moved control to the new picture, and from a kernel to the first explorer.

    python -m benchmarks.widgets

One thread. A callback is timed as processor time, so that a busy machine does not matter, and as elapsed time, which is
what a learner feels: compute, draw, and encode as PNG. Every explorer starts where it starts by default; each of its
controls then goes through up to nine values, in an order in which nothing computed before helps.
"""

import statistics
import time

import nbformat
import torch
from jupyter_client.manager import start_new_kernel

from skiplab.companion import explorations, figures, widgets
from skiplab.companion.fingerprint import notebook_path
from skiplab.studies.bounds import explorer as bounds_explorer
from skiplab.studies.playground import explorers
from skiplab.studies.skip_removal import explorer as skip_removal_explorer
from skiplab.studies.skipless import explorer as skipless_explorer

OPENINGS = 3


def callbacks(exploration: explorations.Exploration) -> tuple[list[float], list[float]]:
    """Return the processor and the elapsed milliseconds of each move of each control."""
    explorer = (widgets.GrayingExplorer if exploration.name == "graying" else widgets.Explorer)(exploration)
    processor, elapsed = [], []
    for name, control in exploration.controls.items():
        for value in control.grid(9):
            if value == explorer.controls[name].value:
                continue
            for cached in (
                explorer.attention_map,
                skip_removal_explorer._branch,
                skipless_explorer._initial,
                bounds_explorer._unit_logits,
            ):
                cached.cache_clear()
            start, cpu = time.perf_counter(), time.thread_time()
            explorer.controls[name].value = value
            processor.append(1e3 * (time.thread_time() - cpu))
            elapsed.append(1e3 * (time.perf_counter() - start))
        explorer.reset()
    return processor, elapsed


def opening() -> float:
    """Return the seconds from a ready kernel until the playground's first explorer has its picture."""
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(notebook_path("07_playground").parent))
    cells = [
        cell.source
        for cell in nbformat.read(notebook_path("07_playground"), as_version=4).cells
        if cell.cell_type == "code"
    ]
    shown = []

    def watch(message: dict) -> None:
        if "application/vnd.jupyter.widget-view+json" in message["content"].get("data", {}):
            shown.append(time.perf_counter())

    start = time.perf_counter()
    try:
        for cell in cells:
            client.execute_interactive(cell, output_hook=watch, timeout=300)
            if shown:
                return shown[0] - start
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    raise RuntimeError("the playground showed no explorer")


def main() -> None:
    torch.set_num_threads(1)
    figures.theme()
    print(
        "| explorer | moves | median (ms) | worst (ms) | median elapsed (ms) | worst elapsed (ms) |\n"
        "|---|---|---|---|---|---|"
    )
    for exploration in explorers.EXPLORATIONS.values():
        exploration.find()  # imports and photographs
        processor, elapsed = callbacks(exploration)
        print(
            f"| {exploration.name} | {len(processor)} | {statistics.median(processor):.0f} | {max(processor):.0f} | "
            f"{statistics.median(elapsed):.0f} | {max(elapsed):.0f} |"
        )
    openings = [opening() for _ in range(OPENINGS)]
    print(
        f"\nFrom a ready kernel to the first explorer's picture: "
        f"{statistics.median(openings):.1f} s (median of {OPENINGS})."
    )


if __name__ == "__main__":
    main()
