"""How much one layer can raise or lower HC: theorem 3 of Anti-Oversmoothing (arXiv 2203.05962) and its extensions."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.linalg import matrix_norm, svdvals, vector_norm

from skiplab.errors import InputError, unknown
from skiplab.theory.bounds.checks import (
    EPS,
    TOLERANCE,
    BoundCheck,
    check_form,
    compare,
    float64,
    matrices,
    rounding_of,
    shapes,
)
from skiplab.theory.bounds.low_pass import largest_gain
from skiplab.theory.spectral import hc


def attention_gain(logits: Tensor, form: str = "paper") -> Tensor:
    """Return a bound of the gain of HC through softmax(P), for `logits` P (…, n, n), as (…): theorem 3 without ‖W_V‖.

    HC A = HC A HC, since A maps what all tokens share to itself; and ‖A‖₂² ≤ ‖A‖₁‖A‖_∞, where ‖A‖_∞ = 1. Forms:
    - "paper": √(n e^{2α}/(e^{2α}+n−1)), α = max|P|: no entry of A exceeds e^{2α}/(e^{2α}+n−1), and no column sum
      exceeds n times that.
    - "range": the same with r_i, the range of row i, for 2α (softmax ignores a constant), row by row:
      ‖A‖₁ ≤ Σ_i 1/(1+(n−1)e^{−r_i}).
    - "sharp": the least of "range" and two that vanish with r = max r_i, as the gain does. (1) HC kills 1cᵀ, so take
      A − 1cᵀ with c the least entry of each column, c_k ≥ ℓ = 1/(1+(n−1)eʳ): rows sum to at most 1−nℓ, columns to
      n(u−ℓ), u = 1/(1+(n−1)e^{−r}). (2) √(n/2) tanh(r/2), from corollary 2: if p_k/q_k has a range within a factor
      e^Δ, the odds of any set differ by no more, so ½‖p−q‖₁ ≤ tanh(Δ/4); for two rows of A, Δ ≤ 2r.

    Never more than √n, and in form "sharp" never more than √(n/2), which is attained. No exponent is positive, so
    nothing overflows.
    """
    check_form(form, "paper", "range", "sharp")
    logits = float64(logits)
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
    return torch.minimum(torch.minimum(columns, (excess * spread).sqrt()), largest_gain(n) * torch.tanh(r / 2))


def attention_rate(x: Tensor, logits: Tensor, w_v: Tensor, form: str = "paper") -> BoundCheck:
    """Check theorem 3: ‖HC[softmax(P) X W_V]‖_F ≤ gain(P) ‖W_V‖₂ ‖HC[X]‖_F, with `attention_gain` in the given `form`.

    `x` (n, d), `logits` P (n, n), `w_v` (d, d'). True in all forms. So HC decays in every layer with
    ‖W_V‖₂ < 1/√n, as published. Even ‖W_V‖₂ < √(2/n) is enough, since the gain never exceeds √(n/2).
    """
    x, logits, w_v = matrices(x=x, logits=logits, w_v=w_v)
    _same_tokens(x, logits[None], w_v)
    bound = attention_gain(logits, form) * svdvals(w_v)[0] * matrix_norm(hc(x))
    measured = matrix_norm(hc(torch.softmax(logits, dim=-1) @ x @ w_v))
    return compare("theorem 3", measured, bound, {}, rounding_of(x, w_v))


def multihead_rate(x: Tensor, logits: Tensor, w_v: Tensor, w_o: Tensor, form: str = "paper") -> BoundCheck:
    """Check theorem 3 for H heads: ‖HC[Σ_h A_h X W_V^h W_O^h]‖_F ≤ rate ‖HC[X]‖_F.

    `x` (n, d), `logits` (H, n, n), `w_v` (d, H·a) and `w_o` (H·a, d'), heads side by side. g_h is the gain of head h
    in theorem 3. True in all forms:
    - "paper": H σ₁ σ₂, σ₁ = max_h g_h‖W_V^h‖₂ and σ₂ = max_h ‖W_O^h‖₂: the triangle inequality over heads.
    - "root": √H σ₁ ‖W_O‖₂: squares of the heads' HC add up before W_O. ‖W_O‖₂ ≤ √H σ₂.
    - "whole": max_h g_h ‖W_V‖₂ ‖W_O‖₂, with no H at all: Σ_h ‖HC[A_h X W_V^h]‖² ≤ max g² Σ_h ‖HC[X] W_V^h‖²
      = max g² ‖HC[X] W_V‖². ‖W_V‖₂ ≤ √H max_h ‖W_V^h‖₂, so each form is at least as sharp as the one before.
    """
    check_form(form, "paper", "root", "whole")
    x, w_v, w_o = matrices(x=x, w_v=w_v, w_o=w_o)
    if logits.ndim != 3 or w_v.shape[1] != len(w_o) or not len(logits) or len(w_o) % len(logits):
        raise InputError(f"expected logits (H, n, n), w_v (d, H·a), w_o (H·a, ·); saw {shapes(logits, w_v, w_o)}")
    logits = float64(logits)
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
    return compare("theorem 3, heads", matrix_norm(hc(output)), rate * matrix_norm(hc(x)), {}, rounding_of(x, w_v, w_o))


def residual_rate(x: Tensor, branch: Tensor, rate: float | Tensor, form: str = "paper") -> BoundCheck:
    """Check what a skip does to HC. `x` and `branch` (n, d); `rate` bounds ‖HC[branch]‖_F / ‖HC[x]‖_F, a hypothesis.

    Both forms are the triangle inequality. "paper" is ‖HC[x + branch]‖ ≤ (1 + rate)‖HC[x]‖, which does not say that a
    skip keeps any HC. "lower" is (1 − rate)‖HC[x]‖ ≤ ‖HC[x + branch]‖, which does say so where rate < 1.
    """
    check_form(form, "paper", "lower")
    x, branch = matrices(x=x, branch=branch)
    if x.shape != branch.shape:
        raise InputError(f"expected x and branch of one shape (n, d); saw {shapes(x, branch)}")
    before, after, added = (matrix_norm(hc(tokens)) for tokens in (x, x + branch, branch))
    rounding = rounding_of(x) + rounding_of(branch)
    hypotheses = {"‖HC[branch]‖ ≤ rate ‖HC[x]‖": bool(added <= rate * before * (1 + TOLERANCE) + rounding)}
    if form == "lower":
        hypotheses["rate < 1"] = bool(rate < 1)
        return compare("skip keeps HC", (1 - rate) * before, after, hypotheses, rounding)
    return compare("skip", after, (1 + rate) * before, hypotheses, rounding)


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

    σ₃ = ‖W_up‖₂ · steepest slope of the activation · ‖W_down‖₂ is a Lipschitz constant of the FFN (gelu's slope is
    1.129). Proof: ‖HC[Y]‖² = Σ_ij ‖y_i − y_j‖²/(2n), and no distance of two tokens grows by more than the factor σ₃.
    `b_up` (m,) changes the output but not σ₃. Raises InputError for an unknown activation.
    """
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    x, w_up, w_down = matrices(x=x, w_up=w_up, w_down=w_down)
    act, slope = ACTIVATIONS[activation]
    inner = x @ w_up if b_up is None else x @ w_up + float64(b_up)
    output = act(inner) @ w_down
    rate = svdvals(w_up)[0] * slope * svdvals(w_down)[0]
    after = matrix_norm(hc(x + output if skip else output))
    rounding = rounding_of(x) + rounding_of(x, w_up, w_down) + rounding_of(inner, w_down)
    return compare("FFN", after, (rate + skip) * matrix_norm(hc(x)), {}, rounding)


def layer_norm_rate(x: Tensor, gain: Tensor | None = None, eps: float = 0.0, form: str = "repaired") -> BoundCheck:
    """Check how much layer norm, with `gain` g (d,) and `eps`, can raise HC. `x` (n, d).

    In a pre-norm block theorem 3 is about LN(x), so it needs this factor. With s_i² = var(x_i) + eps over features:
    - "paper": factor 1, as if there were no norm. False.
    - "repaired": max|g| / min_i s_i.
    - "sharp": max|g| / √(s_a s_b), s_a and s_b the two smallest s.

    Proof. Centred tokens u_i, lengthened by one fixed coordinate √(d·eps), have norm √d s_i; LN divides by s_i. For any
    two vectors ‖û − v̂‖² = 2 − 2cos ≤ ‖u−v‖²/(‖u‖‖v‖), so LN(x_i) and LN(x_j) differ by at most
    max|g| ‖x_i − x_j‖/√(s_i s_j); and ‖HC‖² is Σ_ij ‖·‖²/(2n).
    """
    check_form(form, "paper", "repaired", "sharp")
    (x,) = matrices(x=x)
    gain = torch.ones(x.shape[1], dtype=x.dtype) if gain is None else float64(gain)
    std = (x.var(dim=1, correction=0) + eps).sqrt()
    two_smallest = std.sort().values[[0, min(1, len(x) - 1)]]
    largest = gain.abs().max()
    factors = {"paper": 1.0, "repaired": largest / std.min(), "sharp": largest / two_smallest.prod().sqrt()}
    hypotheses = {"every token varies over features": bool(std.min() > 32 * EPS * x.abs().max())}
    normed = (x - x.mean(dim=1, keepdim=True)) / std[:, None].clamp(min=1e-300) * gain
    rounding = rounding_of(x) * float((largest / std.min().clamp(min=1e-300)).detach()) + rounding_of(normed)
    return compare("layer norm", matrix_norm(hc(normed)), factors[form] * matrix_norm(hc(x)), hypotheses, rounding)


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
    check_form(form, "paper", "half_range")
    w_q, w_k = matrices(w_q=w_q, w_k=w_k)
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
    x, w_q, w_k = matrices(x=x, w_q=w_q, w_k=w_k)
    logits = attention_logits(kind, x, w_q, w_k)
    bound = logit_bound(kind, vector_norm(x, dim=1).max(), w_q, w_k, form)
    half_range = (logits.amax(dim=1) - logits.amin(dim=1)).max() / 2
    largest = svdvals(w_q)[0].maximum(svdvals(w_k)[0]).detach()
    rounding = 16 * sum(w_q.shape) * EPS * float((vector_norm(x.detach(), dim=1).max() * largest) ** 2 + 1)
    return compare(f"{kind} logits", half_range if form == "half_range" else logits.abs().max(), bound, {}, rounding)


def _same_tokens(x: Tensor, logits: Tensor, w_v: Tensor) -> None:
    if logits.shape[1:] != (len(x), len(x)) or x.shape[1] != len(w_v):
        raise InputError(f"expected x (n, d), logits (…, n, n), w_v (d, ·); saw {shapes(x, logits, w_v)}")
