"""The explorer of notebook 02: Token Graying of photographs, and of the learner's own picture."""

import functools
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from torch import Tensor

from skiplab.companion.explorations import (
    BEFORE,
    DASHED,
    PICTURE_SIDE,
    SOLID,
    Choice,
    Exploration,
    Found,
    Panel,
    Slider,
    image,
    number,
)
from skiplab.studies.low_pass.explorer import as_picture
from skiplab.theory.conditioning import singular_values
from skiplab.training.photographs import photographs
from skiplab.transforms.graying import gray_dct, gray_svd, patchify

PICTURES = ("astronaut", "chelsea", "china", "coffee", "flower", "hubble_deep_field", "retina", "rocket")


def graying(picture: str, epsilon: float, patch: int, pixels: Tensor | None = None) -> Found:
    """Gray a picture's patches with exponent ε, by SVD and by DCT. `pixels` uint8 (3, 128, 128) replaces the `picture`.

    Pixels are shifted by one half, so that grey is 0. Found: `pictures` and `spectra`, σ/σ_max, of the original, SVD-TG
    and DCT-TG; their `kappas`; `expected` κ^ε. Always Skip Attention: κ becomes κ^ε by SVD-TG, exactly.
    """
    if pixels is None:
        pixels = _photographs(PICTURE_SIDE)[picture]
    tokens = patchify(pixels.double() / 255 - 0.5, patch)
    versions = [tokens, gray_svd(tokens, epsilon), gray_dct(tokens, epsilon)]
    stack = torch.stack(versions)
    values = singular_values(stack)
    kappas = graying_kappas(values, tokens.shape)
    return Found(
        epsilon=epsilon,
        pictures=[as_picture(version + 0.5, patch, PICTURE_SIDE) for version in versions],
        spectra=values / values[:, :1].clamp(min=1e-300),
        kappas=kappas,
        expected=kappas[0] ** epsilon,
    )


def graying_kappas(values: Tensor, shape: Sequence[int]) -> list[float]:
    """Return κ from singular values (·, m): infinite where the smallest is a zero but for rounding."""
    floor = max(shape) * torch.finfo(values.dtype).eps * values[:, 0]
    return torch.where(values[:, -1] <= floor, torch.inf, values[:, 0] / values[:, -1]).tolist()


GRAYING = (
    Panel("original"),
    Panel("SVD-TG"),
    Panel("DCT-TG"),
    Panel(
        "σ/σ_max",
        ("index", 1, 200),
        (1e-5, 1.5),
        log="xy",
        legend={"original": BEFORE, "SVD-TG": SOLID, "DCT-TG": DASHED},
    ),
)


def draw_graying(axes: Sequence[Axes], found: Found) -> None:
    """Draw the three pictures and their spectra."""
    for axis, picture, values, style in zip(axes, found.pictures, found.spectra, (BEFORE, SOLID, DASHED)):
        image(axis, picture)
        axes[3].plot(range(1, len(values) + 1), values.clamp(min=1e-9), **style)


def graying_facts(found: Found) -> list[str]:
    """Say κ before and after, beside κ^ε."""
    original, by_svd, by_dct = found.kappas
    if original == float("inf"):
        return [
            "κ of the patches is infinite (some directions do not occur at all), and zero singular values stay zero: "
            "no ε makes κ finite"
        ]
    return [
        f"κ of the patches {original:.4g}, κ^ε = {found.expected:.4g} at ε = {found.epsilon:g}",
        f"κ after SVD-TG {number(by_svd)}, after DCT-TG {number(by_dct)}",
    ]


_photographs = functools.lru_cache(photographs)  # reading them takes longer than all the rest


EXPLORATION = Exploration(
    "graying",
    "Token Graying",
    {
        "picture": Choice("picture", PICTURES, "astronaut"),
        "epsilon": Slider("exponent ε", 0.05, 1.0, 0.05, 0.7),
        "patch": Choice("patch size", (8, 16, 32), 16),
    },
    graying,
    GRAYING,
    draw_graying,
    graying_facts,
    [{"epsilon": 1.0}, {"epsilon": 0.3}, {"epsilon": 0.05}],
)
