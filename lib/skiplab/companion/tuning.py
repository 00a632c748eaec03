"""Hyperparameters chosen on the baseline, and where in their grid the choice lies."""

from collections.abc import Callable, Collection, Sequence

from skiplab.companion import runs
from skiplab.companion.runs import Run
from skiplab.training import loop

Configure = Callable[[str, float, int], loop.TrainConfig]  # arm, learning rate, seed


def tune(configure: Configure, rates: Sequence[float], seeds: Sequence[int], **store: object) -> list[Run]:
    """Train the plain arm at every learning rate; return its runs at the best, one a seed.

    The best has the highest mean validation top-1. `store` goes to `runs.load_or_run`: workers and report.
    """
    found = runs.load_or_run(loop.train, [configure("plain", rate, seed) for rate in rates for seed in seeds], **store)
    best = runs.table(found).groupby("learning_rate").validation_top1.mean().idxmax()
    return [run for run in found if run.config.learning_rate == best]


def place_in_grid(rate: float, rates: Collection[float]) -> str:
    """Say where a learning rate lies among those tried: at an edge, what lies beyond might be better."""
    if len(rates) == 1:
        return "the only one tried"
    edges = {max(rates): "the largest tried", min(rates): "the smallest tried"}
    return edges.get(rate, "not at the edge of those tried")
