"""A block is two branches, SAB and FFN; a skip policy says which of them are added to their input.

FAMILIES is the one table of what is supported: for each family, how to reach the two branches of its timm blocks.
A new family is a new entry there and nothing else. The branches are the right-hand sides of timm 1.0.31's own
`x = x + …`, norm, layer scale and drop path included; the experiment is skip removal in Always Skip Attention
(arXiv 2505.01996).
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from timm.models import cait, convmixer, pvt_v2, swin_transformer, vision_transformer
from torch import Tensor, cat, nn

from skiplab.errors import InputError, unknown

SKIPS = ("both", "no_sab", "no_ffn", "none")


@dataclass(frozen=True)
class Branches:
    """Say how to reach the branches of one timm block class.

    `sab` and `ffn` take the block and its inputs and return what timm adds to the tokens; `ffn` is None where the
    block has no second skip. `tokens_at` is the position of the tokens among the block's inputs, `path` matches the
    block's name in the model, `as_tokens` turns what the block works on into (B, n, d).
    """

    block: type[nn.Module]
    path: str
    sab: Callable[..., Tensor]
    ffn: Callable[..., Tensor] | None
    tokens_at: int = 0
    kind: str = "attention"
    as_tokens: Callable[[Tensor], Tensor] = lambda tokens: tokens


@dataclass(frozen=True)
class Family:
    """Describe one family: its bare `name` at the front door, timm's class and modules, its blocks and image sizes.

    `patch_size` returns the (height, width) in pixels of which image sizes must be multiples.
    """

    name: str
    model: type[nn.Module]
    modules: tuple[str, ...]
    branches: tuple[Branches, ...]
    patch_size: Callable[[nn.Module], tuple[int, int]] = lambda model: model.patch_embed.patch_size
    least_image_size: int = 1

    @property
    def skips(self) -> tuple[str, ...]:
        """The skip policies that this family supports."""
        return SKIPS if all(branches.ffn for branches in self.branches) else ("both", "none")


def _vit_sab(block, x, attn_mask=None, is_causal=False):
    return block.drop_path1(block.ls1(block.attn(block.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))


def _vit_ffn(block, x, attn_mask=None, is_causal=False):
    return block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


def _swin_sab(block, x):
    return block.drop_path1(block._attn(block.norm1(x)))  # shifts, pads and partitions into windows


def _swin_ffn(block, x):
    return block.drop_path2(block.mlp(block.norm2(x)))


def _cait_sab(block, x):
    return block.drop_path(block.gamma_1 * block.attn(block.norm1(x)))


def _cait_ffn(block, x):
    return block.drop_path(block.gamma_2 * block.mlp(block.norm2(x)))


def _cait_class_sab(block, patches, class_token):
    return _cait_sab(block, cat((class_token, patches), dim=1))  # ClassAttn returns the class token only


def _cait_class_ffn(block, patches, class_token):
    return _cait_ffn(block, class_token)


def _pvt_sab(block, x, feat_size):
    return block.drop_path1(block.attn(block.norm1(x), feat_size))


def _pvt_ffn(block, x, feat_size):
    return block.drop_path2(block.mlp(block.norm2(x), feat_size))


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "vit",
            vision_transformer.VisionTransformer,
            modules=("vision_transformer", "deit"),
            branches=(Branches(vision_transformer.Block, r"blocks\.\d+", _vit_sab, _vit_ffn),),
        ),
        Family(
            "swin",
            swin_transformer.SwinTransformer,
            modules=("swin_transformer",),
            branches=(
                Branches(
                    swin_transformer.SwinTransformerBlock,
                    r"layers\.\d+\.blocks\.\d+",
                    _swin_sab,
                    _swin_ffn,
                    as_tokens=lambda x: x.flatten(1, 2),  # (B, H, W, d)
                ),
            ),
        ),
        Family(
            "cait",
            cait.Cait,
            modules=("cait",),
            branches=(
                Branches(cait.LayerScaleBlock, r"blocks\.\d+", _cait_sab, _cait_ffn),
                Branches(
                    cait.LayerScaleBlockClassAttn,
                    r"blocks_token_only\.\d+",
                    _cait_class_sab,
                    _cait_class_ffn,
                    tokens_at=1,
                    kind="class attention",
                ),
            ),
        ),
        Family(
            "pvt_v2",
            pvt_v2.PyramidVisionTransformerV2,
            modules=("pvt_v2",),
            branches=(Branches(pvt_v2.Block, r"stages\.\d+\.blocks\.\d+", _pvt_sab, _pvt_ffn),),
            patch_size=lambda model: (1, 1),  # overlapping patches take any size …
            least_image_size=32,  # … that its strided keys leave at least one of
        ),
        Family(
            "convmixer",
            convmixer.ConvMixer,
            modules=("convmixer",),
            branches=(
                Branches(
                    convmixer.Residual,
                    r"blocks\.\d+\.0",
                    sab=lambda block, x: block.fn(x),
                    ffn=None,
                    kind="depth-wise convolution",
                    as_tokens=lambda x: x.flatten(2).transpose(1, 2),  # (B, d, H, W)
                ),
            ),
            patch_size=lambda model: model.stem[0].kernel_size,
        ),
    )
}


class Steps(NamedTuple):
    """What one block computes, in the layout that the block works on; `ffn` is None where there is no such branch."""

    tokens: Tensor
    sab: Tensor
    between: Tensor
    ffn: Tensor | None
    output: Tensor


def run_block(branches: Branches, block: nn.Module, inputs: tuple, options: dict[str, Any]) -> Steps:
    """Run a block's two branches on the `inputs` and `options` timm calls it with, adding the skips that it has."""
    tokens = inputs[branches.tokens_at]
    sab = branches.sab(block, *inputs, **options)
    between = tokens + sab if getattr(block, "sab_skip", True) else sab
    if branches.ffn is None:
        return Steps(tokens, sab, between, None, between)
    inputs = (*inputs[: branches.tokens_at], between, *inputs[branches.tokens_at + 1 :])
    ffn = branches.ffn(block, *inputs, **options)
    return Steps(tokens, sab, between, ffn, between + ffn if getattr(block, "ffn_skip", True) else ffn)


@functools.cache
def _without_skips(branches: Branches, skip: str) -> type[nn.Module]:
    """Subclass a timm block so that it runs without the skips that the policy removes.

    A block changes by its class alone: nothing is bound to an instance, so deepcopy, state_dict, hooks and
    gradient checkpointing work as in timm.
    """

    def forward(self, *inputs, **options):
        return run_block(branches, self, inputs, options).output

    members = {
        "forward": forward,
        "__reduce__": lambda self: (_blank_block, (branches.block, skip), self.__dict__),
        "timm_block": branches.block,
        "sab_skip": skip == "no_ffn",
        "ffn_skip": skip == "no_sab",
    }
    return type(f"{branches.block.__name__}_{skip}", (branches.block,), members)


def _blank_block(timm_block: type[nn.Module], skip: str) -> nn.Module:
    """Return a block without its content, for pickle: classes that are made here cannot be found by name."""
    known = [branches for family in FAMILIES.values() for branches in family.branches]
    made = _without_skips(next(branches for branches in known if branches.block is timm_block), skip)
    return made.__new__(made)


def family_of(model: nn.Module) -> Family:
    """Return the family of a timm model; raises InputError for a model of another family."""
    for family in FAMILIES.values():
        if isinstance(model, family.model):
            return family
    supported = ", ".join(family.model.__name__ for family in FAMILIES.values())
    raise InputError(f"{type(model).__name__} is no model of a supported family (supported: {supported})")


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module, Branches]]:
    """List each (name, block, how to reach its branches) of a timm model, in the order in which the blocks run.

    Raises InputError for a model of another family, and for blocks of another class than the table's.
    """
    found = [
        (name, module, branches)
        for name, module in model.named_modules()
        for branches in family_of(model).branches
        if re.fullmatch(branches.path, name)
    ]
    for name, block, branches in found:
        if getattr(block, "timm_block", type(block)) is not branches.block:
            raise InputError(f"block {name} is a {type(block).__name__}; only timm's {_title(branches)} is supported")
    if not found:
        raise InputError(f"this {type(model).__name__} has no blocks")
    return found


def _title(branches: Branches) -> str:
    return f"{branches.block.__module__.removeprefix('timm.models.')}.{branches.block.__name__}"


def check_skip(family: Family, skip: str) -> None:
    """Raise InputError where `skip` is no policy, or none that the family supports."""
    if skip not in SKIPS:
        raise unknown("skip", skip, SKIPS)
    if skip not in family.skips:
        raise InputError(
            f"skip {skip!r} does not exist for {family.name}, whose blocks have one skip only"
            f" (allowed: {', '.join(family.skips)})"
        )


def remove_skips(model: nn.Module, skip: str) -> None:
    """Give every block of a timm model the `skip` policy ("both", "no_sab", "no_ffn", "none"), in place.

    Where a skip is removed, the branch's output replaces the tokens instead of being added to them. Raises
    InputError for a policy that the model's family does not support, and as `find_blocks` does.
    """
    check_skip(family_of(model), skip)
    for _, block, branches in find_blocks(model):
        block.__class__ = branches.block if skip == "both" else _without_skips(branches, skip)
