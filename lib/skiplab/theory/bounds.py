"""Every proposition and theorem of the three papers as a check that also tests its own hypotheses.

Follows Always Skip Attention (arXiv 2505.01996, section 4: propositions on condition numbers), Anti-Oversmoothing in
Deep Vision Transformers (arXiv 2203.05962, theorems 1 and 3, corollary 2 and their extensions) and Cutting the Skip
(arXiv 2510.00345, propositions 1 and 2).

Most checks take a `form`. "paper" is the statement as published, with the hypotheses published; "repaired" is a true
statement nearest to it; further forms are sharper or wider, and proved in the docstring. A counterexample to a
published statement shows as `holds` False in form "paper" and as None, a failed hypothesis, in form "repaired".

Everything is computed in float64. A comparison forgives a relative `TOLERANCE` and the rounding of the operations.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.linalg import eigvals, eigvalsh, matrix_norm, svdvals, vector_norm

from skiplab.errors import InputError, unknown
from skiplab.theory.spectral import check_attention, dc, hc

TOLERANCE = 1e-9  # relative; what a published inequality may miss by before it counts as violated
EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class BoundCheck:
    """The outcome of checking `measured` ≤ `bound`.

    `holds` is None where one of the `hypotheses` fails: the statement says nothing there. `slack` is
    ln(bound / measured): 0 where the bound is attained, negative where it is violated. `log_ratio` is −slack as a
    tensor that carries the gradient, for `counterexamples.adversarial_search`.
    """

    name: str
    measured: float
    bound: float
    hypotheses: dict[str, bool]
    holds: bool | None
    slack: float
    log_ratio: Tensor = field(repr=False, compare=False)


# --- Always Skip Attention: condition numbers -----------------------------------------------------------------------


def cubic_condition(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, form: str = "repaired") -> BoundCheck:
    """Check proposition 4.1: κ(X W_Q W_Kᵀ Xᵀ X W_V) ≤ κ(W_Q) κ(W_K) κ(W_V) κ(X)³ for linear attention.

    `x` (n, d), weights (d, ·). Forms:
    - "paper": no more than that the condition numbers on the right are finite. False: see counterexamples.
    - "repaired": square weights and n ≥ d. With X of full column rank the output is X M, M = W_Q W_Kᵀ XᵀX W_V square
      and invertible, and σ_min(X M) ≥ σ_min(X) σ_min(M); for n < d, M may turn the rows of X into one another.
    - "definite": any n and d, if B = W_Q W_Kᵀ has a symmetric part ≥ λ > 0 and W_V is square; the bound is
      κ(X)³ κ(W_V) ‖B‖₂/λ. For n < d, ‖(X B Xᵀ)u‖ ≥ uᵀX B Xᵀu ≥ λ σ_min(X)² for a unit u, and σ_min(X W_V) ≥
      σ_min(X) σ_min(W_V); for n ≥ d as above with σ_min(B) ≥ λ. W_Q = W_K square and invertible is an instance.

    Raises InputError for shapes that do not fit.
    """
    x, w_q, w_k, w_v = _matrices(x=x, w_q=w_q, w_k=w_k, w_v=w_v)
    _form(form, "paper", "repaired", "definite")
    if not (len(w_q) == len(w_k) == len(w_v) == x.shape[1] and w_q.shape == w_k.shape):
        raise InputError(f"expected weights (d, ·) for tokens (n, d); saw {_shapes(x, w_q, w_k, w_v)}")
    b = w_q @ w_k.mT
    square = w_v.shape[0] == w_v.shape[1]
    if form == "definite":
        definite = eigvalsh((b + b.mT) / 2)[0]
        hypotheses = {"symmetric part of W_Q W_Kᵀ positive": bool(definite > 0), "W_V square": square}
        bound = _kappa(x) ** 3 * _kappa(w_v) * svdvals(b)[0] / definite.clamp(min=0)
    else:
        bound = _kappa(x) ** 3 * _kappa(w_q) * _kappa(w_k) * _kappa(w_v)
        repairs = {"n ≥ d": x.shape[0] >= x.shape[1], "weights square": square and w_q.shape[0] == w_q.shape[1]}
        hypotheses = repairs if form == "repaired" else {}
    return _kappa_check("proposition 4.1", b @ x.mT @ (x @ w_v), bound, hypotheses, x, w_q, w_k, x, x, w_v)


def ffn_condition(x: Tensor, w_up: Tensor, w_down: Tensor, form: str = "repaired") -> BoundCheck:
    """Check the FFN bound without activation: κ(X W_up W_down) ≤ κ(X) κ(W_up) κ(W_down).

    `x` (n, d), `w_up` (d, m), `w_down` (m, d). Forms:
    - "paper": finite condition numbers. False for the usual m = 4d: W_down may turn W_up's outputs into one another.
    - "repaired": square weights, any n and d. For invertible W, ‖uᵀX W‖ ≥ ‖uᵀX‖ σ_min(W), and likewise from the other
      side for n ≥ d, so no singular value of X shrinks by more than σ_min(W).
    - "product": κ(X) κ(W_up W_down) on the right: the same proof, for any m. What real shapes obey.
    """
    x, w_up, w_down = _matrices(x=x, w_up=w_up, w_down=w_down)
    _form(form, "paper", "repaired", "product")
    if x.shape[1] != w_up.shape[0] or w_up.shape[1] != w_down.shape[0] or w_down.shape[1] != x.shape[1]:
        raise InputError(f"expected x (n, d), w_up (d, m), w_down (m, d); saw {_shapes(x, w_up, w_down)}")
    bound = _kappa(x) * (_kappa(w_up @ w_down) if form == "product" else _kappa(w_up) * _kappa(w_down))
    hypotheses = {"weights square": w_up.shape[0] == w_up.shape[1]} if form == "repaired" else {}
    return _kappa_check("FFN condition", w_up @ w_down, bound, hypotheses, x, w_up, w_down)


def skip_condition(x: Tensor, m: Tensor, form: str = "repaired") -> BoundCheck:
    """Check proposition 4.2, what adding X does to κ(X M). `x` (n, d), `m` (d, d).

    Forms, with m = ‖M‖₂:
    - "paper": κ(XM + X) ≤ κ(XM), always. False: M near −I cancels the skip.
    - "repaired": m < 1 ⇒ κ(XM + X) ≤ κ(X)(1+m)/(1−m), since the singular values of I + M lie in [1−m, 1+m] and a
      square invertible factor changes κ(X) by at most its own κ.
    - "definite": μ > −1 ⇒ κ(XM + X) ≤ κ(X)(1+m)/(1+μ), μ the smallest eigenvalue of (M + Mᵀ)/2, since
      ‖(I+M)v‖ ≥ vᵀ(I+M)v ≥ 1+μ for a unit v. μ ≥ −m: never worse than "repaired", and no m < 1 is needed.
    - "lowers": m < 1, X of full column rank and κ(M) > κ(X)²(1+m)/(1−m) ⇒ κ(XM + X) < κ(XM). By "repaired" the left
      is at most κ(X)(1+m)/(1−m) < κ(M)/κ(X) ≤ κ(XM); the last since σ_max(XM) ≥ σ_min(X) σ_max(M) and
      σ_min(XM) ≤ σ_max(X) σ_min(M).
    """
    x, m = _matrices(x=x, m=m)
    _form(form, "paper", "repaired", "definite", "lowers")
    if m.shape != (x.shape[1], x.shape[1]):
        raise InputError(f"expected x (n, d) and m (d, d); saw {_shapes(x, m)}")
    skipped = m + torch.eye(len(m), dtype=m.dtype)
    norm, mu = svdvals(m)[0], eigvalsh((m + m.mT) / 2)[0]
    stretch = (1 + norm) / (1 - norm).clamp(min=0)
    if form == "paper":
        hypotheses, bound = {}, _kappa(x @ m)
    elif form == "repaired":
        hypotheses, bound = {"‖M‖ < 1": bool(norm < 1)}, _kappa(x) * stretch
    elif form == "definite":
        hypotheses, bound = {"M + Mᵀ > −2": bool(mu > -1)}, _kappa(x) * (1 + norm) / (1 + mu).clamp(min=0)
    else:
        bound = _kappa(x @ m)
        hypotheses = {
            "‖M‖ < 1": bool(norm < 1),
            "X of full column rank": x.shape[0] >= x.shape[1] and bool(_kappa(x).isfinite()),
            "κ(M) > κ(X)²(1+‖M‖)/(1−‖M‖)": bool(_kappa(m) > _kappa(x) ** 2 * stretch),
        }
    # The bounds by κ(X) are finite by hypothesis unless X itself has no full rank, where they say nothing.
    return _kappa_check(
        "proposition 4.2", skipped, bound, hypotheses, x, skipped, finite=form not in ("paper", "lowers")
    )


# --- Anti-Oversmoothing: theorem 1 and corollary 2, attention alone ---------------------------------------------------


def low_pass_limit(attn: Tensor, z: Tensor, form: str = "repaired", *, limit: float = 1e-6) -> BoundCheck:
    """Check theorem 1: for A > 0 with rows summing to 1, ‖HC[Aᵗz]‖/‖DC[Aᵗz]‖ → 0. `attn` (n, n), `z` (n, d).

    `measured` is the ratio after so many steps that the rate below promises `limit` (or, with πᵀz = 0, after so many
    that ‖HC[Aᵗz]‖ fell below `limit`·‖HC[z]‖). π is the stationary distribution. Forms:
    - "paper": A > 0. False where πᵀz = 0.
    - "repaired": A > 0 and πᵀz ≠ 0. With τ the Dobrushin coefficient, h = ‖HC[Aᵗz]‖ ≤ √(n/2) τᵗ ‖HC[z]‖ (see
      `product_low_pass`), and the mean of Aᵗz is πᵀz + (1/n − π)ᵀ HC[Aᵗz], so the ratio is at most
      h / (√n (‖πᵀz‖ − ‖π − 1/n‖ h)), which falls to 0 with τ < 1.
    - "floor": A > 0 and πᵀz = 0, where the ratio never falls: `measured` is its inverse ‖DC‖/‖HC‖, `bound` is
      √n ‖π − 1/n‖₂, by the same identity. 0, so an infinite ratio, for a doubly stochastic A.

    A is raised to 2^k by squaring on the complement πᵀw = 0, projected back each time: iterating in floating point
    would leak a multiple of 1 into w and hide the failure. Raises InputError as `spectral.check_attention`.
    """
    _form(form, "paper", "repaired", "floor")
    (attn,), (z,) = _attention(attn), _matrices(z=z)
    n, ones = len(attn), torch.ones(len(attn), 1, dtype=torch.float64)
    if len(z) != n:
        raise InputError(f"attn (n, n) and z (n, d) must have the same n; saw {_shapes(attn, z)}")
    pi = stationary_distribution(attn)
    mean = pi @ z
    mean = torch.where(mean.norm() <= 16 * n * EPS * z.norm(), 0.0, mean)
    gap, high = vector_norm(pi - 1 / n), matrix_norm(hc(z))
    tau = _dobrushin(attn)
    # The steps, a power of two: h must fall to `target`.
    lowest = limit * math.sqrt(n) * mean.norm() / (1 + limit * math.sqrt(n) * gap)
    target = torch.where(mean.norm() > 0, lowest, limit * high)
    needed = 0.0
    if high > 0 and 0 < tau < 1:
        needed = math.log2(max(1.0, float(torch.log(target / high / _spread(n)) / torch.log(tau))))
    power, log_scale = _decaying_power(attn, pi, min(math.ceil(needed), 50))
    rest = power @ (z - ones * mean)
    rest = rest - ones * (pi @ rest)
    mean = mean * math.exp(min(-log_scale, 700.0))  # everything is measured in units of e^log_scale
    low, rest_high = matrix_norm(dc(rest + mean)), matrix_norm(hc(rest))
    hypotheses = {
        "A > 0": bool(attn.min() > 0),
        "reached within 2^50 steps": needed <= 50 and bool(tau < 1),
    }
    if form == "floor":
        hypotheses |= {"πᵀz = 0": not mean.any(), "HC[Aᵗz] ≠ 0": bool(rest_high > 0)}
        return _check("theorem 1, floor", low / rest_high, math.sqrt(n) * gap, hypotheses, rounding=1e-9)
    if form == "repaired":
        hypotheses["πᵀz ≠ 0"] = bool(mean.any())
    return _check("theorem 1", torch.where(rest_high > 0, rest_high / low, 0.0), limit, hypotheses)


def _decaying_power(attn: Tensor, pi: Tensor, doublings: int) -> tuple[Tensor, float]:
    """Return (M, s) with eˢ M = Aᵗ − 1πᵀ for t = 2^doublings: what is left of Aᵗ on the complement πᵀw = 0."""
    ones = torch.ones(len(attn), 1, dtype=torch.float64)
    power, log_scale = attn - ones * pi, 0.0
    power = torch.where(power.abs() <= 4 * EPS, 0.0, power)  # rounding of the difference, not a signal
    for _ in range(doublings):
        power = power @ power
        power = power - ones * (pi @ power)
        power = power - power @ ones * pi
        scale = power.abs().max().clamp(min=1e-300)
        power, log_scale = power / scale, 2 * log_scale + float(scale.log())
    return power, log_scale


def stationary_distribution(attn: Tensor) -> Tensor:
    """Return π (1, n) with πᵀA = πᵀ for a positive row-stochastic `attn` (n, n), by squaring A until its rows agree.

    Only non-negative numbers are added, so small entries keep their digits even where A is nearly I.
    """
    power = attn
    for _ in range(60):
        power = power @ power
        power = power / power.sum(dim=1, keepdim=True)
    return power.mean(dim=0, keepdim=True)


def low_pass_rate(attn: Tensor, z: Tensor, steps: int, form: str = "repaired") -> BoundCheck:
    """Check how fast attention smooths: ‖HC[Aᵗz]‖_F after `steps` of the same A. `attn` (n, n), `z` (n, d).

    Forms: "paper" takes the asymptotic rate for a bound, |λ₂|ᵗ‖HC[z]‖_F, which a matrix that is not normal violates;
    "repaired" is corollary 2's √(n/2) τ(A)ᵗ‖HC[z]‖_F.
    """
    _form(form, "paper", "repaired")
    (attn,), (z,) = _attention(attn), _matrices(z=z)
    high = hc(z)
    for _ in range(steps):
        high = hc(attn @ high)
    if form == "paper":
        rate, factor = eigvals(hc(attn)).abs().max(), 1.0  # HC A has the eigenvalues of A, with 0 in place of 1
    else:
        rate, factor = _dobrushin(attn), _spread(len(attn))
    rounding = 64 * len(attn) * EPS * float(matrix_norm(z.detach()))
    return _check("theorem 1, rate", matrix_norm(high), factor * rate**steps * matrix_norm(hc(z)), {}, rounding)


def product_low_pass(attns: Sequence[Tensor] | Tensor) -> BoundCheck:
    """Check corollary 2 with a rate: the gain of HC through A_L … A_1 is at most √(n/2) Π τ(A_l). `attns` (L, n, n).

    τ(A) = ½ max_ij Σ_k |a_ik − a_jk| is Dobrushin's coefficient; `measured` is ‖HC A_L … A_1 HC‖₂, HC as a projection.

    Proof, for one column z. A row of A z is an average of z, and two rows differ by at most τ times the range of z:
    range(Az) ≤ τ range(z). range(z) ≤ √2 ‖HC z‖, as the two extreme entries alone give HC that length; and
    ‖HC y‖ ≤ range(y) √(⌊n/2⌋⌈n/2⌉/n), attained where half of the entries lie at each end. Together √(n/2) for even n,
    √((n²−1)/2n) for odd n, both attained with τ = 1. A matrix z is its columns.

    So Π τ → 0 suffices for infinite depth to smooth. It is not necessary: see counterexamples. τ is raised by n
    roundings, for rows that sum to 1 only to rounding.
    """
    attns = _attention(*attns)
    if len({attn.shape for attn in attns}) != 1:
        raise InputError(f"expected one or more maps of one size (n, n); saw {_shapes(*attns)}")
    n = len(attns[0])
    gain = hc(torch.eye(n, dtype=torch.float64))
    bound = _spread(n)
    for attn in attns:
        gain = hc(attn @ gain)
        bound = bound * (_dobrushin(attn) + 4 * n * EPS)
    return _check("corollary 2", svdvals(gain)[0], bound, {})


# --- Anti-Oversmoothing: theorem 3 and its extensions, one layer ------------------------------------------------------


def attention_gain(logits: Tensor, form: str = "paper") -> Tensor:
    """Return a bound of the gain of HC through softmax(P), for `logits` P (…, n, n), as (…): theorem 3 without ‖W_V‖.

    HC A = HC A HC, since A maps what all tokens share to itself; and ‖A‖₂² ≤ ‖A‖₁‖A‖_∞, where ‖A‖_∞ = 1. Forms:
    - "paper": √(n e^{2α}/(e^{2α}+n−1)), α = max|P|: no entry of A exceeds e^{2α}/(e^{2α}+n−1), so no column sum n times it.
    - "range": the same with r_i, the range of row i, for 2α (softmax ignores a constant), row by row:
      ‖A‖₁ ≤ Σ_i 1/(1+(n−1)e^{−r_i}).
    - "sharp": the least of "range" and two that vanish with r = max r_i, as the gain does. (1) HC kills 1cᵀ, so take
      A − 1cᵀ with c the least entry of each column, c_k ≥ ℓ = 1/(1+(n−1)eʳ): rows sum to at most 1−nℓ, columns to
      n(u−ℓ), u = 1/(1+(n−1)e^{−r}). (2) √(n/2) tanh(r/2), from corollary 2: if p_k/q_k has a range within a factor
      e^Δ, the odds of any set differ by no more, so ½‖p−q‖₁ ≤ tanh(Δ/4); for two rows of A, Δ ≤ 2r.

    Never more than √n, nor, in form "sharp", than √(n/2), which is attained. No exponent is positive: nothing overflows.
    """
    _form(form, "paper", "range", "sharp")
    logits = _float64(logits)
    n = logits.shape[-1]
    ranges = logits.amax(dim=-1) - logits.amin(dim=-1)
    if form == "paper":
        ranges = 2 * logits.abs().amax(dim=(-2, -1))[..., None].expand_as(ranges)
    columns = (1 / (1 + (n - 1) * torch.exp(-ranges))).sum(dim=-1).sqrt()
    if form != "sharp":
        return columns
    r = ranges.amax(dim=-1)
    excess = -(n - 1) * torch.expm1(-r) / (torch.exp(-r) + n - 1)  # 1 − nℓ
    spread = -n * (n - 1) * torch.expm1(-2 * r) / ((1 + (n - 1) * torch.exp(-r)) * (torch.exp(-r) + n - 1))  # n(u − ℓ)
    return torch.minimum(torch.minimum(columns, (excess * spread).sqrt()), _spread(n) * torch.tanh(r / 2))


def attention_rate(x: Tensor, logits: Tensor, w_v: Tensor, form: str = "paper") -> BoundCheck:
    """Check theorem 3: ‖HC[softmax(P) X W_V]‖_F ≤ gain(P) ‖W_V‖₂ ‖HC[X]‖_F, with `attention_gain` in the given `form`.

    `x` (n, d), `logits` P (n, n), `w_v` (d, d'). True in all forms. So HC decays in every layer where
    ‖W_V‖₂ < 1/√n, as published; √(2/n) is enough, since the gain never exceeds √(n/2).
    """
    x, logits, w_v = _matrices(x=x, logits=logits, w_v=w_v)
    _same_tokens(x, logits[None], w_v)
    bound = attention_gain(logits, form) * svdvals(w_v)[0] * matrix_norm(hc(x))
    measured = matrix_norm(hc(torch.softmax(logits, dim=-1) @ x @ w_v))
    return _check("theorem 3", measured, bound, {}, _rounding(x, w_v))


def multihead_rate(x: Tensor, logits: Tensor, w_v: Tensor, w_o: Tensor, form: str = "paper") -> BoundCheck:
    """Check theorem 3 for H heads: ‖HC[Σ_h A_h X W_V^h W_O^h]‖_F ≤ rate ‖HC[X]‖_F.

    `x` (n, d), `logits` (H, n, n), `w_v` (d, H·a) and `w_o` (H·a, d'), heads side by side. g_h is the gain of head h
    in theorem 3. True in all forms:
    - "paper": H σ₁ σ₂, σ₁ = max_h g_h‖W_V^h‖₂ and σ₂ = max_h ‖W_O^h‖₂: the triangle inequality over heads.
    - "root": √H σ₁ ‖W_O‖₂: squares of the heads' HC add up before W_O. ‖W_O‖₂ ≤ √H σ₂.
    - "whole": max_h g_h ‖W_V‖₂ ‖W_O‖₂, with no H at all: Σ_h ‖HC[A_h X W_V^h]‖² ≤ max g² Σ_h ‖HC[X] W_V^h‖²
      = max g² ‖HC[X] W_V‖². ‖W_V‖₂ ≤ √H max_h ‖W_V^h‖₂, so each form is at least as sharp as the one before.
    """
    _form(form, "paper", "root", "whole")
    x, w_v, w_o = _matrices(x=x, w_v=w_v, w_o=w_o)
    if logits.ndim != 3 or w_v.shape[1] != len(w_o) or not len(logits) or len(w_o) % len(logits):
        raise InputError(f"expected logits (H, n, n), w_v (d, H·a), w_o (H·a, ·); saw {_shapes(logits, w_v, w_o)}")
    logits = _float64(logits)
    _same_tokens(x, logits, w_v)
    heads = len(logits)
    values, outputs = w_v.unflatten(1, (heads, -1)).movedim(1, 0), w_o.unflatten(0, (heads, -1))
    gains = attention_gain(logits)
    largest_head = (gains * svdvals(values)[:, 0]).max()
    if form == "paper":
        rate = heads * largest_head * svdvals(outputs)[:, 0].max()
    elif form == "root":
        rate = math.sqrt(heads) * largest_head * svdvals(w_o)[0]
    else:
        rate = gains.max() * svdvals(w_v)[0] * svdvals(w_o)[0]
    output = (torch.softmax(logits, dim=-1) @ x @ values @ outputs).sum(dim=0)
    return _check("theorem 3, heads", matrix_norm(hc(output)), rate * matrix_norm(hc(x)), {}, _rounding(x, w_v, w_o))


def residual_rate(x: Tensor, branch: Tensor, rate: float | Tensor, form: str = "paper") -> BoundCheck:
    """Check what a skip does to HC. `x` and `branch` (n, d); `rate` bounds ‖HC[branch]‖_F / ‖HC[x]‖_F, a hypothesis.

    Forms, both the triangle inequality: "paper" ‖HC[x + branch]‖ ≤ (1 + rate)‖HC[x]‖, which alone does not say that a
    skip keeps anything; "lower" (1 − rate)‖HC[x]‖ ≤ ‖HC[x + branch]‖, which does, where rate < 1.
    """
    _form(form, "paper", "lower")
    x, branch = _matrices(x=x, branch=branch)
    if x.shape != branch.shape:
        raise InputError(f"expected x and branch of one shape (n, d); saw {_shapes(x, branch)}")
    before, after, added = (matrix_norm(hc(tokens)) for tokens in (x, x + branch, branch))
    rounding = _rounding(x) + _rounding(branch)
    hypotheses = {"‖HC[branch]‖ ≤ rate ‖HC[x]‖": bool(added <= rate * before * (1 + TOLERANCE) + rounding)}
    if form == "lower":
        hypotheses["rate < 1"] = bool(rate < 1)
        return _check("skip keeps HC", (1 - rate) * before, after, hypotheses, rounding)
    return _check("skip", after, (1 + rate) * before, hypotheses, rounding)


# The steepest slope of each activation; gelu's is at √2, more than 1: Φ(√2) + √2 φ(√2).
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "relu": (torch.relu, 1.0),
    "gelu": (torch.nn.functional.gelu, 0.5 + 0.5 * math.erf(1) + math.exp(-1) / math.sqrt(math.pi)),
    "identity": (lambda x: x, 1.0),
}


def ffn_rate(
    x: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor | None = None, *, activation: str = "gelu", skip: bool = False
) -> BoundCheck:
    """Check ‖HC[FFN(X)]‖_F ≤ σ₃‖HC[X]‖_F, and 1 + σ₃ with its `skip`. `x` (n, d), `w_up` (d, m), `w_down` (m, d).

    σ₃ = ‖W_up‖₂ · steepest slope of the activation · ‖W_down‖₂ is a Lipschitz constant of the FFN (1.129 is gelu's
    slope). Proof: ‖HC[Y]‖² = Σ_ij ‖y_i − y_j‖²/(2n), and no pair of tokens moves apart by more than σ₃. `b_up` (m,)
    changes the output but not σ₃. Raises InputError for an unknown activation.
    """
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    x, w_up, w_down = _matrices(x=x, w_up=w_up, w_down=w_down)
    act, slope = ACTIVATIONS[activation]
    inner = x @ w_up if b_up is None else x @ w_up + _float64(b_up)
    output = act(inner) @ w_down
    rate = svdvals(w_up)[0] * slope * svdvals(w_down)[0]
    after = matrix_norm(hc(x + output if skip else output))
    rounding = _rounding(x) + _rounding(x, w_up, w_down) + _rounding(inner, w_down)
    return _check("FFN", after, (rate + skip) * matrix_norm(hc(x)), {}, rounding)


def layer_norm_rate(x: Tensor, gain: Tensor | None = None, eps: float = 0.0, form: str = "repaired") -> BoundCheck:
    """Check how much layer norm, with `gain` g (d,) and `eps`, can raise HC. `x` (n, d).

    Theorem 3 in a pre-norm block speaks of LN(x), so needs this factor. With s_i² = var(x_i) + eps over features:
    - "paper": factor 1, the norm left out of account. False.
    - "repaired": max|g| / min_i s_i.
    - "sharp": max|g| / √(s_a s_b), s_a and s_b the two smallest s.

    Proof. Centred tokens u_i, lengthened by one fixed coordinate √(d·eps), have norm √d s_i; LN divides by s_i. For any
    two vectors ‖û − v̂‖² = 2 − 2cos ≤ ‖u−v‖²/(‖u‖‖v‖), so LN(x_i) and LN(x_j) differ by at most
    max|g| ‖x_i − x_j‖/√(s_i s_j); and ‖HC‖² is Σ_ij ‖·‖²/(2n).
    """
    _form(form, "paper", "repaired", "sharp")
    (x,) = _matrices(x=x)
    gain = torch.ones(x.shape[1], dtype=x.dtype) if gain is None else _float64(gain)
    std = (x.var(dim=1, correction=0) + eps).sqrt()
    two_smallest = std.sort().values[[0, min(1, len(x) - 1)]]
    largest = gain.abs().max()
    factors = {"paper": 1.0, "repaired": largest / std.min(), "sharp": largest / two_smallest.prod().sqrt()}
    hypotheses = {"every token varies over features": bool(std.min() > 32 * EPS * x.abs().max())}
    normed = (x - x.mean(dim=1, keepdim=True)) / std[:, None].clamp(min=1e-300) * gain
    rounding = _rounding(x) * float((largest / std.min().clamp(min=1e-300)).detach()) + _rounding(normed)
    return _check("layer norm", matrix_norm(hc(normed)), factors[form] * matrix_norm(hc(x)), hypotheses, rounding)


LOGITS = ("dot", "l2", "logistic")


def attention_logits(kind: str, x: Tensor, w_q: Tensor, w_k: Tensor) -> Tensor:
    """Return the logits (n, n) of tokens `x` (n, d) for weights (d, width), q = W_Qᵀx_i and k = W_Kᵀx_j.

    `kind` is "dot" q·k/√width, "l2" −‖q − k‖²/√width or "logistic" 1/(1 + e^{−q·k/√width}). Raises InputError for
    another.
    """
    if kind not in LOGITS:
        raise unknown("kind of logits", kind, LOGITS)
    q, k, scale = x @ w_q, x @ w_k, w_q.shape[1] ** -0.5
    if kind == "l2":
        return -(q[:, None] - k[None]).square().sum(dim=-1) * scale
    return q @ k.mT * scale if kind == "dot" else torch.sigmoid(q @ k.mT * scale)


def logit_bound(kind: str, gamma: float | Tensor, w_q: Tensor, w_k: Tensor, form: str = "paper") -> Tensor:
    """Return a bound of Theorem 3's α over all tokens of norm at most `gamma`, as a float64 scalar.

    Weights are (d, width), s = 1/√width. Form "paper" bounds max|P|:
    - "dot": γ² ‖W_Q W_Kᵀ‖₂ s (Cauchy-Schwarz); "l2": γ² (‖W_Q‖₂ + ‖W_K‖₂)² s; "logistic": 1.
    Form "half_range" bounds half the range of a row, which is all that theorem 3 needs:
    - "dot": the same. "logistic": ½ tanh(α/2), α that of "dot", so never over ½: sigmoid(α) − sigmoid(−α) = tanh(α/2).
    - "l2": with a = γ‖W_Q‖₂ and b = γ‖W_K‖₂, 2ab·s if a ≥ b, else (a+b)² s/2: ‖q − k‖ runs from max(‖q‖−b, 0)
      to ‖q‖+b over a row, and the difference of the squares grows with ‖q‖. At most half of the paper's.
    """
    if kind not in LOGITS:
        raise unknown("kind of logits", kind, LOGITS)
    _form(form, "paper", "half_range")
    w_q, w_k = _matrices(w_q=w_q, w_k=w_k)
    scale = w_q.shape[1] ** -0.5
    dot = gamma**2 * svdvals(w_q @ w_k.mT)[0] * scale
    a, b = gamma * svdvals(w_q)[0], gamma * svdvals(w_k)[0]
    if kind == "dot":
        return dot
    if kind == "logistic":
        return torch.ones((), dtype=torch.float64) if form == "paper" else torch.tanh(dot / 2) / 2
    return (a + b) ** 2 * scale if form == "paper" else torch.where(a >= b, 2 * a * b, (a + b) ** 2 / 2) * scale


def logit_check(kind: str, x: Tensor, w_q: Tensor, w_k: Tensor, form: str = "paper") -> BoundCheck:
    """Check `logit_bound` on tokens `x` (n, d), γ being their largest norm. True in both forms."""
    x, w_q, w_k = _matrices(x=x, w_q=w_q, w_k=w_k)
    logits = attention_logits(kind, x, w_q, w_k)
    bound = logit_bound(kind, vector_norm(x, dim=1).max(), w_q, w_k, form)
    half_range = (logits.amax(dim=1) - logits.amin(dim=1)).max() / 2
    largest = svdvals(w_q)[0].maximum(svdvals(w_k)[0]).detach()
    rounding = 16 * sum(w_q.shape) * EPS * float((vector_norm(x.detach(), dim=1).max() * largest) ** 2 + 1)
    return _check(f"{kind} logits", half_range if form == "half_range" else logits.abs().max(), bound, {}, rounding)


# --- Cutting the Skip -------------------------------------------------------------------------------------------------


def diffuse_rows(logits: Tensor) -> BoundCheck:
    """Check proposition 1, first half: nearly constant rows of `logits` (n, n) make A = softmax(P) ill-conditioned.

    `measured` is 1/κ(A), `bound` √(Σ_i min(sinh²(r_i/2)/n, 1 − 1/n) / (n−1)), r_i the range of row i; for small ranges
    κ(A) ≥ 2√(n−1)/r: it grows as 1/range and at least as √n. Hypothesis: n ≥ 2.

    Proof. For a row a with entries in [m, Em], E = eʳ, (a_j − m)(Em − a_j) ≥ 0 sums to Σa² ≤ m(1+E) − nEm²
    ≤ (1+E)²/(4nE), so ‖a − 1/n‖² ≤ sinh²(r/2)/n; and a distribution is never further than √(1 − 1/n) from uniform.
    J = 11ᵀ/n has rank 1, so the n−1 smallest singular values of A have squares that sum to at most ‖A − J‖_F², hence
    (n−1) σ_min² ≤ ‖A − J‖_F². And σ_max ≥ 1, since A1 = 1.
    """
    (logits,) = _square_logits(logits)
    n = len(logits)
    ranges = (logits.amax(dim=1) - logits.amin(dim=1)).clamp(max=100.0)  # sinh(50) is far beyond the other term
    distance = torch.minimum(torch.sinh(ranges / 2).square() / n, torch.full_like(ranges, 1 - 1 / n)).sum()
    values = svdvals(torch.softmax(logits, dim=-1))
    bound = (distance / max(n - 1, 1)).sqrt()
    return _check("skipless 1, diffuse", values[-1] / values[0], bound, {"n ≥ 2": n > 1}, 4 * n * EPS)


def diagonal_rows(logits: Tensor) -> BoundCheck:
    """Check proposition 1, second half: a dominant diagonal of `logits` (n, n) makes A = softmax(P) near I, so κ(A) ≈ 1.

    With g the smallest p_ii − p_ij and e = e^{−g}: κ(A) ≤ (1+ρ)/(1−ρ) where ρ < 1, the hypothesis;
    ρ² = 2δ(δ + (n−1)e/(1+e)), δ = (n−1)e/(1+(n−1)e).

    Proof. 1 − a_ii ≤ δ, so rows of |A − I| sum to at most 2δ; an entry off the diagonal is at most e/(1+e), which bounds
    the column sums; and ‖A − I‖₂² ≤ ‖A − I‖₁‖A − I‖_∞.
    """
    (logits,) = _square_logits(logits)
    n = len(logits)
    off = ~torch.eye(n, dtype=torch.bool)
    gap = (logits.diagonal()[:, None] - logits)[off].min() if n > 1 else torch.tensor(torch.inf, dtype=torch.float64)
    e = torch.exp(-gap.clamp(min=0))
    delta = (n - 1) * e / (1 + (n - 1) * e)
    rho = (2 * delta * (delta + (n - 1) * e / (1 + e))).sqrt()
    values = svdvals(torch.softmax(logits, dim=-1))
    kappa = values[0] / values[-1].clamp(min=1e-300)
    return _check(
        "skipless 1, diagonal", kappa, (1 + rho) / (1 - rho).clamp(min=0), {"ρ < 1": bool((gap > 0) & (rho < 1))}
    )


def dominant_term(main: Tensor, rest: Tensor) -> BoundCheck:
    """Check proposition 2 in a form that can be checked: κ(main + rest) stays near κ(main). Both (m, m).

    κ(main + rest) ≤ κ(main) (1 + ‖rest‖/‖main‖) / (1 − ‖rest‖/σ_min(main)), if ‖rest‖₂ < σ_min(main), the hypothesis:
    Weyl's inequality at both ends. For attention, main is (W_V W_O)ᵀ ⊗ A, with κ = κ(W_V W_O) κ(A), and rest comes from
    the softmax (`jacobian.jacobian_terms`). That ‖rest‖ is below ‖main‖ is not enough.
    """
    main, rest = _matrices(main=main, rest=rest)
    if main.shape != rest.shape or main.shape[0] != main.shape[1]:
        raise InputError(f"expected two square matrices of one size; saw {_shapes(main, rest)}")
    values, norm = svdvals(main), svdvals(rest)[0]
    remaining = 1 - norm / values[-1].clamp(min=1e-300)
    bound = _kappa(main) * (1 + norm / values[0]) / remaining.clamp(min=0)
    identity = torch.eye(len(main), dtype=torch.float64)
    dominant = {"‖rest‖ < σ_min(main)": bool(remaining > 0)}
    return _kappa_check("skipless 2", main + rest, bound, dominant, identity, main.abs() + rest.abs())


# --- Helpers ----------------------------------------------------------------------------------------------------------


def _check(
    name: str, measured: Tensor | float, bound: Tensor | float, hypotheses: dict[str, bool], rounding: float = 0.0
) -> BoundCheck:
    """Compare in float64; `rounding` is the absolute error that the computation of `measured` and `bound` may have."""
    measured, bound = (torch.as_tensor(side, dtype=torch.float64) for side in (measured, bound))
    if (measured.isnan() or bound.isnan()) and all(hypotheses.values()):
        raise InputError(f"{name} cannot be computed in float64 here: measured {float(measured)}, bound {float(bound)}")
    holds = bool(measured <= bound * (1 + TOLERANCE) + rounding)
    log_ratio = torch.zeros(()) if measured == bound else torch.log(measured) - torch.log(bound)
    return BoundCheck(
        name,
        measured=float(measured.detach()),
        bound=float(bound.detach()),
        hypotheses=hypotheses,
        holds=holds if all(hypotheses.values()) else None,
        slack=0.0 - float(log_ratio.detach()),
        log_ratio=log_ratio,
    )


def _kappa_check(
    name: str,
    right: Tensor,
    bound: Tensor,
    hypotheses: dict[str, bool],
    x: Tensor,
    *factors: Tensor,
    finite: bool = True,
) -> BoundCheck:
    """Check κ(x @ right) ≤ bound, where `right` was computed as a product of `factors`.

    A computed σ_min may be off by roundings of the product of norms. Where κ exceeds the bound only within that error,
    nothing can be said, and the hypothesis "decided in float64" fails.
    """
    product = x @ right
    values = svdvals(product)
    error = (
        4
        * max(*x.shape, *right.shape)
        * EPS
        * math.prod(float(svdvals(factor.detach())[0]) for factor in (x, *factors))
    )
    measured = _kappa(product)
    least = values[0] / (values[-1] + error)
    decided = bool((measured <= bound * (1 + TOLERANCE)) | (least > bound))
    hypotheses = hypotheses | {"κ on the right finite": bool(bound.isfinite())} if finite else hypotheses
    return _check(name, measured, bound, hypotheses | {"decided in float64": decided})


def _kappa(x: Tensor) -> Tensor:
    """Return `conditioning.condition_number` of float64 `x` (n, d), with its gradient."""
    values = svdvals(x)
    return torch.where(values[-1] <= max(x.shape) * EPS * values[0], torch.inf, values[0] / values[-1])


def _dobrushin(attn: Tensor) -> Tensor:
    """Return τ(A) = ½ max_ij Σ_k |a_ik − a_jk| of `attn` (n, n), one row against all others at a time."""
    return torch.stack([(attn - row).abs().sum(dim=1).max() for row in attn]).max() / 2


def _spread(n: int) -> float:
    """Return √(2⌊n/2⌋⌈n/2⌉/n), the largest gain of HC through a row-stochastic (n, n): √(n/2) for even n."""
    return math.sqrt(2 * (n // 2) * ((n + 1) // 2) / n)


def _rounding(x: Tensor, *weights: Tensor) -> float:
    """Return the rounding error of ‖HC[A X W …]‖_F, with margin: it scales with all of X, HC or not."""
    sizes = [float(matrix_norm(tensor.detach())) for tensor in (x, *weights)]
    return 8 * (sum(x.shape) + sum(w.shape[1] for w in weights)) * math.sqrt(len(x)) * EPS * math.prod(sizes)


def _attention(*attns: Tensor) -> list[Tensor]:
    """Return each map (n, n) in float64 with rows that sum to 1 to float64's precision."""
    checked = [_float64(check_attention(attn)) for attn in attns]
    if any(attn.ndim != 2 for attn in checked):
        raise InputError(f"a check takes one map (n, n) at a time; saw {_shapes(*checked)}")
    return [attn / attn.sum(dim=1, keepdim=True) for attn in checked]


def _float64(tensor: Tensor) -> Tensor:
    return tensor.cpu().double()  # an Apple GPU has no float64


def _matrices(**tensors: Tensor) -> list[Tensor]:
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not tensor.numel() or not tensor.isfinite().all():
            raise InputError(f"{name} must be a non-empty matrix of finite numbers; saw shape {tuple(tensor.shape)}")
    return [_float64(tensor) for tensor in tensors.values()]


def _square_logits(logits: Tensor) -> list[Tensor]:
    matrices = _matrices(logits=logits)
    if logits.shape[0] != logits.shape[1]:
        raise InputError(f"logits must be square, (n, n); saw {_shapes(logits)}")
    return matrices


def _same_tokens(x: Tensor, logits: Tensor, w_v: Tensor) -> None:
    if logits.shape[1:] != (len(x), len(x)) or x.shape[1] != len(w_v):
        raise InputError(f"expected x (n, d), logits (…, n, n), w_v (d, ·); saw {_shapes(x, logits, w_v)}")


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)


def _form(form: str, *allowed: str) -> None:
    if form not in allowed:
        raise unknown("form", form, allowed)
