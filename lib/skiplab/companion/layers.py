"""What the blocks of a ViT do to what tokens share and how they differ, and what the theorems say about these blocks.

For ViT and DeiT blocks of timm 1.0.31: pre-norm, one fused qkv matrix. Everything is computed in float64 on the CPU. The
figures are those of Wang, Zheng, Chen, Wang (arXiv 2203.05962): figure 1, figure 5 and the similarities by layer.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy
import pandas
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.linalg import matrix_norm

from skiplab.errors import InputError
from skiplab.models import probe, zoo
from skiplab.theory import bounds
from skiplab.theory.bounds import BoundCheck
from skiplab.theory.jacobian import attention_jacobian, jacobian_kappa
from skiplab.theory.spectral import attention_similarity, frequency_response, hc, log_hc_intensity, token_similarity
from skiplab.training import loop
from skiplab.training.photographs import photographs
from skiplab.transforms.augment import normalise

# What is left of a block in each panel of figure 1: (its FFN, its skips).
VARIANTS = {
    "SA only": (False, False),
    "SA + FFN": (True, False),
    "SA + skip": (False, True),
    "SA + FFN + skip": (True, True),
}
ROUNDING = 1e-12  # of ‖X‖_F, forgiven where HC itself is down at rounding


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
def check(config: loop.TrainConfig) -> None:
    """Raise InputError where the theorems say nothing about the blocks of `config`'s model: call it before training."""
    arguments = {name: value for name, value in config.model_args.items() if name != "pretrained"}
    for _, block in zoo.blocks(zoo.create_model(config.model, num_classes=2, **arguments).double().eval()):
        for parameter in block.parameters():
            parameter += 0.1  # what starts without effect shows
        check_block(block)


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
    wrong += [part for part, (found, said) in pairs.items() if not _size(found - said) <= 1e-6 * _size(found)]
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


def _size(x: Tensor) -> Tensor:
    """Return ‖HC[X]‖_F of (B, n, d) as (B,)."""
    return matrix_norm(hc(x))


def sab(block: Block, x: Tensor) -> Tensor:
    return block.ls1(block.attn(block.norm1(x)))


def ffn(block: Block, x: Tensor) -> Tensor:
    return block.ls2(block.mlp(block.norm2(x)))


# --- Models and images ------------------------------------------------------------------------------------------------


def published(names: list[str], data: str, report: Callable[[str], None]) -> list[loop.TrainConfig]:
    """Return what builds each timm model of `names` with its published weights, for images of `data` at 224 pixels.

    Empty for ["none"], and where a model cannot be fetched, which `report` is told: the notebook then does without.
    """
    if names == ["none"]:
        return []
    configs = [
        loop.TrainConfig(
            data, name, seed=0, epochs=1, learning_rate=1.0, img_size=224, channels=3, model_args={"pretrained": True}
        )
        for name in names
    ]
    for config in configs:
        try:
            loop.build_model(config)
        except Exception as error:  # whatever a network, a hub or a proxy does
            report(
                f"published weights of {config.model} are not available here ({type(error).__name__}): models trained "
                "here take their place"
            )
            return []
    return configs


def untrained(config: loop.TrainConfig) -> nn.Module:
    """Return the model of `config` with its initial weights."""
    arguments = {name: value for name, value in config.model_args.items() if name != "pretrained"}
    return loop.build_model(replace(config, model_args=arguments)).eval()


def natural_images(config: loop.TrainConfig) -> Tensor:
    """Return the embedded photographs (8, C, H, W) in the size, channels and scale that the model of `config` takes."""
    data = loop.dataset(config)
    images = torch.stack(list(photographs(data.img_size).values()))
    if data.channels == 1:
        images = images.float().mean(dim=1, keepdim=True).round().byte()
    return normalise(images, torch.tensor(data.test.mean), torch.tensor(data.test.std))


# --- Figure 1: high frequencies by layer, and the theorem's bound -----------------------------------------------------


@torch.no_grad()
def hc_by_layer(model: nn.Module, images: Tensor) -> pandas.DataFrame:
    """Follow HC through the layers of a ViT, whole and with parts removed at evaluation: a row per variant, image, layer.

    `intensity` is ln(‖HC[X_l]‖_F/‖X_0‖_F), layer 0 being the embedded image, and `share` ln(‖HC[X_l]‖_F/‖X_l‖_F); `one_step` is the bound from the layer
    before, `accumulated` that from the first. `above` and `above_accumulated` say whether ‖HC[X_l]‖ exceeds them.
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


# --- What each part does ----------------------------------------------------------------------------------------------


@torch.no_grad()
def gains_by_part(model: nn.Module, images: Tensor) -> pandas.DataFrame:
    """Return ln of how much each part of each block raises HC, averaged over images: a row per part, a column per block.

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


# --- Spectra and similarities -----------------------------------------------------------------------------------------


def band_gains(maps: list[Tensor]) -> Tensor:
    """Return the gain of each band, averaged over images, of every block and head: (L, h, n)."""
    return torch.stack([frequency_response(block).double().mean(dim=0) for block in maps])


def bands(n: int) -> Tensor:
    """Return the non-negative frequencies of n tokens, in cycles per token, by index of the first ⌊n/2⌋ + 1 bands."""
    return torch.arange(n // 2 + 1) / n


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
    """Return the mean cosine of different tokens after each block, and of different rows of its maps: a row per block."""
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


@torch.no_grad()
def other_logits(model: nn.Module, images: Tensor) -> pandas.DataFrame:
    """Return the HC gain ‖HC A‖₂ of a ViT's heads with each kind of logits, and its bounds: a row per kind and block.

    Averages over images and heads. The model's own tokens, W_Q and W_K, but no biases; nothing is trained again.
    """
    rows = []
    for number, x in enumerate(_inputs(model, images), start=1):
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


def _inputs(model: nn.Module, images: Tensor) -> Iterator[tuple[Block, Tensor]]:
    blocks, x = exact(model, images)
    for block in blocks:
        yield block, x
        between = x + sab(block, x)
        x = between + ffn(block, between)


# --- The theorems on a trained model's weights and tokens -------------------------------------------------------------


@torch.no_grad()
def check_model(model: nn.Module, images: Tensor) -> pandas.DataFrame:
    """Apply the checks of `skiplab.theory.bounds` to every block of a ViT and every image: a row per check.

    Columns: `claim` (the statement's id in the ledger), block, image, holds (None where a hypothesis fails), slack, and
    `failed`, the hypotheses that fail.
    """
    rows, stacks = [], [[] for _ in images]
    for number, (block, x) in enumerate(_inputs(model, images), start=1):
        w, normed = weights(block), block.norm1(x)
        between = x + sab(block, x)
        p, second = logits(block, normed), block.norm2(between)
        for image in range(len(x)):
            stacks[image].append(torch.softmax(p[image], dim=-1).mean(dim=0))
            found = {
                **_attention_checks(block, w, x[image], normed[image], p[image]),
                **_ffn_checks(block, w, between[image], second[image]),
            }
            rows += [_row(claim, number, image, check) for claim, check in found.items()]
    rows += [
        _row("anti.cor2.dobrushin", len(stack), image, bounds.product_low_pass(torch.stack(stack)))
        for image, stack in enumerate(stacks)
    ]
    return pandas.DataFrame(rows)


def _row(claim: str, block: int, image: int, check: BoundCheck) -> dict:
    failed = [name for name, true in check.hypotheses.items() if not true]
    return {
        "claim": claim,
        "block": block,
        "image": image,
        "holds": check.holds,
        "slack": check.slack,
        "failed": failed,
    }


def _attention_checks(block: Block, w: Weights, x: Tensor, z: Tensor, p: Tensor) -> dict[str, BoundCheck]:
    """Check what the papers say about one SAB; for what is about one head, its first."""
    w_q, w_k, w_v = w.head(0)
    branch = sab(block, x[None])[0]
    linear = torch.zeros(len(w.w_v), len(w.w_v), dtype=torch.float64)  # Z M is what linear attention returns
    for head, w_o in enumerate(w.w_o.chunk(w.heads)):
        q, k, v = w.head(head)
        linear = linear + q @ k.mT @ (z.mT @ z) @ v @ w_o * block.attn.scale / len(z)
    whole = bounds.multihead_rate(z, p, w.w_v, w.w_o, "whole")
    factor = bounds.layer_norm_rate(x, block.norm1.weight, block.norm1.eps)
    rate = whole.bound / float(matrix_norm(hc(z))) * factor.bound / float(matrix_norm(hc(x)))
    return {
        "asa.prop41.as_stated": bounds.cubic_condition(z, w_q, w_k, w_v, "paper"),
        "asa.prop41.repaired": bounds.cubic_condition(z, w_q, w_k, w_v),
        "asa.prop41.definite": bounds.cubic_condition(z, w_q, w_k, w_v, "definite"),
        "asa.prop42.as_stated": bounds.skip_condition(z, linear, "paper"),
        "asa.prop42.ratio": bounds.skip_condition(z, linear),
        "asa.prop42.definite": bounds.skip_condition(z, linear, "definite"),
        "asa.prop42.sufficient": bounds.skip_condition(z, linear, "lowers"),
        "anti.thm1.repaired": bounds.low_pass_limit(torch.softmax(p[0], dim=-1), z),
        "anti.thm1.lambda2_bound": bounds.low_pass_rate(torch.softmax(p[0], dim=-1), z, 1, "paper"),
        "anti.thm3.as_stated": bounds.attention_rate(z, p[0], w_v),
        "anti.thm3.row_range": bounds.attention_rate(z, p[0], w_v, "range"),
        "anti.thm3.sharp": bounds.attention_rate(z, p[0], w_v, "sharp"),
        "anti.ext.multihead": bounds.multihead_rate(z, p, w.w_v, w.w_o),
        "anti.ext.multihead_whole": whole,
        "anti.thm3.block": _scaled(whole, float(matrix_norm(hc(x))) / float(matrix_norm(hc(z)))),
        "anti.thm3.layernorm": _scaled(whole, factor.bound / float(matrix_norm(hc(z)))),
        "anti.ext.skip": bounds.residual_rate(x, branch, rate),
        "anti.thm3.logits_dot": bounds.logit_check("dot", z, w_q, w_k),
        "anti.thm3.logits_l2": bounds.logit_check("l2", z, w_q, w_k),
        "cut.prop1.diffuse": bounds.diffuse_rows(p[0]),
    }


def _ffn_checks(block: Block, w: Weights, x: Tensor, z: Tensor) -> dict[str, BoundCheck]:
    return {
        "asa.ffn.as_stated": bounds.ffn_condition(z, w.w_up, w.w_down, "paper"),
        "asa.ffn.repaired": bounds.ffn_condition(z, w.w_up, w.w_down),
        "asa.ffn.product": bounds.ffn_condition(z, w.w_up, w.w_down, "product"),
        "anti.ext.ffn": bounds.ffn_rate(z, w.w_up, w.w_down, w.b_up),
    }


def _scaled(check: BoundCheck, factor: float) -> BoundCheck:
    """Return a check with its bound multiplied: that of the block's own input in place of the normed one."""
    bound = check.bound * factor
    holds = check.measured <= bound * (1 + bounds.TOLERANCE)
    return BoundCheck(
        check.name, check.measured, bound, check.hypotheses, holds, check.slack + math.log(factor), check.log_ratio
    )


def failed_hypotheses(checks: pandas.DataFrame) -> pandas.DataFrame:
    """Return in how many percent of the cases each hypothesis fails, from `check_model`: a row per claim and hypothesis."""
    cases = checks.groupby("claim", sort=False).size()
    failed = checks.explode("failed").dropna(subset="failed").groupby(["claim", "failed"], sort=False).size()
    table = failed.rename("fails in % of cases").reset_index().rename(columns={"failed": "hypothesis"})
    table["fails in % of cases"] = (100 * table["fails in % of cases"] / table.claim.map(cases)).round(0).astype(int)
    return table


# --- The Jacobian -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def jacobian_kappas(model: nn.Module, images: Tensor, tokens: int) -> pandas.DataFrame:
    """Return ln κ of the attention's Jacobian K at z = LN(x) and of K + I, for the first, middle and last block.

    On the first image, its first `tokens` tokens, and without biases: a dense K has (tokens · d)² entries.
    """
    rows = []
    found = list(_inputs(model, images[:1]))
    for number in sorted({0, len(found) // 2, len(found) - 1}):
        block, x = found[number]
        w = weights(block)
        z = block.norm1(x)[0, :tokens]
        bare, skipped = jacobian_kappa(attention_jacobian(z, w.w_q, w.w_k, w.w_v, w.w_o, w.heads))
        rows.append({"block": number + 1, "bare": math.log(bare), "with skip": math.log(skipped)})
    return pandas.DataFrame(rows)
