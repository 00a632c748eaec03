"""Random cases of a statement, and how many of them violate it.

A `Statement` says how the inputs of a case are drawn and how they are judged; `count` judges as many cases as wanted
and keeps the slack of each."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import matrix_norm

from skiplab import draws as portable
from skiplab.companion.judging import Measurement
from skiplab.errors import InputError
from skiplab.theory import bounds
from skiplab.theory.bounds import BoundCheck

ATTEMPTS = 20  # draws tried for each case asked for, since some draws do not satisfy the hypotheses


NEGLIGIBLE = 1e-300


class Draws:
    """Random ingredients of cases, from one seed; their structure is often one that is likely to break a bound."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return portable.normal(*shape, generator=self.generator)

    def whole(self, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        return float(portable.uniform(low=low, high=high, generator=self.generator))

    def orthonormal(self, rows: int, columns: int) -> Tensor:
        """Return a random matrix with orthonormal rows or columns, whichever are fewer."""
        q, r = torch.linalg.qr(self.normal(max(rows, columns), min(rows, columns)))
        q = q * r.diagonal().sign()
        return q if rows >= columns else q.mT

    def weight(self, rows: int, columns: int) -> Tensor:
        """Return Gaussian, orthonormal or ill-conditioned weights of any scale."""
        kind, scale = self.whole(0, 2), 10 ** self.uniform(-1, 1)
        if kind == 0:
            return scale * self.orthonormal(rows, columns)
        stretch = torch.logspace(0, -3 * (kind - 1), columns, dtype=torch.float64)
        return scale * self.normal(rows, columns) * stretch

    def tokens(self, n: int, d: int) -> Tensor:
        """Return Gaussian, nearly equal or ill-conditioned tokens of any scale."""
        x, kind = self.normal(n, d), self.whole(0, 3)
        if kind == 1:
            x = x[:1] + 10 ** self.uniform(-6, 0) * x
        elif kind == 2:
            x = x * torch.logspace(0, -3, d, dtype=torch.float64)
        return x * 10 ** self.uniform(-3, 3)

    def full_rank(self, n: int, d: int) -> Tensor:
        """Return an (n, d) matrix with singular values from 0.01 to 1, so kappa ≤ 100."""
        values = torch.tensor([self.uniform(0.01, 1) for _ in range(min(n, d))], dtype=torch.float64)
        return self.orthonormal(n, min(n, d)) * values @ self.orthonormal(min(n, d), d)

    def logits(self, *shape: int) -> Tensor:
        """Return (…, n, n) logits of size 1e-6 to 1e3, or such that half of the tokens look at each of two."""
        kind, p = self.whole(0, 4), self.normal(*shape, shape[-1])
        if kind == 0:
            return p * 1e-6 + 3
        if kind == 1:
            return p + 12 * torch.eye(shape[-1], dtype=torch.float64)
        if kind == 2:
            targets = torch.arange(shape[-1]) % min(shape[-1], 2)
            return 30.0 * torch.nn.functional.one_hot(targets, shape[-1]).double().expand_as(p)
        return p * 10 ** self.uniform(-1, 3)

    def attention(self, *shape: int, sharpness: float = 1.0) -> Tensor:
        """Return (…, n, n) positive row-stochastic maps."""
        return torch.softmax(sharpness * self.normal(*shape, shape[-1]), dim=-1)

    def small(self, d: int) -> Tensor:
        """Return a (d, d) matrix of spectral norm below 1."""
        m = self.normal(d, d)
        return m / matrix_norm(m, 2) * self.uniform(0.01, 0.999)


@dataclass(frozen=True)
class Statement:
    """How the inputs of a case are drawn and judged, what figures call it, and how a search looks for its worst case.

    `search` is a check of tensors that gradients pass through, and what samples its start from a generator; where a
    statement has none, `unsearched` says why.
    """

    draw: Callable[[Draws], tuple]
    check: Callable[..., BoundCheck]
    label: str = ""
    search: tuple[Callable[..., BoundCheck], Callable[[torch.Generator], tuple[Tensor, ...]]] | None = None
    unsearched: str = ""


def shaped(*shapes: tuple[int, ...]) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """Return what samples Gaussian tensors of these shapes."""
    return lambda generator: tuple(portable.normal(*shape, generator=generator) for shape in shapes)


@dataclass(frozen=True)
class Survey:
    """What `count` counted: the slack ln(bound/measured) of each case, and the worst violation in words."""

    claim: str
    slacks: tuple[float, ...]
    violations: int
    example: str = ""

    @property
    def measurement(self) -> Measurement:
        """Return the counts in the ledger's form."""
        return Measurement(violations=self.violations, cases=len(self.slacks), note=self.example)

    @property
    def share(self) -> Measurement:
        """Return the counts without a counterexample: those of a claim about a share of draws."""
        return Measurement(violations=self.violations, cases=len(self.slacks))


def count(claim: str, statement: Statement, cases: int, seed: int = 0) -> Survey:
    """Judge `cases` generated cases of a statement in which all its hypotheses hold.

    Raises InputError where too few of the draws satisfy the hypotheses.
    """
    draws = Draws(seed)
    slacks, violations, worst = [], 0, None
    for _ in range(ATTEMPTS * cases):
        inputs = statement.draw(draws)
        check = statement.check(*inputs)
        if check.holds is None:
            continue
        slacks.append(check.slack)
        if check.holds is False:
            violations += 1
            if worst is None or check.slack < worst[0].slack:
                worst = check, inputs
        if len(slacks) == cases:
            return Survey(claim, tuple(slacks), violations, _in_words(*worst) if worst else "")
    raise InputError(
        f"{claim}: only {len(slacks)} of {ATTEMPTS * cases} draws satisfy the hypotheses, {cases} are needed"
    )


def _in_words(check: BoundCheck, inputs: tuple) -> str:
    shapes = ", ".join("×".join(map(str, value.shape)) for value in inputs if isinstance(value, Tensor))
    return f"worst: measured {check.measured:.3g}, bound {check.bound:.3g}" + (f"; shapes {shapes}" if shapes else "")


def judged(
    name: str, measured: float | Tensor, bound: float | Tensor, tolerance: float = bounds.TOLERANCE, **hypotheses: bool
) -> BoundCheck:
    """Compare measured ≤ bound, forgiving a relative `tolerance`, for statements that `bounds` has no check of."""
    sides = [torch.as_tensor(side, dtype=torch.float64) for side in (measured, bound)]
    measured, bound = (float(side.detach()) for side in sides)
    logs = [side.clamp(min=NEGLIGIBLE).log() for side in sides]
    ratio = torch.zeros(()) if measured == bound else logs[0] - logs[1]
    holds = measured <= bound * (1 + tolerance) if all(hypotheses.values()) else None
    return BoundCheck(name, measured, bound, dict(hypotheses), holds, 0.0 - float(ratio.detach()), ratio)
