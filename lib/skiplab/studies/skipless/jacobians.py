"""The formulas of self-attention's Jacobian in Cutting the Skip (arXiv 2510.00345), against autograd."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.linalg import matrix_norm

from skiplab.companion.cases import Draws
from skiplab.companion.judging import Measurement
from skiplab.theory.conditioning import singular_values
from skiplab.theory.jacobian import attention, attention_jacobian, autograd_jacobian

DIFFERENCE = 1e-6  # relative, above which a formula of the Jacobian counts as violated


def jacobian_cases(cases: int, seed: int = 0) -> dict[str, Measurement]:
    """Try the four statements about the Jacobian on `cases` random layers each; return each measurement by its id."""
    tests = {
        "cut.jacobian.formula": _formula,
        "cut.jacobian.skip": _with_skip,
        "cut.jacobian.product": _stacked,
        "cut.jacobian.layernorm": _through_norm,
    }
    return {claim: _count(test, cases, seed) for claim, test in tests.items()}


def _count(test: Callable[[Draws], float], cases: int, seed: int) -> Measurement:
    draws = Draws(seed)
    found = [test(draws) for _ in range(cases)]
    return Measurement(
        violations=sum(not value <= DIFFERENCE for value in found),
        cases=cases,
        note=f"largest relative difference {max(found):.1e}",
    )


def _layer(draws: Draws, d: int, heads: int) -> tuple[Tensor, ...]:
    """Return W_Q, W_K, W_V, W_O of a layer, its attention anything from uniform to sharp."""
    sharpness = 10 ** draws.uniform(-2, 0.5)
    w_q, w_k, w_v, w_o = (draws.normal(d, d) / math.sqrt(d) for _ in range(4))
    return sharpness * w_q, w_k, w_v, w_o


def _shape(draws: Draws) -> tuple[int, int, int]:
    heads = draws.whole(1, 2)
    return draws.whole(2, 6), heads * draws.whole(2, 3), heads


def apart(found: Tensor, expected: Tensor) -> float:
    return float(matrix_norm(found - expected) / matrix_norm(expected))


def _formula(draws: Draws) -> float:
    n, d, heads = _shape(draws)
    x, w = draws.normal(n, d), _layer(draws, d, heads)
    return apart(attention_jacobian(x, *w, heads), autograd_jacobian(lambda z: attention(z, *w, heads), x))


def _with_skip(draws: Draws) -> float:
    n, d, heads = _shape(draws)
    x, w = draws.normal(n, d), _layer(draws, d, heads)
    expected = attention_jacobian(x, *w, heads) + torch.eye(n * d, dtype=x.dtype)
    return apart(autograd_jacobian(lambda z: z + attention(z, *w, heads), x), expected)


def _stacked(draws: Draws) -> float:
    n, d, heads = _shape(draws)
    x, stack = draws.normal(n, d), [_layer(draws, d, heads) for _ in range(draws.whole(2, 4))]

    def whole(z: Tensor) -> Tensor:
        for w in stack:
            z = attention(z, *w, heads)
        return z

    product, z = torch.eye(n * d, dtype=x.dtype), x
    for w in stack:
        product, z = attention_jacobian(z, *w, heads) @ product, attention(z, *w, heads)
    return apart(product, autograd_jacobian(whole, x))


def _through_norm(draws: Draws) -> float:
    """Return σ_min/σ_max of the Jacobian of SA(LN(x))."""
    n, d, heads = _shape(draws)
    d = max(d, 3 * heads)  # tokens of two dimensions have no Jacobian but 0 through LayerNorm
    x, w = draws.normal(n, d), _layer(draws, d, heads)
    values = singular_values(
        autograd_jacobian(lambda z: attention(nn.functional.layer_norm(z, (d,), eps=0.0), *w, heads), x)
    )
    return float(values[-1] / values[0])
