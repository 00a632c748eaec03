"""AttnScale and FeatScale: two cures for attention that smooths, added to a timm model without moving its outputs.

Wang, Zheng, Chen, Wang, "Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis", ICLR 2022,
arXiv 2203.05962, and its released code (VITA-Group/ViT-Anti-Oversmoothing). SCALINGS is the one table of what is
supported: which modules of a block change their class. Everything new starts at zero and is one-dimensional, so timm's
optimiser factory gives it no weight decay.

**AttnScale** replaces the attention map A by Â = L + (1 + ω)(A − L), L = 11ᵀ/n, with one ω a head. It is computed as
ÂV = (1 + ω)·AV − ω·LV, LV being a mean of values: with fused attention no n×n map is made. Attention dropout falls on
A (ViT and Swin); in the released code it falls on Â, with the same expectation.

Two forms differ where the released L is not the low-pass part of A:

- CaiT mixes its heads after the softmax (`proj_w`), and the mixed rows no longer sum to 1. "released" scales the mixed
  maps; "respecting" scales the softmax's maps, before the mixing. Both are a change of proj_w's weights alone.
- Swin masks tokens that meet in a shifted window without being neighbours. "released" has L average over the whole
  window, across the mask; "respecting" over the tokens that attend to each other. (timm does not mask padding, so L
  counts it as A does.)

**FeatScale** replaces the attention's output X by X + s∘DC[X] + t∘HC[X], with s and t in R^d, after the projection and
its dropout as released. Its place among layer scale and drop path does not matter: it commutes with both. In Swin, DC
is the mean over the image, not over a window, as released: the paper's X is all tokens of a layer. One released
version of the DeiT block adds the two scaled terms twice, which is s and t doubled; the paper is followed here.

As released, CaiT's class attention is left alone: its map is one row, and one token has no HC.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from timm.layers import Attention, DropPath
from timm.models.cait import TalkingHeadAttn
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from skiplab.errors import InputError, unknown
from skiplab.models.residual import Family, family_of, find_blocks

KINDS = ("attnscale", "featscale")
FORMS = ("released", "respecting")


def _attend(
    attention: nn.Module, query: Tensor, key: Tensor, value: Tensor, low_pass: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return (1 + ω)·AV − ω·LV from (B, h, n, d/h), with the heads side by side again: (B, n, d)."""
    if attention.fused_attn:
        dropout = attention.attn_drop.p if attention.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    else:
        logits = (query * attention.scale) @ key.mT
        attn = (logits if bias is None else logits + bias).softmax(dim=-1)
        attended = attention.attn_drop(attn) @ value
    omega = attention.omega[:, None, None]
    return torch.addcmul(-omega * low_pass, attended, 1 + omega).transpose(1, 2).flatten(2)


def _heads(attention: nn.Module, x: Tensor) -> Tensor:
    """Return queries, keys and values of tokens (B, n, d), as (3, B, h, n, d/h)."""
    return attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)


def _refuse_masks(attn_mask: Tensor | None, is_causal: bool) -> None:
    if attn_mask is not None or is_causal:
        raise InputError(
            "AttnScale and FeatScale of a ViT average over all tokens, so attn_mask and is_causal are"
            " not supported (allowed: attn_mask=None, is_causal=False)"
        )


class AttnScaledAttention(Attention):
    """ViT's attention with AttnScale."""

    scales = ("omega",)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend as timm does, scaled; raises InputError for a mask."""
        _refuse_masks(attn_mask, is_causal)
        query, key, value = _heads(self, x)
        out = self.norm(_attend(self, self.q_norm(query), self.k_norm(key), value, value.mean(dim=-2, keepdim=True)))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


class ReleasedWindows(WindowAttention):
    """Swin's attention with AttnScale, L averaging over the whole window."""

    scales = ("omega",)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within windows (B · windows, n, d), where `mask` (windows, n, n) is 0."""
        bias = self._get_rel_pos_bias()
        if mask is not None:
            bias = bias + mask.repeat(len(x) // len(mask), 1, 1)[:, None]
        query, key, value = _heads(self, x)
        return self.proj_drop(self.proj(_attend(self, query, key, value, self.low_pass(value, mask), bias)))

    def low_pass(self, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return LV of values (B · windows, h, n, d/h)."""
        return value.mean(dim=-2, keepdim=True)


class RespectingWindows(ReleasedWindows):
    """Swin's attention with AttnScale, L averaging over the tokens that the mask lets attend to each other."""

    def low_pass(self, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return LV of values (B · windows, h, n, d/h)."""
        if mask is None:
            return super().low_pass(value, mask)
        reached = (mask == 0).to(value.dtype)
        low_pass = (reached / reached.sum(dim=-1, keepdim=True))[:, None]
        return (low_pass @ value.unflatten(0, (-1, len(mask)))).flatten(0, 1)


class ReleasedMixing(nn.Linear):
    """CaiT's `proj_w`, scaling the maps it has mixed: softmax maps (B, n, n, h) to (1 + ω)·mixed − ω/n."""

    scales = ("omega",)

    def forward(self, attn: Tensor) -> Tensor:
        """Mix the heads, then scale each mixed head."""
        gain = 1 + self.omega
        return F.linear(attn, gain[:, None] * self.weight, gain * self.bias - self.omega / attn.shape[-2])


class RespectingMixing(nn.Linear):
    """CaiT's `proj_w`, scaling the softmax maps (B, n, n, h) that it mixes, whose rows sum to 1."""

    scales = ("omega",)

    def forward(self, attn: Tensor) -> Tensor:
        """Scale each head, then mix the scaled heads."""
        weight = self.weight * (1 + self.omega)
        return F.linear(attn, weight, self.bias - self.weight @ self.omega / attn.shape[-2])


class FeatScaledAttention(Attention):
    """ViT's attention with FeatScale."""

    scales = ("s", "t")

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend as timm does and scale the output; raises InputError for a mask."""
        _refuse_masks(attn_mask, is_causal)
        return feat_scale(super().forward(x), self.s, self.t)


class FeatScaled:
    """Mixin for a module that returns what the attention put out: scales its DC and HC."""

    scales = ("s", "t")

    def forward(self, x: Tensor) -> Tensor:
        """Return what the module returns, scaled."""
        return feat_scale(super().forward(x), self.s, self.t)


class FeatScaledTalkingHeads(FeatScaled, TalkingHeadAttn):
    """CaiT's attention with FeatScale."""


class FeatScaledIdentity(FeatScaled, nn.Identity):
    """Swin's `drop_path1`, the first module to see a whole image again, with FeatScale; where no path is dropped."""


class FeatScaledDropPath(FeatScaled, DropPath):
    """Swin's `drop_path1` with FeatScale, where paths are dropped."""


# (family, kind, form) → for each module of a block that changes: its class in timm → its class with scaling
SCALINGS = {
    ("vit", "attnscale", "released"): {"attn": {Attention: AttnScaledAttention}},
    ("vit", "attnscale", "respecting"): {"attn": {Attention: AttnScaledAttention}},  # neither mask nor mixing
    ("vit", "featscale", "released"): {"attn": {Attention: FeatScaledAttention}},
    ("swin", "attnscale", "released"): {"attn": {WindowAttention: ReleasedWindows}},
    ("swin", "attnscale", "respecting"): {"attn": {WindowAttention: RespectingWindows}},
    ("swin", "featscale", "released"): {"drop_path1": {nn.Identity: FeatScaledIdentity, DropPath: FeatScaledDropPath}},
    ("cait", "attnscale", "released"): {
        "attn": {TalkingHeadAttn: TalkingHeadAttn},
        "attn.proj_w": {nn.Linear: ReleasedMixing},
    },
    ("cait", "attnscale", "respecting"): {
        "attn": {TalkingHeadAttn: TalkingHeadAttn},
        "attn.proj_w": {nn.Linear: RespectingMixing},
    },
    ("cait", "featscale", "released"): {"attn": {TalkingHeadAttn: FeatScaledTalkingHeads}},
}


def feat_scale(x: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Return X + s∘DC[X] + t∘HC[X] of tokens (B, n, d) or (B, H, W, d), written as (1 + t)∘X + (s − t)∘DC[X]."""
    mean = x.mean(dim=tuple(range(1, x.ndim - 1)), keepdim=True)
    return torch.addcmul((s - t) * mean, x, 1 + t)


def check_scaling(family: Family, kind: str, form: str = "released") -> None:
    """Raise InputError where `kind` or `form` is unknown, or does not exist for the family."""
    if kind not in KINDS:
        raise unknown("scaling", kind, KINDS)
    if form not in FORMS:
        raise unknown("form", form, FORMS)
    supported = dict.fromkeys(name for name, *key in SCALINGS if key == [kind, form])
    if not supported:
        raise InputError(f"{kind} has no form {form!r}: it knows neither mask nor mixing (allowed: released)")
    if family.name not in supported:
        raise InputError(f"scaling {kind!r} does not exist for {family.name} (supported: {', '.join(supported)})")


def apply_scaling(model: nn.Module, kind: str, *, form: str = "released") -> None:
    """Add AttnScale or FeatScale to every self-attention block of a timm model, in place; its outputs do not move.

    New parameters, all zero: `omega` (h,) for kind "attnscale", and `s` and `t` (d,) for "featscale".

    Args:
        model: A timm model of the families vit (ViT and DeiT), swin and cait, with any skip policy.
        kind: "attnscale" or "featscale".
        form: For AttnScale on Swin and CaiT: "released" as in the paper's code, or "respecting" the shift mask and the
            row sums (see the top of this file). ViT's two forms are the same.

    Raises:
        InputError: For an unknown kind or form, a family without it, a model that has a scaling, and an attention of
            another class than timm's own; the model is then unchanged.
    """
    family = family_of(model)
    check_scaling(family, kind, form)
    if scaling_parameters(model):
        raise InputError(f"this {type(model).__name__} has a scaling already")
    changes = []
    for name, block, branches in find_blocks(model):
        if branches.kind == "class attention":
            continue
        for path, classes in SCALINGS[family.name, kind, form].items():
            module = block.get_submodule(path)
            if type(module) not in classes:
                expected = " or ".join(timm_class.__name__ for timm_class in classes)
                raise InputError(f"{name}.{path} is a {type(module).__name__}; {kind} supports timm's {expected} only")
            changes.append((module, classes[type(module)], block.attn))
    for module, scaled_class, attention in changes:
        module.__class__ = scaled_class
        for scale in getattr(scaled_class, "scales", ()):
            size = attention.num_heads if scale == "omega" else attention.proj.out_features
            module.register_parameter(scale, nn.Parameter(attention.proj.weight.new_zeros(size)))


def scaling_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return each ω, or s and t, of a model by its name in the state_dict, in block order; empty without scaling."""
    return {
        f"{name}.{scale}": getattr(module, scale)
        for name, module in model.named_modules()
        for scale in getattr(module, "scales", ())
    }


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], *, optional: tuple[str, ...] = ()) -> list[str]:
    """Load a state_dict with all of the model's scaling parameters, or with none; return the names of those missing.

    What is missing keeps its values: the scaling parameters, and those whose names begin with one of `optional`. Raises
    InputError for a part of the scaling parameters, and for any other name or shape; nothing is loaded then.
    """
    own = model.state_dict()
    missing = [name for name in own if name not in weights and not name.startswith(optional)]
    scaling = scaling_parameters(model)
    lacking = [name for name in missing if name in scaling]
    if 0 < len(lacking) < len(scaling):
        raise InputError(
            f"the checkpoint has only {len(scaling) - len(lacking)} of the model's {len(scaling)} scaling"
            f" parameters (all or none must be there; first missing: {lacking[0]})"
        )
    differences = {
        "missing": [name for name in missing if name not in scaling],
        "not in the model": [name for name in weights if name not in own],
        "of another shape": [name for name in weights if name in own and weights[name].shape != own[name].shape],
    }
    found = [f"{len(names)} {problem}, first {names[0]}" for problem, names in differences.items() if names]
    if found:
        raise InputError(f"the checkpoint does not fit this {type(model).__name__}: {'; '.join(found)}")
    model.load_state_dict(weights, strict=False)
    return missing
