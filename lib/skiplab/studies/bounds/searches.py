"""Searches for the worst case of each statement: how close to a bound, or how far beyond it, gradients find their way.

SEARCHES holds what is searched, UNSEARCHED why a statement is not, LABELS what figures call each."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.linalg import matrix_norm

from skiplab import draws as portable
from skiplab.companion.cases import NEGLIGIBLE, judged
from skiplab.studies.bounds.conditions import CUBIC, FFN, SKIP
from skiplab.studies.bounds.dominance import diagonal, norm_is_enough, uniform
from skiplab.studies.bounds.rates import bands_alike, decays, with_skip
from skiplab.studies.bounds.stacks import dobrushin, worst_gain
from skiplab.studies.bounds.statements import STATEMENTS
from skiplab.theory import bounds, counterexamples
from skiplab.theory.bounds import BoundCheck
from skiplab.theory.spectral import hc, hc_ratio


def _shaped(*shapes: tuple[int, ...]) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda generator: tuple(portable.normal(*shape, generator=generator) for shape in shapes)


def _searched_block(x: Tensor, logits: Tensor, w_v: Tensor, form: str = "repaired") -> BoundCheck:
    """Check what `_block` checks, with gradients: measured/bound of both steps multiplied."""
    normed = (x - x.mean(dim=1, keepdim=True)) / x.std(dim=1, correction=0, keepdim=True)
    inner, norm = bounds.attention_rate(normed, logits, w_v), bounds.layer_norm_rate(x, form=form)
    return judged("theorem 3, block", (inner.log_ratio + norm.log_ratio).exp(), 1.0)


def _approach(attn: Tensor, z: Tensor, steps: int = 4) -> BoundCheck:
    """Check the rate behind theorem 1, ‖HC‖/‖DC‖ of Aᵗz ≤ h / √n(‖πᵀz‖ − ‖π − 1/n‖h) with h = √(n/2) τᵗ‖HC[z]‖."""
    n, pi = len(attn), bounds.stationary_distribution(attn)
    h = math.sqrt(n / 2) * dobrushin(attn) ** steps * matrix_norm(hc(z))
    left = (pi @ z).norm() - (pi - 1 / n).norm() * h
    ratio = hc_ratio(torch.linalg.matrix_power(attn, steps) @ z)
    return judged("theorem 1, approach", ratio, h / math.sqrt(n) / left.clamp(min=NEGLIGIBLE), said=bool(left > 0))


def _floor(attn: Tensor, z: Tensor, steps: int = 4) -> BoundCheck:
    """Check ‖DC‖/‖HC‖ ≤ √n ‖π − 1/n‖ of Aᵗw, w being what is left of `z` on πᵀw = 0."""
    n, pi = len(attn), bounds.stationary_distribution(attn)
    w = torch.linalg.matrix_power(attn, steps) @ (z - pi @ z)
    return judged("theorem 1, floor", 1 / hc_ratio(w), math.sqrt(n) * (pi - 1 / n).norm())


def _gentle(share: float, x: Tensor, logits: Tensor, w_v: Tensor) -> BoundCheck:
    """Check a skip whose branch has `share` of the input's HC by theorem 3: with no branch at all nothing is to be found."""
    return with_skip(x, logits, share * w_v / (bounds.attention_gain(logits) * matrix_norm(w_v, 2)), form="lower")


def _normalised(norm: float, x: Tensor, logits: Tensor, w_v: Tensor) -> BoundCheck:
    return decays(x, logits, norm * w_v / matrix_norm(w_v, 2))


def _any_half_range(x: Tensor, w_q: Tensor, w_k: Tensor) -> BoundCheck:
    """Return the tightest of the three kinds of logits."""
    return min(
        (bounds.logit_check(kind, x, w_q, w_k, "half_range") for kind in bounds.LOGITS), key=lambda check: check.slack
    )


def _on_maps(check: Callable, *logits: Tensor) -> BoundCheck:
    return check(*(torch.softmax(p, dim=-1) for p in logits))


_LAYER, _WEIGHTS, _HEADS = ((6, 4), (6, 6), (4, 4)), ((5, 4), (4, 3), (4, 3)), ((6, 4), (2, 6, 6), (4, 4), (4, 4))


SEARCHES = {
    "asa.prop41.as_stated": (CUBIC, _shaped((3, 4), (4, 4), (4, 4), (4, 4))),
    "asa.prop41.repaired": (bounds.cubic_condition, _shaped((5, 3), (3, 3), (3, 3), (3, 3))),
    "asa.prop41.definite": (
        lambda x, w, v: bounds.cubic_condition(x, w, w, v, "definite"),
        _shaped((3, 4), (4, 4), (4, 4)),
    ),
    "asa.prop41.narrow_heads": (CUBIC, _shaped((6, 4), (4, 2), (4, 2), (4, 2))),
    "asa.ffn.as_stated": (FFN, _shaped((5, 3), (3, 12), (12, 3))),
    "asa.ffn.repaired": (bounds.ffn_condition, _shaped((5, 3), (3, 3), (3, 3))),
    "asa.ffn.product": (partial(bounds.ffn_condition, form="product"), _shaped((5, 3), (3, 12), (12, 3))),
    "asa.prop42.as_stated": (SKIP, _shaped((5, 3), (3, 3))),
    "asa.prop42.ratio": (lambda x, m: bounds.skip_condition(x, m / 10), _shaped((5, 3), (3, 3))),
    "asa.prop42.definite": (lambda x, m: bounds.skip_condition(x, m / 10, "definite"), _shaped((5, 3), (3, 3))),
    "asa.prop42.sufficient": (  # M of κ ≈ 10⁴, which the search may lower until the hypothesis stops it
        lambda x, m: bounds.skip_condition(x, m / 10 * torch.logspace(0, -4, 3, dtype=torch.float64), "lowers"),
        _shaped((5, 3), (3, 3)),
    ),
    "anti.thm1.repaired": (  # the rate from which `low_pass_limit` takes its number of steps
        lambda p, z: _approach(torch.softmax(p, dim=1), z + 3),
        _shaped((6, 6), (6, 1)),
    ),
    "anti.thm1.exception": (lambda p, z: _floor(torch.softmax(p, dim=1), z), _shaped((6, 6), (6, 1))),
    "anti.thm1.lambda2_bound": (
        lambda p, z: bounds.low_pass_rate(torch.softmax(p, dim=1), z.detach(), 1, "paper"),
        _shaped((6, 6), (6, 1)),
    ),
    "anti.thm1.dobrushin_rate": (
        lambda p, z: bounds.low_pass_rate(torch.softmax(p, dim=1), z, 2),
        _shaped((6, 6), (6, 1)),
    ),
    "anti.cor2.tau_min": (partial(_on_maps, STATEMENTS["anti.cor2.tau_min"].check), _shaped((6, 6))),
    "anti.cor2.tau_product": (partial(_on_maps, STATEMENTS["anti.cor2.tau_product"].check), _shaped((6, 6), (6, 6))),
    "anti.cor2.dobrushin": (lambda p: bounds.product_low_pass(torch.softmax(p, dim=-1)), _shaped((1, 6, 6))),
    "anti.thm3.as_stated": (bounds.attention_rate, _shaped(*_LAYER)),
    "anti.thm3.row_range": (partial(bounds.attention_rate, form="range"), _shaped(*_LAYER)),
    "anti.thm3.sharp": (partial(bounds.attention_rate, form="sharp"), _shaped(*_LAYER)),
    "anti.thm3.monotone": (partial(_normalised, 6**-0.5), _shaped(*_LAYER)),
    "anti.thm3.monotone_sharp": (partial(_normalised, 3**-0.5), _shaped(*_LAYER)),
    "anti.thm3.block": (partial(_searched_block, form="paper"), _shaped(*_LAYER)),
    "anti.thm3.layernorm": (_searched_block, _shaped(*_LAYER)),
    "anti.thm3.layernorm_sharp": (partial(_searched_block, form="sharp"), _shaped(*_LAYER)),
    "anti.ext.multihead": (bounds.multihead_rate, _shaped(*_HEADS)),
    "anti.ext.multihead_sqrt": (partial(bounds.multihead_rate, form="root"), _shaped(*_HEADS)),
    "anti.ext.multihead_whole": (partial(bounds.multihead_rate, form="whole"), _shaped(*_HEADS)),
    "anti.ext.skip": (partial(with_skip, form="paper"), _shaped(*_LAYER)),
    "anti.ext.skip_lower": (partial(_gentle, 0.5), _shaped(*_LAYER)),
    "anti.ext.skip_bands": (bands_alike, _shaped(*_LAYER)),
    "anti.ext.ffn": (bounds.ffn_rate, _shaped((6, 4), (4, 8), (8, 4))),
    "anti.ext.ffn_skip": (partial(bounds.ffn_rate, skip=True), _shaped((6, 4), (4, 8), (8, 4))),
    **{f"anti.thm3.logits_{kind}": (partial(bounds.logit_check, kind), _shaped(*_WEIGHTS)) for kind in bounds.LOGITS},
    "anti.thm3.half_range": (_any_half_range, _shaped(*_WEIGHTS)),
    "cut.prop1.uniform": (uniform, _shaped((5, 5))),
    "cut.prop1.diffuse": (bounds.diffuse_rows, _shaped((5, 5))),
    "cut.prop1.diagonal": (diagonal, _shaped((5, 5))),
    "cut.prop1.diagonal_kappa": (lambda p: bounds.diagonal_rows(p + 6 * torch.eye(5)), _shaped((5, 5))),
    "cut.prop2.smaller_norm": (lambda main, rest: norm_is_enough(main, rest / 10), _shaped((4, 4), (4, 4))),
    "cut.prop2.repaired": (
        lambda main, rest: bounds.dominant_term(main + 6 * torch.eye(4), rest / 10),
        _shaped((4, 4), (4, 4)),
    ),
}


# Why the other statements have no search.
_BUILT = "says what a counterexample reaches, which has nothing free but one angle or distance"


UNSEARCHED = {
    **dict.fromkeys(("asa.prop41.counterexample", "asa.prop41.heads_counterexample", "asa.ffn.counterexample",
                     "asa.prop42.counterexample", "anti.cor2.attained", "anti.thm3.layernorm_attained"), _BUILT),
    "anti.thm1.as_stated": "false only where πᵀz = 0, a set that no gradient leads to; elsewhere it is anti.thm1.repaired",
    "anti.thm1.rounding": "about the rounding of an iteration, which has no gradient",
    "anti.thm1.rate": "counts from a step, a whole number, that depends on the eigenvectors; anti.thm1.dobrushin_rate is searched",
    "anti.cor2.stochastic": "an identity: what is measured is rounding",
    "anti.cor2.smooths": "the gain of 1,000 random layers is rounding, and so is its gradient",
    "anti.cor2.only_if": "its hypothesis, a gain below 1e-6, is lost with the first step towards a larger Π τ",
    "anti.ext.skip_identity": "an identity: what is measured is rounding",
}  # fmt: skip


# What the figure of slack calls each inequality (not what says how far one is reached, or is true to rounding), from the published ones to the repaired and the sharper.
LABELS = {
    "asa.prop41.as_stated": "4.1 as published", "asa.prop41.narrow_heads": "4.1 for a head's weights",
    "asa.prop41.repaired": "4.1, square weights, n ≥ d", "asa.prop41.definite": "4.1, W_Q W_Kᵀ definite",
    "asa.ffn.as_stated": "FFN as published", "asa.ffn.repaired": "FFN, square weights",
    "asa.ffn.product": "FFN, κ(W_up W_down)", "asa.prop42.as_stated": "4.2 as published",
    "asa.prop42.ratio": "4.2, (1+m)/(1−m)", "asa.prop42.definite": "4.2, (1+m)/(1+μ)",
    "asa.prop42.sufficient": "4.2, κ(M) large enough", "anti.thm1.as_stated": "theorem 1 as published",
    "anti.thm1.repaired": "theorem 1, πᵀz ≠ 0", "anti.thm1.exception": "theorem 1, floor at πᵀz = 0", "anti.thm1.lambda2_bound": "|λ₂|ᵗ from step 1",
    "anti.thm1.dobrushin_rate": "√(n/2) τᵗ", "anti.cor2.dobrushin": "corollary 2, √(n/2) Π τ",
    "anti.cor2.tau_min": "τ ≤ 1 − n min A", "anti.cor2.tau_product": "τ(AB) ≤ τ(A) τ(B)",
    "anti.thm3.as_stated": "theorem 3 as published", "anti.thm3.row_range": "theorem 3, row ranges",
    "anti.thm3.sharp": "theorem 3, sharp", "anti.thm3.monotone": "decay, ‖W_V‖ < 1/√n",
    "anti.thm3.monotone_sharp": "decay, ‖W_V‖ < √(2/n)", "anti.thm3.block": "… in a block, no LayerNorm factor",
    "anti.thm3.layernorm": "… with the LayerNorm's factor", "anti.thm3.layernorm_sharp": "… with its sharper factor",
    "anti.ext.multihead": "H heads, H σ₁σ₂", "anti.ext.multihead_sqrt": "H heads, √H",
    "anti.ext.multihead_whole": "H heads, no factor H", "anti.ext.skip": "skip, 1 + rate",
    "anti.ext.skip_lower": "skip, 1 − rate", "anti.ext.skip_bands": "skip, both bands alike",
    "anti.ext.ffn": "FFN, σ₃", "anti.ext.ffn_skip": "FFN with its skip, 1 + σ₃",
    "anti.thm3.logits_dot": "dot-product logits", "anti.thm3.logits_l2": "L2 logits",
    "anti.thm3.logits_logistic": "logistic logits", "anti.thm3.half_range": "logits, half the range",
    "cut.prop1.uniform": "skipless 1, nearly uniform", "cut.prop1.diffuse": "skipless 1, diffuse rows",
    "cut.prop1.diagonal": "skipless 1, diagonal entries", "cut.prop1.diagonal_kappa": "skipless 1, diagonal rows", "cut.prop2.smaller_norm": "skipless 2, smaller norm",
    "cut.prop2.repaired": "skipless 2, ‖rest‖ < σ_min",
}  # fmt: skip


def worst_cases(steps: int, restarts: int = 2) -> dict[str, float]:
    """Return for each statement of SEARCHES the largest measured/bound that gradient ascent finds."""
    return {
        name: counterexamples.adversarial_search(check, sample, steps=steps, restarts=restarts).ratio
        for name, (check, sample) in SEARCHES.items()
    }


def largest_step(steps: int, seed: int = 0, n: int = 16) -> float:
    """Return the largest ‖HC A HC‖₂ that a search finds over positive row-stochastic (n, n): at most √(n/2)."""
    check = SEARCHES["anti.cor2.dobrushin"][0]
    return counterexamples.adversarial_search(
        check, _shaped((1, n, n)), steps=steps, step_size=0.3, seed=seed
    ).check.measured


def never_smoothing_keeps(layers: int, n: int = 8) -> float:
    """Return how many percent of HC the stack A_l = (1 − 2⁻ˡ)I + 2⁻ˡ 11ᵀ/n leaves."""
    return float(100 * worst_gain(counterexamples.never_smoothing(layers, n)))


def largest_normed(steps: int, seed: int = 0) -> tuple[float, float]:
    """Return the largest ‖HC[LN(x)]‖/‖HC[x]‖ that a search finds, and the share of the repaired bound reached there."""
    found = counterexamples.adversarial_search(
        lambda rest: bounds.layer_norm_rate(1 + rest / 50, form="paper"), _shaped((6, 4)), steps=steps, seed=seed
    )
    x = 1 + found.inputs[0] / 50
    return found.ratio, math.exp(-bounds.layer_norm_rate(x).slack)
