"""Statements about one layer's rate: Anti-Oversmoothing (arXiv 2203.05962), theorem 3 and its extensions."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.linalg import matrix_norm

from skiplab.companion.cases import NEGLIGIBLE, Draws, Statement, judged
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


RATES = {
    "anti.thm3.as_stated": Statement(_layer, bounds.attention_rate),
    "anti.thm3.row_range": Statement(_layer, _row_range),
    "anti.thm3.sharp": Statement(_layer, partial(bounds.attention_rate, form="sharp")),
    "anti.thm3.monotone": Statement(partial(_below, lambda n: n**-0.5), decays),
    "anti.thm3.monotone_sharp": Statement(partial(_below, lambda n: (2 / n) ** 0.5), decays),
    **{
        f"anti.thm3.logits_{kind}": Statement(_projections, partial(bounds.logit_check, kind)) for kind in bounds.LOGITS
    },
    "anti.thm3.half_range": Statement(_kind, partial(bounds.logit_check, form="half_range")),
    "anti.thm3.block": Statement(_normed_layer, partial(_block, form="paper")),
    "anti.thm3.layernorm": Statement(_normed_layer, partial(_block, form="repaired")),
    "anti.thm3.layernorm_attained": Statement(
        lambda draws: (counterexamples.layer_norm_raises(10 ** draws.uniform(-4, 0), draws.whole(2, 10)),),
        lambda x: judged("layer norm, attained", abs(bounds.layer_norm_rate(x).slack), 1e-6),
    ),
    "anti.thm3.layernorm_sharp": Statement(_normed_layer, partial(_block, form="sharp")),
    "anti.ext.multihead": Statement(_many_heads, bounds.multihead_rate),
    "anti.ext.multihead_sqrt": Statement(_many_heads, partial(bounds.multihead_rate, form="root")),
    "anti.ext.multihead_whole": Statement(_many_heads, partial(bounds.multihead_rate, form="whole")),
    "anti.ext.skip": Statement(_square_layer, partial(with_skip, form="paper")),
    "anti.ext.skip_lower": Statement(_gentle_layer, partial(with_skip, form="lower")),
    "anti.ext.skip_identity": Statement(lambda draws: (draws.attention(draws.whole(2, 10)),), _same_one),
    "anti.ext.skip_bands": Statement(_either_band, bands_alike),
    "anti.ext.ffn": Statement(_ffn, bounds.ffn_rate),
    "anti.ext.ffn_skip": Statement(_ffn, partial(bounds.ffn_rate, skip=True)),
}
