"""The explorer of notebook 05: from low-pass to all-pass with AttnScale and FeatScale."""

from collections.abc import Sequence

import numpy
import torch
from matplotlib.axes import Axes

from skiplab.companion.explorations import BEFORE, DASHED, HERE, SOLID, Exploration, Found, Panel, Slider
from skiplab.errors import InputError
from skiplab.studies.low_pass.explorer import attention_map, patches
from skiplab.theory.spectral import dc, hc, hc_ratio, signal_spectrum


def all_pass(omega: float, s: float, t: float, layers: int) -> Found:
    """Give high frequencies back: AttnScale's ω to the map, FeatScale's s and t to the tokens after it.

    AttnScale: Â = L + (1+ω)(A − L), L = 11ᵀ/n. FeatScale: X + s·DC[X] + t·HC[X]. Found, for the kinds "plain",
    "AttnScale" and "FeatScale": `maps`, the band gains of A and Â; `spectra` of the tokens after `layers`; `ratios`
    ‖HC‖/‖DC‖ by layer. Raises InputError for s = −1. Anti-Oversmoothing, section 4.
    """
    if s == -1:
        raise InputError(
            "with s = −1 FeatScale removes all that the tokens share: ‖HC‖/‖DC‖ is not defined; take s above −1"
        )
    attn, _ = attention_map(1.0, 64, "random")
    scaled = dc(attn.new_ones(64, 64)) / 64 + (1 + omega) * (attn - 1 / 64)
    found = {kind: [patches(64)] for kind in ("plain", "AttnScale", "FeatScale")}
    for _ in range(12):
        found["plain"].append(attn @ found["plain"][-1])
        found["AttnScale"].append(scaled @ found["AttnScale"][-1])
        x = attn @ found["FeatScale"][-1]
        found["FeatScale"].append(x + s * dc(x) + t * hc(x))
    return Found(
        layers=layers,
        omega=omega,
        s=s,
        t=t,
        maps={"A": signal_spectrum(attn), "Â": signal_spectrum(scaled)},
        spectra={kind: signal_spectrum(steps[layers]) for kind, steps in found.items()},
        ratios={kind: hc_ratio(torch.stack(steps)) for kind, steps in found.items()},
    )


KINDS = {"plain": BEFORE, "AttnScale": SOLID, "FeatScale": DASHED}


ALL_PASS = (
    Panel(
        "gain of one map",
        ("cycles per token", 0, 0.5),
        (0.02, 50),
        legend={"A": BEFORE, "Â": SOLID},
        place="upper right",
    ),
    Panel("spectrum of the tokens", ("cycles per token", 0, 0.5), (1e-9, 1e9), legend=KINDS, place="upper right"),
    Panel("‖HC‖/‖DC‖", ("layers", 0, 12), (1e-12, 1e6)),
)


def draw_all_pass(axes: Sequence[Axes], found: Found) -> None:
    """Draw the filters, the tokens' spectra, and the decay by layer."""
    bands = numpy.linspace(0, 0.5, 33)
    for values, style in zip(found.maps.values(), (BEFORE, SOLID)):
        axes[0].plot(bands, values[:33], **style)
    for kind, style in KINDS.items():
        axes[1].plot(bands, found.spectra[kind][:33].clamp(min=1e-12), **style)
        axes[2].plot(found.ratios[kind], **style)
    axes[2].axvline(found.layers, **HERE)


def all_pass_facts(found: Found) -> list[str]:
    """Say the factors on HC and DC, and the ratios reached."""
    return [
        f"each layer: AttnScale multiplies HC by 1 + ω = {1 + found.omega:.4g}; "
        f"FeatScale HC by 1 + t = {1 + found.t:.4g} and DC by 1 + s = {1 + found.s:.4g}",
        f"‖HC‖/‖DC‖ after {found.layers} layers: "
        + ", ".join(f"{kind} {ratios[found.layers]:.3g}" for kind, ratios in found.ratios.items()),
    ]


EXPLORATION = Exploration(
    "all_pass",
    "From low-pass to all-pass",
    {
        "omega": Slider("AttnScale ω", 0.0, 5.0, 0.1, 1.0),
        "s": Slider("FeatScale s (DC)", -1.0, 1.0, 0.1, 0.0),
        "t": Slider("FeatScale t (HC)", 0.0, 5.0, 0.1, 1.0),
        "layers": Slider("layers", 0, 12, 1, 4),
    },
    all_pass,
    ALL_PASS,
    draw_all_pass,
    all_pass_facts,
    [{"omega": 0.0, "t": 0.0}, {"omega": 4.0, "t": 4.0}, {"s": 1.0}],
)
