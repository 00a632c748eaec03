"""Bounds of condition numbers: Always Skip Attention (arXiv 2505.01996) and Cutting the Skip (arXiv 2510.00345)."""

import torch
from torch import Tensor
from torch.linalg import eigvalsh, svdvals

from skiplab.errors import InputError
from skiplab.theory.bounds.checks import EPS, BoundCheck, check_form, compare, compare_kappa, kappa, matrices, shapes

# --- Always Skip Attention, section 4 -------------------------------------------------------------------------------


def cubic_condition(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, form: str = "repaired") -> BoundCheck:
    """Check proposition 4.1: κ(X W_Q W_Kᵀ Xᵀ X W_V) ≤ κ(W_Q) κ(W_K) κ(W_V) κ(X)³ for linear attention.

    `x` (n, d), weights (d, ·). Forms:
    - "paper": assumes only that the condition numbers on the right are finite. False: see counterexamples.
    - "repaired": square weights and n ≥ d. With X of full column rank the output is X M, M = W_Q W_Kᵀ XᵀX W_V square
      and invertible, and σ_min(X M) ≥ σ_min(X) σ_min(M). For n < d, M may turn the rows of X into one another.
    - "definite": any n and d, if B = W_Q W_Kᵀ has a symmetric part ≥ λ > 0 and W_V is square. The bound is
      κ(X)³ κ(W_V) ‖B‖₂/λ. For n < d, ‖(X B Xᵀ)u‖ ≥ uᵀX B Xᵀu ≥ λ σ_min(X)² for a unit u, and σ_min(X W_V) ≥
      σ_min(X) σ_min(W_V); for n ≥ d as above with σ_min(B) ≥ λ. One instance: W_Q = W_K, square and invertible.

    Raises InputError for shapes that do not fit.
    """
    x, w_q, w_k, w_v = matrices(x=x, w_q=w_q, w_k=w_k, w_v=w_v)
    check_form(form, "paper", "repaired", "definite")
    if not (len(w_q) == len(w_k) == len(w_v) == x.shape[1] and w_q.shape == w_k.shape):
        raise InputError(f"expected weights (d, ·) for tokens (n, d); saw {shapes(x, w_q, w_k, w_v)}")
    b = w_q @ w_k.mT
    square = w_v.shape[0] == w_v.shape[1]
    hypotheses = {}
    if form == "definite":
        definite = eigvalsh((b + b.mT) / 2)[0]
        hypotheses = {"symmetric part of W_Q W_Kᵀ positive": bool(definite > 0), "W_V square": square}
        bound = kappa(x) ** 3 * kappa(w_v) * svdvals(b)[0] / definite.clamp(min=0)
    else:
        bound = kappa(x) ** 3 * kappa(w_q) * kappa(w_k) * kappa(w_v)
        if form == "repaired":
            weights_square = square and w_q.shape[0] == w_q.shape[1]
            hypotheses = {"n ≥ d": x.shape[0] >= x.shape[1], "weights square": weights_square}
    right, factors = b @ x.mT @ (x @ w_v), (w_q, w_k, x, x, w_v)
    return compare_kappa("proposition 4.1", x, right, factors, bound, hypotheses | _finite(bound))


def ffn_condition(x: Tensor, w_up: Tensor, w_down: Tensor, form: str = "repaired") -> BoundCheck:
    """Check the FFN bound without activation: κ(X W_up W_down) ≤ κ(X) κ(W_up) κ(W_down).

    `x` (n, d), `w_up` (d, m), `w_down` (m, d). Forms:
    - "paper": finite condition numbers. False for the usual m = 4d: W_down may turn W_up's outputs into one another.
    - "repaired": square weights, any n and d. For invertible W, ‖uᵀX W‖ ≥ ‖uᵀX‖ σ_min(W), and likewise from the other
      side for n ≥ d, so no singular value of X shrinks by more than σ_min(W).
    - "product": κ(X) κ(W_up W_down) on the right, by the same proof, for any m. It covers the shapes that models have.
    """
    x, w_up, w_down = matrices(x=x, w_up=w_up, w_down=w_down)
    check_form(form, "paper", "repaired", "product")
    if x.shape[1] != w_up.shape[0] or w_up.shape[1] != w_down.shape[0] or w_down.shape[1] != x.shape[1]:
        raise InputError(f"expected x (n, d), w_up (d, m), w_down (m, d); saw {shapes(x, w_up, w_down)}")
    bound = kappa(x) * (kappa(w_up @ w_down) if form == "product" else kappa(w_up) * kappa(w_down))
    hypotheses = {"weights square": w_up.shape[0] == w_up.shape[1]} if form == "repaired" else {}
    return compare_kappa("FFN condition", x, w_up @ w_down, (w_up, w_down), bound, hypotheses | _finite(bound))


def skip_condition(x: Tensor, m: Tensor, form: str = "repaired") -> BoundCheck:
    """Check proposition 4.2: what adding X does to κ(X M). `x` (n, d), `m` (d, d).

    Forms, with m = ‖M‖₂:
    - "paper": κ(XM + X) ≤ κ(XM), always. False: M near −I cancels the skip.
    - "repaired": m < 1 ⇒ κ(XM + X) ≤ κ(X)(1+m)/(1−m), since the singular values of I + M lie in [1−m, 1+m] and a
      square invertible factor changes κ(X) by at most its own κ.
    - "definite": μ > −1 ⇒ κ(XM + X) ≤ κ(X)(1+m)/(1+μ), μ the smallest eigenvalue of (M + Mᵀ)/2, since
      ‖(I+M)v‖ ≥ vᵀ(I+M)v ≥ 1+μ for a unit v. As μ ≥ −m, it is never worse than "repaired", and it allows m ≥ 1.
    - "lowers": m < 1, X of full column rank and κ(M) > κ(X)²(1+m)/(1−m) ⇒ κ(XM + X) < κ(XM). By "repaired" the left
      is at most κ(X)(1+m)/(1−m) < κ(M)/κ(X) ≤ κ(XM); the last since σ_max(XM) ≥ σ_min(X) σ_max(M) and
      σ_min(XM) ≤ σ_max(X) σ_min(M).
    """
    x, m = matrices(x=x, m=m)
    check_form(form, "paper", "repaired", "definite", "lowers")
    if m.shape != (x.shape[1], x.shape[1]):
        raise InputError(f"expected x (n, d) and m (d, d); saw {shapes(x, m)}")
    skipped = m + torch.eye(len(m), dtype=m.dtype)
    norm, mu = svdvals(m)[0], eigvalsh((m + m.mT) / 2)[0]
    stretch = (1 + norm) / (1 - norm).clamp(min=0)
    hypotheses = {}
    if form == "repaired":
        bound, hypotheses = kappa(x) * stretch, {"‖M‖ < 1": bool(norm < 1)}
    elif form == "definite":
        bound, hypotheses = kappa(x) * (1 + norm) / (1 + mu).clamp(min=0), {"M + Mᵀ > −2": bool(mu > -1)}
    else:
        bound = kappa(x @ m)
    if form == "lowers":
        hypotheses = {
            "‖M‖ < 1": bool(norm < 1),
            "X of full column rank": x.shape[0] >= x.shape[1] and bool(kappa(x).isfinite()),
            "κ(M) > κ(X)²(1+‖M‖)/(1−‖M‖)": bool(kappa(m) > kappa(x) ** 2 * stretch),
        }
    if form in ("repaired", "definite"):
        hypotheses |= _finite(bound)
    return compare_kappa("proposition 4.2", x, skipped, (skipped,), bound, hypotheses)


def _finite(bound: Tensor) -> dict[str, bool]:
    """Return the hypothesis that the condition numbers on the right of a bound are finite."""
    return {"κ on the right finite": bool(bound.isfinite())}


# --- Cutting the Skip -----------------------------------------------------------------------------------------------


def diffuse_rows(logits: Tensor) -> BoundCheck:
    """Check proposition 1, first half: nearly constant rows of `logits` (n, n) make A = softmax(P) ill-conditioned.

    `measured` is 1/κ(A), `bound` √(Σ_i min(sinh²(r_i/2)/n, 1 − 1/n) / (n−1)), r_i the range of row i. For small ranges
    κ(A) ≥ 2√(n−1)/r: it grows as 1/range and at least as √n. Hypothesis: n ≥ 2.

    Proof. For a row a with entries in [m, Em], E = eʳ, (a_j − m)(Em − a_j) ≥ 0 sums to Σa² ≤ m(1+E) − nEm²
    ≤ (1+E)²/(4nE), so ‖a − 1/n‖² ≤ sinh²(r/2)/n; and a distribution is never further than √(1 − 1/n) from uniform.
    J = 11ᵀ/n has rank 1, so the n−1 smallest singular values of A have squares that sum to at most ‖A − J‖_F², hence
    (n−1) σ_min² ≤ ‖A − J‖_F². And σ_max ≥ 1, since A1 = 1.
    """
    logits = _square_logits(logits)
    n = len(logits)
    ranges = (logits.amax(dim=1) - logits.amin(dim=1)).clamp(max=100.0)  # sinh(50) is far beyond the other term
    distance = torch.minimum(torch.sinh(ranges / 2).square() / n, torch.full_like(ranges, 1 - 1 / n)).sum()
    values = svdvals(torch.softmax(logits, dim=-1))
    bound = (distance / max(n - 1, 1)).sqrt()
    return compare("skipless 1, diffuse", values[-1] / values[0], bound, {"n ≥ 2": n > 1}, 4 * n * EPS)


def diagonal_rows(logits: Tensor) -> BoundCheck:
    """Check proposition 1, second half: a dominant diagonal of `logits` P (n, n) brings A = softmax(P) near I.

    Then κ(A) ≈ 1. With g the smallest p_ii − p_ij and e = e^{−g}: κ(A) ≤ (1+ρ)/(1−ρ) under the hypothesis ρ < 1, where
    ρ² = 2δ(δ + (n−1)e/(1+e)) and δ = (n−1)e/(1+(n−1)e).

    Proof. 1 − a_ii ≤ δ, so rows of |A − I| sum to at most 2δ. An entry off the diagonal is at most e/(1+e), which
    bounds the column sums. And ‖A − I‖₂² ≤ ‖A − I‖₁‖A − I‖_∞.
    """
    logits = _square_logits(logits)
    n = len(logits)
    off = ~torch.eye(n, dtype=torch.bool)
    gap = (logits.diagonal()[:, None] - logits)[off].min() if n > 1 else torch.tensor(torch.inf, dtype=torch.float64)
    e = torch.exp(-gap.clamp(min=0))
    delta = (n - 1) * e / (1 + (n - 1) * e)
    rho = (2 * delta * (delta + (n - 1) * e / (1 + e))).sqrt()
    values = svdvals(torch.softmax(logits, dim=-1))
    bound = (1 + rho) / (1 - rho).clamp(min=0)
    hypotheses = {"ρ < 1": bool((gap > 0) & (rho < 1))}
    return compare("skipless 1, diagonal", values[0] / values[-1].clamp(min=1e-300), bound, hypotheses)


def dominant_term(main: Tensor, rest: Tensor) -> BoundCheck:
    """Check a form of proposition 2 that can be checked: κ(main + rest) stays near κ(main). Both (m, m).

    κ(main + rest) ≤ κ(main) (1 + ‖rest‖/‖main‖) / (1 − ‖rest‖/σ_min(main)), if ‖rest‖₂ < σ_min(main), the hypothesis,
    by Weyl's inequality at both ends. For attention, main is (W_V W_O)ᵀ ⊗ A, with κ = κ(W_V W_O) κ(A), and rest comes
    from the softmax (`jacobian.jacobian_terms`). It is not enough that ‖rest‖ is below ‖main‖.
    """
    main, rest = matrices(main=main, rest=rest)
    if main.shape != rest.shape or main.shape[0] != main.shape[1]:
        raise InputError(f"expected two square matrices of one size; saw {shapes(main, rest)}")
    values, norm = svdvals(main), svdvals(rest)[0]
    remaining = 1 - norm / values[-1].clamp(min=1e-300)
    bound = kappa(main) * (1 + norm / values[0]) / remaining.clamp(min=0)
    hypotheses = {"‖rest‖ < σ_min(main)": bool(remaining > 0)} | _finite(bound)
    identity, factors = torch.eye(len(main), dtype=torch.float64), (main.abs() + rest.abs(),)
    return compare_kappa("skipless 2", identity, main + rest, factors, bound, hypotheses)


def _square_logits(logits: Tensor) -> Tensor:
    (checked,) = matrices(logits=logits)
    if logits.shape[0] != logits.shape[1]:
        raise InputError(f"logits must be square, (n, n); saw {shapes(logits)}")
    return checked
