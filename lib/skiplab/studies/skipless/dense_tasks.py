"""Dense tasks of notebook 06: the table of DINO's evaluations, and what claims ask of it."""

from collections.abc import Mapping, Sequence

import pandas

from skiplab.companion import claims
from skiplab.companion.runs import Run

SETS = {"voc2012": "voc", "ade20k": "ade20k", "coco_stuff": "coco_stuff", "coco20k": "coco20k"}  # as claims name them


def dense_table(evaluations: Sequence[Run], pretrained: Mapping[str, Run]) -> pandas.DataFrame:
    """Return a row per evaluation: arm, depth and seed of the model, what it was evaluated on, and the scores.

    `pretrained` maps a run's hash to it. Arms are "skips" and "skipless".
    """
    rows = []
    for run in evaluations:
        model = pretrained[run.config.initial.partition("/")[2]].config
        rows.append(
            {
                "arm": "skips" if model.skip == "both" else "skipless",
                "depth": model.model_args["depth"],
                "seed": model.seed,
                "dense": run.config.dense,
                "discovery": run.config.discovery,
            }
            | {name: run.result.get(name) for name in ("miou_single", "miou_multi", "corloc", "similarity")}
        )
    return pandas.DataFrame(rows)


def dense_values(table: pandas.DataFrame, data: str, depth: int) -> dict[str, pandas.Series]:
    """Return, for every claim that gives a number for a published dense set, the values by seed that decide it.

    `data` is the pre-training set: the paper's numbers are of ImageNet-1K, the reproduction's of Tiny-ImageNet. Models
    are those of the full `depth`.
    """
    known, found = claims.claims(), {}
    paper = {"imagenet-1k": "cut.dino", "tiny-imagenet": "cut.repro.dino"}.get(data)
    for (arm, dense, discovery), rows in table[table.depth == depth].groupby(["arm", "dense", "discovery"]):
        rows = rows.set_index("seed")
        places = {
            f"{SETS.get(dense)}.single": "miou_single",
            f"{SETS.get(dense)}.multi": "miou_multi",
            f"tokencut.{SETS.get(discovery)}": "corloc",
        }
        if paper == "cut.repro.dino":
            places = {"voc": "miou_single", "tokencut": "corloc"} if "voc2012" in (dense, discovery) else {}
        found |= {
            f"{paper}.{place}.{arm}": rows[column]
            for place, column in places.items()
            if f"{paper}.{place}.{arm}" in known and rows[column].notna().all()
        }
    return found


def difference(table: pandas.DataFrame, metric: str, skipless_depth: int, skips_depth: int) -> pandas.Series:
    """Return the paired difference of a metric by seed: skipless of one depth minus with skips of another."""

    def scores(arm: str, depth: int) -> pandas.Series:
        rows = table[(table.arm == arm) & (table.depth == depth)].dropna(subset=metric)
        return rows.drop_duplicates("seed").set_index("seed")[metric]

    return scores("skipless", skipless_depth) - scores("skips", skips_depth)
