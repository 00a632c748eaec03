"""What notebook 04 tabulates: counterexamples, which layers the theorems cover, and how κ(A) grows."""

import numpy
import pandas
import torch

from skiplab import draws as portable
from skiplab.companion.cases import judged
from skiplab.studies.bounds.conditions import CUBIC, FFN, SKIP
from skiplab.studies.bounds.stacks import worst_gain
from skiplab.theory import bounds, counterexamples
from skiplab.theory.bounds import BoundCheck
from skiplab.theory.conditioning import condition_number
from skiplab.theory.spectral import hc_ratio

Refuted = list[tuple[str, BoundCheck, str, BoundCheck]]  # a statement, refuted, and its repair, on the same input


def _refuted_layers() -> Refuted:
    """Return the counterexamples about κ: one layer, its FFN and its skip."""
    return [
        (
            "4.1, fewer tokens than dimensions",
            CUBIC(*counterexamples.cubic_wide()),
            "W_Q W_Kᵀ positive definite: κ(X)³κ(W_V)‖B‖/λ",
            bounds.cubic_condition(*counterexamples.cubic_wide(), form="definite"),
        ),
        (
            "4.1, narrow heads",
            CUBIC(*counterexamples.cubic_heads()),
            "square weights and n ≥ d",
            bounds.cubic_condition(*counterexamples.cubic_heads()),
        ),
        (
            "FFN, d → 4d → d",
            FFN(*counterexamples.ffn_wide()),
            "κ(X) κ(W_up W_down)",
            bounds.ffn_condition(*counterexamples.ffn_wide(), form="product"),
        ),
        (
            "4.2, a branch that cancels",
            SKIP(*counterexamples.skip_cancels()),
            "κ(X)(1+m)/(1+μ)",
            bounds.skip_condition(*counterexamples.skip_cancels(), form="definite"),
        ),
    ]


def _refuted_rates() -> Refuted:
    """Return the counterexamples about smoothing: maps, stacks of them, LayerNorm and skip."""
    never, despite = counterexamples.never_smoothing(), counterexamples.smoothing_despite_tau()
    x, branch = counterexamples.skip_high_pass()
    mean_zero = counterexamples.stationary_mean_zero()
    return [
        (
            "theorem 1, πᵀz = 0",
            bounds.low_pass_limit(*mean_zero, form="paper"),
            "there DC/HC ≤ √n‖π − 1/n‖",
            bounds.low_pass_limit(*mean_zero, form="floor"),
        ),
        (
            "|λ₂|ᵗ from the first step",
            bounds.low_pass_rate(*counterexamples.amplifying_attention(), 1, "paper"),
            "√(n/2) τᵗ",
            bounds.low_pass_rate(*counterexamples.amplifying_attention(), 1),
        ),
        ("a deep stack smooths", judged("", worst_gain(never), 0.01), "√(n/2) Π τ", bounds.product_low_pass(never)),
        (
            "it smooths only if Π τ → 0",
            judged("", bounds.dobrushin(despite).prod(), 0.01),
            "√(n/2) Π τ",
            bounds.product_low_pass(despite),
        ),
        (
            "theorem 3 through LayerNorm",
            bounds.layer_norm_rate(counterexamples.layer_norm_raises(), form="paper"),
            "max|g| / min std(x)",
            bounds.layer_norm_rate(counterexamples.layer_norm_raises()),
        ),
        (
            "a skip treats bands alike",
            judged("", hc_ratio(x + branch), hc_ratio(x)),
            "(1 + rate) ‖HC‖",
            bounds.residual_rate(x, branch, 0.0),
        ),
    ]


def counterexample_table() -> pandas.DataFrame:
    """Return a row per counterexample: the statement, both its sides, and the repaired statement on the same input."""
    return pandas.DataFrame(
        [
            {
                "statement": name,
                "measured": _shown(false.measured),
                "bound": _shown(false.bound),
                "repaired": repair,
                "repaired measured": "says nothing" if true.holds is None else _shown(true.measured),
                "repaired bound": "says nothing" if true.holds is None else _shown(true.bound),
            }
            for name, false, repair, true in _refuted_layers() + _refuted_rates()
        ]
    )


def _shown(value: float) -> str:
    """Write three digits; what is rounding, or divided by rounding, only by its size."""
    return "< 1e-12" if value < 1e-12 else "> 1e12" if value > 1e12 else f"{value:.3g}"


# Tokens, dimensions and width of a head, for each kind of attention layer in the papers' own models (224 pixels).
LAYERS = {
    "ViT-Tiny": (197, 192, 64), "ViT-S": (197, 384, 64), "ViT-B": (197, 768, 64), "CaiT-S24": (196, 384, 48),
    **{f"Swin-S, stage {stage}": (49, 48 * 2**stage, 32) for stage in (1, 2, 3, 4)},
    **{f"PVT v2 b3, stage {stage}": (side * side, d, 64)
       for stage, (side, d) in enumerate([(56, 64), (28, 128), (14, 320), (7, 512)], start=1)},
}  # fmt: skip


def covered_layers() -> pandas.DataFrame:
    """Return a row per kind of layer in the papers' models: its shape, and whether the proof of 4.1 covers it."""
    rows = [
        {
            "layer": name,
            "tokens n": n,
            "dimensions d": d,
            "width of a head": width,
            "n ≥ d": n >= d,
            "square weights": width == d,
            "covered": n >= d and width == d,
        }
        for name, (n, d, width) in LAYERS.items()
    ]
    return pandas.DataFrame(rows)


def diffuse_kappas(seeds: list[int], ranges: list[float], sizes: list[int]) -> pandas.DataFrame:
    """Return κ(softmax(P)) for P uniform in [0, range], n tokens: a row per seed, range and n."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for n in sizes:
            unit = portable.uniform(n, n, generator=generator)
            for size in ranges:
                kappa = float(condition_number(torch.softmax(size * unit, dim=-1)))
                rows.append({"seed": seed, "range": size, "n": n, "kappa": kappa})
    return pandas.DataFrame(rows)


def log_slope(table: pandas.DataFrame, x: str, y: str) -> float:
    """Return the slope of ln y against ln x by least squares."""
    return float(numpy.polyfit(numpy.log(table[x]), numpy.log(table[y]), 1)[0])
