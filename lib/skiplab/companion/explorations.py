"""What the explorers of notebook 07 compute and draw: plain functions, without a widget or a browser.

An `Exploration` is the controls with their ranges, `compute` from their values to the numbers shown, `panels`, what stays
the same in every picture, `draw`, what changes, and `facts`, the numbers in words. `widgets` puts one behind controls,
`strip` shows some of its states on paper. Everything is small enough to answer at once on one core, and in float64.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.linalg import eigvals, matrix_norm, matrix_power, qr, svd, svdvals

from skiplab import draws
from skiplab.companion.figures import PALETTE
from skiplab.errors import InputError, unknown
from skiplab.theory import bounds
from skiplab.theory.conditioning import condition_number, singular_values
from skiplab.theory.jacobian import attention, attention_jacobian
from skiplab.theory.spectral import dc, frequency_response, hc, hc_ratio, signal_spectrum
from skiplab.training.photographs import photographs
from skiplab.transforms.graying import gray_dct, gray_svd, patchify, unpatchify

Found = SimpleNamespace  # the numbers of one state; each `compute` says which
GREY = "0.45"
SOLID, DASHED, DOTTED, BEFORE = (
    {"linestyle": style, "color": colour, "linewidth": 2.5}
    for style, colour in (("-", PALETTE[0]), ("--", PALETTE[1]), (":", PALETTE[2]), ("-.", GREY))
)
HERE = {"color": GREY, "linewidth": 1}  # where the controls stand


@dataclass(frozen=True)
class Slider:
    """A number from `low` to `high` in steps; whole numbers if `step` is one."""

    label: str
    low: float
    high: float
    step: float
    start: float

    def check(self, name: str, value: object) -> float:
        """Return the value. Raises InputError where it is no number of the range."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            raise InputError(f"{name} is {value!r}; allowed: a number from {self.low} to {self.high}")
        if isinstance(self.step, int) and value != int(value):
            raise InputError(f"{name} is {value}; it must be a whole number from {self.low} to {self.high}")
        return type(self.step)(value)

    def grid(self, points: int) -> list[float]:
        """Return `points` values of the slider, both ends among them (fewer where it has fewer)."""
        steps = round((self.high - self.low) / self.step)
        return [
            type(self.step)(round(self.low + self.step * round(steps * share), 9))
            for share in dict.fromkeys(numpy.linspace(0, 1, min(points, steps + 1)))
        ]


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    label: str
    options: Sequence
    start: object

    def check(self, name: str, value: object) -> object:
        """Return the value. Raises InputError for one that is not offered."""
        if value not in self.options:
            raise unknown(name, value, self.options)
        return value

    def grid(self, points: int) -> list:
        """Return all values."""
        return list(self.options)


@dataclass(frozen=True)
class Panel:
    """The part of a picture that no control changes: an axis with fixed limits, or with none a place for an image.

    `band` is a grey part of the y axis, from where to where and its words: for values that have no place on the axis.
    """

    title: str
    x: tuple[str, float, float] | None = None
    y: tuple[float, float] = (0, 1)
    log: str = "y"  # the logarithmic axes
    legend: Mapping[str, dict] = field(default_factory=dict)
    place: str | tuple[float, float] = "lower left"
    band: tuple[float, float, str] | None = None

    def prepare(self, axis: Axes) -> None:
        """Draw it on an empty axis."""
        axis.set_title(self.title)
        if self.x is None:
            axis.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[], aspect="equal")
            axis.set_axis_off()
        else:
            label, low, high = self.x
            axis.set(xscale="log" if "x" in self.log else "linear", yscale="log" if "y" in self.log else "linear")
            axis.set(xlabel=label, xlim=(low, high), ylim=self.y)
            if "x" not in self.log and high > 2:
                axis.xaxis.get_major_locator().set_params(integer=True)
        axis.autoscale(False)
        if self.band:
            low, high, words = self.band
            axis.axhspan(low, high, color="0.85", zorder=0, linewidth=0)
            axis.text(0.97, low, words, color="0.35", ha="right", va="top", transform=axis.get_yaxis_transform())
        if self.legend:
            axis.legend(
                [plt.Line2D([], [], **style) for style in self.legend.values()],
                list(self.legend),
                loc=self.place,
                frameon=True,
                framealpha=0.8,
                borderaxespad=0.2,
                handlelength=1.6,
                labelspacing=0.2,
            )


@dataclass(frozen=True)
class Exploration:
    """One question with its controls; `states` are what its strip shows, each a change to where it starts.

    `parameters` are those other ones of notebook 07 that decide what is shown: the papermill command repeats them.
    """

    name: str
    title: str
    controls: dict[str, Slider | Choice]
    compute: Callable[..., Found]
    panels: Sequence[Panel]
    draw: Callable[[Sequence[Axes], Found], None]
    facts: Callable[[Found], list[str]]
    states: Sequence[dict]
    parameters: Mapping = field(default_factory=dict)

    def values(self, changes: dict) -> dict:
        """Return a value for every control. Raises InputError for an unknown name or a value out of range."""
        return checked(self.name, self.controls, changes)

    def find(self, **changes: object) -> Found:
        """Compute one state."""
        return self.compute(**self.values(changes))


def checked(exploration: str, controls: Mapping[str, Slider | Choice], changes: dict) -> dict:
    """Return a value for every control, as `Exploration.values` does."""
    for name in changes:
        if name not in controls:
            raise unknown(f"control of {exploration}", name, controls)
    return {name: control.check(name, changes.get(name, control.start)) for name, control in controls.items()}


def replay_controls(epochs: int, blocks: int) -> dict[str, Slider]:
    """Return the controls of the replay of training, which are known before anything is trained."""
    return {"epoch": Slider("epoch", 0, epochs, 1, 0), "block": Slider("block", 1, blocks, 1, blocks)}


def strip(exploration: Exploration, start: dict | None = None) -> Figure:
    """Draw where an explorer starts and its other `states` below each other, for readers without a kernel.

    No state is repeated: where the start makes two of them one, one seen from the explorer's own start takes the place.
    """
    start, changes = start or {}, ({}, *exploration.states)
    states: list[dict] = []
    for change in (*(start | change for change in changes), *changes):
        state = exploration.values(change)
        if state not in states and len(states) < len(changes):
            states.append(state)
    named = dict.fromkeys(name for change in (start, *changes) for name in change)
    figure = plt.figure(figsize=(8.6, 2.5 * len(states)))
    for part, state in zip(figure.subfigures(len(states), 1, squeeze=False)[:, 0], states):
        axes = part.subplots(1, len(exploration.panels))
        for panel, axis in zip(exploration.panels, axes):
            panel.prepare(axis)
        exploration.draw(axes, exploration.find(**state))
        part.suptitle(
            ", ".join(f"{exploration.controls[name].label} {state[name]}" for name in named),
            fontsize="medium",
            fontweight="bold",
        )
    return figure


def judge(answer: float | None, right: float) -> str:
    """Compare a learner's number with the `right` one, to two decimals, without giving it away."""
    if answer is None:
        return "no answer yet: put a number in place of None and run the cell"
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        return f"{answer!r} is not a number"
    if abs(answer - right) <= 0.0051:
        return "right"
    return f"not yet: {answer:g} is too {'small' if answer < right else 'large'}"


# --- 1. Attention as a low-pass filter --------------------------------------------------------------------------------

SIDE = 96  # pixels of the filtered picture
GRIDS = {16: 4, 36: 6, 64: 8, 144: 12}  # number of tokens: patches along a side


def low_pass(temperature: float, tokens: int, layers: int, logits: str) -> Found:
    """Apply one attention map A = softmax(P/temperature) `layers` times to the patches z of a photograph.

    `logits` P: "random" Gaussian, "distance" −|i−j|²/2 between patches, "content" the patches' scaled inner products.
    Found: `before` and `after` (SIDE, SIDE, 3), the band gains (tokens,) of Aᵗ, `ratios` ‖HC‖/‖DC‖ of Aᵗz for t = 0 …,
    `rate` |λ₂| and `layers`. Theorem 1 of Anti-Oversmoothing: the ratio falls to 0, in the end like |λ₂|ᵗ.
    """
    attn, rate = _filter(temperature, tokens, logits)
    z = _patches(tokens)
    steps = [z]
    for _ in range(12):
        steps.append(attn @ steps[-1])
    before, after = (_as_picture(step, SIDE // GRIDS[tokens], SIDE) for step in (z, steps[layers]))
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
def _filter(temperature: float, tokens: int, logits: str) -> tuple[Tensor, float]:
    """Return the attention map (tokens, tokens) and the modulus of its second eigenvalue."""
    if logits == "random":
        p = draws.normal(tokens, tokens, generator=torch.Generator().manual_seed(0))
    elif logits == "distance":
        places = torch.cartesian_prod(*2 * [torch.arange(GRIDS[tokens], dtype=torch.float64)])
        p = -torch.cdist(places, places).square() / 2
    else:
        x = _patches(tokens)
        x = torch.nn.functional.layer_norm(x, x.shape[1:])  # a patch of one colour becomes 0
        p = x @ x.mT / x.shape[1] ** 0.5
    attn = torch.softmax(p / temperature, dim=-1)
    return attn, float(eigvals(hc(attn)).abs().max())  # HC A has the eigenvalues of A, with 0 in place of 1


@functools.lru_cache
def _patches(tokens: int) -> Tensor:
    """Return the patches (tokens, ·) of the astronaut, pixels from 0 to 1."""
    return patchify(_photographs(SIDE)["astronaut"].double() / 255, SIDE // GRIDS[tokens])


def _as_picture(tokens: Tensor, patch: int, side: int) -> numpy.ndarray:
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
    _image(axes[0], found.after)
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


# --- 2. The strength of a skip ----------------------------------------------------------------------------------------

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
        f"κ(SA(X)) = {_number(found.token_kappas[0])}, κ(sX + SA(X)) = {_number(found.kappas[0])} at s = {found.s:g}",
        f"κ(K) = {_number(found.jacobian_kappas[0])}, κ(K + sI) = {_number(found.kappas[1])}",
    ]


# --- 3. Token Graying -------------------------------------------------------------------------------------------------

PICTURE_SIDE = 128
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
    kappas = _kappas(values, tokens.shape)
    return Found(
        epsilon=epsilon,
        pictures=[_as_picture(version + 0.5, patch, PICTURE_SIDE) for version in versions],
        spectra=values / values[:, :1].clamp(min=1e-300),
        kappas=kappas,
        expected=kappas[0] ** epsilon,
    )


def _kappas(values: Tensor, shape: Sequence[int]) -> list[float]:
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
        _image(axis, picture)
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
        f"κ after SVD-TG {_number(by_svd)}, after DCT-TG {_number(by_dct)}",
    ]


# --- 4. Theorem 3's bound ---------------------------------------------------------------------------------------------

ALPHAS = torch.linspace(0, 4, 17, dtype=torch.float64)
LAYERS = 8


def bound(alpha: float, tokens: int, norm: float, pattern: str) -> Found:
    """Compare theorem 3's bound of ‖HC[SA(X)]‖/‖HC[X]‖ with the largest ratio that these logits allow over all X.

    Logits lie in [−α, α]: "random" uniform, or in "two camps": half of the tokens look at one token, half at another.
    W_V is `norm` times an orthogonal matrix. Found: over ALPHAS the published `bounds`, the `sharp` ones (ours) and the
    `measured`; at `alpha` `bound`, `measured_here` and whether decay is `guaranteed`; `decay`, ‖HC‖ over LAYERS layers of
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


# --- 5. All-pass: AttnScale and FeatScale -----------------------------------------------------------------------------


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
    attn, _ = _filter(1.0, 64, "random")
    scaled = dc(attn.new_ones(64, 64)) / 64 + (1 + omega) * (attn - 1 / 64)
    found = {kind: [_patches(64)] for kind in ("plain", "AttnScale", "FeatScale")}
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
        f"each layer: AttnScale multiplies HC by 1 + ω = {1 + found.omega:.4g}; FeatScale HC by 1 + t = {1 + found.t:.4g} "
        f"and DC by 1 + s = {1 + found.s:.4g}",
        f"‖HC‖/‖DC‖ after {found.layers} layers: "
        + ", ".join(f"{kind} {ratios[found.layers]:.3g}" for kind, ratios in found.ratios.items()),
    ]


# --- 6. The skipless initialisation -----------------------------------------------------------------------------------

INIT_TOKENS, INIT_WIDTH = 12, 16


def skipless(alpha: float, beta: float, c: float, heads: int, similarity: float) -> Found:
    """Initialise attention for training without its skip, and compare its Jacobian with the usual initialisation's.

    W_V = c·U and W_O = c·Vᵀ orthogonal, W_Q W_Kᵀ ≈ αZ + βI per head; against Gaussian weights N(0, 1/d). `similarity` is
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
        kappas={name: _kappas(values[None], jacobians[name].shape)[0] for name, values in spectra.items()},
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
        f"κ(K): skipless {_number(found.kappas['skipless'])}, usual {_number(found.kappas['usual'])}",
        f"mean diagonal of the maps: skipless {found.diagonal['skipless']:.3f}, usual {found.diagonal['usual']:.3f}; "
        f"κ(A) of the skipless ones {_number(found.attention_kappa)}",
    ]


# --- Shared -----------------------------------------------------------------------------------------------------------

_photographs = functools.lru_cache(photographs)  # reading them takes longer than all the rest


def _number(kappa: float) -> str:
    return "infinite" if math.isinf(kappa) else f"{kappa:.4g}"


def _image(axis: Axes, pixels: numpy.ndarray, **options: object) -> None:
    axis.imshow(pixels, interpolation="nearest", extent=(0, 1, 0, 1), **options)


def attention_image(axis: Axes, attn: Tensor) -> None:
    """Draw an attention map (n, n), a row a token that looks; the colours run from 0 to its largest entry, at least 2/n."""
    _image(axis, attn.numpy(), cmap="cividis", vmin=0, vmax=max(float(attn.max()), 2 / len(attn)))


EXPLORATIONS = {
    exploration.name: exploration
    for exploration in (
        Exploration(
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
        ),
        Exploration(
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
        ),
        Exploration(
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
        ),
        Exploration(
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
        ),
        Exploration(
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
        ),
        Exploration(
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
        ),
    )
}
