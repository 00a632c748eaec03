"""The explorer of notebook 06: an initialisation in place of the skip."""

import functools
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.linalg import svd, svdvals

from skiplab import draws
from skiplab.companion.explorations import (
    BEFORE,
    DASHED,
    SOLID,
    Exploration,
    Found,
    Panel,
    Slider,
    attention_image,
    number,
)
from skiplab.errors import InputError
from skiplab.studies.token_graying.explorer import graying_kappas
from skiplab.theory.conditioning import condition_number
from skiplab.theory.jacobian import attention_jacobian

INIT_TOKENS, INIT_WIDTH = 12, 16


def skipless(alpha: float, beta: float, c: float, heads: int, similarity: float) -> Found:
    """Initialise attention for training without its skip, and compare its Jacobian with the usual initialisation's.

    W_V = c·U, W_O = c·Vᵀ orthogonal, W_Q W_Kᵀ ≈ αZ + βI per head; against Gaussian weights N(0, 1/d). `similarity` is
    the mean cosine of the random tokens, which are layer-normed. Found, each for "skipless" and "usual": `maps` (n, n),
    the heads' mean; `spectra` of K; `kappas` of K; `with_skip` the usual K + I's spectrum; `diagonal` of the maps.
    Cutting the Skip, section 4. Raises InputError where the heads do not share the width evenly.
    """
    from skiplab.models.skipless import SkiplessInit, query_key  # timm takes seconds to import

    if INIT_WIDTH % heads:
        nearest = min(
            (count for count in range(1, INIT_WIDTH + 1) if INIT_WIDTH % count == 0),
            key=lambda count: abs(count - heads),
        )
        raise InputError(f"{heads} heads cannot share a width of {INIT_WIDTH} evenly; nearest: {nearest}")
    init = SkiplessInit(alpha, beta, c)
    x, gaussian, orthogonal = _initial(similarity)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        w_q, w_k = query_key(init, INIT_WIDTH, heads)
    u, vh = orthogonal
    weights = {"skipless": (w_q, w_k, c * u, c * vh), "usual": tuple(gaussian)}
    jacobians = {name: attention_jacobian(x, *each, heads) for name, each in weights.items()}
    maps = {name: _maps(x, *each[:2], heads) for name, each in weights.items()}
    spectra = {name: svdvals(k) for name, k in jacobians.items()}
    return Found(
        maps={name: each.mean(dim=0) for name, each in maps.items()},
        spectra=spectra,
        with_skip=svdvals(jacobians["usual"] + torch.eye(x.numel(), dtype=x.dtype)),
        kappas={name: graying_kappas(values[None], jacobians[name].shape)[0] for name, values in spectra.items()},
        attention_kappa=float(condition_number(maps["skipless"]).median()),
        diagonal={name: float(each.diagonal(dim1=1, dim2=2).mean()) for name, each in maps.items()},
    )


@functools.lru_cache(maxsize=64)
def _initial(similarity: float) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return layer-normed tokens (n, d), four Gaussian weights, and the two orthogonal factors of another."""
    generator = torch.Generator().manual_seed(0)
    normal = functools.partial(draws.normal, generator=generator)
    x = similarity**0.5 * normal(1, INIT_WIDTH) + (1 - similarity) ** 0.5 * normal(INIT_TOKENS, INIT_WIDTH)
    x = torch.nn.functional.layer_norm(x, (INIT_WIDTH,))
    gaussian = normal(4, INIT_WIDTH, INIT_WIDTH) / INIT_WIDTH**0.5
    u, _, vh = svd(normal(INIT_WIDTH, INIT_WIDTH))
    return x, gaussian, (u, vh)


def _maps(x: Tensor, w_q: Tensor, w_k: Tensor, heads: int) -> Tensor:
    """Return the attention maps (h, n, n) of tokens (n, d)."""
    q, k = ((x @ w).unflatten(1, (heads, -1)).movedim(1, 0) for w in (w_q, w_k))
    return torch.softmax(q @ k.mT * (INIT_WIDTH / heads) ** -0.5, dim=-1)


SKIPLESS = (
    Panel("attention, skipless"),
    Panel("attention, usual"),
    Panel(
        "σ of the Jacobian",
        ("index", 1, INIT_TOKENS * INIT_WIDTH),
        (1e-5, 300),
        legend={"K, skipless": SOLID, "K, usual": BEFORE, "K + I, usual": DASHED},
    ),
)


def draw_skipless(axes: Sequence[Axes], found: Found) -> None:
    """Draw both attention maps and the singular values of the Jacobians."""
    for axis, attn in zip(axes, found.maps.values()):
        attention_image(axis, attn)
    for values, style in (
        (found.spectra["skipless"], SOLID),
        (found.spectra["usual"], BEFORE),
        (found.with_skip, DASHED),
    ):
        axes[2].plot(range(1, len(values) + 1), values.clamp(min=1e-9), **style)


def skipless_facts(found: Found) -> list[str]:
    """Say κ of the Jacobians and how near the maps are to I."""
    return [
        f"κ(K): skipless {number(found.kappas['skipless'])}, usual {number(found.kappas['usual'])}",
        f"mean diagonal of the maps: skipless {found.diagonal['skipless']:.3f}, usual {found.diagonal['usual']:.3f}; "
        f"κ(A) of the skipless ones {number(found.attention_kappa)}",
    ]


EXPLORATION = Exploration(
    "skipless",
    "An initialisation in place of the skip",
    {
        "alpha": Slider("α", 0.1, 4.0, 0.1, 2.0),
        "beta": Slider("β", 0.1, 4.0, 0.1, 0.6),
        "c": Slider("c", 0.5, 5.0, 0.5, 3.0),
        "heads": Slider("heads", 1, 8, 1, 2),
        "similarity": Slider("similarity of the tokens", 0.0, 0.95, 0.05, 0.0),
    },
    skipless,
    SKIPLESS,
    draw_skipless,
    skipless_facts,
    [{"beta": 4.0}, {"alpha": 0.1, "beta": 0.1}, {"similarity": 0.9}],
)
