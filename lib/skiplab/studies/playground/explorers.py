"""The explorers of notebook 07, by name, and the controls of its replay of training."""

from skiplab.companion.explorations import Slider
from skiplab.studies.anti_oversmoothing.explorer import EXPLORATION as ALL_PASS
from skiplab.studies.bounds.explorer import EXPLORATION as BOUND
from skiplab.studies.low_pass.explorer import EXPLORATION as LOW_PASS
from skiplab.studies.skip_removal.explorer import EXPLORATION as SKIP_STRENGTH
from skiplab.studies.skipless.explorer import EXPLORATION as SKIPLESS
from skiplab.studies.token_graying.explorer import EXPLORATION as GRAYING

EXPLORATIONS = {
    exploration.name: exploration for exploration in (LOW_PASS, SKIP_STRENGTH, GRAYING, BOUND, ALL_PASS, SKIPLESS)
}


def replay_controls(epochs: int, blocks: int) -> dict[str, Slider]:
    """Return the controls of the replay of training, which are known before anything is trained."""
    return {"epoch": Slider("epoch", 0, epochs, 1, 0), "block": Slider("block", 1, blocks, 1, blocks)}
