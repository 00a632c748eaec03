"""AttnScale and FeatScale as stated: identities, and what the authors' form does to models that are not plain ViTs.

The methods are those of Wang, Zheng, Chen, Wang (arXiv 2203.05962), in skiplab.models.scaling."""

import copy
import math
from collections.abc import Sequence

import torch
from timm.models.cait import TalkingHeadAttn
from torch import Tensor, nn

from skiplab import draws
from skiplab.companion.cases import Draws
from skiplab.companion.judging import Measurement
from skiplab.companion.timing import one_thread
from skiplab.errors import InputError
from skiplab.models import probe, zoo
from skiplab.models.scaling import apply_scaling, feat_scale
from skiplab.theory.spectral import dc, hc

TOLERANCE = 1e-6


ROW_SUM = 1e-3  # how close to 1 a row sum counts as 1


UNDERFLOW = 1e-30  # what a softmax leaves of a masked logit lies far below


SMALL = {  # arguments of small models with 28 px images, one for each family
    "vit": {"patch_size": 7, "embed_dim": 24, "depth": 3, "num_heads": 3},
    "cait": {"patch_size": 7, "embed_dim": 24, "depth": 3, "num_heads": 3},
    "swin": {"patch_size": 2, "window_size": 7, "embed_dim": 24, "depths": (2, 2), "num_heads": (3, 3)},
}


def attn_scale(attn: Tensor, omega: Tensor) -> Tensor:
    """Return Â = L + (1 + ω)(A − L), L = 11ᵀ/n, of maps (…, h, n, n) and ω (h,), as the paper writes it."""
    low_pass = 1 / attn.shape[-1]
    return low_pass + (1 + omega[:, None, None]) * (attn - low_pass)


def _counted(differences: Sequence[float]) -> Measurement:
    """Count the relative differences above the tolerance."""
    worst = max(differences)
    return Measurement(
        violations=sum(not difference <= TOLERANCE for difference in differences),
        cases=len(differences),
        note=f"largest relative difference {worst:.0e}",
    )


def identity(cases: int, seed: int = 0) -> Measurement:
    """Compare ÂV with (1 + ω)·AV − ω·mean(V) on maps from nearly uniform to nearly one-hot, in float64."""
    draws, differences = Draws(seed), []
    for _ in range(cases):
        h, n, d = draws.whole(1, 4), draws.whole(2, 40), draws.whole(1, 16)
        attn = draws.attention(h, n, sharpness=10 ** draws.uniform(-2, 1.5))
        value, omega = draws.normal(h, n, d), 3 * draws.normal(h)
        formula, gain = attn_scale(attn, omega) @ value, omega[:, None, None]
        short = (1 + gain) * (attn @ value) - gain * value.mean(dim=-2, keepdim=True)
        differences.append(float((formula - short).norm() / formula.norm()))
    return _counted(differences)


def doubled(cases: int, seed: int = 0) -> Measurement:
    """Compare the released DeiT block, which adds s∘DC[X] and t∘HC[X] twice, with FeatScale at 2s and 2t; float64."""
    draws, differences = Draws(seed), []
    for _ in range(cases):
        n, d = draws.whole(2, 40), draws.whole(1, 16)
        x, s, t = draws.tokens(n, d)[None], draws.normal(d), draws.normal(d)
        added = s * dc(x) + t * hc(x)
        released = x + added + added
        differences.append(float((released - feat_scale(x, 2 * s, 2 * t)).norm() / released.norm()))
    return _counted(differences)


def added_parameters(name: str = "deit_small_patch16_224") -> int:
    """Return how many parameters AttnScale adds to a timm model; nothing is allocated."""
    with torch.device("meta"):
        plain, scaled = (zoo.create_model(name, num_classes=1000, scaling=scaling) for scaling in (None, "attnscale"))
    return sum(p.numel() for p in scaled.parameters()) - sum(p.numel() for p in plain.parameters())


@one_thread()
@torch.no_grad()
def neutral(kind: str, cases: int, seed: int = 0) -> Measurement:
    """Count the images on which a new scaling moves an output of a small DeiT, CaiT or Swin, in any of its forms.

    In float64, and with no parameter at its special initial value.
    """
    torch.manual_seed(seed)
    images = draws.normal(math.ceil(cases / len(SMALL)), 1, 28, 28)
    forms = ("released", "respecting") if kind == "attnscale" else ("released",)
    moved = []
    for family, arguments in SMALL.items():
        plain = zoo.create_model(family, num_classes=10, img_size=28, in_chans=1, **arguments).double().eval()
        for parameter in plain.parameters():
            parameter.add_(0.3 * draws.normal(*parameter.shape))
        scaled = [copy.deepcopy(plain) for _ in forms]
        for model, form in zip(scaled, forms):
            apply_scaling(model, kind, form=form)
        outputs = torch.stack([model(images) for model in scaled])
        moved += (outputs - plain(images)).abs().amax(dim=(0, 2)).tolist()
    return Measurement(
        violations=sum(not difference <= TOLERANCE for difference in moved),
        cases=len(moved),
        note=f"largest change {max(moved):.0e}",
    )


@torch.no_grad()
def talking_heads(model: nn.Module, images: Tensor) -> Measurement:
    """Count the mixed maps of a CaiT, one for each image, block and head, all of whose rows sum to 1."""
    sums = []
    for (_, block), attn in zip(zoo.blocks(model), probe.attention_maps(model, images), strict=True):
        if isinstance(block.attn, TalkingHeadAttn):
            mixing = block.attn.proj_w
            mixed = torch.einsum("gh,bhij->bgij", mixing.weight, attn) + mixing.bias[:, None, None]
            sums.append(mixed.sum(dim=-1))
    rows = torch.stack(sums)  # (blocks, B, h, n)
    violated = ((rows - 1).abs() <= ROW_SUM).all(dim=-1)
    return Measurement(
        violations=int(violated.sum()),
        cases=violated.numel(),
        note=f"rows of a mixed map sum to {float(rows.min()):.3g} up to {float(rows.max()):.3g}",
    )


@torch.no_grad()
def shifted_windows(model: nn.Module, images: Tensor) -> Measurement:
    """Count the masked pairs of tokens in the shifted windows of a Swin with AttnScale whose scaled weight is 0.

    Heads whose ω is 0 are left out.
    """
    weights = []
    for (_, block), attn in zip(zoo.blocks(model), probe.attention_maps(model, images), strict=True):
        if block.attn_mask is not None:
            one_hot = torch.eye(attn.shape[-1]).expand_as(attn)
            low_pass = block.attn.low_pass(one_hot, block.attn_mask)  # L itself
            scaled = attn + block.attn.omega[:, None, None] * (attn - low_pass)
            apart = (block.attn_mask != 0).repeat(len(attn) // len(block.attn_mask), 1, 1)[:, None]
            meant = apart & (block.attn.omega != 0)[:, None, None]
            weights.append(scaled[meant.expand_as(scaled)].abs())
    if not weights:
        raise InputError("this model has no shifted windows; give a Swin whose image is larger than its windows")
    weight = torch.cat(weights)
    note = (
        f"weights of masked pairs: {float(weight.min()):.0e} to {float(weight.max()):.0e}"
        if len(weight)
        else "every ω is 0"
    )
    return Measurement(violations=int((weight <= UNDERFLOW).sum()), cases=len(weight), note=note)
