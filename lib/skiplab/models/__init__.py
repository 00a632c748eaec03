"""timm models, changed as little as possible: the front door, the skip policy and the probe."""

from skiplab.models.probe import BlockTrace, attention_maps, branch_outputs, embeddings
from skiplab.models.residual import FAMILIES, SKIPS, remove_skips
from skiplab.models.zoo import blocks, create_model

__all__ = [
    "FAMILIES",
    "SKIPS",
    "BlockTrace",
    "attention_maps",
    "blocks",
    "branch_outputs",
    "create_model",
    "embeddings",
    "remove_skips",
]
