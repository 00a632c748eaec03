"""The weights of a ViT's blocks as the theorems write them, and its parts as functions of tokens.

For ViT and DeiT blocks of timm 1.0.31: pre-norm, one fused qkv matrix. Everything is computed in float64 on the CPU."""

import copy
from dataclasses import dataclass

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.linalg import matrix_norm

from skiplab.errors import InputError
from skiplab.models import probe, zoo
from skiplab.theory.spectral import hc


@dataclass(frozen=True)
class Weights:
    """A block's matrices as the theorems write them, tokens times W: heads side by side in W_Q, W_K, W_V, W_O."""

    heads: int
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    w_up: Tensor
    b_up: Tensor
    w_down: Tensor

    def head(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return W_Q, W_K and W_V of one head, each (d, width)."""
        return tuple(w.chunk(self.heads, dim=1)[index] for w in (self.w_q, self.w_k, self.w_v))


def weights(block: Block) -> Weights:
    """Read a ViT block's weights; a layer scale is taken into W_O and W_down. Raises InputError for another block."""
    if not isinstance(block, Block) or not hasattr(block.attn, "qkv"):
        raise InputError(
            f"a {type(block).__name__} is no ViT block with one qkv matrix; only timm's ViT and DeiT have these"
        )
    w_q, w_k, w_v = block.attn.qkv.weight.detach().double().chunk(3)
    scales = [getattr(scale, "gamma", torch.ones(())).detach().double() for scale in (block.ls1, block.ls2)]
    w_o, w_down = (
        layer.weight.detach().double().mT * scale
        for layer, scale in zip((block.attn.proj, block.mlp.fc2), scales, strict=True)
    )
    up = block.mlp.fc1
    b_up = torch.zeros(up.out_features) if up.bias is None else up.bias.detach()
    return Weights(
        block.attn.num_heads, w_q.mT, w_k.mT, w_v.mT, w_o, up.weight.detach().double().mT, b_up.double(), w_down
    )


def logits(block: Block, normed: Tensor) -> Tensor:
    """Return the logits (B, h, n, n) of a block's attention for normed tokens (B, n, d), biases included."""
    attn = block.attn
    q, k, _ = attn.qkv(normed).unflatten(-1, (3, attn.num_heads, -1)).movedim(-3, 0).transpose(2, 3)
    return attn.q_norm(q) @ attn.k_norm(k).mT * attn.scale


@torch.no_grad()
def check_block(block: Block) -> None:
    """Raise InputError where a block, in float64, does not compute what `weights` and `logits` say of it."""
    w, attn = weights(block), block.attn
    norms = all(isinstance(norm, nn.LayerNorm) and norm.weight is not None for norm in (block.norm1, block.norm2))
    x = torch.randn(1, 7, len(w.w_q), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = block.norm1(x)
    zero = torch.zeros(attn.qkv.out_features, dtype=torch.float64)
    b_q, b_k, _ = (zero if attn.qkv.bias is None else attn.qkv.bias).chunk(3)
    q, k, v = (
        (z @ w_in + bias).unflatten(-1, (w.heads, -1)).transpose(1, 2)
        for w_in, bias in ((w.w_q, b_q), (w.w_k, b_k), (w.w_v, 0))
    )
    heads = torch.softmax(q @ k.mT * attn.scale, dim=-1) @ v
    pairs = {
        "attention": (sab(block, x), heads.transpose(1, 2).flatten(2) @ w.w_o),
        "FFN": (ffn(block, x), nn.functional.gelu(block.norm2(x) @ w.w_up + w.b_up) @ w.w_down),
    }
    wrong = [] if norms else ["normalisation"]
    wrong += [
        # HC leaves out the biases of values and outputs, which are the same for every token.
        part
        for part, (found, said) in pairs.items()
        if not matrix_norm(hc(found - said)) <= 1e-6 * matrix_norm(hc(found))
    ]
    if wrong:
        raise InputError(
            f"the {' and the '.join(wrong)} of this model's blocks are not those of the theorems: LayerNorm, "
            "softmax attention, an FFN with GELU and nothing between; leave out arguments such as attn_layer, "
            "qk_norm, scale_attn_norm, scale_mlp_norm, act_layer, norm_layer and scaling"
        )


def exact(model: nn.Module, images: Tensor) -> tuple[list[Block], Tensor]:
    """Return a float64 copy of a ViT's blocks, ready for evaluation, and the tokens (B, n, d) that enter the first."""
    model = copy.deepcopy(model).cpu().double().eval()
    blocks = [block for _, block in zoo.blocks(model)]
    for block in blocks:
        check_block(block)
    return blocks, probe.embeddings(model, images.cpu().double())


def sab(block: Block, x: Tensor) -> Tensor:
    return block.ls1(block.attn(block.norm1(x)))


def ffn(block: Block, x: Tensor) -> Tensor:
    return block.ls2(block.mlp(block.norm2(x)))
