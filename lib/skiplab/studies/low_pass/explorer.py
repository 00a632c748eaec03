"""The explorer of notebook 03: attention as a low-pass filter."""

import functools
from collections.abc import Sequence

import numpy
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.linalg import eigvals, matrix_power

from skiplab import draws
from skiplab.companion.explorations import DASHED, HERE, SOLID, Choice, Exploration, Found, Panel, Slider, image
from skiplab.theory.spectral import frequency_response, hc, hc_ratio
from skiplab.training.photographs import photographs
from skiplab.transforms.graying import patchify, unpatchify

SIDE = 96  # pixels of the filtered picture


GRIDS = {16: 4, 36: 6, 64: 8, 144: 12}  # number of tokens: patches along a side


def low_pass(temperature: float, tokens: int, layers: int, logits: str) -> Found:
    """Apply one attention map A = softmax(P/temperature) `layers` times to the patches z of a photograph.

    `logits` P: "random" Gaussian, "distance" −|i−j|²/2 between patches, "content" the patches' scaled inner products.
    Found: `before` and `after` (SIDE, SIDE, 3), the band gains (tokens,) of Aᵗ, `ratios` ‖HC‖/‖DC‖ of Aᵗz for t = 0 …,
    `rate` |λ₂| and `layers`. Theorem 1 of Anti-Oversmoothing: the ratio falls to 0, in the end like |λ₂|ᵗ.
    """
    attn, rate = attention_map(temperature, tokens, logits)
    z = patches(tokens)
    steps = [z]
    for _ in range(12):
        steps.append(attn @ steps[-1])
    before, after = (as_picture(step, SIDE // GRIDS[tokens], SIDE) for step in (z, steps[layers]))
    power = matrix_power(attn, layers)
    return Found(
        before=before,
        after=after,
        gains=frequency_response(power / power.sum(dim=1, keepdim=True)),
        rate=rate,
        ratios=hc_ratio(torch.stack(steps)),
        layers=layers,
    )


@functools.lru_cache(maxsize=64)
def attention_map(temperature: float, tokens: int, logits: str) -> tuple[Tensor, float]:
    """Return the attention map (tokens, tokens) and the modulus of its second eigenvalue."""
    if logits == "random":
        p = draws.normal(tokens, tokens, generator=torch.Generator().manual_seed(0))
    elif logits == "distance":
        places = torch.cartesian_prod(*2 * [torch.arange(GRIDS[tokens], dtype=torch.float64)])
        p = -torch.cdist(places, places).square() / 2
    else:
        x = patches(tokens)
        x = torch.nn.functional.layer_norm(x, x.shape[1:])  # a patch of one colour becomes 0
        p = x @ x.mT / x.shape[1] ** 0.5
    attn = torch.softmax(p / temperature, dim=-1)
    return attn, float(eigvals(hc(attn)).abs().max())  # HC A has the eigenvalues of A, with 0 in place of 1


@functools.lru_cache
def patches(tokens: int) -> Tensor:
    """Return the patches (tokens, ·) of the astronaut, pixels from 0 to 1."""
    return patchify(_photographs(SIDE)["astronaut"].double() / 255, SIDE // GRIDS[tokens])


def as_picture(tokens: Tensor, patch: int, side: int) -> numpy.ndarray:
    """Return tokens of a square picture as pixels (side, side, 3), cut off at 0 and 1."""
    return unpatchify(tokens, patch, 3, side, side).clamp(0, 1).movedim(0, -1).numpy()


LOW_PASS = (
    Panel("Aᵗz, the filtered picture"),
    Panel("gain of Aᵗ by band", ("cycles per token", 0, 0.5), (1e-7, 10)),
    Panel(
        "what differs between tokens",
        ("layers t", 0, 12),
        (1e-9, 3),
        legend={"‖HC‖/‖DC‖": SOLID, "|λ₂|ᵗ × start": DASHED},
    ),
)


def draw_low_pass(axes: Sequence[Axes], found: Found) -> None:
    """Draw the filtered picture, the spectrum of the filter, and the decay beside |λ₂|ᵗ."""
    image(axes[0], found.after)
    bands = len(found.gains) // 2 + 1
    axes[1].plot(numpy.linspace(0, 0.5, bands), found.gains[:bands].clamp(min=1e-12), marker=".", **SOLID)
    layers = numpy.arange(len(found.ratios))
    axes[2].plot(layers, found.ratios, marker="o", **SOLID)
    axes[2].plot(layers, found.ratios[0] * found.rate**layers, **DASHED)
    axes[2].axvline(found.layers, **HERE)


def low_pass_facts(found: Found) -> list[str]:
    """Say the ratio and the rate."""
    t = found.layers
    return [
        f"‖HC‖/‖DC‖: {found.ratios[0]:.3g} at the input, {found.ratios[t]:.3g} after {t} layers",
        f"|λ₂| = {found.rate:.3g}, |λ₂|^{t} = {found.rate**t:.3g}",
    ]


_photographs = functools.lru_cache(photographs)  # reading them takes longer than all the rest


EXPLORATION = Exploration(
    "low_pass",
    "Attention as a low-pass filter",
    {
        "temperature": Slider("temperature", 0.2, 5.0, 0.2, 1.0),
        "tokens": Choice("tokens", tuple(GRIDS), 64),
        "layers": Slider("layers t", 0, 12, 1, 2),
        "logits": Choice("logits", ("random", "distance", "content"), "distance"),
    },
    low_pass,
    LOW_PASS,
    draw_low_pass,
    low_pass_facts,
    [{"layers": 0}, {"layers": 12}, {"logits": "random", "layers": 1}],
)
