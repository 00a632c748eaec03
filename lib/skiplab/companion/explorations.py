"""Explorers as plain functions, without a widget or a browser.

An `Exploration` is the controls with their ranges, `compute` from their values to the numbers shown, `panels`, what
stays the same in every picture, `draw`, what changes, and `facts`, the numbers in words. `widgets` puts one behind
controls, `strip` shows some of its states on paper."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from skiplab.companion.figures import PALETTE
from skiplab.errors import InputError, unknown

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


PICTURE_SIDE = 128


def number(kappa: float) -> str:
    return "infinite" if math.isinf(kappa) else f"{kappa:.4g}"


def image(axis: Axes, pixels: numpy.ndarray, **options: object) -> None:
    axis.imshow(pixels, interpolation="nearest", extent=(0, 1, 0, 1), **options)


def attention_image(axis: Axes, attn: Tensor) -> None:
    """Draw an attention map (n, n), a row per query; the colours run from 0 to its largest entry, at least 2/n."""
    image(axis, attn.numpy(), cmap="cividis", vmin=0, vmax=max(float(attn.max()), 2 / len(attn)))
