"""Do the cures add up? A factorial of scalings, Token Graying (arXiv 2505.01996) and the skipless initialisation
(arXiv 2510.00345), with and without skips; beyond the papers."""

import copy
import math

import pandas
import torch
from torch import Tensor, nn

from skiplab.companion.timing import one_thread
from skiplab.errors import InputError
from skiplab.models import probe
from skiplab.studies.anti_oversmoothing.layers import after_blocks, hc_share
from skiplab.theory.conditioning import condition_number, summarise_log_kappa
from skiplab.theory.spectral import token_similarity

CURES = {"graying": "none", "scaling": "none", "init": "timm"}  # each factor with the level that is no cure


NONE = tuple(CURES.values())


NAMES = {
    "dct": "DCT graying",
    "svd": "SVD graying",
    "svd_fast": "fast SVD graying",
    "attnscale": "AttnScale",
    "featscale": "FeatScale",
    "skipless": "skipless init",
}


MEASURES = {
    "top1": "top-1 (%)",
    "log_kappa": "ln κ of SAB outputs",
    "hc_share": "HC share (%)",
    "similarity": "token similarity",
}


SKIPS = {"both": "both skips", "no_sab": "no SAB skip", "no_ffn": "no FFN skip", "none": "no skips"}


SURE = 2.0  # standard deviations that a difference must exceed


@one_thread()
@torch.no_grad()
def model_state(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Return what a ViT does to test images, in float64: the columns of MEASURES besides top-1.

    `log_kappa` is the median ln κ of the SAB outputs over images and blocks, of those of full rank (NaN: none), and
    `deficient` the percentage of the others; `hc_share` and `similarity` are means over images, after the last block.
    """
    model = copy.deepcopy(model).double()
    traces = probe.branch_outputs(model, images.double())
    kappa = summarise_log_kappa(torch.cat([condition_number(trace.sab) for trace in traces]))
    last = after_blocks(model, traces)[-1]
    return {
        "log_kappa": kappa["median_log_kappa"],
        "deficient": 100 * kappa["n_inf"] / kappa["n"],
        "hc_share": hc_share(last),
        "similarity": float(token_similarity(last).mean()),
    }


def single_effects(table: pandas.DataFrame) -> pandas.DataFrame:
    """Return what each cure alone changes against no cure: a row per skip, seed and cure, a column per measure.

    `table` has a row per run: the columns `skip` and `seed`, those of CURES and those of MEASURES. Raises InputError
    where the run without a cure is missing.
    """
    rows = [
        {"skip": skip, "seed": seed, "cure": NAMES[cure]}
        | {measure: _change(table, measure, skip, seed, levels) for measure in MEASURES}
        for skip, seed, levels in _cells(table)
        for cure in _active(levels)
        if len(_active(levels)) == 1
    ]
    return pandas.DataFrame(rows)


def together(table: pandas.DataFrame) -> pandas.DataFrame:
    """Compare what several cures do to top-1 together with what they do alone: a row per skip, seed and combination.

    `gain` is theirs together over no cure, `parts` the sum of their gains alone and `best` the largest of these, in
    points. `spread` is the standard deviation of gain − parts where that of a run is 1: √(1 + k + (k − 1)²) for k
    cures. `table` is that of `single_effects`, and it raises the same.
    """
    rows = []
    for skip, seed, levels in _cells(table):
        cures = _active(levels)
        if len(cures) > 1:
            alone = [
                _change(
                    table,
                    "top1",
                    skip,
                    seed,
                    tuple(level if level == cure else none for level, none in zip(levels, NONE)),
                )
                for cure in cures
            ]
            rows.append(
                {
                    "skip": skip,
                    "seed": seed,
                    "cures": " + ".join(NAMES[cure] for cure in cures),
                    "gain": _change(table, "top1", skip, seed, levels),
                    "parts": sum(alone),
                    "best": max(alone),
                    "spread": math.sqrt(1 + len(cures) + (len(cures) - 1) ** 2),
                }
            )
    return pandas.DataFrame(rows)


def adding_up(comparison: pandas.DataFrame, sd: float) -> pandas.DataFrame:
    """Count, by skip, how the combinations of `together` compare with their parts, averaged over seeds.

    `sd` is that of one run's top-1; differences up to SURE standard deviations count as none.
    """
    grouped = comparison.groupby(["skip", "cures"], sort=False)
    mean = grouped[["gain", "parts", "best", "spread"]].mean()
    one = SURE * sd / grouped.size() ** 0.5
    excess, margin = mean.gain - mean.parts, one * mean.spread
    counts = pandas.DataFrame(
        {
            "more than the sum": excess > margin,
            "not told from the sum": excess.abs() <= margin,
            "less than the sum": excess < -margin,
            "better than the best alone": mean.gain - mean.best > one * math.sqrt(2),
            "combinations": True,
        }
    )
    return counts.groupby(level="skip", sort=False).sum()


def supported(effects: pandas.DataFrame, comparison: pandas.DataFrame, sd: float) -> list[str]:
    """Say what `single_effects` and `together` support of top-1, and from how many points on; `sd` is one run's."""
    if not sd:
        return ["the noise of a run is not known, so nothing can be told from it: give more than one seed"]
    one = SURE * sd / comparison.seed.nunique() ** 0.5
    alone = one * math.sqrt(2)
    margins = {names.count(" + ") + 1: one * spread for names, spread in zip(comparison.cures, comparison.spread)}
    lines = [
        f"{comparison.seed.nunique()} seed(s), sd of one run {sd:.1f} points: noise hides gains "
        f"up to {alone:.1f} points, "
        "and distances from the sum up to "
        + ", ".join(f"{margin:.1f} ({cures} cures)" for cures, margin in sorted(margins.items()))
    ]
    for skip, rows in comparison.groupby("skip", sort=False):
        single = effects[effects["skip"] == skip].groupby("cure", sort=False).top1.mean()
        mean = rows.groupby("cures", sort=False)[["gain", "parts", "best", "spread"]].mean()
        beyond, ahead = single[single.abs() > alone], mean[mean.gain - mean.best > alone]
        neither = ((mean.gain - mean.parts).abs() <= one * mean.spread) & ((mean.gain - mean.best).abs() <= alone)
        lines += [
            f"{SKIPS[skip]}: beyond noise alone: "
            + (", ".join(f"{cure} {gain:+.1f}" for cure, gain in beyond.items()) or "no cure"),
            "  better together than the best alone, beyond noise: "
            + ("; ".join(ahead.index) or f"none of {len(mean)}"),
            f"  told neither from the sum nor from the best alone: {neither.sum()} of {len(mean)}, "
            f"of which these runs do "
            "not say whether the cures add up",
        ]
    return lines


def _cells(table: pandas.DataFrame) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(row.skip, row.seed, tuple(getattr(row, factor) for factor in CURES)) for row in table.itertuples()]


def _active(levels: tuple[str, ...]) -> list[str]:
    return [level for level, none in zip(levels, NONE) if level != none]


def _change(table: pandas.DataFrame, measure: str, skip: str, seed: int, levels: tuple[str, ...]) -> float:
    """Return what the cures of `levels` change in a measure, against no cure."""
    values = table.set_index(["skip", "seed", *CURES])[measure]
    for cell in (levels, NONE):
        if (skip, seed, *cell) not in values.index:
            missing = ", ".join(f"{factor} {level}" for factor, level in zip(CURES, cell))
            raise InputError(
                f"no run with skip {skip}, seed {seed}, {missing}: what cures do together is compared "
                "with each of them alone and with none"
            )
    return float(values[(skip, seed, *levels)] - values[(skip, seed, *NONE)])
