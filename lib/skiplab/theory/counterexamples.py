"""Counterexamples to published statements, and a search for the worst case of any statement.

Each function builds inputs of one check of `skiplab.theory.bounds` for which the form "paper" is false; the docstring
says which repaired form survives. The statements are those of arXiv 2505.01996 (section 4), 2203.05962 and 2510.00345.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skiplab import draws
from skiplab.errors import InputError
from skiplab.theory.bounds import BoundCheck, stationary_distribution
from skiplab.theory.spectral import dc


def cubic_wide(theta: float = 1.5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (x, w_q, w_k, w_v) with n = 2 < d = 4 and κ(output) = 1/cos θ, where proposition 4.1 says 1.

    X = [I₂ 0] and W_K = W_V = I; W_Q turns the first feature by θ towards the third, which no token has. Then
    X W_Q W_Kᵀ Xᵀ = diag(cos θ, 1). Repaired: n ≥ d, or a positive symmetric part of W_Q W_Kᵀ (here cos θ > 0, and the
    bound 1/cos θ is attained).
    """
    w_q = torch.eye(4, dtype=torch.float64)
    w_q[0, 0] = w_q[2, 2] = math.cos(theta)
    w_q[0, 2], w_q[2, 0] = math.sin(theta), -math.sin(theta)
    identity = torch.eye(4, dtype=torch.float64)
    return identity[:2], w_q, identity, identity


def cubic_heads(theta: float = 1.5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (x, w_q, w_k, w_v) with n = d = 3, weights (3, 2) and κ(output) = 1/cos θ, where 4.1 says 1.

    n ≥ d does not save the proposition when a head is narrower than the tokens: W_V has columns e₁ and e₂, W_K has
    cos θ e₁ + sin θ e₃ and e₂, so W_Kᵀ XᵀX W_V = diag(cos θ, 1). Repaired: square weights.
    """
    identity = torch.eye(3, dtype=torch.float64)
    w_k = identity[:, :2].clone()
    w_k[0, 0], w_k[2, 0] = math.cos(theta), math.sin(theta)
    return identity, identity[:, :2], w_k, identity[:, :2]


def ffn_wide(theta: float = 1.5, d: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x, w_up, w_down) of shapes (2d, d), (d, 4d), (4d, d), all of κ = 1, with κ(X W_up W_down) = 1/cos θ.

    W_up = [I 0]; W_down has orthonormal columns, the first turned by θ out of the d rows that W_up reaches. Repaired:
    square weights, or κ(W_up W_down) on the right.
    """
    w_up = torch.eye(d, 4 * d, dtype=torch.float64)
    w_down = torch.eye(4 * d, d, dtype=torch.float64)
    w_down[0, 0], w_down[d, 0] = math.cos(theta), math.sin(theta)
    return torch.eye(2 * d, d, dtype=torch.float64), w_up, w_down


def skip_cancels(distance: float = 1e-6, d: int = 4) -> tuple[Tensor, Tensor]:
    """Return (x, m) where adding X raises κ(X M) = 5/2 to 1.5·5/distance: M = diag(−1 + distance, ½, …, ½).

    X = diag(1, …, 1, 5), so κ(X) = 5. Repaired: ‖M‖ < 1, which does hold here, bounds κ(XM + X) but only by
    κ(X)(2 − distance)/distance; for XM + X to be *better* than XM, κ(M) must exceed κ(X)²(1+m)/(1−m).
    """
    x = torch.eye(d, dtype=torch.float64)
    x[-1, -1] = 5
    m = torch.eye(d, dtype=torch.float64) / 2
    m[0, 0] = distance - 1
    return x, m


def stationary_mean_zero(n: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return (attn, z), A positive and πᵀz = 0: theorem 1's ratio ‖HC[Aᵗz]‖/‖DC[Aᵗz]‖ does not go to 0.

    All of Aᵗz goes to 0, within the complement πᵀw = 0, which A maps to itself. Repaired: πᵀz ≠ 0.
    """
    generator = torch.Generator().manual_seed(seed)
    attn = torch.softmax(draws.normal(n, n, generator=generator), dim=1)
    z = draws.normal(n, 1, generator=generator)
    return attn, z - stationary_distribution(attn) @ z


def amplifying_attention(n: int = 16, floor: float = 1e-3) -> tuple[Tensor, Tensor]:
    """Return (attn, z), A positive with λ₂ = 0, whose first step raises ‖HC‖ by nearly √(n/2), despite |λ₂|ᵗ = 0.

    Half of the tokens, 1 and 2 among them, look at token 1, the others at token 2, and z = e₁ − e₂; `floor` of the
    weight is spread evenly. Rows 1 and 2 are equal, so A² has equal rows. Repaired: √(n/2) τ(A)ᵗ.
    """
    sharp = torch.zeros(n, n, dtype=torch.float64)
    sharp[: n // 2, 0] = sharp[n // 2 :, 1] = 1
    z = torch.zeros(n, 1, dtype=torch.float64)
    z[0], z[1] = 1, -1
    return (1 - floor) * sharp + floor / n, z


def never_smoothing(layers: int = 48, n: int = 8) -> Tensor:
    """Return positive maps (layers, n, n) whose product keeps 29 % of every HC for ever, despite corollary 2.

    A_l = (1 − 2⁻ˡ) I + 2⁻ˡ 11ᵀ/n scales HC by exactly 1 − 2⁻ˡ, and Π (1 − 2⁻ˡ) → 0.2888. Repaired: it smooths if
    Π τ(A_l) → 0.
    """
    share = 0.5 ** torch.arange(1, layers + 1, dtype=torch.float64)[:, None, None]
    return (1 - share) * torch.eye(n, dtype=torch.float64) + share / n


def smoothing_despite_tau(layers: int = 48) -> Tensor:
    """Return positive maps (layers, 4, 4) with Π τ(A_l) > 0.28 whose product smooths everything in two layers.

    Odd layers average tokens {1,2} and {3,4}, even ones {1,3} and {2,4}; each mixes in 2⁻ˡ of 11ᵀ/4 to be positive.
    One layer alone has τ = 1 − 2⁻ˡ, but two make 11ᵀ/4. So Π τ → 0 is sufficient for smoothing, not necessary.
    """
    pair, identity = torch.full((2, 2), 0.5, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    two = torch.stack([torch.kron(identity, pair), torch.kron(pair, identity)])
    maps = two.repeat((layers + 1) // 2, 1, 1)[:layers]
    share = 0.5 ** torch.arange(1, layers + 1, dtype=torch.float64)[:, None, None]
    return (1 - share) * maps + share / 4


def skip_high_pass(n: int = 6, d: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return (x, branch), a block with its skip that removes DC and keeps HC: x + A x W_V with A = 11ᵀ/n and W_V = −I.

    So for a skip theorem 3 gives the factor 1 + rate and no more. It does not follow that a skip treats both bands
    alike: here ‖HC‖/‖DC‖ rises to infinity.
    """
    x = draws.normal(n, d, generator=torch.Generator().manual_seed(seed)) + 1
    return x, -dc(x)


def layer_norm_raises(size: float = 1e-3, n: int = 4) -> Tensor:
    """Return tokens `x` (n, n) whose HC layer norm raises by about √n/size: a constant plus `size` in one feature each.

    The constant is invisible to layer norm, which divides by the small rest. Repaired: the factor 1/min std(x_i), here
    attained.
    """
    return 1 + size * torch.eye(n, dtype=torch.float64)


@dataclass(frozen=True)
class Tightest:
    """The largest `ratio` measured/bound that `adversarial_search` found, with its check and inputs."""

    ratio: float
    check: BoundCheck
    inputs: tuple[Tensor, ...]


def adversarial_search(
    check: Callable[..., BoundCheck],
    sample: Callable[[torch.Generator], tuple[Tensor, ...]],
    *,
    restarts: int = 4,
    steps: int = 100,
    step_size: float = 0.05,
    seed: int = 0,
) -> Tightest:
    """Make measured/bound of `check` as large as possible by gradient ascent (Adam) from random starts.

    `sample(generator)` draws the tensors that `check` takes; all of them are moved. An input with a constraint (a
    distribution, an orthogonal matrix) is built from free tensors inside `check`. Only points where every hypothesis
    holds count. A ratio over 1 refutes the statement; near 1 the bound is tight. Raises InputError if no point counts.
    """
    generator = torch.Generator().manual_seed(seed)
    best: Tightest | None = None
    for _ in range(restarts):
        inputs = [tensor.double().clone().requires_grad_() for tensor in sample(generator)]
        optimiser = torch.optim.Adam(inputs, lr=step_size, maximize=True)
        for _ in range(steps):
            found = check(*inputs)
            ratio = math.exp(min(-found.slack, 700.0))
            if found.holds is not None and not (best and best.ratio >= ratio):
                best = Tightest(ratio, found, tuple(tensor.detach().clone() for tensor in inputs))
            if not (found.log_ratio.requires_grad and found.log_ratio.isfinite()):
                break
            optimiser.zero_grad()
            found.log_ratio.backward()
            for tensor in inputs:  # equal singular values or a norm at 0 have no gradient
                tensor.grad = torch.nan_to_num(tensor.grad, 0.0, 0.0, 0.0) if tensor.grad is not None else None
            optimiser.step()
    if best is None:
        raise InputError(
            f"adversarial_search saw no point where all hypotheses hold, in {restarts} restarts; change `sample`"
        )
    return best
