"""timm models, changed as little as possible: the front door, the skip policy and the probe."""

from lib.models.probe import BlockTrace, attention_maps, branch_outputs, embeddings
from lib.models.residual import FAMILIES, SKIPS, remove_skips
from lib.models.zoo import blocks, create_model

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
