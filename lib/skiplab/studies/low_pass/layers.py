"""What the blocks of a ViT do to what tokens share and how they differ, layer by layer.

Everything is computed in float64 on the CPU. The figures are those of Wang, Zheng, Chen, Wang (arXiv 2203.05962):
figure 1, figure 5 and the similarities by layer."""

import math
from collections.abc import Iterator, Sequence

import numpy
import pandas
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.linalg import matrix_norm

from skiplab.companion import competence
from skiplab.companion.judging import Need
from skiplab.models import probe
from skiplab.models.matrices import Weights, exact, ffn, logits, sab, weights
from skiplab.theory import bounds
from skiplab.theory.spectral import (
    attention_similarity,
    frequency_response,
    hc,
    log_hc_intensity,
    low_pass_share,
    token_similarity,
)

# What is left of a block in each panel of figure 1: (its FFN, its skips).
VARIANTS = {
    "SA only": (False, False),
    "SA + FFN": (True, False),
    "SA + skip": (False, True),
    "SA + FFN + skip": (True, True),
}


ROUNDING = 1e-12  # of ‖X‖_F, forgiven where HC itself is down at rounding


def _size(x: Tensor) -> Tensor:
    """Return ‖HC[X]‖_F of (B, n, d) as (B,)."""
    return matrix_norm(hc(x))


@torch.no_grad()
def hc_by_layer(model: nn.Module, images: Tensor) -> pandas.DataFrame:
    """Follow HC through a ViT's layers, whole and with parts removed at evaluation: a row per variant, image, layer.

    `intensity` is ln(‖HC[X_l]‖_F/‖X_0‖_F), layer 0 being the embedded image, and `share`
    ln(‖HC[X_l]‖_F/‖X_l‖_F); `one_step` is the bound from the layer before, `accumulated` that from the first. `above`
    and `above_accumulated` say whether ‖HC[X_l]‖ exceeds them.
    """
    blocks, start = exact(model, images)
    rows = []
    for variant, (with_ffn, with_skip) in VARIANTS.items():
        x, accumulated = start, _size(start)
        rows += _rows(variant, 0, x, start, _size(x), accumulated)
        for layer, block in enumerate(blocks, start=1):
            before = _size(x)
            x, rate = _advance(block, x, with_ffn, with_skip)
            accumulated = accumulated * rate
            rows += _rows(variant, layer, x, start, rate * before, accumulated)
    return pandas.DataFrame(rows)


def _rows(variant: str, layer: int, x: Tensor, start: Tensor, one_step: Tensor, accumulated: Tensor) -> list[dict]:
    reference, found = matrix_norm(start), _size(x)
    allowed = ROUNDING * matrix_norm(x)
    columns = {
        "intensity": log_hc_intensity(x, start),
        "share": log_hc_intensity(x, x),
        "one_step": (one_step / reference).log(),
        "accumulated": (accumulated / reference).log(),
        "above": found > one_step * (1 + bounds.TOLERANCE) + allowed,
        "above_accumulated": found > accumulated * (1 + bounds.TOLERANCE) + allowed,
    }
    values = {name: column.tolist() for name, column in columns.items()}
    return [
        {"variant": variant, "layer": layer, "image": image} | {name: column[image] for name, column in values.items()}
        for image in range(len(x))
    ]


def _advance(block: Block, x: Tensor, with_ffn: bool, with_skip: bool) -> tuple[Tensor, Tensor]:
    """Return the tokens after a block and a bound (B,) of ‖HC[after]‖/‖HC[x]‖, by the published forms of theorem 3."""
    w = weights(block)
    branch = sab(block, x)
    rate = attention_rates(block, w, x) * norm_factors(block.norm1, x) + with_skip
    x = x + branch if with_skip else branch
    if with_ffn:
        branch = ffn(block, x)
        lipschitz = matrix_norm(w.w_up, 2) * bounds.ACTIVATIONS["gelu"][1] * matrix_norm(w.w_down, 2)
        rate = rate * (lipschitz * norm_factors(block.norm2, x) + with_skip)
        x = x + branch if with_skip else branch
    return x, rate


def attention_rates(block: Block, w: Weights, x: Tensor, form: str = "paper") -> Tensor:
    """Return theorem 3's rate for all heads, (B,), of the normed tokens' HC."""
    normed = block.norm1(x)
    checks = [
        bounds.multihead_rate(z, p, w.w_v, w.w_o, form) for z, p in zip(normed, logits(block, normed), strict=True)
    ]
    return torch.tensor([check.bound for check in checks], dtype=torch.float64) / _size(normed).clamp(min=1e-300)


def norm_factors(norm: nn.LayerNorm, x: Tensor, form: str = "repaired") -> Tensor:
    """Return the layer norm's factor (B,): how much it can raise HC of each image's tokens at most."""
    checks = [bounds.layer_norm_rate(tokens, norm.weight, norm.eps, form) for tokens in x]
    return torch.tensor([check.bound for check in checks], dtype=torch.float64) / _size(x).clamp(min=1e-300)


def slopes(table: pandas.DataFrame) -> pandas.Series:
    """Return each variant's slope over layers of the log HC intensity, averaged over images, from `hc_by_layer`.

    Only layers before the first where HC is at rounding count; the first two always do.
    """
    mean = table.groupby(["variant", "layer"], sort=False)[["intensity", "share"]].mean().reset_index("layer")
    found = {}
    for variant, rows in mean.groupby(level="variant", sort=False):
        at_rounding = (rows.share < math.log(ROUNDING)).to_numpy()
        end = max(2, int(at_rounding.argmax()) if at_rounding.any() else len(rows))
        found[variant] = float(numpy.polyfit(rows.layer[:end], rows.intensity[:end], 1)[0])
    return pandas.Series(found)


@torch.no_grad()
def gains_by_part(model: nn.Module, images: Tensor) -> pandas.DataFrame:
    """Return ln of how much each part of each block raises HC, mean over images: a row per part, a column per block.

    A head's map: ‖HC[A_h Z]‖/‖HC[Z]‖ averaged over heads, Z the normed tokens. Heads together: ‖HC[Σ_h O_h]‖ against
    √Σ_h ‖HC[O_h]‖², O_h what head h adds: 0 where the heads are orthogonal, above where they agree.
    """
    blocks, x = exact(model, images)
    columns = {}
    for number, block in enumerate(blocks, start=1):
        z, w = block.norm1(x), weights(block)
        maps = torch.softmax(logits(block, z), dim=-1)
        values = (z @ w.w_v).unflatten(-1, (w.heads, -1)).transpose(1, 2)
        outputs = maps @ values @ w.w_o.unflatten(0, (w.heads, -1))  # (B, h, n, d)
        between = x + sab(block, x)
        after = between + ffn(block, between)
        mixed = _size(maps @ z[:, None])
        gains = {
            "LayerNorm": _size(z) / _size(x),
            "one head's map": (mixed / _size(z)[:, None]).log().mean(dim=1).exp(),
            "heads together": _size(outputs.sum(dim=1)) / _size(outputs).square().sum(dim=1).sqrt(),
            "SAB": _size(sab(block, x)) / _size(x),
            "SAB + skip": _size(between) / _size(x),
            "FFN": _size(ffn(block, between)) / _size(between),
            "FFN + skip": _size(after) / _size(between),
        }
        columns[number] = {part: float(gain.log().mean()) for part, gain in gains.items()}
        x = after
    return pandas.DataFrame(columns).rename_axis(index="part", columns="block")


def band_gains(maps: list[Tensor]) -> Tensor:
    """Return the gain of each band, averaged over images, of every block and head: (L, h, n)."""
    return torch.stack([frequency_response(block).double().mean(dim=0) for block in maps])


def stacked(maps: list[Tensor]) -> list[Tensor]:
    """Return the products A_l … A_1, l = 1 … L, of each image's maps averaged over heads: (B, n, n) each."""
    products, product = [], None
    for block in maps:
        mean = block.double().mean(dim=1)
        mean = mean / mean.sum(dim=-1, keepdim=True)
        product = mean if product is None else mean @ product
        products.append(product)
    return products


@torch.no_grad()
def similarity_by_layer(model: nn.Module, images: Tensor) -> pandas.DataFrame:
    """Return the mean cosine of different tokens after each block, and of the columns of its maps, by block."""
    maps, traces = probe.attention_maps(model, images), probe.branch_outputs(model, images)
    tokens = [trace.tokens for trace in traces[1:]] + [traces[-1].ffn_with_input]
    return pandas.DataFrame(
        [
            {
                "block": number,
                "depth": number / len(maps),
                "features": float(token_similarity(x).mean()),
                "attention": float(attention_similarity(attn).mean()),
            }
            for number, (x, attn) in enumerate(zip(tokens, maps, strict=True), start=1)
        ]
    )


def control(model: nn.Module, images: Tensor) -> pandas.Series:
    """Return what claims about trained models say, of this one: slopes, the low-pass share, rank correlations."""
    ranks = similarity_by_layer(model, images).corr("spearman").block
    found = slopes(hc_by_layer(model, images)).copy()
    found["fig5.low_pass"] = low_pass_share(band_gains(probe.attention_maps(model, images)))
    found["similarity.features"], found["similarity.attention"] = ranks.features, ranks.attention
    found["SA + skip"] -= found["SA only"]
    return found


def beyond(trained: Sequence[float], untrained: Sequence[pandas.Series], name: str, sign: int = 1) -> Need:
    """Ask trained models to differ from `control` of the untrained ones in `name`, on the claimed side."""
    return competence.beyond(list(trained), [found[name] for found in untrained], sign=sign)


@torch.no_grad()
def other_logits(model: nn.Module, images: Tensor) -> pandas.DataFrame:
    """Return the HC gain ‖HC A‖₂ of a ViT's heads with each kind of logits, and its bounds: a row per kind and block.

    Averages over images and heads. The model's own tokens, W_Q and W_K, but no biases; nothing is trained again.
    """
    rows = []
    for number, x in enumerate(block_inputs(model, images), start=1):
        block, tokens = x
        w, normed = weights(block), block.norm1(tokens)
        for kind in bounds.LOGITS:
            p = torch.stack(
                [bounds.attention_logits(kind, z, *w.head(head)[:2]) for z in normed for head in range(w.heads)]
            )
            gains = {
                "gain": matrix_norm(hc(torch.softmax(p, dim=-1)), 2),
                "bound": bounds.attention_gain(p),
                "sharp bound": bounds.attention_gain(p, "sharp"),
            }
            rows.append({"logits": kind, "block": number} | {name: float(gain.mean()) for name, gain in gains.items()})
    return pandas.DataFrame(rows)


def block_inputs(model: nn.Module, images: Tensor) -> Iterator[tuple[Block, Tensor]]:
    blocks, x = exact(model, images)
    for block in blocks:
        yield block, x
        between = x + sab(block, x)
        x = between + ffn(block, between)
