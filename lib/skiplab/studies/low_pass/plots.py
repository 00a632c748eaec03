"""The figures of notebook 03: they draw what `layers` and `others` computed, and compute nothing."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy
import pandas
import seaborn
from matplotlib.figure import Figure
from torch import Tensor

from skiplab.companion.figures import PALETTE
from skiplab.studies.low_pass.layers import VARIANTS
from skiplab.theory.spectral import bands

FLOOR = 1e-12  # where the pictures of products end


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
    for axis, column, title in zip(axes, ("features", "attention"), ("tokens", "columns of the attention maps")):
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
