"""Statements about stacks of attention maps: Anti-Oversmoothing (arXiv 2203.05962), theorem 1 and corollary 2."""

import math
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


def _projected(draws: Draws) -> tuple[Tensor, Tensor]:
    """Return a positive map and tokens with πᵀz = 0."""
    n = draws.whole(3, 10)
    attn, z = draws.attention(n), draws.normal(n, draws.whole(1, 3))
    return attn, z - bounds.stationary_distribution(attn) @ z


def _usual(draws: Draws) -> tuple[Tensor, Tensor]:
    """Return a positive map and tokens with |πᵀz| ≥ 1e-3 ‖z‖."""
    while True:
        n = draws.whole(3, 10)
        attn, z = draws.attention(n, sharpness=draws.uniform(0.1, 4)), draws.normal(n, draws.whole(1, 3))
        if (bounds.stationary_distribution(attn) @ z).norm() >= 1e-3 * z.norm():
            return attn, z


def _second_eigenvalue(attn: Tensor) -> float:
    return float(torch.linalg.eigvals(hc(attn)).abs().max())


def _unprojected(attn: Tensor, z: Tensor) -> BoundCheck:
    """Check that without projecting back the ratio falls below 1e-6 after 40 / −log10|λ₂| steps."""
    for _ in range(math.ceil(40 / -math.log10(_second_eigenvalue(attn)))):
        z = attn @ z
        z = z / z.norm()
    return judged("theorem 1, rounding", hc_ratio(z), 1e-6)


def _asymptotic(attn: Tensor, z: Tensor) -> BoundCheck:
    """Check ratio ≤ 2 κ(V)|λ₂|ᵗ‖z‖ / (√n |πᵀz|) from the first step where κ(V)|λ₂|ᵗ‖z‖ ≤ ½√n |πᵀz|, ten steps on."""
    kappa = float(torch.linalg.cond(torch.linalg.eig(attn)[1]))
    rate, mean = _second_eigenvalue(attn), bounds.stationary_distribution(attn) @ z
    scale = math.sqrt(len(attn)) * float(mean.norm()) / float(z.norm())
    start = max(0, math.ceil(math.log(scale / 2 / kappa) / math.log(rate)))
    worst = None
    for step in range(1, start + 11):
        z = attn @ z
        check = judged("theorem 1, eigenvalue", hc_ratio(z), 2 * kappa * rate**step / scale + 1e-12)
        if step >= start and (worst is None or check.slack < worst.slack):
            worst = check
    return replace(worst, hypotheses={"diagonalisable": kappa < 1e8}, holds=worst.holds if kappa < 1e8 else None)


def _steps(draws: Draws) -> tuple[Tensor, Tensor, int]:
    if draws.whole(0, 1):
        attn, z = counterexamples.amplifying_attention(2 * draws.whole(2, 12))
        share = 10 ** draws.uniform(-3, -1)  # exactly equal rows would be more than LAPACK's eigenvalues can bear
        return (1 - share) * attn + share * draws.attention(len(attn)), z, draws.whole(1, 3)
    n = draws.whole(2, 10)
    return draws.attention(n, sharpness=draws.uniform(0.1, 6)), draws.normal(n, 2), draws.whole(1, 6)


def _attained(attn: Tensor, z: Tensor) -> BoundCheck:
    """Check that one step of A reaches √(n/2) τ(A) ‖HC[z]‖, to a relative 1e-6."""
    return judged("corollary 2, attained", abs(bounds.low_pass_rate(attn, z, 1).slack), 1e-6)


def _stack(draws: Draws, layers: int) -> Tensor:
    return draws.attention(layers, draws.whole(2, 10), sharpness=draws.uniform(0.1, 8))


def _product(attns: Tensor) -> Tensor:
    """Return A_L … A_1 of (L, n, n), neighbours first."""
    while len(attns) > 1:
        rest = attns[-1:] if len(attns) % 2 else attns[:0]
        attns = torch.cat([attns[1::2] @ attns[: len(attns) - len(rest) : 2], rest])
    return attns[0]


def _stochastic(attns: Tensor) -> BoundCheck:
    """Check that a product of maps is positive and that its rows sum to 1 within 1e-12."""
    product = _product(attns)
    off = float((product.sum(dim=1) - 1).abs().max())
    return judged("corollary 2, stochastic", math.inf if product.min() <= 0 else off, 1e-12)


def worst_gain(attns: Tensor) -> Tensor:
    """Return ‖HC A_L … A_1 HC‖₂."""
    centre = hc(torch.eye(attns.shape[-1], dtype=torch.float64))
    return matrix_norm(hc(_product(attns) @ centre), 2)


def _deep_stack(draws: Draws) -> tuple[Tensor]:
    if draws.whole(0, 3) == 0:
        return (counterexamples.never_smoothing(1000, draws.whole(3, 8)),)
    return (_stack(draws, 1000),)


def _smoothing_stack(draws: Draws) -> tuple[Tensor]:
    if draws.whole(0, 3) == 0:
        return (counterexamples.smoothing_despite_tau(2 * draws.whole(10, 30)),)
    return (draws.attention(200, draws.whole(2, 8), sharpness=draws.uniform(0.1, 3)),)


def _only_if(attns: Tensor) -> BoundCheck:
    """Check that a stack which removes all but 1e-6 of HC has Π τ < 0.1."""
    return judged("corollary 2, only if", bounds.dobrushin(attns).prod(), 0.1, smooths=bool(worst_gain(attns) < 1e-6))


def _pair(draws: Draws) -> tuple[Tensor, Tensor]:
    n = draws.whole(2, 10)
    return draws.attention(n, sharpness=draws.uniform(0.1, 8)), draws.attention(n, sharpness=draws.uniform(0.1, 8))


def _approach(attn: Tensor, z: Tensor, steps: int = 4) -> BoundCheck:
    """Check the rate behind theorem 1, ‖HC‖/‖DC‖ of Aᵗz ≤ h / √n(‖πᵀz‖ − ‖π − 1/n‖h) with h = √(n/2) τᵗ‖HC[z]‖."""
    n, pi = len(attn), bounds.stationary_distribution(attn)
    h = math.sqrt(n / 2) * bounds.dobrushin(attn) ** steps * matrix_norm(hc(z))
    left = (pi @ z).norm() - (pi - 1 / n).norm() * h
    ratio = hc_ratio(torch.linalg.matrix_power(attn, steps) @ z)
    return judged("theorem 1, approach", ratio, h / math.sqrt(n) / left.clamp(min=NEGLIGIBLE), said=bool(left > 0))


def _floor(attn: Tensor, z: Tensor, steps: int = 4) -> BoundCheck:
    """Check ‖DC‖/‖HC‖ ≤ √n ‖π − 1/n‖ of Aᵗw, w being what is left of `z` on πᵀw = 0."""
    n, pi = len(attn), bounds.stationary_distribution(attn)
    w = torch.linalg.matrix_power(attn, steps) @ (z - pi @ z)
    return judged("theorem 1, floor", 1 / hc_ratio(w), math.sqrt(n) * (pi - 1 / n).norm())


def _on_maps(check: Callable, *logits: Tensor) -> BoundCheck:
    return check(*(torch.softmax(p, dim=-1) for p in logits))


def _least_entry(attn: Tensor) -> BoundCheck:
    return judged("tau, least entry", bounds.dobrushin(attn), 1 - len(attn) * attn.min(), 1e-12)


def _submultiplicative(a: Tensor, b: Tensor) -> BoundCheck:
    return judged("tau, product", bounds.dobrushin(a @ b), bounds.dobrushin(a) * bounds.dobrushin(b))


STACKS = {
    "anti.thm1.as_stated": Statement(
        lambda draws: (_projected if draws.whole(0, 1) else _usual)(draws),
        partial(bounds.low_pass_limit, form="paper"),
        label="theorem 1 as published",
        unsearched="false only where πᵀz = 0, a set that no gradient leads to; elsewhere it is anti.thm1.repaired",
    ),
    "anti.thm1.repaired": Statement(
        _usual,
        bounds.low_pass_limit,
        label="theorem 1, πᵀz ≠ 0",
        search=(  # the rate from which `low_pass_limit` takes its number of steps
            lambda p, z: _approach(torch.softmax(p, dim=1), z + 3),
            shaped((6, 6), (6, 1)),
        ),
    ),
    "anti.thm1.exception": Statement(
        _projected,
        partial(bounds.low_pass_limit, form="floor"),
        label="theorem 1, floor at πᵀz = 0",
        search=(lambda p, z: _floor(torch.softmax(p, dim=1), z), shaped((6, 6), (6, 1))),
    ),
    "anti.thm1.rounding": Statement(
        _projected, _unprojected, unsearched="about the rounding of an iteration, which has no gradient"
    ),
    "anti.thm1.rate": Statement(
        _usual,
        _asymptotic,
        unsearched="counts from a step that depends on the eigenvectors; anti.thm1.dobrushin_rate is searched",
    ),
    "anti.thm1.lambda2_bound": Statement(
        _steps,
        partial(bounds.low_pass_rate, form="paper"),
        label="|λ₂|ᵗ from step 1",
        search=(
            lambda p, z: bounds.low_pass_rate(torch.softmax(p, dim=1), z.detach(), 1, "paper"),
            shaped((6, 6), (6, 1)),
        ),
    ),
    "anti.thm1.dobrushin_rate": Statement(
        _steps,
        bounds.low_pass_rate,
        label="√(n/2) τᵗ",
        search=(
            lambda p, z: bounds.low_pass_rate(torch.softmax(p, dim=1), z, 2),
            shaped((6, 6), (6, 1)),
        ),
    ),
    "anti.cor2.stochastic": Statement(
        lambda draws: (_stack(draws, draws.whole(2, 24)),),
        _stochastic,
        unsearched="an identity: what is measured is rounding",
    ),
    "anti.cor2.smooths": Statement(
        _deep_stack,
        lambda attns: judged("corollary 2, deep", worst_gain(attns), 0.01),
        unsearched="the gain of 1,000 random layers is rounding, and so is its gradient",
    ),
    "anti.cor2.dobrushin": Statement(
        lambda draws: (_stack(draws, draws.whole(1, 6)),),
        bounds.product_low_pass,
        label="corollary 2, √(n/2) Π τ",
        search=(lambda p: bounds.product_low_pass(torch.softmax(p, dim=-1)), shaped((1, 6, 6))),
    ),
    "anti.cor2.attained": Statement(
        lambda draws: counterexamples.amplifying_attention(2 * draws.whole(2, 12), 10 ** draws.uniform(-6, -1)),
        _attained,
        unsearched=BUILT,
    ),
    "anti.cor2.only_if": Statement(
        _smoothing_stack,
        _only_if,
        unsearched="its hypothesis, a gain below 1e-6, is lost with the first step towards a larger Π τ",
    ),
    "anti.cor2.tau_min": Statement(
        lambda draws: _pair(draws)[:1],
        _least_entry,
        label="τ ≤ 1 − n min A",
        search=(partial(_on_maps, _least_entry), shaped((6, 6))),
    ),
    "anti.cor2.tau_product": Statement(
        _pair,
        _submultiplicative,
        label="τ(AB) ≤ τ(A) τ(B)",
        search=(partial(_on_maps, _submultiplicative), shaped((6, 6), (6, 6))),
    ),
}
