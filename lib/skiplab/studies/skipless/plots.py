"""The figures of notebook 06: they draw what `inside`, `outcomes` and the runs hold."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy
import pandas
import seaborn
from matplotlib.figure import Figure
from torch import Tensor

from skiplab.companion.figures import PALETTE
from skiplab.theory.conditioning import WORST
from skiplab.training.dense import IGNORE, Scene

ROUNDING = -15.95  # log10 of float64's
STYLES = ("s-", "^--", "o-")  # of the arms: two of them may lie on each other


def spectra(table: pandas.DataFrame, arms: Mapping[str, str], block: int) -> Figure:
    """Draw `inside.depth_spectra` of each arm (columns arm and seed added): one block's values, then by depth."""
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.3))
    for (arm, label), colour, style in zip(arms.items(), PALETTE, STYLES):
        rows = table[table.arm == arm]
        for values in rows[rows.depth == block]["values"]:
            axes[0].plot(numpy.linspace(0, 1, len(values)), numpy.clip(values, 1e-17, None), color=colour, linewidth=1)
        for axis, column, worst in ((axes[1], "log_kappa", WORST), (axes[2], "median", None)):
            values = rows[column].clip(upper=worst) if worst else rows[column].clip(lower=ROUNDING)
            summary = values.groupby(rows.depth).agg(["mean", "std"]).fillna(0)
            _bars(axis, summary, style, colour, label)
    axes[0].set(
        yscale="log",
        xlabel="share of the singular values",
        ylabel="σ / σ_max",
        title=f"one attention layer: block {block}",
    )
    axes[1].set(xlabel="depth of the block", ylabel="ln κ", title="one attention layer, by depth")
    axes[1].axhspan(WORST - 0.5, WORST + 2, color="0.85", zorder=0, linewidth=0)
    axes[1].text(table.depth.max(), WORST - 3.5, "rank-deficient", color="0.35", fontsize="small", ha="right")
    axes[2].set(xlabel="number of blocks", ylabel="log₁₀(σ_median / σ_max)", title="product of the layers' Jacobians")
    axes[2].axhspan(-17.5, ROUNDING + 0.2, color="0.85", zorder=0, linewidth=0)
    axes[2].text(table.depth.max(), -17.2, "rounding", color="0.35", fontsize="small", ha="right")
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def attention(maps: Mapping[str, Tensor], table: pandas.DataFrame, arms: Mapping[str, str], n: int) -> Figure:
    """Draw maps (n, n) of one block, and the mean diagonal weight by block from `inside.report`."""
    figure, axes = plt.subplots(
        1, len(maps) + 1, figsize=(2.7 * len(maps) + 3.6, 3.0), width_ratios=[1] * len(maps) + [1.5]
    )
    highest = max(float(attn.max()) for attn in maps.values())
    for axis, (title, attn) in zip(axes, maps.items()):
        seaborn.heatmap(
            attn,
            ax=axis,
            vmin=0,
            vmax=highest,
            cmap="cividis",
            square=True,
            xticklabels=False,
            yticklabels=False,
            cbar=axis is axes[len(maps) - 1],
            cbar_kws={"label": "weight", "shrink": 0.8},
        )
        axis.set(title=title, xlabel="key", ylabel="query" if axis is axes[0] else "")
    for (arm, label), colour, style in zip(arms.items(), PALETTE, STYLES):
        summary = table[table.arm == arm].groupby("block").weight.agg(["mean", "std"]).fillna(0)
        _bars(axes[-1], summary, style, colour, label)
    axes[-1].axhline(1 / n, color="0.4", linestyle="--", linewidth=1, label="uniform, 1/n")
    axes[-1].axhline(0.5, color="0.4", linestyle=":", linewidth=1, label="nearly the identity (our rule)")
    axes[-1].set(xlabel="block", ylabel="mean diagonal weight of A", ylim=(0, 1))
    axes[-1].legend(fontsize="small")
    return figure


def training(table: pandas.DataFrame, arms: Mapping[str, str], optimizers: Mapping[str, str]) -> Figure:
    """Draw validation top-1 by steps and by seconds, a row per optimiser, from `outcomes.curves`."""
    figure, axes = plt.subplots(
        len(optimizers), 2, figsize=(7.6, 2.5 * len(optimizers) + 0.6), sharey=True, squeeze=False
    )
    for line, (optimizer, title) in zip(axes, optimizers.items()):
        for (arm, label), colour, style in zip(arms.items(), PALETTE, STYLES):
            rows = table[(table.optimizer == optimizer) & (table.arm == arm)]
            summary = rows.groupby("steps")[["validation_top1", "seconds"]].agg(["mean", "std"]).fillna(0)
            middle, band = summary["validation_top1"]["mean"], summary["validation_top1"]["std"]
            for axis, x in zip(line, (summary.index, summary["seconds"]["mean"])):
                axis.plot(x, middle, style, markersize=4, color=colour, label=label)
                axis.fill_between(x, middle - band, middle + band, color=colour, alpha=0.2, linewidth=0)
        line[0].set(ylabel="validation top-1 (%)", title=f"{title}, by steps")
        line[1].set(title=f"{title}, by time")
    axes[0, 0].set_ylim(0, 5 + table.validation_top1.max())
    axes[-1, 0].set(xlabel="steps")
    axes[-1, 1].set(xlabel="seconds of training on one core")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def rates(
    table: pandas.DataFrame, arms: Mapping[str, str], optimizers: Mapping[str, str], best: Mapping[str, float]
) -> Figure:
    """Draw test top-1 by learning rate, a panel per optimiser and a line per arm; dotted: each optimiser's `best`."""
    figure, axes = plt.subplots(1, len(optimizers), figsize=(3.6 * len(optimizers), 3.2), sharey=True, squeeze=False)
    for axis, (optimizer, title) in zip(axes[0], optimizers.items()):
        for (arm, label), colour, style in zip(arms.items(), PALETTE, STYLES):
            rows = table[(table.optimizer == optimizer) & (table.arm == arm)].sort_values("learning_rate")
            axis.plot(rows.learning_rate, rows.test_top1, style, color=colour, label=label)
        axis.axvline(best[optimizer], color="0.5", linestyle=":", linewidth=1)
        ticks = sorted(table.learning_rate.unique())
        axis.set(
            title=title, xlabel="learning rate", xscale="log", xticks=ticks, xticklabels=[f"{rate:g}" for rate in ticks]
        )
        axis.minorticks_off()
    axes[0, 0].set(ylabel="test top-1 (%)", ylim=(0, 5 + table.test_top1.max()))
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def sensitivity(
    table: pandas.DataFrame,
    centre: Mapping[str, float],
    readings: pandas.DataFrame,
    others: Mapping[str, Sequence[float]],
) -> Figure:
    """Draw test top-1 by alpha, beta and c, one changed at a time from `centre`, and for each reading; bands: `others`.

    `table` has the columns name, value, seed and test_top1, `readings` reading, seed and test_top1.
    """
    figure, axes = plt.subplots(1, 4, figsize=(10.4, 3.0), sharey=True, width_ratios=[1, 1, 1, 1.7])
    for axis, (name, symbol) in zip(axes, {"alpha": "α", "beta": "β", "c": "c"}.items()):
        rows = table[table.name == name]
        summary = rows.groupby("value").test_top1.agg(["mean", "std"]).fillna(0)
        axis.errorbar(summary.index, summary["mean"], summary["std"], fmt="o-", capsize=3, color=PALETTE[2])
        axis.plot(rows.value, rows.test_top1, ".", color="0.4", markersize=3, zorder=3)
        axis.axvline(centre[name], color="0.6", linestyle=":", linewidth=1)
        axis.set(xlabel=symbol, xscale="log", xticks=list(summary.index))
        axis.set_xticklabels([f"{value:g}" for value in summary.index])
        axis.minorticks_off()
    names = list(dict.fromkeys(readings.reading))
    summary = readings.groupby("reading").test_top1.agg(["mean", "std"]).fillna(0).loc[names]
    axes[3].errorbar(range(len(names)), summary["mean"], summary["std"], fmt="o", capsize=3, color=PALETTE[2])
    axes[3].plot(readings.reading.map(names.index), readings.test_top1, ".", color="0.4", markersize=3, zorder=3)
    axes[3].set(xticks=range(len(names)), xlim=(-0.5, len(names) - 0.5))
    broken = [name.replace(" for ", "\nfor ").replace(" shared", "\nshared").replace("MLP ", "MLP\n") for name in names]
    axes[3].set_xticklabels(broken, fontsize="x-small")
    tops = [table.test_top1.max(), readings.test_top1.max()]
    for (name, values), colour in zip(others.items(), PALETTE):
        middle, sd = numpy.mean(values), numpy.std(values, ddof=1) if len(values) > 1 else 0.0
        tops.append(middle + sd)
        for axis in axes:
            axis.axhspan(middle - sd, middle + sd, color=colour, alpha=0.25, linewidth=0, label=f"{name}, ± 1 sd")
    axes[0].set(ylabel="test top-1 (%)", ylim=(0, 5 + max(tops)))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def dense(table: pandas.DataFrame, metrics: Mapping[str, str], arms: Mapping[str, str]) -> Figure:
    """Draw each dense metric by depth, arm and seed; `table` has columns arm, depth, seed and those of `metrics`."""
    figure, axes = plt.subplots(1, len(metrics), figsize=(3.1 * len(metrics), 3.2), squeeze=False)
    for axis, (column, label) in zip(axes[0], metrics.items()):
        for (arm, title), colour, marker in zip(arms.items(), (PALETTE[0], PALETTE[2]), "so"):
            rows = table[table.arm == arm]
            summary = rows.groupby("depth")[column].agg(["mean", "std"]).fillna(0)
            _bars(axis, summary, f"{marker}-", colour, title)
            axis.plot(rows.depth, rows[column], ".", color="0.4", markersize=3, zorder=3)
        axis.set(xlabel="blocks", ylabel=label, xticks=sorted(table.depth.unique()))
        axis.set_ylim(-0.05 * axis.get_ylim()[1], None)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def pictures(
    scenes: Sequence[Scene], colours: Mapping[str, Tensor], boxes: Mapping[str, Sequence[numpy.ndarray]]
) -> Figure:
    """Show scenes, masks, and each model's PCA colours with the box that TokenCut found (dashed: the true boxes)."""
    columns = 2 + len(colours)
    figure, axes = plt.subplots(len(scenes), columns, figsize=(1.75 * columns, 1.75 * len(scenes) + 0.3), squeeze=False)
    for row, (line, scene) in enumerate(zip(axes, scenes)):
        size = scene.image.shape[-1]
        picture = scene.image.transpose(1, 2, 0)
        line[0].imshow(picture, cmap="gray")
        if scene.mask is not None:
            classes = numpy.where(scene.mask == IGNORE, 0, scene.mask)
            line[1].imshow(classes, cmap="tab20", vmin=0, vmax=19, interpolation="nearest")
        for axis, name in zip(line[2:], colours):
            axis.imshow(colours[name][row], interpolation="nearest", extent=(0, size, size, 0))
            _frame(axis, boxes[name][row], "-", "white")
            for box in scene.boxes:
                _frame(axis, box, ":", "0.8")
        for axis in line:
            axis.set(xticks=[], yticks=[])
            axis.grid(False)
    for axis, title in zip(axes[0], ("image", "classes", *colours)):
        axis.set_title(title, fontsize="small")
    return figure


def _frame(axis: plt.Axes, box: numpy.ndarray, style: str, colour: str) -> None:
    left, top, right, bottom = box
    frame = plt.Rectangle((left, top), right - left, bottom - top, fill=False)
    frame.set(linestyle=style, edgecolor=colour, linewidth=1.4)
    axis.add_patch(frame)


def _bars(axis: plt.Axes, summary: pandas.DataFrame, style: str, colour: tuple, label: str) -> None:
    axis.errorbar(
        summary.index, summary["mean"], summary["std"], fmt=style, markersize=4, capsize=2, color=colour, label=label
    )
