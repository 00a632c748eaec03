"""Attention alone is a low-pass filter: theorem 1 and corollary 2 of Anti-Oversmoothing (arXiv 2203.05962)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import eigvals, matrix_norm, svdvals, vector_norm

from skiplab.errors import InputError
from skiplab.theory.bounds.checks import EPS, BoundCheck, attention_maps, check_form, compare, matrices, shapes
from skiplab.theory.spectral import dc, hc

MOST_DOUBLINGS = 50  # of theorem 1: at most 2^50 steps


def low_pass_limit(attn: Tensor, z: Tensor, form: str = "repaired", *, limit: float = 1e-6) -> BoundCheck:
    """Check theorem 1: for A > 0 with rows summing to 1, ‖HC[Aᵗz]‖/‖DC[Aᵗz]‖ → 0. `attn` (n, n), `z` (n, d).

    `measured` is the ratio after as many steps as the rate below needs to promise `limit` (or, with πᵀz = 0, to bring
    ‖HC[Aᵗz]‖ below `limit`·‖HC[z]‖). π is the stationary distribution. Forms:
    - "paper": A > 0. False where πᵀz = 0.
    - "repaired": A > 0 and πᵀz ≠ 0. With τ the Dobrushin coefficient, h = ‖HC[Aᵗz]‖ ≤ √(n/2) τᵗ ‖HC[z]‖ (see
      `product_low_pass`), and the mean of Aᵗz is πᵀz + (1/n − π)ᵀ HC[Aᵗz], so the ratio is at most
      h / (√n (‖πᵀz‖ − ‖π − 1/n‖ h)), which falls to 0 with τ < 1.
    - "floor": A > 0 and πᵀz = 0, where the ratio never falls: `measured` is its inverse ‖DC‖/‖HC‖, `bound` is
      √n ‖π − 1/n‖₂, by the same identity. For a doubly stochastic A it is 0, so the ratio is infinite.

    Raises InputError as `spectral.check_attention`, and where the sizes differ.
    """
    check_form(form, "paper", "repaired", "floor")
    (attn,), (z,) = attention_maps(attn), matrices(z=z)
    n = len(attn)
    if len(z) != n:
        raise InputError(f"attn (n, n) and z (n, d) must have the same n; saw {shapes(attn, z)}")
    pi = stationary_distribution(attn)
    mean = pi @ z
    mean = torch.where(mean.norm() <= 16 * n * EPS * z.norm(), 0.0, mean)
    gap, tau = vector_norm(pi - 1 / n), dobrushin(attn)
    needed = _doublings_needed(z, mean, gap, tau, limit)
    low, high = _bands_after(attn, pi, z, mean, min(math.ceil(needed), MOST_DOUBLINGS))
    reached = needed <= MOST_DOUBLINGS and bool(tau < 1)
    hypotheses = {"A > 0": bool(attn.min() > 0), f"reached within 2^{MOST_DOUBLINGS} steps": reached}
    if form == "floor":
        hypotheses |= {"πᵀz = 0": not mean.any(), "HC[Aᵗz] ≠ 0": bool(high > 0)}
        return compare("theorem 1, floor", low / high, math.sqrt(n) * gap, hypotheses, rounding=1e-9)
    if form == "repaired":
        hypotheses["πᵀz ≠ 0"] = bool(mean.any())
    return compare("theorem 1", torch.where(high > 0, high / low, 0.0), limit, hypotheses)


def _doublings_needed(z: Tensor, mean: Tensor, gap: Tensor, tau: Tensor, limit: float) -> float:
    """Return log₂ of the number of steps after which the rate of theorem 1 promises `limit`."""
    n, high = len(z), matrix_norm(hc(z))
    if not (high > 0 and 0 < tau < 1):
        return 0.0
    lowest = limit * math.sqrt(n) * mean.norm() / (1 + limit * math.sqrt(n) * gap)
    target = torch.where(mean.norm() > 0, lowest, limit * high)  # what ‖HC‖ must fall to
    return math.log2(max(1.0, float(torch.log(target / high / largest_gain(n)) / torch.log(tau))))


def _bands_after(attn: Tensor, pi: Tensor, z: Tensor, mean: Tensor, doublings: int) -> tuple[Tensor, Tensor]:
    """Return ‖DC[Aᵗz]‖ and ‖HC[Aᵗz]‖ after t = 2^doublings steps, both in the same arbitrary unit."""
    ones = torch.ones(len(attn), 1, dtype=torch.float64)
    power, log_scale = _decaying_power(attn, pi, doublings)
    rest = power @ (z - ones * mean)
    rest = rest - ones * (pi @ rest)
    mean = mean * math.exp(min(-log_scale, 700.0))  # the unit is e^log_scale
    return matrix_norm(dc(rest + mean)), matrix_norm(hc(rest))


def _decaying_power(attn: Tensor, pi: Tensor, doublings: int) -> tuple[Tensor, float]:
    """Return (M, s) with eˢ M = Aᵗ − 1πᵀ for t = 2^doublings: what is left of Aᵗ on the complement πᵀw = 0.

    A is squared on that complement and projected back onto it each time. Simply iterating A in floating point would
    leak a multiple of 1 into w, which hides where theorem 1 fails.
    """
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

    Forms: "paper" takes the asymptotic rate as a bound, |λ₂|ᵗ‖HC[z]‖_F, which a matrix that is not normal violates;
    "repaired" is corollary 2's √(n/2) τ(A)ᵗ‖HC[z]‖_F.
    """
    check_form(form, "paper", "repaired")
    (attn,), (z,) = attention_maps(attn), matrices(z=z)
    high = hc(z)
    for _ in range(steps):
        high = hc(attn @ high)
    if form == "paper":
        rate, factor = eigvals(hc(attn)).abs().max(), 1.0  # HC A has the eigenvalues of A, with 0 in place of 1
    else:
        rate, factor = dobrushin(attn), largest_gain(len(attn))
    rounding = 64 * len(attn) * EPS * float(matrix_norm(z.detach()))
    return compare("theorem 1, rate", matrix_norm(high), factor * rate**steps * matrix_norm(hc(z)), {}, rounding)


def product_low_pass(attns: Sequence[Tensor] | Tensor) -> BoundCheck:
    """Check corollary 2 with a rate: the gain of HC through A_L … A_1 is at most √(n/2) Π τ(A_l). `attns` (L, n, n).

    τ is the `dobrushin` coefficient; `measured` is ‖HC A_L … A_1 HC‖₂, HC as a projection.

    Proof, for one column z. A row of A z is an average of z, and two rows differ by at most τ times the range of z:
    range(Az) ≤ τ range(z). range(z) ≤ √2 ‖HC z‖, as the two extreme entries alone give HC that length; and
    ‖HC y‖ ≤ range(y) √(⌊n/2⌋⌈n/2⌉/n), attained where half of the entries lie at each end. Together √(n/2) for even n,
    √((n²−1)/2n) for odd n, both attained with τ = 1. A matrix z is its columns.

    So Π τ → 0 is enough for infinite depth to smooth, but it is not necessary: see counterexamples. τ is raised by n
    roundings, because rows sum to 1 only up to rounding.
    """
    attns = attention_maps(*attns)
    if len({attn.shape for attn in attns}) != 1:
        raise InputError(f"expected one or more maps of one size (n, n); saw {shapes(*attns)}")
    n = len(attns[0])
    gain = hc(torch.eye(n, dtype=torch.float64))
    bound = largest_gain(n)
    for attn in attns:
        gain = hc(attn @ gain)
        bound = bound * (dobrushin(attn) + 4 * n * EPS)
    return compare("corollary 2", svdvals(gain)[0], bound, {})


def dobrushin(attn: Tensor) -> Tensor:
    """Return Dobrushin's coefficient τ(A) = ½ max_ij Σ_k |a_ik − a_jk| of maps (…, n, n), as (…).

    One row is compared with all others at a time, so memory stays that of a few maps.
    """
    distances = [(attn - row[..., None, :]).abs().sum(dim=-1).amax(dim=-1) for row in attn.unbind(dim=-2)]
    return torch.stack(distances).amax(dim=0) / 2


def largest_gain(n: int) -> float:
    """Return √(2⌊n/2⌋⌈n/2⌉/n), the largest gain of HC through a row-stochastic (n, n): √(n/2) for even n."""
    return math.sqrt(2 * (n // 2) * ((n + 1) // 2) / n)
