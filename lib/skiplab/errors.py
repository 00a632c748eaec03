"""One kind of error for bad input: a line that names the value seen, what is allowed, and the nearest valid choice."""

import difflib
import math
import sys
from collections.abc import Callable, Iterable


class InputError(ValueError):
    """Report bad input in one line; a notebook shows the line without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


def unknown(kind: str, value: object, allowed: Iterable[object]) -> InputError:
    """Build the error for a `value` that is not among the `allowed` ones, naming the nearest."""
    choices = sorted(str(choice) for choice in allowed)
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InputError(f"unknown {kind} {value!r}{hint} (allowed: {', '.join(choices)})")


def indivisible(name: str, value: int, by: str, divisor: int) -> InputError:
    """Build the error for a whole number that another does not divide, naming the nearest that it does."""
    below = value - value % divisor
    near = " or ".join(str(multiple) for multiple in (below, below + divisor) if multiple)
    return InputError(f"{name} {value} is not divisible by {by} {divisor} (nearest: {near})")


def check_plain(name: str, value: object) -> None:
    """Raise InputError for what JSON does not hold and for a number that a float does not, in dicts and lists too."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InputError(f"{name} has the entry {key!r}, an {type(key).__name__}; names must be words")
            check_plain(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_plain(f"{name}[{index}]", item)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(f"{name} is {value}; it must be a finite number")
    elif isinstance(value, int):
        if abs(value) > sys.float_info.max:
            digits, limit = int(math.log10(abs(value))) + 1, "at most 1.8e+308" if value > 0 else "at least -1.8e+308"
            raise InputError(f"{name} is a whole number of {digits} digits; it must be {limit}")
    elif not isinstance(value, str | None):
        raise InputError(
            f"{name} is {value!r:.60}, a {type(value).__name__}; it must be a number, text, true, false, null, or a "
            "list or dict of these"
        )


def run_command(function: Callable[..., object], *arguments: object) -> int:
    """Call what a command does and print what it returns; return the exit status, 1 after a line on bad input."""
    try:
        said = function(*arguments)
    except InputError as error:
        print(error, file=sys.stderr)
        return 1
    if said is not None:
        print(said)
    return 0
