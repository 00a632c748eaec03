"""AttnScale and FeatScale: two cures for attention that smooths, added to a timm model without moving its outputs.

Wang, Zheng, Chen, Wang, "Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis", ICLR 2022,
arXiv 2203.05962, and its released code (VITA-Group/ViT-Anti-Oversmoothing). SCALINGS is the one table of what is
supported: which modules of a block change their class. Everything new starts at zero and is one-dimensional, so timm's
optimiser factory gives it no weight decay.

**AttnScale** replaces the attention map A by Â = L + (1 + ω)(A − L), L = 11ᵀ/n, with one ω a head. The rows of A sum
to 1, so AL = L and ÂV = A(V + ω(V − LV)): timm's own attention runs on other values, fused or not, and no further n×n
map is made. Attention dropout then falls on A in ViT and Swin; as released it falls on Â, with the same expectation.
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
from timm.layers import Attention, DropPath
from timm.models.cait import TalkingHeadAttn
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from lib.errors import InputError, unknown
from lib.models.residual import Family, family_of, find_blocks

KINDS = ("attnscale", "featscale")
FORMS = ("released", "respecting")


class ScaledValues(nn.Linear):
    """timm's `qkv` with values V + ω(V − LV) in place of V: tokens (…, n, d) to (…, n, 3d)."""

    scales = ("omega",)

    def forward(self, x: Tensor) -> Tensor:
        """Project tokens to queries, keys and scaled values."""
        query, key, value = super().forward(x).chunk(3, dim=-1)
        omega = self.omega.repeat_interleave(value.shape[-1] // len(self.omega))
        scaled = value + omega * (value - self.low_pass(value))
        return torch.cat([query, key, scaled.to(value.dtype)], dim=-1)  # under autocast ω is wider than V

    def low_pass(self, value: Tensor) -> Tensor:
        """Return LV: the mean over tokens."""
        return value.mean(dim=-2, keepdim=True)


class MaskedValues(ScaledValues):
    """`ScaledValues` of Swin's windows (B · windows, n, d) whose L averages only where the shift `mask` lets A reach."""

    mask: Tensor | None = None  # (windows, n, n), 0 where tokens attend to each other

    def low_pass(self, value: Tensor) -> Tensor:
        """Return LV: the mean over the tokens on the same side of the mask."""
        if self.mask is None:
            return super().low_pass(value)
        reached = (self.mask == 0).to(value.dtype)
        low_pass = reached / reached.sum(dim=-1, keepdim=True)
        return (low_pass @ value.unflatten(0, (-1, len(low_pass)))).flatten(0, 1)


class MaskedWindowAttention(WindowAttention):
    """Swin's attention that tells its `MaskedValues` the mask, which timm gives to the attention alone."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within each window."""
        self.qkv.mask = mask
        return super().forward(x, mask)


class ReleasedMixing(nn.Linear):
    """CaiT's `proj_w`, scaling the maps it has mixed: softmax maps (B, n, n, h) to (1 + ω)·mixed − ω/n."""

    scales = ("omega",)

    def forward(self, attn: Tensor) -> Tensor:
        """Mix the heads, then scale each mixed head."""
        gain = 1 + self.omega
        return nn.functional.linear(attn, gain[:, None] * self.weight, gain * self.bias - self.omega / attn.shape[-2])


class RespectingMixing(nn.Linear):
    """CaiT's `proj_w`, scaling the softmax maps (B, n, n, h) that it mixes, whose rows sum to 1."""

    scales = ("omega",)

    def forward(self, attn: Tensor) -> Tensor:
        """Scale each head, then mix the scaled heads."""
        weight = self.weight * (1 + self.omega)
        return nn.functional.linear(attn, weight, self.bias - self.weight @ self.omega / attn.shape[-2])


class UnmaskedAttention(Attention):
    """timm's attention, refusing masks: both scalings average over all tokens, which a mask would keep apart."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend from every token to every token (B, n, d)."""
        if attn_mask is not None or is_causal:
            raise InputError("AttnScale and FeatScale of a ViT average over all tokens: attn_mask and is_causal"
                             " are not supported (create the model with scaling=None)")
        return super().forward(x)


class FeatScaled:
    """Mixin for a module that returns the attention's output: scales its DC and HC."""

    scales = ("s", "t")

    def forward(self, *inputs, **options) -> Tensor:
        """Return what the module returns, scaled."""
        return feat_scale(super().forward(*inputs, **options), self.s, self.t)


class FeatScaledAttention(FeatScaled, UnmaskedAttention):
    """ViT's attention with FeatScale."""


class FeatScaledTalkingHeads(FeatScaled, TalkingHeadAttn):
    """CaiT's attention with FeatScale."""


class FeatScaledIdentity(FeatScaled, nn.Identity):
    """Swin's `drop_path1` with FeatScale, where no path is dropped: the first module to see a whole image."""


class FeatScaledDropPath(FeatScaled, DropPath):
    """Swin's `drop_path1` with FeatScale."""


# (family, kind, form) → for each module of a block that changes: its class in timm → its class with scaling
SCALINGS = {
    ("swin", "attnscale", "released"): {
        "attn": {WindowAttention: WindowAttention},
        "attn.qkv": {nn.Linear: ScaledValues},
    },
    ("swin", "attnscale", "respecting"): {
        "attn": {WindowAttention: MaskedWindowAttention},
        "attn.qkv": {nn.Linear: MaskedValues},
    },
    ("cait", "attnscale", "released"): {
        "attn": {TalkingHeadAttn: TalkingHeadAttn},
        "attn.proj_w": {nn.Linear: ReleasedMixing},
    },
    ("cait", "attnscale", "respecting"): {
        "attn": {TalkingHeadAttn: TalkingHeadAttn},
        "attn.proj_w": {nn.Linear: RespectingMixing},
    },
    **{
        ("vit", "attnscale", form): {"attn": {Attention: UnmaskedAttention}, "attn.qkv": {nn.Linear: ScaledValues}}
        for form in FORMS  # neither mask nor mixing: one and the same
    },
    ("vit", "featscale", "released"): {"attn": {Attention: FeatScaledAttention}},
    ("swin", "featscale", "released"): {"drop_path1": {nn.Identity: FeatScaledIdentity, DropPath: FeatScaledDropPath}},
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
            module = _submodule(block, path)
            if type(module) not in classes:
                expected = " or ".join(timm_class.__name__ for timm_class in classes)
                raise InputError(f"{name}.{path} is a {type(module).__name__}; {kind} supports timm's {expected} only")
            changes.append((module, classes[type(module)], block.attn))
    for module, scaled_class, attention in changes:
        module.__class__ = scaled_class
        for scale in getattr(scaled_class, "scales", ()):
            size = attention.num_heads if scale == "omega" else attention.proj.out_features
            module.register_parameter(scale, nn.Parameter(attention.proj.weight.new_zeros(size)))


def _submodule(block: nn.Module, path: str) -> nn.Module | None:
    for name in path.split("."):
        block = getattr(block, name, None)
    return block


def scaling_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return each ω, or s and t, of a model by its name in the state_dict, in block order; empty without scaling."""
    return {
        f"{name}.{scale}": getattr(module, scale)
        for name, module in model.named_modules()
        for scale in getattr(module, "scales", ())
    }


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """Load a state_dict with all of the model's scaling parameters, or with none; return the names of those missing.

    A plain checkpoint leaves the scaling parameters as they are. Raises InputError for a part of them, and for any
    other name or shape that differs; nothing is loaded then.
    """
    own = model.state_dict()
    missing = [name for name in own if name not in weights]
    scaling = scaling_parameters(model)
    lacking = [name for name in missing if name in scaling]
    if 0 < len(lacking) < len(scaling):
        raise InputError(f"the checkpoint has only {len(scaling) - len(lacking)} of the model's {len(scaling)} scaling"
                         f" parameters (all or none must be there; first missing: {lacking[0]})")
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
