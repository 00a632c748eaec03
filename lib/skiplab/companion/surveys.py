"""Surveys of statements: generate cases that a statement is about, and count those that violate it.

STATEMENTS holds for each statement of data/claims.yaml that notebook 04 counts how a case is drawn and judged, SHARES
for each share of draws, SEARCHES where a search looks for the worst case. The mathematics is in `skiplab.theory.bounds`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy
import pandas
import torch
from torch import Tensor
from torch.linalg import matrix_norm

from skiplab import draws as portable
from skiplab.companion.ledger import Measurement
from skiplab.errors import InputError, unknown
from skiplab.theory import bounds, counterexamples
from skiplab.theory.bounds import BoundCheck
from skiplab.theory.conditioning import condition_number
from skiplab.theory.spectral import hc, hc_ratio

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
    """How the inputs of a case are drawn, and how they are judged."""

    draw: Callable[[Draws], tuple]
    check: Callable[..., BoundCheck]


@dataclass(frozen=True)
class Survey:
    """What `survey` counted: the slack ln(bound/measured) of each case, and the worst violation in words."""

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
        """Return the percentage of cases that violate the statement, in the ledger's form."""
        return Measurement((100 * self.violations / len(self.slacks),))


def survey(claim: str, cases: int, seed: int = 0) -> Survey:
    """Judge `cases` generated cases of a statement of STATEMENTS or SHARES in which all its hypotheses hold.

    Raises InputError for another name, and where too few of the draws satisfy the hypotheses.
    """
    known = STATEMENTS | SHARES
    if claim not in known:
        raise unknown("statement", claim, known)
    draws, statement = Draws(seed), known[claim]
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


# --- Always Skip Attention --------------------------------------------------------------------------------------------


def _square_weights(draws: Draws, d: int, count: int) -> tuple[Tensor, ...]:
    make = draws.orthonormal if draws.whole(0, 1) else draws.normal
    return tuple(make(d, d) for _ in range(count))


def _any_shape(draws: Draws) -> tuple:
    n, d = draws.whole(2, 8), draws.whole(2, 8)
    return draws.normal(n, d), *_square_weights(draws, d, 3)


def _tall(draws: Draws) -> tuple:
    d = draws.whole(2, 7)
    return draws.full_rank(d + draws.whole(0, 4), d), *_square_weights(draws, d, 3)


def _definite(draws: Draws) -> tuple:
    n, d = draws.whole(2, 8), draws.whole(2, 8)
    w = draws.weight(d, d)
    same = (
        (w, w)
        if draws.whole(0, 1)
        else (torch.eye(d, dtype=torch.float64) + 0.5 * draws.small(d), torch.eye(d).double())
    )
    return draws.normal(n, d), *same, draws.weight(d, d)


def _heads(draws: Draws, n: int, d: int, width: int) -> tuple:
    return draws.normal(n, d), *(draws.normal(d, width) for _ in range(3))


def _narrow(draws: Draws) -> tuple:
    d = draws.whole(3, 8)
    if draws.whole(0, 3) == 0:
        return counterexamples.cubic_heads(draws.uniform(0.1, 1.5))
    return _heads(draws, d + draws.whole(0, 8), d, draws.whole(2, d - 1))


def _ffn_shapes(draws: Draws) -> tuple:
    d = draws.whole(2, 6)
    make = draws.orthonormal if draws.whole(0, 1) else draws.normal
    return draws.normal(d + draws.whole(0, 6), d), make(d, 4 * d), make(4 * d, d)


def _cancelling(d: int, distance: float = 1e-6) -> Tensor:
    """Return M = diag(−1 + distance, ½, …, ½)."""
    m = torch.full((d,), 0.5, dtype=torch.float64)
    m[0] = distance - 1
    return m.diag()


def _skipped(draws: Draws) -> tuple:
    d = draws.whole(2, 7)
    m = draws.normal(d, d) if draws.whole(0, 1) else _cancelling(d, 10 ** draws.uniform(-6, -1))
    return draws.full_rank(d + draws.whole(0, 4), d), m


def _rotated(build: Callable, check: Callable, theta: float) -> BoundCheck:
    """Check that a counterexample reaches 1/cos θ where the published bound says 1, both to a relative 1e-6."""
    found = check(*build(theta), form="paper")
    return judged(found.name, max(abs(found.measured * math.cos(theta) - 1), abs(found.bound - 1)), 1e-6)


def _raised(x: Tensor, m: Tensor) -> BoundCheck:
    """Check κ(XM) ≤ κ(XM + X): adding the input does not help."""
    return judged("4.2, the other way", condition_number(x @ m), condition_number(x @ m + x))


def _tall_and(draw: Callable[[Draws, int], Tensor]) -> Callable[[Draws], tuple]:
    def both(draws: Draws) -> tuple:
        d = draws.whole(2, 7)
        return draws.full_rank(d + draws.whole(0, 4), d), draw(draws, d)

    return both


def _nearly_singular(draws: Draws, d: int) -> Tensor:
    m = 0.3 * draws.small(d)
    m[:, -1] *= 1e-6
    return m


def _angle(draws: Draws) -> tuple[float]:
    return (draws.uniform(0.01, 1.56),)


CUBIC, FFN, SKIP = (
    partial(check, form="paper") for check in (bounds.cubic_condition, bounds.ffn_condition, bounds.skip_condition)
)

_CONDITIONS = {
    "asa.prop41.as_stated": Statement(_any_shape, CUBIC),
    "asa.prop41.repaired": Statement(_tall, bounds.cubic_condition),
    "asa.prop41.definite": Statement(_definite, partial(bounds.cubic_condition, form="definite")),
    "asa.prop41.narrow_heads": Statement(_narrow, CUBIC),
    "asa.prop41.counterexample": Statement(
        _angle, partial(_rotated, counterexamples.cubic_wide, bounds.cubic_condition)
    ),
    "asa.prop41.heads_counterexample": Statement(
        _angle, partial(_rotated, counterexamples.cubic_heads, bounds.cubic_condition)
    ),
    "asa.ffn.as_stated": Statement(_ffn_shapes, FFN),
    "asa.ffn.repaired": Statement(lambda draws: _tall(draws)[:3], bounds.ffn_condition),
    "asa.ffn.product": Statement(_ffn_shapes, partial(bounds.ffn_condition, form="product")),
    "asa.ffn.counterexample": Statement(_angle, partial(_rotated, counterexamples.ffn_wide, bounds.ffn_condition)),
    "asa.prop42.as_stated": Statement(_skipped, SKIP),
    "asa.prop42.counterexample": Statement(_tall_and(lambda draws, d: _cancelling(d)), _raised),
    "asa.prop42.ratio": Statement(_tall_and(Draws.small), bounds.skip_condition),
    "asa.prop42.definite": Statement(
        _tall_and(lambda draws, d: draws.small(d) * draws.uniform(0.1, 3)),
        partial(bounds.skip_condition, form="definite"),
    ),
    "asa.prop42.sufficient": Statement(
        lambda draws: (draws.orthonormal(9, 4) * draws.uniform(1, 3), _nearly_singular(draws, 4)),
        partial(bounds.skip_condition, form="lowers"),
    ),
}

# --- Anti-Oversmoothing: theorem 1 and corollary 2 --------------------------------------------------------------------


def _projected(draws: Draws) -> tuple[Tensor, Tensor]:
    """Return a positive map and tokens with πᵀz = 0."""
    n = draws.whole(3, 10)
    attn, z = draws.attention(n), draws.normal(n, draws.whole(1, 3))
    return attn, z - bounds.stationary_distribution(attn) @ z


def _usual(draws: Draws) -> tuple[Tensor, Tensor]:
    """Return a positive map and tokens with |πᵀz| ≥ 1e-3 ‖z‖."""
    while True:
        n = draws.whole(3, 10)
        attn, z = draws.attention(n, sharpness=draws.uniform(0.1, 4)), draws.normal(n, draws.whole(1, 3))
        if (bounds.stationary_distribution(attn) @ z).norm() >= 1e-3 * z.norm():
            return attn, z


def _second_eigenvalue(attn: Tensor) -> float:
    return float(torch.linalg.eigvals(hc(attn)).abs().max())


def _unprojected(attn: Tensor, z: Tensor) -> BoundCheck:
    """Check that without projecting back the ratio falls below 1e-6 after 40 / −log10|λ₂| steps."""
    for _ in range(math.ceil(40 / -math.log10(_second_eigenvalue(attn)))):
        z = attn @ z
        z = z / z.norm()
    return judged("theorem 1, rounding", hc_ratio(z), 1e-6)


def _asymptotic(attn: Tensor, z: Tensor) -> BoundCheck:
    """Check ratio ≤ 2 κ(V)|λ₂|ᵗ‖z‖ / (√n |πᵀz|) from the first step where κ(V)|λ₂|ᵗ‖z‖ ≤ ½√n |πᵀz|, ten steps on."""
    kappa = float(torch.linalg.cond(torch.linalg.eig(attn)[1]))
    rate, mean = _second_eigenvalue(attn), bounds.stationary_distribution(attn) @ z
    scale = math.sqrt(len(attn)) * float(mean.norm()) / float(z.norm())
    start = max(0, math.ceil(math.log(scale / 2 / kappa) / math.log(rate)))
    worst = None
    for step in range(1, start + 11):
        z = attn @ z
        check = judged("theorem 1, eigenvalue", hc_ratio(z), 2 * kappa * rate**step / scale + 1e-12)
        if step >= start and (worst is None or check.slack < worst.slack):
            worst = check
    return replace(worst, hypotheses={"diagonalisable": kappa < 1e8}, holds=worst.holds if kappa < 1e8 else None)


def _steps(draws: Draws) -> tuple[Tensor, Tensor, int]:
    if draws.whole(0, 1):
        attn, z = counterexamples.amplifying_attention(2 * draws.whole(2, 12))
        share = 10 ** draws.uniform(-3, -1)  # exactly equal rows would be more than LAPACK's eigenvalues can bear
        return (1 - share) * attn + share * draws.attention(len(attn)), z, draws.whole(1, 3)
    n = draws.whole(2, 10)
    return draws.attention(n, sharpness=draws.uniform(0.1, 6)), draws.normal(n, 2), draws.whole(1, 6)


def _attained(attn: Tensor, z: Tensor) -> BoundCheck:
    """Check that one step of A reaches √(n/2) τ(A) ‖HC[z]‖, to a relative 1e-6."""
    return judged("corollary 2, attained", abs(bounds.low_pass_rate(attn, z, 1).slack), 1e-6)


def _stack(draws: Draws, layers: int) -> Tensor:
    return draws.attention(layers, draws.whole(2, 10), sharpness=draws.uniform(0.1, 8))


def _product(attns: Tensor) -> Tensor:
    """Return A_L … A_1 of (L, n, n), neighbours first."""
    while len(attns) > 1:
        rest = attns[-1:] if len(attns) % 2 else attns[:0]
        attns = torch.cat([attns[1::2] @ attns[: len(attns) - len(rest) : 2], rest])
    return attns[0]


def _stochastic(attns: Tensor) -> BoundCheck:
    """Check that a product of maps is positive and that its rows sum to 1 within 1e-12."""
    product = _product(attns)
    off = float((product.sum(dim=1) - 1).abs().max())
    return judged("corollary 2, stochastic", math.inf if product.min() <= 0 else off, 1e-12)


def _gain(attns: Tensor) -> Tensor:
    """Return ‖HC A_L … A_1 HC‖₂."""
    centre = hc(torch.eye(attns.shape[-1], dtype=torch.float64))
    return matrix_norm(hc(_product(attns) @ centre), 2)


def _deep_stack(draws: Draws) -> tuple[Tensor]:
    if draws.whole(0, 3) == 0:
        return (counterexamples.never_smoothing(1000, draws.whole(3, 8)),)
    return (_stack(draws, 1000),)


def _smoothing_stack(draws: Draws) -> tuple[Tensor]:
    if draws.whole(0, 3) == 0:
        return (counterexamples.smoothing_despite_tau(2 * draws.whole(10, 30)),)
    return (draws.attention(200, draws.whole(2, 8), sharpness=draws.uniform(0.1, 3)),)


def dobrushin(attn: Tensor) -> Tensor:
    """Return τ(A) = ½ max_ij Σ_k |a_ik − a_jk| of maps (…, n, n) as (…)."""
    return (attn[..., :, None, :] - attn[..., None, :, :]).abs().sum(dim=-1).amax(dim=(-2, -1)) / 2


def _only_if(attns: Tensor) -> BoundCheck:
    """Check that a stack which removes all but 1e-6 of HC has Π τ < 0.1."""
    return judged("corollary 2, only if", dobrushin(attns).prod(), 0.1, smooths=bool(_gain(attns) < 1e-6))


def _pair(draws: Draws) -> tuple[Tensor, Tensor]:
    n = draws.whole(2, 10)
    return draws.attention(n, sharpness=draws.uniform(0.1, 8)), draws.attention(n, sharpness=draws.uniform(0.1, 8))


_STACKS = {
    "anti.thm1.as_stated": Statement(
        lambda draws: (_projected if draws.whole(0, 1) else _usual)(draws), partial(bounds.low_pass_limit, form="paper")
    ),
    "anti.thm1.repaired": Statement(_usual, bounds.low_pass_limit),
    "anti.thm1.exception": Statement(_projected, partial(bounds.low_pass_limit, form="floor")),
    "anti.thm1.rounding": Statement(_projected, _unprojected),
    "anti.thm1.rate": Statement(_usual, _asymptotic),
    "anti.thm1.lambda2_bound": Statement(_steps, partial(bounds.low_pass_rate, form="paper")),
    "anti.thm1.dobrushin_rate": Statement(_steps, bounds.low_pass_rate),
    "anti.cor2.stochastic": Statement(lambda draws: (_stack(draws, draws.whole(2, 24)),), _stochastic),
    "anti.cor2.smooths": Statement(_deep_stack, lambda attns: judged("corollary 2, deep", _gain(attns), 0.01)),
    "anti.cor2.dobrushin": Statement(lambda draws: (_stack(draws, draws.whole(1, 6)),), bounds.product_low_pass),
    "anti.cor2.attained": Statement(
        lambda draws: counterexamples.amplifying_attention(2 * draws.whole(2, 12), 10 ** draws.uniform(-6, -1)),
        _attained,
    ),
    "anti.cor2.only_if": Statement(_smoothing_stack, _only_if),
    "anti.cor2.tau_min": Statement(
        lambda draws: _pair(draws)[:1], lambda a: judged("tau, least entry", dobrushin(a), 1 - len(a) * a.min(), 1e-12)
    ),
    "anti.cor2.tau_product": Statement(
        _pair, lambda a, b: judged("tau, product", dobrushin(a @ b), dobrushin(a) * dobrushin(b))
    ),
}

# --- Anti-Oversmoothing: theorem 3 and its extensions -----------------------------------------------------------------


def _layer(draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    n, d = draws.whole(2, 10), draws.whole(2, 8)
    return draws.tokens(n, d), draws.logits(n), draws.weight(d, draws.whole(2, 8))


def _below(limit: Callable[[int], float], draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer with ‖W_V‖₂ below `limit(n)`."""
    x, logits, w_v = _layer(draws)
    return x, logits, w_v / matrix_norm(w_v, 2) * draws.uniform(0.5, 0.9999) * limit(len(x))


def _decays(x: Tensor, logits: Tensor, w_v: Tensor) -> BoundCheck:
    """Check that self-attention does not raise HC, for ‖W_V‖₂ below a limit."""
    return judged("theorem 3, monotone", matrix_norm(hc(torch.softmax(logits, dim=-1) @ x @ w_v)), matrix_norm(hc(x)))


def _row_range(x: Tensor, logits: Tensor, w_v: Tensor) -> BoundCheck:
    """Check theorem 3 with the ranges of the rows, and that this bound is never above the published one."""
    check = bounds.attention_rate(x, logits, w_v, "range")
    larger = check.bound > bounds.attention_rate(x, logits, w_v).bound * (1 + 1e-12)
    return replace(check, holds=check.holds and not larger)


def _projections(draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    n, d, width = draws.whole(2, 10), draws.whole(2, 8), draws.whole(1, 4)
    return draws.tokens(n, d), draws.weight(d, width), draws.weight(d, width)


def _normed_layer(draws: Draws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, logits, w_v = _layer(draws)
    spread = 10 ** draws.uniform(-4, 0)
    return x[:1].mean() + spread * x, logits, w_v, draws.normal(x.shape[1])


def _block(x: Tensor, logits: Tensor, w_v: Tensor, gain: Tensor, *, form: str) -> BoundCheck:
    """Check theorem 3's rate for SA(LN(x)) in terms of ‖HC[x]‖, with the layer norm's factor in the given `form`."""
    norm = bounds.layer_norm_rate(x, gain, form=form)
    normed = (x - x.mean(dim=1, keepdim=True)) / x.std(dim=1, correction=0, keepdim=True) * gain
    inner = bounds.attention_rate(normed, logits, w_v)
    said = norm.holds is not None and norm.measured > 1e-9 * float(normed.norm())
    return judged(
        "theorem 3, block", inner.measured, inner.bound * norm.bound / max(norm.measured, NEGLIGIBLE), 1e-6, said=said
    )


def _many_heads(draws: Draws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, d, heads, width = draws.whole(2, 10), draws.whole(2, 8), draws.whole(1, 12), draws.whole(1, 3)
    return draws.tokens(n, d), draws.logits(heads, n), draws.weight(d, heads * width), draws.weight(heads * width, d)


def _with_skip(x: Tensor, logits: Tensor, w_v: Tensor, *, form: str) -> BoundCheck:
    """Check a block with its skip, its rate being theorem 3's."""
    rate = bounds.attention_gain(logits) * matrix_norm(w_v, 2)
    return bounds.residual_rate(x, torch.softmax(logits, dim=-1) @ x @ w_v, rate, form)


def _square_layer(draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    n, d = draws.whole(2, 10), draws.whole(2, 8)
    w_v = draws.weight(d, d)
    return draws.tokens(n, d), draws.logits(n), w_v


def _gentle_layer(draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer whose rate in theorem 3 is below 1."""
    x, logits, w_v = _square_layer(draws)
    return x, logits, w_v * draws.uniform(0.1, 0.99) / (bounds.attention_gain(logits) * matrix_norm(w_v, 2))


def _either_band(draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    """Return an ordinary layer, or the one that removes DC and keeps HC: A = 11ᵀ/n and W_V = −I."""
    x, logits, w_v = _square_layer(draws)
    if draws.whole(0, 1):
        return x, logits, w_v
    return x, torch.zeros_like(logits), -torch.eye(len(w_v), dtype=torch.float64)


def _bands_alike(x: Tensor, logits: Tensor, w_v: Tensor) -> BoundCheck:
    """Check that a block with its skip does not raise ‖HC‖/‖DC‖."""
    after = x + torch.softmax(logits, dim=-1) @ x @ w_v
    return judged("skip, bands", hc_ratio(after), hc_ratio(x), said=bool(hc_ratio(x) > 1e-9))


def _response(attn: Tensor) -> Tensor:
    """Return F A F⁻¹ in full, F the unitary DFT."""
    return torch.fft.fft(torch.fft.ifft(attn.to(torch.complex128), dim=1, norm="ortho"), dim=0, norm="ortho")


def _same_one(attn: Tensor) -> BoundCheck:
    identity = torch.eye(len(attn), dtype=torch.float64)
    return judged("skip, response", (_response(attn + identity) - _response(attn) - identity).abs().max(), 1e-10)


def _ffn(draws: Draws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, d, inner = draws.whole(2, 10), draws.whole(2, 8), draws.whole(2, 12)
    return draws.tokens(n, d), draws.weight(d, inner), draws.weight(inner, d), draws.normal(inner)


def _kind(draws: Draws) -> tuple:
    return (bounds.LOGITS[draws.whole(0, 2)], *_projections(draws))


_RATES = {
    "anti.thm3.as_stated": Statement(_layer, bounds.attention_rate),
    "anti.thm3.row_range": Statement(_layer, _row_range),
    "anti.thm3.sharp": Statement(_layer, partial(bounds.attention_rate, form="sharp")),
    "anti.thm3.monotone": Statement(partial(_below, lambda n: n**-0.5), _decays),
    "anti.thm3.monotone_sharp": Statement(partial(_below, lambda n: (2 / n) ** 0.5), _decays),
    **{
        f"anti.thm3.logits_{kind}": Statement(_projections, partial(bounds.logit_check, kind)) for kind in bounds.LOGITS
    },
    "anti.thm3.half_range": Statement(_kind, partial(bounds.logit_check, form="half_range")),
    "anti.thm3.block": Statement(_normed_layer, partial(_block, form="paper")),
    "anti.thm3.layernorm": Statement(_normed_layer, partial(_block, form="repaired")),
    "anti.thm3.layernorm_attained": Statement(
        lambda draws: (counterexamples.layer_norm_raises(10 ** draws.uniform(-4, 0), draws.whole(2, 10)),),
        lambda x: judged("layer norm, attained", abs(bounds.layer_norm_rate(x).slack), 1e-6),
    ),
    "anti.thm3.layernorm_sharp": Statement(_normed_layer, partial(_block, form="sharp")),
    "anti.ext.multihead": Statement(_many_heads, bounds.multihead_rate),
    "anti.ext.multihead_sqrt": Statement(_many_heads, partial(bounds.multihead_rate, form="root")),
    "anti.ext.multihead_whole": Statement(_many_heads, partial(bounds.multihead_rate, form="whole")),
    "anti.ext.skip": Statement(_square_layer, partial(_with_skip, form="paper")),
    "anti.ext.skip_lower": Statement(_gentle_layer, partial(_with_skip, form="lower")),
    "anti.ext.skip_identity": Statement(lambda draws: (draws.attention(draws.whole(2, 10)),), _same_one),
    "anti.ext.skip_bands": Statement(_either_band, _bands_alike),
    "anti.ext.ffn": Statement(_ffn, bounds.ffn_rate),
    "anti.ext.ffn_skip": Statement(_ffn, partial(bounds.ffn_rate, skip=True)),
}

# --- Cutting the Skip -------------------------------------------------------------------------------------------------


def _nearly_constant(draws: Draws) -> tuple[Tensor]:
    n = draws.whole(2, 20)
    return (draws.uniform(-5, 5) + draws.uniform(0, 0.1) * portable.uniform(n, n, generator=draws.generator),)


def _uniform(logits: Tensor) -> BoundCheck:
    """Check that entries of A lie in [e⁻ʳ/n, eʳ/n], r the largest range of a row."""
    r = (logits.amax(dim=1) - logits.amin(dim=1)).max()
    scaled = (len(logits) * torch.softmax(logits, dim=1)).log().abs().max()
    return judged("skipless 1, uniform", scaled.exp(), r.exp())


def _dominant_diagonal(draws: Draws) -> tuple[Tensor]:
    n = draws.whole(2, 20)
    logits = draws.normal(n, n)
    return (logits + (logits.max() - logits.min() + draws.uniform(0, 12)) * torch.eye(n, dtype=torch.float64),)


def _diagonal(logits: Tensor) -> BoundCheck:
    """Check a_ii ≥ 1 / (1 + (n−1) e^−m), m the least excess of the diagonal."""
    n = len(logits)
    off = torch.where(torch.eye(n, dtype=torch.bool), -torch.inf, logits)
    excess = (logits.diagonal() - off.amax(dim=1)).min()
    return judged(
        "skipless 1, identity", 1 / (1 + (n - 1) * torch.exp(-excess)), torch.softmax(logits, dim=1).diagonal().min()
    )


def _main_and_rest(limit: str, draws: Draws) -> tuple[Tensor, Tensor]:
    """Return a matrix and a smaller one: smaller than its norm, or than its smallest singular value."""
    d = draws.whole(2, 7)
    main, rest = draws.weight(d, d), draws.normal(d, d)
    u, sizes, vh = torch.linalg.svd(main)
    if limit == "norm" and draws.whole(0, 1):  # the worst: nearly all of what is smallest is taken away
        return main, -0.999 * sizes[-1] * u[:, -1:] @ vh[-1:]
    size = sizes[0 if limit == "norm" else -1]
    return main, rest * draws.uniform(0.01, 0.99) * size / matrix_norm(rest, 2)


def _norm_is_enough(main: Tensor, rest: Tensor) -> BoundCheck:
    """Check κ(main + rest) ≤ κ(main)(1 + ρ)/(1 − ρ), ρ = ‖rest‖/‖main‖ < 1: proposition 2 read too freely."""
    rho = matrix_norm(rest, 2) / matrix_norm(main, 2)
    cond = torch.linalg.cond  # with its gradient
    return judged("skipless 2, norm", cond(main + rest), cond(main) * (1 + rho) / (1 - rho), said=bool(rho < 1))


_SKIPLESS = {
    "cut.prop1.uniform": Statement(_nearly_constant, _uniform),
    "cut.prop1.diffuse": Statement(lambda draws: (draws.logits(draws.whole(2, 12)),), bounds.diffuse_rows),
    "cut.prop1.diagonal": Statement(_dominant_diagonal, _diagonal),
    "cut.prop1.diagonal_kappa": Statement(_dominant_diagonal, bounds.diagonal_rows),
    "cut.prop2.smaller_norm": Statement(partial(_main_and_rest, "norm"), _norm_is_enough),
    "cut.prop2.repaired": Statement(partial(_main_and_rest, "least"), bounds.dominant_term),
}

STATEMENTS = _CONDITIONS | _STACKS | _RATES | _SKIPLESS

# --- Shares of draws at one size --------------------------------------------------------------------------------------


def _all(make: Callable[[Draws], Callable], *shapes: tuple[int, int]) -> Callable[[Draws], tuple]:
    """Draw a Gaussian X of the first shape and weights of the others."""
    return lambda draws: (draws.normal(*shapes[0]), *(make(draws)(*shape) for shape in shapes[1:]))


def _gaussian(draws: Draws) -> Callable:
    return draws.normal


def _orthonormal(draws: Draws) -> Callable:
    return draws.orthonormal


SHARES = {
    "asa.prop41.gaussian_draws": Statement(_all(_gaussian, (8, 16), *[(16, 16)] * 3), CUBIC),
    "asa.prop41.orthogonal_draws": Statement(_all(_orthonormal, (8, 16), *[(16, 16)] * 3), CUBIC),
    "asa.prop41.heads_draws": Statement(_all(_gaussian, (8, 4), *[(4, 2)] * 3), CUBIC),
    "asa.ffn.gaussian_draws": Statement(_all(_gaussian, (16, 8), (8, 32), (32, 8)), FFN),
    "asa.ffn.orthonormal_draws": Statement(_all(_orthonormal, (16, 8), (8, 32), (32, 8)), FFN),
    "asa.prop42.gaussian_draws": Statement(_all(_gaussian, (16, 8), (8, 8)), SKIP),
}

# --- Searches for the worst case --------------------------------------------------------------------------------------


def _shaped(*shapes: tuple[int, ...]) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda generator: tuple(portable.normal(*shape, generator=generator) for shape in shapes)


def _searched_block(x: Tensor, logits: Tensor, w_v: Tensor, form: str = "repaired") -> BoundCheck:
    """Check what `_block` checks, with gradients: measured/bound of both steps multiplied."""
    normed = (x - x.mean(dim=1, keepdim=True)) / x.std(dim=1, correction=0, keepdim=True)
    inner, norm = bounds.attention_rate(normed, logits, w_v), bounds.layer_norm_rate(x, form=form)
    return judged("theorem 3, block", (inner.log_ratio + norm.log_ratio).exp(), 1.0)


def _approach(attn: Tensor, z: Tensor, steps: int = 4) -> BoundCheck:
    """Check the rate behind theorem 1, ‖HC‖/‖DC‖ of Aᵗz ≤ h / √n(‖πᵀz‖ − ‖π − 1/n‖h) with h = √(n/2) τᵗ‖HC[z]‖."""
    n, pi = len(attn), bounds.stationary_distribution(attn)
    h = math.sqrt(n / 2) * dobrushin(attn) ** steps * matrix_norm(hc(z))
    left = (pi @ z).norm() - (pi - 1 / n).norm() * h
    ratio = hc_ratio(torch.linalg.matrix_power(attn, steps) @ z)
    return judged("theorem 1, approach", ratio, h / math.sqrt(n) / left.clamp(min=NEGLIGIBLE), said=bool(left > 0))


def _floor(attn: Tensor, z: Tensor, steps: int = 4) -> BoundCheck:
    """Check ‖DC‖/‖HC‖ ≤ √n ‖π − 1/n‖ of Aᵗw, w being what is left of `z` on πᵀw = 0."""
    n, pi = len(attn), bounds.stationary_distribution(attn)
    w = torch.linalg.matrix_power(attn, steps) @ (z - pi @ z)
    return judged("theorem 1, floor", 1 / hc_ratio(w), math.sqrt(n) * (pi - 1 / n).norm())


def _gentle(share: float, x: Tensor, logits: Tensor, w_v: Tensor) -> BoundCheck:
    """Check a skip whose branch has `share` of the input's HC by theorem 3: with no branch at all nothing is to be found."""
    return _with_skip(x, logits, share * w_v / (bounds.attention_gain(logits) * matrix_norm(w_v, 2)), form="lower")


def _normalised(norm: float, x: Tensor, logits: Tensor, w_v: Tensor) -> BoundCheck:
    return _decays(x, logits, norm * w_v / matrix_norm(w_v, 2))


def _any_half_range(x: Tensor, w_q: Tensor, w_k: Tensor) -> BoundCheck:
    """Return the tightest of the three kinds of logits."""
    return min(
        (bounds.logit_check(kind, x, w_q, w_k, "half_range") for kind in bounds.LOGITS), key=lambda check: check.slack
    )


def _on_maps(check: Callable, *logits: Tensor) -> BoundCheck:
    return check(*(torch.softmax(p, dim=-1) for p in logits))


_LAYER, _WEIGHTS, _HEADS = ((6, 4), (6, 6), (4, 4)), ((5, 4), (4, 3), (4, 3)), ((6, 4), (2, 6, 6), (4, 4), (4, 4))


SEARCHES = {
    "asa.prop41.as_stated": (CUBIC, _shaped((3, 4), (4, 4), (4, 4), (4, 4))),
    "asa.prop41.repaired": (bounds.cubic_condition, _shaped((5, 3), (3, 3), (3, 3), (3, 3))),
    "asa.prop41.definite": (
        lambda x, w, v: bounds.cubic_condition(x, w, w, v, "definite"),
        _shaped((3, 4), (4, 4), (4, 4)),
    ),
    "asa.prop41.narrow_heads": (CUBIC, _shaped((6, 4), (4, 2), (4, 2), (4, 2))),
    "asa.ffn.as_stated": (FFN, _shaped((5, 3), (3, 12), (12, 3))),
    "asa.ffn.repaired": (bounds.ffn_condition, _shaped((5, 3), (3, 3), (3, 3))),
    "asa.ffn.product": (partial(bounds.ffn_condition, form="product"), _shaped((5, 3), (3, 12), (12, 3))),
    "asa.prop42.as_stated": (SKIP, _shaped((5, 3), (3, 3))),
    "asa.prop42.ratio": (lambda x, m: bounds.skip_condition(x, m / 10), _shaped((5, 3), (3, 3))),
    "asa.prop42.definite": (lambda x, m: bounds.skip_condition(x, m / 10, "definite"), _shaped((5, 3), (3, 3))),
    "asa.prop42.sufficient": (  # M of κ ≈ 10⁴, which the search may lower until the hypothesis stops it
        lambda x, m: bounds.skip_condition(x, m / 10 * torch.logspace(0, -4, 3, dtype=torch.float64), "lowers"),
        _shaped((5, 3), (3, 3)),
    ),
    "anti.thm1.repaired": (  # the rate from which `low_pass_limit` takes its number of steps
        lambda p, z: _approach(torch.softmax(p, dim=1), z + 3),
        _shaped((6, 6), (6, 1)),
    ),
    "anti.thm1.exception": (lambda p, z: _floor(torch.softmax(p, dim=1), z), _shaped((6, 6), (6, 1))),
    "anti.thm1.lambda2_bound": (
        lambda p, z: bounds.low_pass_rate(torch.softmax(p, dim=1), z.detach(), 1, "paper"),
        _shaped((6, 6), (6, 1)),
    ),
    "anti.thm1.dobrushin_rate": (
        lambda p, z: bounds.low_pass_rate(torch.softmax(p, dim=1), z, 2),
        _shaped((6, 6), (6, 1)),
    ),
    "anti.cor2.tau_min": (partial(_on_maps, STATEMENTS["anti.cor2.tau_min"].check), _shaped((6, 6))),
    "anti.cor2.tau_product": (partial(_on_maps, STATEMENTS["anti.cor2.tau_product"].check), _shaped((6, 6), (6, 6))),
    "anti.cor2.dobrushin": (lambda p: bounds.product_low_pass(torch.softmax(p, dim=-1)), _shaped((1, 6, 6))),
    "anti.thm3.as_stated": (bounds.attention_rate, _shaped(*_LAYER)),
    "anti.thm3.row_range": (partial(bounds.attention_rate, form="range"), _shaped(*_LAYER)),
    "anti.thm3.sharp": (partial(bounds.attention_rate, form="sharp"), _shaped(*_LAYER)),
    "anti.thm3.monotone": (partial(_normalised, 6**-0.5), _shaped(*_LAYER)),
    "anti.thm3.monotone_sharp": (partial(_normalised, 3**-0.5), _shaped(*_LAYER)),
    "anti.thm3.block": (partial(_searched_block, form="paper"), _shaped(*_LAYER)),
    "anti.thm3.layernorm": (_searched_block, _shaped(*_LAYER)),
    "anti.thm3.layernorm_sharp": (partial(_searched_block, form="sharp"), _shaped(*_LAYER)),
    "anti.ext.multihead": (bounds.multihead_rate, _shaped(*_HEADS)),
    "anti.ext.multihead_sqrt": (partial(bounds.multihead_rate, form="root"), _shaped(*_HEADS)),
    "anti.ext.multihead_whole": (partial(bounds.multihead_rate, form="whole"), _shaped(*_HEADS)),
    "anti.ext.skip": (partial(_with_skip, form="paper"), _shaped(*_LAYER)),
    "anti.ext.skip_lower": (partial(_gentle, 0.5), _shaped(*_LAYER)),
    "anti.ext.skip_bands": (_bands_alike, _shaped(*_LAYER)),
    "anti.ext.ffn": (bounds.ffn_rate, _shaped((6, 4), (4, 8), (8, 4))),
    "anti.ext.ffn_skip": (partial(bounds.ffn_rate, skip=True), _shaped((6, 4), (4, 8), (8, 4))),
    **{f"anti.thm3.logits_{kind}": (partial(bounds.logit_check, kind), _shaped(*_WEIGHTS)) for kind in bounds.LOGITS},
    "anti.thm3.half_range": (_any_half_range, _shaped(*_WEIGHTS)),
    "cut.prop1.uniform": (_uniform, _shaped((5, 5))),
    "cut.prop1.diffuse": (bounds.diffuse_rows, _shaped((5, 5))),
    "cut.prop1.diagonal": (_diagonal, _shaped((5, 5))),
    "cut.prop1.diagonal_kappa": (lambda p: bounds.diagonal_rows(p + 6 * torch.eye(5)), _shaped((5, 5))),
    "cut.prop2.smaller_norm": (lambda main, rest: _norm_is_enough(main, rest / 10), _shaped((4, 4), (4, 4))),
    "cut.prop2.repaired": (
        lambda main, rest: bounds.dominant_term(main + 6 * torch.eye(4), rest / 10),
        _shaped((4, 4), (4, 4)),
    ),
}

# Why the other statements have no search.
_BUILT = "says what a counterexample reaches, which has nothing free but one angle or distance"
UNSEARCHED = {
    **dict.fromkeys(("asa.prop41.counterexample", "asa.prop41.heads_counterexample", "asa.ffn.counterexample",
                     "asa.prop42.counterexample", "anti.cor2.attained", "anti.thm3.layernorm_attained"), _BUILT),
    "anti.thm1.as_stated": "false only where πᵀz = 0, a set that no gradient leads to; elsewhere it is anti.thm1.repaired",
    "anti.thm1.rounding": "about the rounding of an iteration, which has no gradient",
    "anti.thm1.rate": "counts from a step, a whole number, that depends on the eigenvectors; anti.thm1.dobrushin_rate is searched",
    "anti.cor2.stochastic": "an identity: what is measured is rounding",
    "anti.cor2.smooths": "the gain of 1,000 random layers is rounding, and so is its gradient",
    "anti.cor2.only_if": "its hypothesis, a gain below 1e-6, is lost with the first step towards a larger Π τ",
    "anti.ext.skip_identity": "an identity: what is measured is rounding",
}  # fmt: skip

# What the figure of slack calls each inequality (not what says how far one is reached, or is true to rounding), from the published ones to the repaired and the sharper.
LABELS = {
    "asa.prop41.as_stated": "4.1 as published", "asa.prop41.narrow_heads": "4.1 for a head's weights",
    "asa.prop41.repaired": "4.1, square weights, n ≥ d", "asa.prop41.definite": "4.1, W_Q W_Kᵀ definite",
    "asa.ffn.as_stated": "FFN as published", "asa.ffn.repaired": "FFN, square weights",
    "asa.ffn.product": "FFN, κ(W_up W_down)", "asa.prop42.as_stated": "4.2 as published",
    "asa.prop42.ratio": "4.2, (1+m)/(1−m)", "asa.prop42.definite": "4.2, (1+m)/(1+μ)",
    "asa.prop42.sufficient": "4.2, κ(M) large enough", "anti.thm1.as_stated": "theorem 1 as published",
    "anti.thm1.repaired": "theorem 1, πᵀz ≠ 0", "anti.thm1.exception": "theorem 1, floor at πᵀz = 0", "anti.thm1.lambda2_bound": "|λ₂|ᵗ from step 1",
    "anti.thm1.dobrushin_rate": "√(n/2) τᵗ", "anti.cor2.dobrushin": "corollary 2, √(n/2) Π τ",
    "anti.cor2.tau_min": "τ ≤ 1 − n min A", "anti.cor2.tau_product": "τ(AB) ≤ τ(A) τ(B)",
    "anti.thm3.as_stated": "theorem 3 as published", "anti.thm3.row_range": "theorem 3, row ranges",
    "anti.thm3.sharp": "theorem 3, sharp", "anti.thm3.monotone": "decay, ‖W_V‖ < 1/√n",
    "anti.thm3.monotone_sharp": "decay, ‖W_V‖ < √(2/n)", "anti.thm3.block": "… in a block, no LayerNorm factor",
    "anti.thm3.layernorm": "… with the LayerNorm's factor", "anti.thm3.layernorm_sharp": "… with its sharper factor",
    "anti.ext.multihead": "H heads, H σ₁σ₂", "anti.ext.multihead_sqrt": "H heads, √H",
    "anti.ext.multihead_whole": "H heads, no factor H", "anti.ext.skip": "skip, 1 + rate",
    "anti.ext.skip_lower": "skip, 1 − rate", "anti.ext.skip_bands": "skip, both bands alike",
    "anti.ext.ffn": "FFN, σ₃", "anti.ext.ffn_skip": "FFN with its skip, 1 + σ₃",
    "anti.thm3.logits_dot": "dot-product logits", "anti.thm3.logits_l2": "L2 logits",
    "anti.thm3.logits_logistic": "logistic logits", "anti.thm3.half_range": "logits, half the range",
    "cut.prop1.uniform": "skipless 1, nearly uniform", "cut.prop1.diffuse": "skipless 1, diffuse rows",
    "cut.prop1.diagonal": "skipless 1, diagonal entries", "cut.prop1.diagonal_kappa": "skipless 1, diagonal rows", "cut.prop2.smaller_norm": "skipless 2, smaller norm",
    "cut.prop2.repaired": "skipless 2, ‖rest‖ < σ_min",
}  # fmt: skip


def worst_cases(steps: int, restarts: int = 2) -> dict[str, float]:
    """Return for each statement of SEARCHES the largest measured/bound that gradient ascent finds."""
    return {
        name: counterexamples.adversarial_search(check, sample, steps=steps, restarts=restarts).ratio
        for name, (check, sample) in SEARCHES.items()
    }


def largest_step(steps: int, seed: int = 0, n: int = 16) -> float:
    """Return the largest ‖HC A HC‖₂ that a search finds over positive row-stochastic (n, n): at most √(n/2)."""
    check = SEARCHES["anti.cor2.dobrushin"][0]
    return counterexamples.adversarial_search(
        check, _shaped((1, n, n)), steps=steps, step_size=0.3, seed=seed
    ).check.measured


def never_smoothing_keeps(layers: int, n: int = 8) -> float:
    """Return how many percent of HC the stack A_l = (1 − 2⁻ˡ)I + 2⁻ˡ 11ᵀ/n leaves."""
    return float(100 * _gain(counterexamples.never_smoothing(layers, n)))


def largest_normed(steps: int, seed: int = 0) -> tuple[float, float]:
    """Return the largest ‖HC[LN(x)]‖/‖HC[x]‖ that a search finds, and the share of the repaired bound reached there."""
    found = counterexamples.adversarial_search(
        lambda rest: bounds.layer_norm_rate(1 + rest / 50, form="paper"), _shaped((6, 4)), steps=steps, seed=seed
    )
    x = 1 + found.inputs[0] / 50
    return found.ratio, math.exp(-bounds.layer_norm_rate(x).slack)


# --- Counterexamples and shapes ---------------------------------------------------------------------------------------


def counterexample_table() -> pandas.DataFrame:
    """Return a row per counterexample: what was stated, both sides of it, and the repaired statement on the same input."""
    never, despite = counterexamples.never_smoothing(), counterexamples.smoothing_despite_tau()
    x, branch = counterexamples.skip_high_pass()
    mean_zero = counterexamples.stationary_mean_zero()
    rows = [
        (
            "4.1, fewer tokens than dimensions",
            CUBIC(*counterexamples.cubic_wide()),
            "W_Q W_Kᵀ positive definite: κ(X)³κ(W_V)‖B‖/λ",
            bounds.cubic_condition(*counterexamples.cubic_wide(), form="definite"),
        ),
        (
            "4.1, narrow heads",
            CUBIC(*counterexamples.cubic_heads()),
            "square weights and n ≥ d",
            bounds.cubic_condition(*counterexamples.cubic_heads()),
        ),
        (
            "FFN, d → 4d → d",
            FFN(*counterexamples.ffn_wide()),
            "κ(X) κ(W_up W_down)",
            bounds.ffn_condition(*counterexamples.ffn_wide(), form="product"),
        ),
        (
            "4.2, a branch that cancels",
            SKIP(*counterexamples.skip_cancels()),
            "κ(X)(1+m)/(1+μ)",
            bounds.skip_condition(*counterexamples.skip_cancels(), form="definite"),
        ),
        (
            "theorem 1, πᵀz = 0",
            bounds.low_pass_limit(*mean_zero, form="paper"),
            "there DC/HC ≤ √n‖π − 1/n‖",
            bounds.low_pass_limit(*mean_zero, form="floor"),
        ),
        (
            "|λ₂|ᵗ from the first step",
            bounds.low_pass_rate(*counterexamples.amplifying_attention(), 1, "paper"),
            "√(n/2) τᵗ",
            bounds.low_pass_rate(*counterexamples.amplifying_attention(), 1),
        ),
        ("a deep stack smooths", judged("", _gain(never), 0.01), "√(n/2) Π τ", bounds.product_low_pass(never)),
        (
            "it smooths only if Π τ → 0",
            judged("", dobrushin(despite).prod(), 0.01),
            "√(n/2) Π τ",
            bounds.product_low_pass(despite),
        ),
        (
            "theorem 3 through LayerNorm",
            bounds.layer_norm_rate(counterexamples.layer_norm_raises(), form="paper"),
            "max|g| / min std(x)",
            bounds.layer_norm_rate(counterexamples.layer_norm_raises()),
        ),
        (
            "a skip treats bands alike",
            judged("", hc_ratio(x + branch), hc_ratio(x)),
            "(1 + rate) ‖HC‖",
            bounds.residual_rate(x, branch, 0.0),
        ),
    ]
    sides = ("measured", "bound")
    return pandas.DataFrame(
        [
            {"statement": name}
            | {side: _shown(getattr(false, side)) for side in sides}
            | {"repaired": repair}
            | {
                f"repaired {side}": "says nothing" if true.holds is None else _shown(getattr(true, side))
                for side in sides
            }
            for name, false, repair, true in rows
        ]
    )


def _shown(value: float) -> str:
    """Write three digits; what is rounding, or divided by rounding, only by its size."""
    return "< 1e-12" if value < 1e-12 else "> 1e12" if value > 1e12 else f"{value:.3g}"


# Tokens, dimensions and width of a head, for each kind of attention layer in the papers' own models (224 pixels).
LAYERS = {
    "ViT-Tiny": (197, 192, 64), "ViT-S": (197, 384, 64), "ViT-B": (197, 768, 64), "CaiT-S24": (196, 384, 48),
    **{f"Swin-S, stage {stage}": (49, 48 * 2**stage, 32) for stage in (1, 2, 3, 4)},
    **{f"PVT v2 b3, stage {stage}": (side * side, d, 64)
       for stage, (side, d) in enumerate([(56, 64), (28, 128), (14, 320), (7, 512)], start=1)},
}  # fmt: skip


def covered_layers() -> pandas.DataFrame:
    """Return a row per kind of layer in the papers' models: its shape, and whether proposition 4.1's proof covers it."""
    rows = [
        {
            "layer": name,
            "tokens n": n,
            "dimensions d": d,
            "width of a head": width,
            "n ≥ d": n >= d,
            "square weights": width == d,
            "covered": n >= d and width == d,
        }
        for name, (n, d, width) in LAYERS.items()
    ]
    return pandas.DataFrame(rows)


# --- Skipless proposition 1: how κ(A) grows ---------------------------------------------------------------------------


def diffuse_kappas(seeds: list[int], ranges: list[float], sizes: list[int]) -> pandas.DataFrame:
    """Return κ(softmax(P)) for P uniform in [0, range], n tokens: a row per seed, range and n."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for n in sizes:
            unit = portable.uniform(n, n, generator=generator)
            for size in ranges:
                kappa = float(condition_number(torch.softmax(size * unit, dim=-1)))
                rows.append({"seed": seed, "range": size, "n": n, "kappa": kappa})
    return pandas.DataFrame(rows)


def log_slope(table: pandas.DataFrame, x: str, y: str) -> float:
    """Return the slope of ln y against ln x by least squares."""
    return float(numpy.polyfit(numpy.log(table[x]), numpy.log(table[y]), 1)[0])
