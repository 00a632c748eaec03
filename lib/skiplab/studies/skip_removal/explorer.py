"""The explorer of notebook 01: how strong a skip must be."""

import functools
from collections.abc import Sequence

import numpy
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.linalg import svdvals

from skiplab import draws
from skiplab.companion.explorations import (
    BEFORE,
    DASHED,
    GREY,
    HERE,
    SOLID,
    Choice,
    Exploration,
    Found,
    Panel,
    Slider,
    number,
)
from skiplab.theory.conditioning import condition_number
from skiplab.theory.jacobian import attention, attention_jacobian

WIDTH = 12  # features of a token


STRENGTHS = torch.linspace(0, 1, 21, dtype=torch.float64)


TOP = 1e8  # κ from here on, infinity too, is drawn at the upper edge


def skip_strength(s: float, sharpness: float, tokens: int, draw: int) -> Found:
    """Add s times its input to self-attention: s·X + SA(X), and s·I to its Jacobian K. Random tokens and weights.

    `sharpness` multiplies the logits, `draw` is the seed. Found: singular values of SA(X) `bare`, of sX + SA(X)
    `skipped`, of K `jacobian`, of K + sI `jacobian_skipped`; κ of both sums over STRENGTHS, `token_kappas` and
    `jacobian_kappas` (21,), and at `s`: `kappas`. Always Skip Attention, proposition 4.2; Cutting the Skip, section 3.
    """
    x, output, k, token_kappas, jacobian_kappas = _branch(sharpness, tokens, draw)
    skipped, jacobian = s * x + output, k + s * torch.eye(len(k), dtype=k.dtype)
    return Found(
        s=s,
        bare=svdvals(output),
        skipped=svdvals(skipped),
        jacobian=svdvals(k),
        jacobian_skipped=svdvals(jacobian),
        token_kappas=token_kappas,
        jacobian_kappas=jacobian_kappas,
        kappas=(float(condition_number(skipped)), float(condition_number(jacobian))),
    )


@functools.lru_cache(maxsize=64)
def _branch(sharpness: float, tokens: int, draw: int) -> tuple[Tensor, ...]:
    """Return X and SA(X) (tokens, WIDTH), K, and κ of sX + SA(X) and of K + sI at all STRENGTHS."""
    generator = torch.Generator().manual_seed(draw)
    x = draws.normal(tokens, WIDTH, generator=generator)
    w_q, w_k, w_v, w_o = draws.normal(4, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    weights = (sharpness * w_q, w_k, w_v, w_o)
    output, k = attention(x, *weights), attention_jacobian(x, *weights)
    s = STRENGTHS[:, None, None]
    return x, output, k, condition_number(s * x + output), condition_number(s * torch.eye(len(k), dtype=k.dtype) + k)


SKIP_STRENGTH = (
    Panel(
        "singular values: tokens",
        ("share of the directions", 0, 1),
        (1e-5, 30),
        legend={"SA(X)": BEFORE, "sX + SA(X)": SOLID},
    ),
    Panel(
        "condition number κ",
        ("strength s of the skip", 0, 1),
        (1, 1.5 * TOP),
        legend={"sX + SA(X)": SOLID, "K + sI": DASHED},
        place="upper right",
    ),
    Panel(
        "singular values: Jacobian",
        ("share of the directions", 0, 1),
        (1e-5, 30),
        legend={"K": BEFORE, "K + sI": DASHED},
    ),
)


def draw_skip_strength(axes: Sequence[Axes], found: Found) -> None:
    """Draw the singular values of tokens and Jacobian, without and with the skip, and κ over its strength."""
    for axis, bare, skipped, style in (
        (axes[0], found.bare, found.skipped, SOLID),
        (axes[2], found.jacobian, found.jacobian_skipped, DASHED),
    ):
        shares = numpy.linspace(0, 1, len(bare))
        axis.plot(shares, bare.clamp(min=1e-9), **BEFORE)
        axis.plot(shares, skipped.clamp(min=1e-9), **style)
    axes[1].plot(STRENGTHS, found.token_kappas.clamp(max=TOP), **SOLID)
    axes[1].plot(STRENGTHS, found.jacobian_kappas.clamp(max=TOP), **DASHED)
    axes[1].plot([found.s] * 2, [min(kappa, TOP) for kappa in found.kappas], "o", color=GREY, markersize=9)
    axes[1].axvline(found.s, **HERE)


def skip_strength_facts(found: Found) -> list[str]:
    """Say κ with no skip and with this one."""
    return [
        f"κ(SA(X)) = {number(found.token_kappas[0])}, κ(sX + SA(X)) = {number(found.kappas[0])} at s = {found.s:g}",
        f"κ(K) = {number(found.jacobian_kappas[0])}, κ(K + sI) = {number(found.kappas[1])}",
    ]


EXPLORATION = Exploration(
    "skip_strength",
    "How much skip is enough?",
    {
        "s": Slider("strength s", 0.0, 1.0, 0.05, 0.0),
        "sharpness": Slider("sharpness of the logits", 0.0, 4.0, 0.5, 1.0),
        "tokens": Choice("tokens", (4, 8, 12), 8),
        "draw": Slider("random draw", 0, 9, 1, 0),
    },
    skip_strength,
    SKIP_STRENGTH,
    draw_skip_strength,
    skip_strength_facts,
    [{"s": 0.25}, {"s": 0.5}, {"s": 1.0}],
)
