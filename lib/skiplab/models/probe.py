"""Look inside a model without disturbing it: branch outputs, attention maps and embeddings of a batch of images.

Every function runs the model once, in eval mode and without gradients, and puts back what it changed, also after an
error: hooks, fused attention, and the training flag of every submodule. Give it the model itself, not a compiled or
wrapped one, and keep autocast off: condition numbers need full precision.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.models.cait import ClassAttn, TalkingHeadAttn
from timm.models.pvt_v2 import Attention as ReducedAttention
from torch import Tensor, nn

from skiplab.errors import InputError
from skiplab.models.residual import Branches, find_blocks, run_block


@dataclass(frozen=True)
class BlockTrace:
    """What one block computed, as tokens (B, n, d), with norm, layer scale and drop path as timm adds them.

    `kind` is "attention", "class attention" (CaiT: the tokens are the class token alone, n = 1) or "depth-wise
    convolution" (ConvMixer: its one branch stands in `sab`, and the `ffn` fields are None). The `with_input` fields
    are the branch output plus what went into the branch, whether or not the block has that skip.
    """

    name: str
    kind: str
    tokens: Tensor
    sab: Tensor
    sab_with_input: Tensor
    ffn: Tensor | None
    ffn_with_input: Tensor | None


def branch_outputs(model: nn.Module, images: Tensor) -> list[BlockTrace]:
    """Return what the branches of every block compute from images (B, C, H, W), in block order.

    Raises InputError for an empty batch, for a model or block of another family, and for a block that did not run.
    """
    traces: list[BlockTrace] = []
    with _undisturbed(model, images) as undo:
        found = find_blocks(model)
        for name, block, branches in found:
            hook = partial(_trace, traces, name, branches)
            undo.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        model(images)
    if [trace.name for trace in traces] != [name for name, _, _ in found]:
        raise InputError(f"{len(traces)} of {len(found)} blocks ran under the probe: give it the model uncompiled")
    return traces


def _trace(
    traces: list[BlockTrace], name: str, branches: Branches, block: nn.Module, inputs: tuple, options: dict[str, Any]
) -> None:
    # The branches run here once more than in the block: that keeps the block's own forward out of the probe's hands.
    steps = run_block(branches, block, inputs, options)
    tokens, sab, between = map(branches.as_tokens, (steps.tokens, steps.sab, steps.between))
    ffn = None if steps.ffn is None else branches.as_tokens(steps.ffn)
    ffn_with_input = None if ffn is None else between + ffn
    traces.append(BlockTrace(name, branches.kind, tokens, sab, tokens + sab, ffn, ffn_with_input))


def embeddings(model: nn.Module, images: Tensor) -> Tensor:
    """Return the tokens (B, n, d) that enter the first block for images (B, C, H, W).

    Raises InputError for an empty batch, and for a model or block of another family.
    """
    entered: list[Tensor] = []
    with _undisturbed(model, images) as undo:
        _, block, branches = find_blocks(model)[0]
        hook = block.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[branches.tokens_at]))
        undo.callback(hook.remove)
        model(images)
    if not entered:
        raise InputError("the first block did not run under the probe: give it the model uncompiled")
    return branches.as_tokens(entered[0])


def attention_maps(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return every block's attention after the softmax and before dropout, in block order.

    A map is (B, h, n, n); Swin's is (B · windows, h, n, n) with n the tokens of a window, PVT v2's (B, h, n, m) with
    m its reduced keys, and that of CaiT's class attention (B, h, 1, n). CaiT's talking heads are taken before
    `proj_w` mixes them, since their rows sum to 1 only there. Fused attention is off during the capture only.

    Raises InputError for an empty batch, for a model or block of another family, for a model without attention, and
    where a map was not captured, has another shape, or has rows that do not sum to 1.
    """
    attentions = [(name, block.attn) for name, block, _ in find_blocks(model) if hasattr(block, "attn")]
    if not attentions:
        raise InputError(f"{type(model).__name__} has no attention maps: it has no attention")
    captured: dict[str, list[Tensor]] = {name: [] for name, _ in attentions}
    with _undisturbed(model, images) as undo:
        for name, attention in attentions:
            if hasattr(attention, "fused_attn"):
                undo.callback(setattr, attention, "fused_attn", attention.fused_attn)
                attention.fused_attn = False
            after_softmax = attention.proj_w if isinstance(attention, TalkingHeadAttn) else attention.attn_drop
            for module in (attention, after_softmax):
                hook = module.register_forward_pre_hook(partial(_keep_input, captured[name]))
                undo.callback(hook.remove)
        model(images)
    return [_checked_map(name, attention, *captured[name]) for name, attention in attentions]


def _keep_input(kept: list[Tensor], module: nn.Module, inputs: tuple) -> None:
    kept.append(inputs[0])


def _checked_map(name: str, attention: nn.Module, tokens: Tensor | None = None, attn: Tensor | None = None) -> Tensor:
    if attn is None:
        raise InputError(f"block {name} gave no attention map: give the probe the model uncompiled")
    if isinstance(attention, TalkingHeadAttn):
        attn = attn.permute(0, 3, 1, 2)  # proj_w mixes heads, so they come last there
    batch, n, _ = tokens.shape
    queries = 1 if isinstance(attention, ClassAttn) else n
    keys = attn.shape[-1] if isinstance(attention, ReducedAttention) else n
    if attn.shape != (batch, attention.num_heads, queries, keys):
        expected = (batch, attention.num_heads, queries, keys)
        raise InputError(f"the attention map of block {name} has shape {tuple(attn.shape)}, expected {expected}")
    error = (attn.sum(dim=-1, dtype=torch.float64) - 1).abs().max().item()
    if not error <= max(1e-5, 2 * torch.finfo(attn.dtype).eps):
        raise InputError(f"the rows of block {name}'s attention map do not sum to 1: off by {error:.3g}")
    return attn


@contextmanager
def _undisturbed(model: nn.Module, images: Tensor) -> Iterator[ExitStack]:
    """Hold the model in eval mode without gradients; undo that, and what the yielded stack is told, at the end."""
    if images.ndim != 4 or len(images) == 0:
        raise InputError(f"images must be (B, C, H, W) with B ≥ 1, got shape {tuple(images.shape)}")
    with ExitStack() as undo, torch.no_grad():
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
        model.eval()
        yield undo
