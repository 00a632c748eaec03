"""Whether runs can say anything about a claim: the `needs` of data/claims.yaml, checked on what was measured.

Each function returns a `Need`: whether it is met, and what was found, in words.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from skiplab.companion.deciding import Interval, mean_interval
from skiplab.companion.judging import Need, mean_sd


def _interval(values: Sequence[float]) -> Interval:
    """Return the interval of a mean, of infinite width, which meets no need, where values are missing or not finite."""
    finite = values and all(map(math.isfinite, values))
    return mean_interval(values) if finite else Interval(math.nan, -math.inf, math.inf, math.nan, len(values))


def learnt(top1: Collection[float], chance: float, reference: float) -> Need:
    """Ask a baseline's top-1 (%), one value a seed, to get half of the way from chance to a `reference`, on average."""
    least, mean = (chance + reference) / 2, mean_sd(top1)[0]
    return Need(mean >= least, f"the baseline reaches {mean:.1f} % of the {least:.1f} % asked for")


def off_floor(arms: Mapping[str, Collection[float]], chance: float) -> Need:
    """Ask one of the arms for a top-1 (%) whose whole interval lies above twice chance."""
    lows = {name: _interval(list(top1)).low for name, top1 in arms.items()}
    best = max(lows, key=lows.get)
    return Need(lows[best] > 2 * chance, f"{best} is the best arm, its interval begins at {lows[best]:.1f} %")


def long_enough(epochs: int, event: int) -> Need:
    """Ask training to last until the epoch at which the event is said to happen."""
    return Need(epochs >= event, f"{epochs} epochs of {event}")


def full_rank(log_kappas: Collection[float]) -> Need:
    """Ask more than half of the images for patches with a finite condition number; takes ln κ."""
    finite = sum(math.isfinite(value) for value in log_kappas)
    return Need(2 * finite > len(log_kappas), f"{finite} of {len(log_kappas)} images have patches of finite κ")


def beyond(trained: Sequence[float], untrained: Sequence[float], *, sign: int = 1) -> Need:
    """Ask trained networks to differ from themselves before training, above (`sign` 1) or below (-1)."""
    found = _interval([sign * (after - before) for after, before in zip(trained, untrained, strict=True)])
    before = mean_sd(untrained)[0]
    return Need(found.low > 0, f"untrained {before:.3g}, training adds {sign * found.mean:+.3g}")


def active(sizes: Collection[float], least: float = 0.01) -> Need:
    """Ask what a method learns, such as |ω|, one value a seed, for a mean size of at least `least`."""
    mean = mean_sd(sizes)[0]
    return Need(mean >= least, f"mean size {mean:.2g} of {least:g}")


def improved(after: Sequence[float], before: Sequence[float]) -> Need:
    """Ask pre-training for a k-NN top-1 (%) above that of the untrained network, with the whole interval over seeds."""
    found = _interval([one - other for one, other in zip(after, before, strict=True)])
    return Need(found.low > 0, f"k-NN rises by {found.mean:+.1f} points ({found.low:+.1f} to {found.high:+.1f})")


def both(*needs: Need) -> Need:
    """Ask for all of several needs of one name, of which there must be one at least."""
    unmet = [need for need in needs if not need.met]
    return Need(bool(needs) and not unmet, "; ".join(need.found for need in unmet or needs) or "nothing was measured")
