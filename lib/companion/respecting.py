"""Train with AttnScale in the form that respects Swin's shift mask and CaiT's row sums, for the run store.

A model's front door knows the released form only, since the other is ours; see lib/models/scaling.py for both.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from lib.models import zoo
from lib.models.scaling import apply_scaling
from lib.training import loop


def train_respecting(config: loop.TrainConfig, folder: Path, report: Callable[[list[dict]], None] | None = None) -> dict:
    """Train as `loop.train` does, with form="respecting" wherever the model has AttnScale.

    The parameters' names are those of the released form. Raises InputError for FeatScale, which has no such form.
    """
    zoo.apply_scaling = partial(apply_scaling, form="respecting")
    try:
        return loop.train(config, folder, report)
    finally:
        zoo.apply_scaling = apply_scaling
