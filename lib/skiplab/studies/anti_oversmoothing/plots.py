"""The figures of notebook 05: they draw what the other modules computed, and compute nothing."""

import re
from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas
import seaborn
from matplotlib.figure import Figure
from torch import Tensor

from skiplab.companion.figures import PALETTE
from skiplab.studies.anti_oversmoothing.adding import CURES, MEASURES, NAMES, SKIPS
from skiplab.theory.spectral import bands

COLOURS = {"plain": "0.45", "AttnScale": PALETTE[0], "AttnScale, respecting": PALETTE[2], "FeatScale": PALETTE[1]}
LEVELS = {"none": "none", **NAMES}


def gains(table: pandas.DataFrame) -> Figure:
    """Draw what each scaling adds to top-1: a row per `model`, a dot per seed (`gain`, points), a bar for the mean."""
    models, arms = list(dict.fromkeys(table.model)), list(dict.fromkeys(table.arm))
    figure, axis = plt.subplots(figsize=(6.6, 0.75 * len(models) + 1.3))
    for offset, arm in enumerate(arms):
        rows = table[table.arm == arm]
        heights = rows.model.map(models.index) + 0.2 * (offset - (len(arms) - 1) / 2)
        axis.plot(rows.gain, heights, "o", color=COLOURS[arm], alpha=0.6, markersize=5, label=arm)
        means = rows.gain.groupby(heights).mean()
        axis.plot(means, means.index, "|", color=COLOURS[arm], markersize=13, markeredgewidth=3)
    axis.axvline(0, color="0.3", linewidth=1)
    axis.set(
        yticks=range(len(models)),
        yticklabels=models,
        ylim=(len(models) - 0.5, -0.5),
        xlabel="top-1 with the scaling − without, same seed (points)",
        title="dots: seeds; bars: their mean",
    )
    figure.legend(loc="outside lower center", ncols=len(arms))
    return figure


def learned(table: pandas.DataFrame) -> Figure:
    """Draw ω (above), s and t (below) by layer, mean and ± 1 sd over seeds: a column per model of `layers`."""
    depths = list(dict.fromkeys(table.layers))
    figure, axes = plt.subplots(
        2, len(depths), figsize=(3.1 * len(depths) + 0.6, 5), sharex="col", sharey="row", squeeze=False
    )
    for column, depth in enumerate(depths):
        rows = table[table.layers == depth]
        for axis, scales, colours in (
            (axes[0, column], ["ω"], PALETTE[:1]),
            (axes[1, column], ["s", "t"], PALETTE[1:3]),
        ):
            seaborn.lineplot(
                rows[rows.scale.isin(scales)],
                x="layer",
                y="value",
                hue="scale",
                style="scale",
                hue_order=scales,
                style_order=scales,
                markers=True,
                dashes=False,
                errorbar="sd",
                palette=colours,
                ax=axis,
            )
            axis.axhline(0, color="0.3", linewidth=1)
            axis.legend(title="", ncols=2)
            axis.xaxis.get_major_locator().set_params(integer=True)
        axes[0, column].set(title=depth, ylabel="mean over heads")
        axes[1, column].set(xlabel="layer", ylabel="mean over channels")
    return figure


def spectra(gains_of: Mapping[str, Tensor], columns: int = 6) -> Figure:
    """Draw the gain of each band by layer, averaged over heads, of models with gains (L, h, n): a panel per layer."""
    layers = min(len(gain) for gain in gains_of.values())
    columns, rows = min(columns, layers), -(-layers // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(1.45 * columns + 0.8, 1.5 * rows + 0.9), sharex=True, sharey=True, squeeze=False
    )
    for layer, axis in enumerate(axes.flat):
        if layer >= layers:
            axis.set_visible(False)
            continue
        for name, gain in gains_of.items():
            frequencies = bands(gain.shape[-1])
            axis.plot(frequencies, gain[layer].mean(dim=0)[: len(frequencies)], color=COLOURS[name], label=name)
        axis.set(yscale="log", xticks=[0, 0.5])
        axis.set_title(f"layer {layer + 1}", fontsize="small")
        axis.tick_params(labelsize="small")
    figure.supxlabel("cycles per token", fontsize="medium")
    figure.supylabel("gain of the band", fontsize="medium")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(gains_of))
    return figure


def by_layer(table: pandas.DataFrame) -> Figure:
    """Draw HC share and similarities by layer, mean and range over seeds: a row per model of `layers`."""
    titles = {
        "hc_share": "HC share of the tokens (%)",
        "features": "similarity of tokens",
        "attention": "similarity of attention columns",
    }
    depths, arms = list(dict.fromkeys(table.layers)), list(dict.fromkeys(table.arm))
    figure, axes = plt.subplots(len(depths), 3, figsize=(8.6, 2.4 * len(depths) + 0.5), sharey="col", squeeze=False)
    for row, depth in enumerate(depths):
        for axis, (column, title) in zip(axes[row], titles.items()):
            seaborn.lineplot(
                table[table.layers == depth],
                x="layer",
                y=column,
                hue="arm",
                style="arm",
                hue_order=arms,
                style_order=arms,
                palette=[COLOURS[arm] for arm in arms],
                errorbar=("pi", 100),
                ax=axis,
            )
            axis.set(title=title if row == 0 else "", xlabel="layer", ylabel=depth if column == "hc_share" else "")
            handles, labels = axis.get_legend_handles_labels()
            axis.get_legend().remove()
            axis.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(arms))
    return figure


def factorial(table: pandas.DataFrame) -> Figure:
    """Draw the factorial, averaged over seeds: a panel per measure, a row per model, a column per graying."""
    table = table.assign(
        graying=table.graying.map(lambda level: LEVELS[level].removesuffix(" graying")),
        arm=[_arm(row) for row in table.itertuples()],
    )
    order, columns = list(dict.fromkeys(table.arm)), list(dict.fromkeys(table.graying))
    figure, axes = plt.subplots(1, len(MEASURES), figsize=(9.4, 0.3 * len(order) + 1.4), sharey=True)
    for axis, (measure, title) in zip(axes, MEASURES.items()):
        cells = table.groupby(["arm", "graying"])[measure].mean().unstack().reindex(index=order, columns=columns)
        digits = ".2f" if measure == "similarity" else ".1f"
        seaborn.heatmap(
            cells,
            ax=axis,
            annot=True,
            fmt=digits,
            cmap="cividis",
            cbar=False,
            linewidths=0.5,
            annot_kws={"fontsize": "small"},
        )
        axis.set(title=title, xlabel="graying", ylabel="")
    return figure


def _arm(row: object) -> str:
    """Name a row of the factorial: its skip, the skipless initialisation if it has that, its scaling if it has one."""
    cures = [
        NAMES[level] for level, none in ((row.init, CURES["init"]), (row.scaling, CURES["scaling"])) if level != none
    ]
    return ", ".join([SKIPS[row.skip], *cures])


def adding(effects: pandas.DataFrame, comparison: pandas.DataFrame, sd: float, sure: float) -> Figure:
    """Draw, by skip, what each cure does alone (above) and what several do together against their sum (below).

    `effects` and `comparison` are those of `single_effects` and `together`; the band around the diagonal is ± `sure`
    standard deviations of gain − parts for two cures, `sd` being that of one run.
    """
    skips = list(dict.fromkeys(comparison.skip))
    figure, axes = plt.subplots(2, len(skips), figsize=(4.5 * len(skips), 6.4), squeeze=False)
    scale = effects.groupby("skip")[list(MEASURES)].agg(lambda column: column.abs().max()).max().replace(0, 1)
    for column, skip in enumerate(skips):
        mean = effects[effects.skip == skip].groupby("cure", sort=False)[list(MEASURES)].mean()
        axis = axes[0, column]
        seaborn.heatmap(
            mean / scale, annot=mean, fmt="+.2f", cmap="RdBu", vmin=-1, vmax=1, cbar=False, linewidths=0.5, ax=axis
        )
        axis.set_xticklabels([re.sub(r" (SAB|sim|\(%)", r"\n\1", name) for name in MEASURES.values()], rotation=0)
        axis.set(title=f"{SKIPS[skip]}: change by each cure alone", ylabel="")
        axis, rows = axes[1, column], comparison[comparison.skip == skip]
        ends = [min(rows.parts.min(), rows.gain.min(), 0) - 1, max(rows.parts.max(), rows.gain.max(), 0) + 1]
        axis.plot(ends, ends, color="0.3", linewidth=1)
        band = sure * sd * 2
        axis.fill_between(ends, [end - band for end in ends], [end + band for end in ends], color="0.85", linewidth=0)
        for init, marker, label in ((False, "o", "graying and scaling"), (True, "s", "with the skipless init")):
            chosen = rows[rows.cures.str.contains(NAMES["skipless"]) == init]
            axis.plot(chosen.parts, chosen.gain, marker, color=PALETTE[2 if init else 0], label=label)
        axis.set(
            xlabel="sum of the gains alone (points)",
            ylabel="gain together (points)",
            title=f"{SKIPS[skip]}: several cures in top-1",
        )
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure
