"""One kind of error for bad input: a single line that names the value seen, what is allowed, and the nearest valid choice."""

import difflib
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


def run_command(function: Callable[..., object], *arguments: object) -> int:
    """Call what a command does and print what it returns; return the exit status. Bad input is one line on stderr, and 1."""
    try:
        said = function(*arguments)
    except InputError as error:
        print(error, file=sys.stderr)
        return 1
    if said is not None:
        print(said)
    return 0
