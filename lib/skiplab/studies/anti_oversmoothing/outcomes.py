"""The trained arms of notebook 05: scores beside the baseline, and what the scalings learnt."""

from collections.abc import Mapping, Sequence

import pandas
from torch import nn

from skiplab.companion import runs
from skiplab.companion.runs import Run
from skiplab.companion.tuning import Configure, tune
from skiplab.errors import InputError
from skiplab.models.scaling import scaling_parameters
from skiplab.training import loop

ARMS = {"plain": {}, "AttnScale": {"scaling": "attnscale"}, "FeatScale": {"scaling": "featscale"}}  # model arguments


RESPECTING = "AttnScale, respecting"  # masks and row sums: on Swin and CaiT


ARGUMENTS = ARMS | {RESPECTING: {"scaling": "attnscale", "scaling_form": "respecting"}}


def compare(
    configure: Configure, rates: Sequence[float], seeds: Sequence[int], *, respecting: bool = False, **store: object
) -> dict[str, list[Run]]:
    """Train every arm at the learning rate that `tune` finds for the plain one; return each arm's runs, one a seed.

    With `respecting` AttnScale is also trained in the form that respects masks and row sums.
    """
    plain = tune(configure, rates, seeds, **store)
    rate, scaled = plain[0].config.learning_rate, [arm for arm in (ARGUMENTS if respecting else ARMS) if arm != "plain"]
    found = runs.load_or_run(loop.train, [configure(arm, rate, seed) for arm in scaled for seed in seeds], **store)
    return {"plain": plain} | {arm: found[len(seeds) * place :][: len(seeds)] for place, arm in enumerate(scaled)}


def scores(compared: Mapping[str, Mapping[str, list[Run]]]) -> pandas.DataFrame:
    """Return a row per run of what `compare` found for each model.

    `gain` is top-1 after the last epoch minus that of the plain arm with the same seed, in points.
    """
    table = pandas.concat(
        [
            runs.table(found).assign(model=model, arm=arm)
            for model, arms in compared.items()
            for arm, found in arms.items()
        ],
        ignore_index=True,
    )
    table["final_test_top1"] = pandas.to_numeric(table.final_test_top1)  # None where training broke
    plain = table[table.arm == "plain"].set_index(["model", "seed"]).final_test_top1
    table["gain"] = table.final_test_top1 - plain.loc[list(zip(table.model, table.seed))].to_numpy()
    return table


def better(table: pandas.DataFrame, model: str) -> str:
    """Return which of AttnScale and FeatScale, as released, has the higher mean validation top-1, from `scores`."""
    rows = table[(table.model == model) & table.arm.isin(["AttnScale", "FeatScale"])]
    return rows.groupby("arm").validation_top1.mean().idxmax()


def learned(model: nn.Module) -> pandas.DataFrame:
    """Return the scalings of a model: a row per layer (from 1), scale ("ω", "s", "t") and index (head, or channel)."""
    rows, layers = [], {}
    for name, values in scaling_parameters(model).items():
        scale = {"omega": "ω"}.get(name.rpartition(".")[2], name.rpartition(".")[2])
        layers[scale] = layers.get(scale, 0) + 1
        rows += [
            {"layer": layers[scale], "scale": scale, "index": index, "value": value}
            for index, value in enumerate(values.tolist())
        ]
    if not rows:
        raise InputError(f"this {type(model).__name__} has no scaling")
    return pandas.DataFrame(rows)


def moved(scores: pandas.DataFrame, arms: Mapping[str, Sequence[Run]], model: str) -> str:
    """Say how far a model's scalings moved from 0 on average, and how far apart its arms score."""
    apart = scores[scores.model == model].groupby("seed").final_test_top1.agg(lambda top1: top1.max() - top1.min())
    scales = pandas.concat(
        [learned(run.load_model()) for arm, found in arms.items() if arm != "plain" for run in found]
    )
    sizes = scales.value.abs().groupby(scales.scale, sort=False).mean()
    return (
        f"{model}: mean "
        + ", ".join(f"|{scale}| {size:.2g}" for scale, size in sizes.items())
        + f"; with the same seed its {len(arms)} arms lie at most {apart.max():.2f} points apart"
    )


def learned_statistics(table: pandas.DataFrame) -> pandas.DataFrame:
    """Return the statistics of the claims anti.learned.*: a row per value of `layers` and seed, a column per claim.

    `table` holds `learned` of the models with AttnScale and with FeatScale, with the columns `layers` and `seed`.
    """
    means = table.groupby(["layers", "seed", "scale", "layer"], sort=False).value.mean().unstack("scale")
    return pandas.DataFrame(
        {
            key: {
                "omega_grows": rank_by_layer(rows["ω"].droplevel(["layers", "seed"])),
                "t_above_s": float((rows["t"] - rows["s"]).mean()),
                "gap_grows": rank_by_layer((rows["t"] - rows["s"]).droplevel(["layers", "seed"])),
            }
            for key, rows in means.groupby(level=["layers", "seed"], sort=False)
        }
    ).T.rename_axis(["layers", "seed"])


def rank_by_layer(values: pandas.Series) -> float:
    """Return Spearman's correlation of a series, indexed by layer, with the layer."""
    return float(values.reset_index(name="value").corr("spearman").loc["layer", "value"])
