"""The explorer of notebook 04: theorem 3's bound, and what really happens."""

import functools
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.linalg import matrix_norm, qr

from skiplab import draws
from skiplab.companion.explorations import DASHED, DOTTED, GREY, HERE, SOLID, Choice, Exploration, Found, Panel, Slider
from skiplab.companion.figures import PALETTE
from skiplab.theory import bounds
from skiplab.theory.spectral import hc

ALPHAS = torch.linspace(0, 4, 17, dtype=torch.float64)


LAYERS = 8


def bound(alpha: float, tokens: int, norm: float, pattern: str) -> Found:
    """Compare theorem 3's bound of ‖HC[SA(X)]‖/‖HC[X]‖ with the largest ratio that these logits allow over all X.

    Logits lie in [−α, α]: "random" uniform, or in "two camps": half of the tokens look at one token, half at another.
    W_V is `norm` times an orthogonal matrix. Found: over ALPHAS the published `bounds`, the `sharp` ones (ours) and the
    `measured`; at `alpha` `bound`, `measured_here`, whether decay is `guaranteed`; `decay`, ‖HC‖ over LAYERS layers of
    random tokens. Anti-Oversmoothing, theorem 3.
    """
    units = _unit_logits(tokens, pattern)
    stack = ALPHAS[:, None, None] * units[0]
    here = alpha * units[0]
    at_alpha = norm * float(bounds.attention_gain(here))
    return Found(
        alpha=alpha,
        tokens=tokens,
        norm=norm,
        bounds=norm * _gains(tokens),
        sharp=norm * bounds.attention_gain(stack, "sharp"),
        measured=norm * _exact_gain(stack),
        bound=at_alpha,
        measured_here=norm * float(_exact_gain(here)),
        guaranteed=at_alpha < 1,
        decay=_decay(alpha * units, norm),
    )


@functools.lru_cache(maxsize=64)
def _unit_logits(tokens: int, pattern: str) -> Tensor:
    """Return LAYERS logits (LAYERS, n, n) in [−1, 1], both ends among them."""
    generator = torch.Generator().manual_seed(tokens)
    if pattern == "random":
        p = draws.uniform(LAYERS, tokens, tokens, generator=generator) * 2 - 1
        return p / p.abs().amax(dim=(1, 2), keepdim=True)
    camps = torch.arange(tokens) % 2
    return (2.0 * torch.nn.functional.one_hot(camps, tokens).double() - 1).expand(LAYERS, -1, -1)


def _gains(tokens: int) -> Tensor:
    """Return theorem 3's gain over ALPHAS: √(n e^{2α}/(e^{2α} + n − 1))."""
    return (tokens / (1 + (tokens - 1) * torch.exp(-2 * ALPHAS))).sqrt()


def _exact_gain(logits: Tensor) -> Tensor:
    """Return ‖HC A‖₂ (…) of A = softmax(P): the largest gain of HC over all tokens."""
    return matrix_norm(hc(torch.softmax(logits, dim=-1)), 2)


def _decay(logits: Tensor, norm: float) -> Tensor:
    """Return ‖HC‖ of random tokens through layers with `logits` (L, n, n), relative to the input: (L + 1,)."""
    generator = torch.Generator().manual_seed(0)
    x = draws.normal(logits.shape[-1], 8, generator=generator)
    w_v = norm * qr(draws.normal(8, 8, generator=generator)).Q
    sizes = [matrix_norm(hc(x))]
    for p in logits:
        x = torch.softmax(p, dim=-1) @ x @ w_v
        sizes.append(matrix_norm(hc(x)))
    return torch.stack(sizes) / sizes[0]


BOUND = (
    Panel(
        "growth of HC in a layer",
        ("α = max |logit|", 0, 4),
        (1e-4, 20),
        legend={"bound": DASHED, "sharp bound": DOTTED, "measured": SOLID},
        place="lower right",
    ),
    Panel("‖W_V‖: decay where blue", ("α", 0, 4), (0, 1.5), log=""),
    Panel("‖HC‖ by layer", ("layer", 0, LAYERS), (1e-12, 1e6)),
)


def draw_bound(axes: Sequence[Axes], found: Found) -> None:
    """Draw bound and measurement over α, the region of guaranteed decay over α and ‖W_V‖, and decay over layers."""
    for values, style in ((found.bounds, DASHED), (found.sharp, DOTTED), (found.measured, SOLID)):
        axes[0].plot(ALPHAS, values.clamp(min=1e-4), **style)
    axes[0].plot([found.alpha] * 2, [found.bound, max(found.measured_here, 1e-4)], "o", color=GREY, markersize=9)
    axes[0].axhline(1, **HERE)
    axes[1].fill_between(ALPHAS, 0, 1 / _gains(found.tokens), color=PALETTE[0], alpha=0.25, linewidth=0)
    axes[1].plot(found.alpha, found.norm, "D", color=PALETTE[1], markersize=12, markeredgecolor="black")
    axes[1].text(3.9, 1.45, "white: says nothing here", ha="right", va="top")
    axes[2].plot(found.decay.clamp(min=1e-12), marker="o", **SOLID)
    axes[2].plot([found.bound**layer for layer in range(LAYERS + 1)], **DASHED)


def bound_facts(found: Found) -> list[str]:
    """Say what is guaranteed, or that nothing is."""
    verdict = (
        f"decay is guaranteed: each layer keeps at most {100 * found.bound:.3g} % of HC"
        if found.guaranteed
        else "theorem 3 says nothing here about decay: its bound is at least 1, HC may shrink or grow"
    )
    everywhere = (
        f"1/√n = {found.tokens**-0.5:.3g}: ‖W_V‖ is {'below' if found.norm < found.tokens**-0.5 else 'not below'} it"
    )
    return [
        f"bound {found.bound:.4g}, largest possible with these logits {found.measured_here:.4g}",
        verdict,
        everywhere,
    ]


EXPLORATION = Exploration(
    "bound",
    "When must attention smooth?",
    {
        "alpha": Slider("largest logit α", 0.0, 4.0, 0.25, 2.0),
        "tokens": Slider("tokens n", 2, 64, 1, 16),
        "norm": Slider("‖W_V‖", 0.05, 1.5, 0.05, 1.0),
        "pattern": Choice("logits", ("random", "two camps"), "random"),
    },
    bound,
    BOUND,
    draw_bound,
    bound_facts,
    [{"norm": 0.2}, {"pattern": "two camps"}, {"alpha": 0.0, "norm": 0.95}],
)
