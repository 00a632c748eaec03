"""The figures of notebook 04: they draw what `searches`, `layers` and `tables` computed, and compute nothing."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy
import pandas
from matplotlib.figure import Figure

from skiplab.companion.figures import PALETTE
from skiplab.theory.conditioning import WORST

EDGE = 6.0  # decades of slack shown on either side


def slack(
    generated: Mapping[str, Sequence[float]],
    trained: Mapping[str, Sequence[float]],
    worst: Mapping[str, float],
    names: Mapping[str, str],
) -> Figure:
    """Draw how far each statement is from being violated, a row per statement of `names`, in decades of bound/measured.

    `generated` and `trained` map a statement's id to natural-log slacks: a thin line spans all of them, a thick one the
    middle half. `worst` maps it to the largest measured/bound that a search found. Left of 0 the statement is violated;
    the names of those that a generated case violates are red.
    """
    figure, axis = plt.subplots(figsize=(7.6, 0.3 * len(names) + 1.5))
    for row, claim in enumerate(names):
        _spread(axis, generated.get(claim, ()), row - 0.14, PALETTE[0])
        _spread(axis, trained.get(claim, ()), row + 0.14, PALETTE[2])
        if claim in worst:
            decades = numpy.clip(-numpy.log10(worst[claim]), -EDGE, EDGE)
            axis.plot(decades, row - 0.14, "D", color=PALETTE[3], markersize=4, zorder=4)
    axis.axvspan(-EDGE * 1.05, 0, color=PALETTE[3], alpha=0.1, zorder=0, linewidth=0)
    axis.axvline(0, color=PALETTE[3], linewidth=1)
    axis.set(
        yticks=range(len(names)),
        yticklabels=names.values(),
        xlim=(-EDGE * 1.05, EDGE * 1.05),
        ylim=(len(names) - 0.5, -0.5),
        xlabel=f"log₁₀(bound / measured), cut off at ± {EDGE:.0f}",
    )
    for label, claim in zip(axis.get_yticklabels(), names):
        if min(generated[claim]) < -1e-9:
            label.set(color=PALETTE[3], fontweight="bold")
    axis.grid(axis="y", visible=False)
    handles = {
        "generated cases": plt.Line2D([], [], color=PALETTE[0], linewidth=4),
        "trained models": plt.Line2D([], [], color=PALETTE[2], linewidth=4),
        "worst case found by search": plt.Line2D([], [], color=PALETTE[3], marker="D", linestyle="", markersize=4),
    }
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=3)
    return figure


def _spread(axis: plt.Axes, slacks: Sequence[float], y: float, colour: tuple) -> None:
    """Draw slacks as a thin line over all, a thick one over the middle half, and a dot at the median."""
    if len(slacks):
        decades = numpy.clip(numpy.asarray(slacks) / numpy.log(10), -EDGE, EDGE)
        least, low, middle, high, most = numpy.quantile(decades, (0, 0.25, 0.5, 0.75, 1))
        axis.plot([least, most], [y] * 2, color=colour, linewidth=1)
        axis.plot([low, high], [y] * 2, color=colour, linewidth=4, solid_capstyle="butt")
        axis.plot(middle, y, "o", color="white", markeredgecolor=colour, markersize=4, zorder=3)


def jacobians(table: pandas.DataFrame) -> Figure:
    """Draw ln κ of the attention's Jacobian with and without its skip, by block: a panel per state of the model.

    Where a Jacobian is rank-deficient (ln κ infinite), the largest ln κ that float64 can tell is drawn.
    """
    kappas = table[["bare", "with skip"]].clip(upper=WORST)
    table = table.assign(**kappas)
    figure, axes = plt.subplots(1, table.state.nunique(), figsize=(6.4, 2.8), sharey=True)
    for axis, (state, rows) in zip(axes, table.groupby("state", sort=False)):
        for (column, label), colour in zip({"bare": "K", "with skip": "K + I"}.items(), PALETTE):
            summary = rows.groupby("block")[column].agg(["mean", "std"])
            axis.errorbar(
                summary.index, summary["mean"], summary["std"], fmt="o-", label=label, color=colour, capsize=3
            )
        axis.set(title=state, xlabel="block", xticks=sorted(rows.block.unique()))
    axes[0].set(ylabel="ln κ", ylim=(0, 1.15 * kappas.max(axis=None)))
    if kappas.max(axis=None) == WORST:
        for axis in axes:
            axis.axhspan(WORST - 0.5, 1.15 * WORST, color="0.85", zorder=0, linewidth=0)
        axes[-1].text(
            0.97,
            0.97,
            "rank-deficient",
            color="0.35",
            fontsize="small",
            ha="right",
            va="top",
            transform=axes[-1].transAxes,
        )
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def diffuse(by_range: pandas.DataFrame, by_size: pandas.DataFrame) -> Figure:
    """Draw κ of nearly uniform attention by logit range and by number of tokens, from `tables.diffuse_kappas`."""
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.0), sharey=True)
    labels = ("range of the logits (64 tokens)", "tokens n (range 0.01)")
    for axis, rows, column, label, base in zip(axes, (by_range, by_size), ("range", "n"), labels, (10, 2)):
        axis.plot(rows[column], rows.kappa, ".", label="three random draws")
        floor = (2 * (rows.n - 1) ** 0.5 / rows["range"]).groupby(rows[column]).first()
        axis.plot(floor.index, floor, "k--", linewidth=1, label="2 √(n − 1) / range, the least possible")
        axis.set_xscale("log", base=base)
        axis.set(yscale="log", xlabel=label)
    axes[0].set_ylabel("κ(A)")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2)
    return figure
