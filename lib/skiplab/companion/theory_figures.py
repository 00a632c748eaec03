"""The figures of notebooks 03 and 04: they draw what `layers` and `surveys` computed, and compute nothing."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy
import pandas
import seaborn
from matplotlib.figure import Figure
from torch import Tensor

from skiplab.companion.figures import PALETTE
from skiplab.companion.layers import VARIANTS, bands
from skiplab.companion.skipless_figures import WORST

FLOOR = 1e-12  # where the pictures of products end
EDGE = 6.0  # decades of slack shown on either side


def filters(kinds: Mapping[str, Tensor], powers: Mapping[int, Tensor], products: Mapping[int, Tensor]) -> Figure:
    """Draw band gains of three kinds of attention, of powers of one map, and of products over depth.

    `kinds` maps a name to gains (…, n), drawn as their mean and middle 80 %; the others map a number of layers to the
    gains (n,) of a product of so many maps.
    """
    figure, axes = plt.subplots(1, 3, figsize=(9.2, 3.4), sharex=True)
    for (name, gains), colour in zip(kinds.items(), PALETTE):
        gains = gains.flatten(0, -2)
        frequencies = bands(gains.shape[-1])
        low, high = (gains.quantile(share, dim=0)[: len(frequencies)] for share in (0.1, 0.9))
        axes[0].plot(frequencies, gains.mean(dim=0)[: len(frequencies)], ".-", label=name, color=colour)
        axes[0].fill_between(frequencies, low, high, alpha=0.2, color=colour, linewidth=0)
    for axis, stack, label in zip(axes[1:], (powers, products), ("t = {}", "after layer {}")):
        for (layers, gains), colour in zip(stack.items(), seaborn.color_palette("viridis_r", len(stack))):
            frequencies = bands(len(gains))
            axis.plot(
                frequencies, gains[: len(frequencies)].clamp(min=FLOOR), ".-", color=colour, label=label.format(layers)
            )
    axes[0].set(ylabel="gain of the band", title="one attention map", yscale="log")
    axes[1].set(title="powers of one trained map", yscale="log", ylim=(FLOOR, 30))
    axes[2].set(title="product of the layers' maps", yscale="log", ylim=(FLOOR, 30))
    for axis in axes:
        axis.set(xlabel="cycles per token")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize="small", columnspacing=1)
    return figure


def intensities(table: pandas.DataFrame) -> Figure:
    """Draw figure 1 of the paper from `layers.hc_by_layer`: a panel per variant, mean over images, rounding shaded."""
    figure, axes = plt.subplots(1, len(VARIANTS), figsize=(9.6, 3.2), sharey=True)
    lines = {
        "intensity": ("measured", "o-"),
        "one_step": ("bound from the layer before", "v--"),
        "accumulated": ("bound from the input", "^:"),
    }
    for axis, variant in zip(axes, VARIANTS):
        mean = table[table.variant == variant].groupby("layer")[list(lines)].mean()
        for (column, (label, style)), colour in zip(lines.items(), (PALETTE[0], PALETTE[1], PALETTE[2])):
            axis.plot(mean.index, mean[column], style, label=label, color=colour, markersize=4)
        axis.axhspan(-45, numpy.log(1e-12), color="0.85", zorder=0)
        axis.set(title=variant, xlabel="layer")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set(ylabel="ln(‖HC[X]‖ / ‖X₀‖)", ylim=(-42, 1.05 * table.accumulated.max()))
    axes[0].text(0.3, -41, "rounding", color="0.35", fontsize="small")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def spectra(before: Tensor, after: Tensor) -> Figure:
    """Draw figure 5 of the paper: band gains (L, h, n) of every layer and head, at initialisation and trained."""
    layers, heads, n = after.shape
    figure, axes = plt.subplots(
        heads, layers, figsize=(1.05 * layers + 0.8, 0.85 * heads + 1.0), sharex=True, sharey=True, squeeze=False
    )
    frequencies = bands(n)
    for layer in range(layers):
        for head in range(heads):
            axis = axes[head, layer]
            axis.plot(frequencies, before[layer, head, : len(frequencies)], color="0.6", label="at initialisation")
            axis.plot(frequencies, after[layer, head, : len(frequencies)], color=PALETTE[0], label="trained")
            axis.set(yscale="log", xticks=[0, 0.5])
            axis.tick_params(labelsize="small")
        axes[0, layer].set_title(f"layer {layer + 1}", fontsize="small")
    for head in range(heads):
        axes[head, 0].set_ylabel(f"head {head + 1}", fontsize="small")
    axes[0, 0].set_ylim(1e-3, 1.5 * float(after.max()))
    figure.supxlabel("cycles per token", fontsize="medium")
    figure.supylabel("gain of the band", fontsize="medium")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, fontsize="small")
    return figure


def head_spectra(models: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """Draw each model's frequencies (bands,) and gains (L, h, bands): a panel per layer, six a row, a line per head."""
    columns = 6
    rows = [-(-len(gains) // columns) for _, gains in models.values()]
    figure = plt.figure(figsize=(9.2, 1.35 * sum(rows) + 0.9 * len(rows)))
    parts_of_it = figure.subfigures(len(rows), 1, height_ratios=[1.35 * count + 0.9 for count in rows], squeeze=False)[
        :, 0
    ]
    for part, count, (name, (frequencies, gains)) in zip(parts_of_it, rows, models.items(), strict=True):
        axes = part.subplots(count, columns, sharex=True, sharey=True, squeeze=False)
        for layer, (axis, heads) in enumerate(zip(axes.flat, gains), start=1):
            for head, colour in zip(heads, seaborn.color_palette("viridis", len(heads)), strict=True):
                axis.plot(frequencies, head, color=colour, linewidth=0.8, alpha=0.8)
            axis.set(yscale="log", ylim=(1e-2, 30), xticks=[0, 0.25, 0.5])
            axis.set_title(f"layer {layer}", fontsize="small")
            axis.tick_params(labelsize="small")
        part.suptitle(f"{name}, a line per head", fontsize="medium")
        part.supxlabel("cycles per token", fontsize="small")
        part.supylabel("gain of the band", fontsize="small")
    return figure


def photograph_spectra(models: Mapping[str, Mapping[str, Tensor]], shown: int = 4) -> Figure:
    """Draw each model's `others.photograph_spectra`: what SABs add, and the tokens, for `shown` of the layers."""
    figure, axes = plt.subplots(1, 2 * len(models), figsize=(5 * len(models) + 0.4, 3.6), sharey=True, squeeze=False)
    for pair, (name, spectra) in zip(axes[0].reshape(-1, 2), models.items()):
        layers = len(spectra["sab"])
        picked = sorted({round(1 + step * (layers - 1) / (shown - 1)) for step in range(shown)})
        for axis, part, first in zip(pair, ("what SABs add", "tokens"), (spectra["sab"], spectra["tokens"][1:])):
            axis.plot(spectra["frequencies"], spectra["patches"][0], "k--", linewidth=1, label="pixels")
            if part == "tokens":
                axis.plot(
                    spectra["frequencies"], spectra["tokens"][0], color="0.5", linestyle=":", label="before layer 1"
                )
            for layer, colour in zip(picked, seaborn.color_palette("viridis_r", len(picked))):
                axis.plot(spectra["frequencies"], first[layer - 1], color=colour, linewidth=1.1, label=f"layer {layer}")
            axis.set(title=f"{name}:\n{part}", xlabel="cycles per token", yscale="log")
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize="small", columnspacing=1)
    axes[0, 0].set_ylabel("amplitude, share of ‖X‖")
    return figure


def parts(table: pandas.DataFrame) -> Figure:
    """Draw what each part of each block does to HC, from `layers.gains_by_part`."""
    figure, axis = plt.subplots(figsize=(0.62 * table.shape[1] + 3.2, 3.0))
    limit = float(table.abs().max(axis=None))
    seaborn.heatmap(
        table,
        ax=axis,
        cmap="RdBu",
        vmin=-limit,
        vmax=limit,
        fmt=".1f",
        annot=table.round(1) + 0.0 if table.shape[1] <= 12 else None,
        cbar_kws={"label": "ln of the factor on ‖HC‖"},
        linewidths=0.5,
    )
    axis.set(ylabel="", title="red: the part removes high frequencies, blue: it adds some")
    return figure


def similarities(table: pandas.DataFrame) -> Figure:
    """Draw how alike tokens and rows of attention are by relative depth: mean and ± 1 sd over models."""
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.0), sharey=True)
    for axis, column, title in zip(axes, ("features", "attention"), ("tokens", "rows of the attention maps")):
        seaborn.lineplot(
            table,
            x="depth",
            y=column,
            hue="layers",
            style="layers",
            markers=True,
            dashes=False,
            ax=axis,
            errorbar="sd",
            palette=PALETTE[: table.layers.nunique()],
        )
        axis.set(title=title, xlabel="depth (share of the layers)", ylabel="mean cosine similarity", ylim=(None, 1))
        handles, labels = axis.get_legend_handles_labels()
        axis.get_legend().remove()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def logit_kinds(table: pandas.DataFrame) -> Figure:
    """Draw the HC gain of attention with each kind of logits, from `layers.other_logits`, against the bounds."""
    kinds = {"dot": "dot-product logits", "l2": "L2 logits", "logistic": "logistic logits"}
    names = {"gain": "measured", "sharp bound": "sharp bound (ours)", "bound": "published bound"}
    figure, axes = plt.subplots(1, len(kinds), figsize=(8.4, 2.9), sharey=True)
    for axis, kind in zip(axes, kinds):
        rows = table[table.logits == kind].set_index("block")
        for (column, style), colour in zip({"gain": "o-", "sharp bound": "s:", "bound": "v--"}.items(), PALETTE):
            axis.plot(rows.index, rows[column], style, label=names[column], color=colour, markersize=4)
        axis.axhline(1, color="0.5", linewidth=1)
        axis.set(title=kinds[kind], xlabel="block", yscale="log")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("gain of HC, ‖HC A‖₂")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


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
        for slacks, offset, colour in (
            (generated.get(claim), -0.14, PALETTE[0]),
            (trained.get(claim), 0.14, PALETTE[2]),
        ):
            if slacks is not None and len(slacks):
                decades = numpy.clip(numpy.asarray(slacks) / numpy.log(10), -EDGE, EDGE)
                least, low, middle, high, most = numpy.quantile(decades, (0, 0.25, 0.5, 0.75, 1))
                axis.plot([least, most], [row + offset] * 2, color=colour, linewidth=1)
                axis.plot([low, high], [row + offset] * 2, color=colour, linewidth=4, solid_capstyle="butt")
                axis.plot(middle, row + offset, "o", color="white", markeredgecolor=colour, markersize=4, zorder=3)
        if claim in worst:
            axis.plot(
                numpy.clip(-numpy.log10(worst[claim]), -EDGE, EDGE),
                row - 0.14,
                "D",
                color=PALETTE[3],
                markersize=4,
                zorder=4,
            )
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
    handles = [
        plt.Line2D([], [], color=PALETTE[0], linewidth=4),
        plt.Line2D([], [], color=PALETTE[2], linewidth=4),
        plt.Line2D([], [], color=PALETTE[3], marker="D", linestyle="", markersize=4),
    ]
    figure.legend(
        handles,
        ["generated cases", "trained models", "worst case found by search"],
        loc="outside upper center",
        ncols=3,
    )
    return figure


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
    """Draw κ of nearly uniform attention by logit range and by number of tokens, from `surveys.diffuse_kappas`."""
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
