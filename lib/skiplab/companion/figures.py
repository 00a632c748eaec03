"""One seaborn theme, and figures saved together with where their numbers come from."""

import hashlib
import io
import json
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pandas
import seaborn
from matplotlib.figure import Figure

from skiplab import files
from skiplab.companion import fingerprint
from skiplab.companion.params import Parameters

PALETTE = seaborn.color_palette("colorblind")
UNCOMMITTED = ("replicate", "smoke", "custom")  # presets whose figures are not results


def theme() -> None:
    """Set the look of every figure, whatever matplotlibrc says: colour-blind-safe, readable at column width."""
    matplotlib.rcdefaults()
    seaborn.set_theme(
        "paper",
        "whitegrid",
        palette=PALETTE,
        font_scale=1.1,
        rc={
            "figure.dpi": 110,
            "savefig.dpi": 160,
            "figure.constrained_layout.use": True,
            "axes.titlesize": "medium",
            "legend.frameon": False,
        },
    )


def folder(preset: str) -> Path:
    """Return where a preset's figures go: quick's are the committed ones."""
    return files.ROOT / "figures" / ("" if preset == "quick" else preset)


def save(figure: Figure, name: str, parameters: Parameters, runs: tuple[str, ...] = (), *, pdf: bool = False) -> Path:
    """Save a figure as PNG (and PDF if asked) with a sidecar JSON; return the PNG's path.

    The sidecar holds the notebook, preset, parameters, the hashes of the runs that the figure shows, and
    `inputs`, the fingerprint of everything the notebook depends on: another one there means a stale figure.
    """
    path = folder(parameters.preset) / f"{name}.png"
    inputs = fingerprint.inputs_fingerprint(parameters.notebook, parameters.preset)
    files.write(path, _rendered(figure, "png", inputs))
    if pdf:
        files.write(path.with_suffix(".pdf"), _rendered(figure, "pdf", inputs))
    sidecar = {
        "notebook": parameters.notebook,
        "preset": parameters.preset,
        "runs": sorted(runs),
        "inputs": inputs,
        "parameters": parameters.experiment(),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    files.write(path.with_suffix(".json"), json.dumps(sidecar, indent=1, sort_keys=True) + "\n")
    return path


def gallery() -> str:
    """Return Markdown that shows every committed figure with a link to its notebook, seen from notebooks/."""
    entries = []
    for sidecar in sorted(folder("quick").glob("*.json")):
        notebook = json.loads(sidecar.read_text(encoding="utf-8"))["notebook"]
        entries.append(
            f"![{sidecar.stem}](../figures/{sidecar.stem}.png)\n\n"
            f"*{sidecar.stem}, from [{notebook}]({notebook}.ipynb)*\n"
        )
    return "\n".join(entries)


def phase_diagram(
    scores: pandas.DataFrame,
    *,
    arm: str,
    row: str,
    column: str,
    value: str,
    arms: dict[str, str],
    best: tuple[object, object],
) -> Figure:
    """Draw one heat map per arm over two hyperparameters; frame the cell that was best for the baseline.

    `scores` has one row per run; the mean over runs in a cell is shown. `arms` maps each value of the column `arm` to
    its title, `best` is (row value, column value).
    """
    figure, axes = plt.subplots(1, len(arms), figsize=(2.3 * len(arms) + 0.8, 2.6), sharey=True)
    for axis, (name, title) in zip(axes, arms.items()):
        cells = scores[scores[arm] == name].pivot_table(index=row, columns=column, values=value)
        seaborn.heatmap(
            cells,
            ax=axis,
            vmin=0,
            vmax=scores[value].max(),
            annot=True,
            fmt=".0f",
            cmap="cividis",
            cbar=axis is axes[-1],
            cbar_kws={"label": "test top-1 (%)"},
            linewidths=0.5,
        )
        position = (cells.columns.get_loc(best[1]), cells.index.get_loc(best[0]))
        axis.add_patch(plt.Rectangle(position, 1, 1, fill=False, edgecolor=PALETTE[3], linewidth=2.5))
        axis.set(title=title, xlabel=axis.get_xlabel(), ylabel=axis.get_ylabel() if axis is axes[0] else "")
        axis.invert_yaxis()
    return figure


def _rendered(figure: Figure, kind: str, inputs: str) -> bytes:
    """Return the file's bytes, free of dates so that equal figures are equal files."""
    buffer = io.BytesIO()
    metadata = {"Software": None, "Source": inputs} if kind == "png" else {"CreationDate": None, "Keywords": inputs}
    figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()
