"""The trained arms of notebook 06: curves, learning rates, and what a number rests on."""

import json
from collections.abc import Mapping, Sequence

import pandas
import torch

from skiplab.companion import judging
from skiplab.companion.runs import Run
from skiplab.companion.tuning import place_in_grid
from skiplab.studies.skipless.inside import CHOSEN
from skiplab.training import dino, loop


def curves(runs: Sequence[Run], names: Sequence[str]) -> pandas.DataFrame:
    """Return a row per run and epoch: arm, optimiser, seed, steps taken, seconds of training, validation top-1.

    Seconds are those of the epochs, validation included, as each run measured them on one thread of its machine.
    """
    rows = []
    for run, name in zip(runs, names, strict=True):
        taken = json.loads((run.folder / "provenance.json").read_text(encoding="utf-8"))["seconds_per_epoch"]
        steps = loop.dataset(run.config).train.num_images // run.config.batch_size
        rows += [
            {
                "arm": name,
                "optimizer": run.config.optimizer,
                "seed": run.config.seed,
                "steps": steps * row["epoch"],
                "seconds": sum(taken[: row["epoch"]]),
                "validation_top1": row["validation_top1"],
            }
            for row in run.history
        ]
    return pandas.DataFrame(rows)


@torch.no_grad()
def untrained_top1(config: dino.DinoConfig) -> float:
    """Return what `dino.distil` reports as validation_top1, of the model before any training."""
    vit, data = dino.build_vit(config).eval(), loop.dataset(config)
    parts = []
    for split, most in ((data.train, dino.NEIGHBOUR_IMAGES), (data.validation, None)):
        batches = zip(
            range(-(-(most or split.num_images) // loop.EVALUATION_BATCH)), split.batches(loop.EVALUATION_BATCH)
        )
        features, labels = zip(*[(vit(images), classes) for _, (images, classes) in batches])
        parts += [torch.cat(features), torch.cat(labels)]
    return dino.neighbour_top1(*parts)


def neighbours(table: pandas.DataFrame, optimizer: str, depth: int) -> str:
    """Say what DINO did to the nearest neighbours' top-1, mean over seeds: with skips, and without at `depth` blocks.

    `table` has a row per run: those of `runs.table`, and `untrained_top1`.
    """
    rows, parts = table[table.optimizer == optimizer], []
    for title, chosen in {
        "DINO with skips": rows["skip"] == "both",
        f"without, {depth} blocks": (rows["skip"] == "none") & (rows.depth == depth),
    }.items():
        after, before = rows[chosen][["validation_top1", "untrained_top1"]].mean()
        parts.append(f"{title}: k-NN {after:.1f} % after pre-training, {before:.1f} % before")
    return "; ".join(parts)


def own_rates(
    table: pandas.DataFrame, best: Mapping[str, float], arms: Mapping[str, str], optimizers: Mapping[str, str]
) -> list[str]:
    """Say where each optimiser's `best` rate lies, and what the arms without skips score there and at their own best.

    `table` has a row per arm, optimiser and learning rate; an arm's own best has the highest validation top-1.
    """
    lines, tried = [], set(table.learning_rate)
    for optimizer, title in optimizers.items():
        rows = table[table.optimizer == optimizer]
        there = rows[rows.learning_rate == best[optimizer]].set_index("arm").test_top1
        own = rows.loc[rows.groupby("arm").validation_top1.idxmax()].set_index("arm")
        lines.append(
            f"{title}: the arm with skips is best at {best[optimizer]:g}, {place_in_grid(best[optimizer], tried)}"
        )
        lines += [
            f"  {arms[arm]}: {there[arm]:.1f} % there; at its own best, {own.learning_rate[arm]:g} "
            f"({place_in_grid(own.learning_rate[arm], tried)}), {own.test_top1[arm]:.1f} %"
            for arm in ("default", "init")
        ]
        lines.append(
            f"  so this init adds {there['init'] - there['default']:+.1f} points at the rate of the verdicts, and "
            f"{own.test_top1['init'] - own.test_top1['default']:+.1f} where each arm has its own"
        )
    return lines


def best_reading(table: pandas.DataFrame) -> str:
    """Say which reading has the highest mean test top-1, and by how much: columns reading, seed and test_top1."""
    scores = table.pivot(index="seed", columns="reading", values="test_top1")
    best = scores.mean().idxmax()
    words = {name: "{:.1f} ± {:.1f} %".format(*judging.mean_sd(scores[name])) for name in (best, CHOSEN)}
    if best == CHOSEN:
        return f"of {len(scores.columns)} readings the chosen one ({CHOSEN}, MLP scaled) is best: {words[best]}"
    ahead = "{:+.1f} ± {:.1f} points".format(*judging.mean_sd(scores[best] - scores[CHOSEN]))
    return (
        f"of {len(scores.columns)} readings the best is {best}, {words[best]}: {ahead} from the chosen one "
        f"({CHOSEN}, MLP scaled), {words[CHOSEN]}, over {len(scores)} seed(s)"
    )


def spread(table: pandas.DataFrame) -> pandas.Series:
    """Return each seed's largest minus smallest test top-1 over all rows."""
    scores = table.groupby("seed").test_top1
    return scores.max() - scores.min()
