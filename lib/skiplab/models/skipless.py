"""The skipless initialisation: weights with which a ViT trains without its skips.

Ji, Martens, Zheng, Zhou, Moghadam, Zhang, Saratchandran, Lucey, "Cutting the Skip: Training Residual-Free
Transformers", ICLR 2026, arXiv 2510.00345. The architecture stays timm's; only the blocks' weights are drawn anew, so
that the Jacobian of self-attention is well-conditioned. With weights that multiply tokens from the right:

- W_V = c·U and W_O = c·Vᵀ, from the SVD U S Vᵀ of a d×d Gaussian matrix: W_V W_O is c² times an orthogonal matrix.
  The singular vectors of such a matrix are two independent Haar matrices (but for signs that cancel): these are drawn.
- W_Q W_Kᵀ is, in every head, the best approximation of rank d/h to αZ + βI, Z_ij ~ N(0, 1/d), split by square roots of
  the singular values.
- The MLP's weights are Haar (semi-)orthogonal times max(√(out/in), 1).
- Biases are zero.

All of it is drawn by `skiplab.draws`: the same bits on every machine up to width 256, and beyond to float64's rounding.

Where the paper is silent, SkiplessInit offers the readings and notebook 06 measures them: `heads` says whether the
heads draw a Z each ("own", the default: with one Z for all, "shared", they would all attend alike), or share out the
singular triples of one αZ + βI ("split", which alone makes Σ_h W_Q^h W_K^hᵀ exactly αZ + βI). `mlp` is "scaled" as
above, "orthogonal" without the factor, or "default" for timm's own weights.
"""

import math
from dataclasses import dataclass

import torch
from timm.layers import Attention, Mlp
from torch import Tensor, nn

from skiplab import draws
from skiplab.errors import InputError, check_plain, indivisible, unknown
from skiplab.models.residual import Family, find_blocks

HEADS = ("own", "shared", "split")
MLPS = ("scaled", "orthogonal", "default")
FAMILY = "vit"


@dataclass(frozen=True)
class SkiplessInit:
    """The initialisation's settings: the paper's for a supervised ViT-B are the defaults, for DINO (1.8, 1, 3).

    Raises InputError for an α, β or c that is not a positive number and for an unknown reading.
    """

    alpha: float = 2.0
    beta: float = 0.6
    c: float = 3.0
    heads: str = "own"
    mlp: str = "scaled"

    def __post_init__(self):
        for name, usual in {"alpha": 2.0, "beta": 0.6, "c": 3.0}.items():
            value = getattr(self, name)
            check_plain(name, value)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise InputError(f"{name} is {value!r}; it must be a positive number, for example {usual}")
        for name, allowed in {"heads": HEADS, "mlp": MLPS}.items():
            if getattr(self, name) not in allowed:
                raise unknown(f"skipless {name}", getattr(self, name), allowed)


def check_init(family: Family, name: str) -> None:
    """Raise InputError where models of `family` have no skipless initialisation."""
    if family.name != FAMILY:
        raise InputError(
            f"{name!r} is of the family {family.name}, which has no skipless initialisation (allowed: {FAMILY})"
        )


@torch.no_grad()
def apply_init(model: nn.Module, init: SkiplessInit) -> None:
    """Draw the weights of every block of a ViT anew, from torch's generator; all else keeps its weights.

    Raises InputError for blocks whose attention or MLP is not timm's standard one: normed queries and keys, or gates,
    would undo what the initialisation sets.
    """
    for name, block, _ in find_blocks(model):
        attention, mlp = block.attn, block.mlp
        plain = (
            isinstance(attention, Attention) and isinstance(attention.q_norm, nn.Identity) and attention.gate is None
        )
        if not plain or type(mlp) is not Mlp or not isinstance(mlp.fc1, nn.Linear):
            raise InputError(
                f"{name} has no skipless initialisation: it needs timm's Attention without query-key norm "
                f"or gate, and Mlp of linear layers; saw {type(attention).__name__} and {type(mlp).__name__}"
            )
        _initialise_attention(attention, init)
        _initialise_mlp(mlp, init.mlp)


def _initialise_attention(attention: Attention, init: SkiplessInit) -> None:
    weight, output = attention.qkv.weight, attention.proj.weight
    d = output.shape[1]
    u, v = draws.orthogonal(d, d), draws.orthogonal(d, d)
    w_q, w_k = query_key(init, d, attention.num_heads)
    weight.copy_(torch.cat([w_q, w_k, init.c * u], dim=1).mT)  # a linear layer holds the transpose
    output.copy_(init.c * v)
    for layer in (attention.qkv, attention.proj):
        _zero_bias(layer)


def query_key(init: SkiplessInit, d: int, heads: int) -> tuple[Tensor, Tensor]:
    """Return W_Q and W_K (d, d) in float64, whose columns are the heads' side by side; drawn from torch's generator."""
    if d % heads:
        raise indivisible("width", d, "heads", heads)
    count, width = (heads if init.heads == "own" else 1), (d if init.heads == "split" else d // heads)
    factors = draws.leading_factors(draw_targets(init, d, count), width)
    repeats = heads if init.heads == "shared" else 1
    w_q, w_k = (part.movedim(0, 1).flatten(1).repeat(1, repeats) for part in factors)
    return w_q, w_k


def draw_targets(init: SkiplessInit, d: int, count: int) -> Tensor:
    """Draw `count` matrices αZ + βI, float64 (count, d, d), from torch's generator."""
    targets = init.alpha / math.sqrt(d) * draws.normal(count, d, d)
    targets.diagonal(dim1=1, dim2=2).add_(init.beta)
    return targets


def _initialise_mlp(mlp: Mlp, reading: str) -> None:
    for layer in (mlp.fc1, mlp.fc2):
        if reading != "default":
            scale = max(math.sqrt(layer.out_features / layer.in_features), 1.0) if reading == "scaled" else 1.0
            layer.weight.copy_(scale * draws.orthogonal(*layer.weight.shape))
        _zero_bias(layer)


def _zero_bias(layer: nn.Linear) -> None:
    if layer.bias is not None:
        layer.bias.zero_()
