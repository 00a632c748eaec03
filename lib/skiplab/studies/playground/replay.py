"""The explorer that replays training: runs with and without a skip whose attention maps were kept after every epoch.

`train_and_watch` is `skiplab.training.loop.train` with one addition, for the run store; the rest shows what it stored.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes

from skiplab import files
from skiplab.companion.explorations import BEFORE, DASHED, HERE, SOLID, Exploration, Found, Panel, attention_image
from skiplab.companion.runs import Run
from skiplab.errors import InputError
from skiplab.models import probe
from skiplab.studies.playground.explorers import replay_controls
from skiplab.training import checkpoint, loop

ARMS = {"both": "both skips", "no_sab": "no SAB skip"}
BAND = 0.88  # the share of the axis of ln κ above which it is infinite


def train_and_watch(config: loop.TrainConfig, folder: Path, report: Callable[[list[dict]], None] | None = None) -> dict:
    """Train as `loop.train` does; each epoch's row of the history also holds `attention`.

    That is, for every block, the mean over heads of the attention map (n, n) of the first validation image, to five
    decimals; None where the weights are no longer finite. Resumes like `loop.train`: maps are kept in the run's folder
    until the store has the result.
    """
    path, saved = folder / "attention.json", folder / "checkpoint.safetensors"
    kept = (
        json.loads(path.read_text(encoding="utf-8"))
        if path.exists()
        else {"0": _attention(config, loop.build_model(config))}
    )

    def keep() -> None:
        state = checkpoint.read(saved)
        model = loop.build_model(config)
        model.load_state_dict(state["model"])
        kept[str(state["epoch"])] = _attention(config, model)
        files.write(path, json.dumps(kept))

    def watch(history: list[dict]) -> None:
        keep()
        if report:
            report(history)

    if saved.exists():  # interrupted before its last map was kept
        keep()
    result = loop.train(config, folder, watch)
    result["history"] = [row | {"attention": kept.get(str(row["epoch"]))} for row in result["history"]]
    return result


def _attention(config: loop.TrainConfig, model: torch.nn.Module) -> list | None:
    image, _ = next(iter(loop.dataset(config).validation.batches(1, device="cpu", train=False)))
    try:
        maps = probe.attention_maps(model, image)
    except InputError:  # rows of NaN do not sum to 1
        return None
    return [attn[0].mean(dim=0).double().round(decimals=5).tolist() for attn in maps]


def exploration(runs: Sequence[Run], parameters: Mapping | None = None) -> Exploration:
    """Return the explorer of two runs of `train_and_watch`, one for each of ARMS, of one length and depth.

    `parameters` are notebook 07's that decide the runs, for the papermill command.
    """
    found = {run.config.skip: run for run in runs}
    if set(found) != set(ARMS) or len(found) != len(runs):
        seen = ", ".join(run.config.skip for run in runs)
        raise InputError(f"a replay needs one run for each of {', '.join(ARMS)}; saw {seen}")
    epochs = max(run.config.epochs for run in runs)
    blocks = 1 + max(row["block"] for row in runs[0].history[0]["log_kappa"])
    kappas = [row["median_log_kappa"] or 0 for run in runs for epoch in run.history for row in epoch["log_kappa"]]
    top = 2 * max(kappas) + 1
    panels = (
        Panel("top-1 (%)", ("epoch", 0, epochs), (0, 100), log=""),
        Panel(
            "ln κ of SAB outputs",
            ("block", 1, max(blocks, 2)),
            (0, top),
            log="",
            legend=dict(zip(ARMS.values(), (SOLID, DASHED))),
            place=(0.02, 0.5),
            band=(BAND * top, top, "rank-deficient"),
        ),
        Panel("map, both skips"),
        Panel("map, no SAB skip"),
    )
    states = [*({"epoch": epoch} for epoch in sorted({1, epochs // 2, epochs} - {0})), {"epoch": epochs, "block": 1}]
    return Exploration(
        "training",
        "Training with and without a skip",
        replay_controls(epochs, blocks),
        functools.partial(replay, found),
        panels,
        draw_replay,
        replay_facts,
        states,
        parameters or {},
    )


def replay(runs: Mapping[str, Run], epoch: int, block: int) -> Found:
    """Look up one epoch of both runs. Found, for each of ARMS: `curves`, validation top-1 by epoch; `kappas`, median
    ln κ of every block's SAB output; `maps`, the block's attention, None where it is lost.

    ln κ is infinite where most outputs are rank-deficient, else of the finite ones, NaN where there is none.

    A run that stopped keeps showing its last epoch.
    """
    rows = {arm: runs[arm].history[min(epoch, len(runs[arm].history) - 1)] for arm in ARMS}
    kappas = {
        arm: [
            _log_kappa(row)
            for row in sorted(rows[arm]["log_kappa"], key=lambda row: row["block"])
            if row["place"] == "sab"
        ]
        for arm in ARMS
    }
    maps = {
        arm: row["attention"] and torch.tensor(row["attention"][block - 1], dtype=torch.float64)
        for arm, row in rows.items()
    }
    return Found(
        epoch=epoch,
        block=block,
        maps=maps,
        stopped={arm: row["epoch"] < epoch for arm, row in rows.items()},
        curves={arm: [row["validation_top1"] for row in runs[arm].history] for arm in ARMS},
        kappas=kappas,
    )


def _log_kappa(row: Mapping) -> float:
    if 2 * row["n_inf"] > row["n"]:
        return math.inf
    return math.nan if row["median_log_kappa"] is None else row["median_log_kappa"]


def draw_replay(axes: Sequence[Axes], found: Found) -> None:
    """Draw the curves up to here, ln κ by block (an infinite one in the band), and both attention maps."""
    edge = axes[1].get_ylim()[1] * (1 + BAND) / 2
    for arm, style, axis in zip(ARMS, (SOLID, DASHED), axes[2:]):
        axes[0].plot(found.curves[arm], **BEFORE | {"linewidth": 1})
        axes[0].plot(found.curves[arm][: found.epoch + 1], marker="o", **style)
        kappas = [edge if math.isinf(kappa) else kappa for kappa in found.kappas[arm]]
        axes[1].plot(range(1, len(kappas) + 1), kappas, marker="o", **style)
        if found.maps[arm] is not None:
            attention_image(axis, found.maps[arm])
    axes[0].axvline(found.epoch, **HERE)
    axes[1].axvline(found.block, **HERE)


def replay_facts(found: Found) -> list[str]:
    """Say top-1, ln κ and the largest weight of the map of both."""
    lines = []
    for arm, name in ARMS.items():
        curve, attn = found.curves[arm], found.maps[arm]
        kappa = found.kappas[arm][found.block - 1]
        parts = [
            f"{name}: top-1 {curve[min(found.epoch, len(curve) - 1)]:.1f} %",
            f"ln κ of block {found.block}'s SAB output "
            + ("infinite" if math.isinf(kappa) else "not defined" if math.isnan(kappa) else f"{kappa:.2f}"),
            "no map: the weights are not finite" if attn is None else f"largest attention {float(attn.max()):.2f}",
        ]
        lines.append(", ".join(parts) + (" (training had stopped)" if found.stopped[arm] else ""))
    return lines
