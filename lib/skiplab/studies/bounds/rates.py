"""Statements about one layer's rate: Anti-Oversmoothing (arXiv 2203.05962), theorem 3 and its extensions."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.linalg import matrix_norm

from skiplab.companion.cases import NEGLIGIBLE, Draws, Statement, judged, shaped
from skiplab.studies.bounds.conditions import BUILT
from skiplab.theory import bounds, counterexamples
from skiplab.theory.bounds import BoundCheck
from skiplab.theory.spectral import hc, hc_ratio


def _layer(draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    n, d = draws.whole(2, 10), draws.whole(2, 8)
    return draws.tokens(n, d), draws.logits(n), draws.weight(d, draws.whole(2, 8))


def _below(limit: Callable[[int], float], draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer with ‖W_V‖₂ below `limit(n)`."""
    x, logits, w_v = _layer(draws)
    return x, logits, w_v / matrix_norm(w_v, 2) * draws.uniform(0.5, 0.9999) * limit(len(x))


def decays(x: Tensor, logits: Tensor, w_v: Tensor) -> BoundCheck:
    """Check that self-attention does not raise HC, for ‖W_V‖₂ below a limit."""
    return judged("theorem 3, monotone", matrix_norm(hc(torch.softmax(logits, dim=-1) @ x @ w_v)), matrix_norm(hc(x)))


def _row_range(x: Tensor, logits: Tensor, w_v: Tensor) -> BoundCheck:
    """Check theorem 3 with the ranges of the rows, and that this bound is never above the published one."""
    check = bounds.attention_rate(x, logits, w_v, "range")
    larger = check.bound > bounds.attention_rate(x, logits, w_v).bound * (1 + 1e-12)
    return replace(check, holds=check.holds and not larger)


def _projections(draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    n, d, width = draws.whole(2, 10), draws.whole(2, 8), draws.whole(1, 4)
    return draws.tokens(n, d), draws.weight(d, width), draws.weight(d, width)


def _normed_layer(draws: Draws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, logits, w_v = _layer(draws)
    spread = 10 ** draws.uniform(-4, 0)
    return x[:1].mean() + spread * x, logits, w_v, draws.normal(x.shape[1])


def _block(x: Tensor, logits: Tensor, w_v: Tensor, gain: Tensor, *, form: str) -> BoundCheck:
    """Check theorem 3's rate for SA(LN(x)) in terms of ‖HC[x]‖, with the layer norm's factor in the given `form`."""
    norm = bounds.layer_norm_rate(x, gain, form=form)
    normed = (x - x.mean(dim=1, keepdim=True)) / x.std(dim=1, correction=0, keepdim=True) * gain
    inner = bounds.attention_rate(normed, logits, w_v)
    said = norm.holds is not None and norm.measured > 1e-9 * float(normed.norm())
    return judged(
        "theorem 3, block", inner.measured, inner.bound * norm.bound / max(norm.measured, NEGLIGIBLE), 1e-6, said=said
    )


def _many_heads(draws: Draws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, d, heads, width = draws.whole(2, 10), draws.whole(2, 8), draws.whole(1, 12), draws.whole(1, 3)
    return draws.tokens(n, d), draws.logits(heads, n), draws.weight(d, heads * width), draws.weight(heads * width, d)


def with_skip(x: Tensor, logits: Tensor, w_v: Tensor, *, form: str) -> BoundCheck:
    """Check a block with its skip, its rate being theorem 3's."""
    rate = bounds.attention_gain(logits) * matrix_norm(w_v, 2)
    return bounds.residual_rate(x, torch.softmax(logits, dim=-1) @ x @ w_v, rate, form)


def _square_layer(draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    n, d = draws.whole(2, 10), draws.whole(2, 8)
    w_v = draws.weight(d, d)
    return draws.tokens(n, d), draws.logits(n), w_v


def _gentle_layer(draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer whose rate in theorem 3 is below 1."""
    x, logits, w_v = _square_layer(draws)
    return x, logits, w_v * draws.uniform(0.1, 0.99) / (bounds.attention_gain(logits) * matrix_norm(w_v, 2))


def _either_band(draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    """Return an ordinary layer, or the one that removes DC and keeps HC: A = 11ᵀ/n and W_V = −I."""
    x, logits, w_v = _square_layer(draws)
    if draws.whole(0, 1):
        return x, logits, w_v
    return x, torch.zeros_like(logits), -torch.eye(len(w_v), dtype=torch.float64)


def bands_alike(x: Tensor, logits: Tensor, w_v: Tensor) -> BoundCheck:
    """Check that a block with its skip does not raise ‖HC‖/‖DC‖."""
    after = x + torch.softmax(logits, dim=-1) @ x @ w_v
    return judged("skip, bands", hc_ratio(after), hc_ratio(x), said=bool(hc_ratio(x) > 1e-9))


def _response(attn: Tensor) -> Tensor:
    """Return F A F⁻¹ in full, F the unitary DFT."""
    return torch.fft.fft(torch.fft.ifft(attn.to(torch.complex128), dim=1, norm="ortho"), dim=0, norm="ortho")


def _same_one(attn: Tensor) -> BoundCheck:
    identity = torch.eye(len(attn), dtype=torch.float64)
    return judged("skip, response", (_response(attn + identity) - _response(attn) - identity).abs().max(), 1e-10)


def _ffn(draws: Draws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, d, inner = draws.whole(2, 10), draws.whole(2, 8), draws.whole(2, 12)
    return draws.tokens(n, d), draws.weight(d, inner), draws.weight(inner, d), draws.normal(inner)


def _kind(draws: Draws) -> tuple:
    return (bounds.LOGITS[draws.whole(0, 2)], *_projections(draws))


def _searched_block(x: Tensor, logits: Tensor, w_v: Tensor, form: str = "repaired") -> BoundCheck:
    """Check what `_block` checks, with gradients: measured/bound of both steps multiplied."""
    normed = (x - x.mean(dim=1, keepdim=True)) / x.std(dim=1, correction=0, keepdim=True)
    inner, norm = bounds.attention_rate(normed, logits, w_v), bounds.layer_norm_rate(x, form=form)
    return judged("theorem 3, block", (inner.log_ratio + norm.log_ratio).exp(), 1.0)


def _gentle(share: float, x: Tensor, logits: Tensor, w_v: Tensor) -> BoundCheck:
    """Check a skip whose branch has `share` of the input's HC by theorem 3; without a branch nothing is to be found."""
    return with_skip(x, logits, share * w_v / (bounds.attention_gain(logits) * matrix_norm(w_v, 2)), form="lower")


def _normalised(norm: float, x: Tensor, logits: Tensor, w_v: Tensor) -> BoundCheck:
    return decays(x, logits, norm * w_v / matrix_norm(w_v, 2))


def _any_half_range(x: Tensor, w_q: Tensor, w_k: Tensor) -> BoundCheck:
    """Return the tightest of the three kinds of logits."""
    return min(
        (bounds.logit_check(kind, x, w_q, w_k, "half_range") for kind in bounds.LOGITS), key=lambda check: check.slack
    )


_LAYER, _WEIGHTS, _HEADS = ((6, 4), (6, 6), (4, 4)), ((5, 4), (4, 3), (4, 3)), ((6, 4), (2, 6, 6), (4, 4), (4, 4))

RATES = {
    "anti.thm3.as_stated": Statement(
        _layer, bounds.attention_rate, label="theorem 3 as published", search=(bounds.attention_rate, shaped(*_LAYER))
    ),
    "anti.thm3.row_range": Statement(
        _layer,
        _row_range,
        label="theorem 3, row ranges",
        search=(partial(bounds.attention_rate, form="range"), shaped(*_LAYER)),
    ),
    "anti.thm3.sharp": Statement(
        _layer,
        partial(bounds.attention_rate, form="sharp"),
        label="theorem 3, sharp",
        search=(partial(bounds.attention_rate, form="sharp"), shaped(*_LAYER)),
    ),
    "anti.thm3.monotone": Statement(
        partial(_below, lambda n: n**-0.5),
        decays,
        label="decay, ‖W_V‖ < 1/√n",
        search=(partial(_normalised, 6**-0.5), shaped(*_LAYER)),
    ),
    "anti.thm3.monotone_sharp": Statement(
        partial(_below, lambda n: (2 / n) ** 0.5),
        decays,
        label="decay, ‖W_V‖ < √(2/n)",
        search=(partial(_normalised, 3**-0.5), shaped(*_LAYER)),
    ),
    "anti.thm3.block": Statement(
        _normed_layer,
        partial(_block, form="paper"),
        label="… in a block, no LayerNorm factor",
        search=(partial(_searched_block, form="paper"), shaped(*_LAYER)),
    ),
    "anti.thm3.layernorm": Statement(
        _normed_layer,
        partial(_block, form="repaired"),
        label="… with the LayerNorm's factor",
        search=(_searched_block, shaped(*_LAYER)),
    ),
    "anti.thm3.layernorm_attained": Statement(
        lambda draws: (counterexamples.layer_norm_raises(10 ** draws.uniform(-4, 0), draws.whole(2, 10)),),
        lambda x: judged("layer norm, attained", abs(bounds.layer_norm_rate(x).slack), 1e-6),
        unsearched=BUILT,
    ),
    "anti.thm3.layernorm_sharp": Statement(
        _normed_layer,
        partial(_block, form="sharp"),
        label="… with its sharper factor",
        search=(partial(_searched_block, form="sharp"), shaped(*_LAYER)),
    ),
    "anti.ext.multihead": Statement(
        _many_heads, bounds.multihead_rate, label="H heads, H σ₁σ₂", search=(bounds.multihead_rate, shaped(*_HEADS))
    ),
    "anti.ext.multihead_sqrt": Statement(
        _many_heads,
        partial(bounds.multihead_rate, form="root"),
        label="H heads, √H",
        search=(partial(bounds.multihead_rate, form="root"), shaped(*_HEADS)),
    ),
    "anti.ext.multihead_whole": Statement(
        _many_heads,
        partial(bounds.multihead_rate, form="whole"),
        label="H heads, no factor H",
        search=(partial(bounds.multihead_rate, form="whole"), shaped(*_HEADS)),
    ),
    "anti.ext.skip": Statement(
        _square_layer,
        partial(with_skip, form="paper"),
        label="skip, 1 + rate",
        search=(partial(with_skip, form="paper"), shaped(*_LAYER)),
    ),
    "anti.ext.skip_lower": Statement(
        _gentle_layer,
        partial(with_skip, form="lower"),
        label="skip, 1 − rate",
        search=(partial(_gentle, 0.5), shaped(*_LAYER)),
    ),
    "anti.ext.skip_identity": Statement(
        lambda draws: (draws.attention(draws.whole(2, 10)),),
        _same_one,
        unsearched="an identity: what is measured is rounding",
    ),
    "anti.ext.skip_bands": Statement(
        _either_band, bands_alike, label="skip, both bands alike", search=(bands_alike, shaped(*_LAYER))
    ),
    "anti.ext.ffn": Statement(
        _ffn, bounds.ffn_rate, label="FFN, σ₃", search=(bounds.ffn_rate, shaped((6, 4), (4, 8), (8, 4)))
    ),
    "anti.ext.ffn_skip": Statement(
        _ffn,
        partial(bounds.ffn_rate, skip=True),
        label="FFN with its skip, 1 + σ₃",
        search=(partial(bounds.ffn_rate, skip=True), shaped((6, 4), (4, 8), (8, 4))),
    ),
    **{
        f"anti.thm3.logits_{kind}": Statement(
            _projections,
            partial(bounds.logit_check, kind),
            {"dot": "dot-product", "l2": "L2", "logistic": "logistic"}[kind] + " logits",
            (partial(bounds.logit_check, kind), shaped(*_WEIGHTS)),
        )
        for kind in bounds.LOGITS
    },
    "anti.thm3.half_range": Statement(
        _kind,
        partial(bounds.logit_check, form="half_range"),
        label="logits, half the range",
        search=(_any_half_range, shaped(*_WEIGHTS)),
    ),
}
