"""Both sides of every bound, written a second time with numpy and mpmath."""

import math

import mpmath
import numpy as np
import pytest
import torch

from skiplab.theory import bounds
from statements import Case, square


def gain_mpmath(logits, form):
    """Theorem 3's factor with 50 digits, written with positive exponents as in the paper."""
    mpmath.mp.dps = 50
    p = [[mpmath.mpf(float(v)) for v in row] for row in logits]
    n = len(p)
    r = [max(row) - min(row) for row in p]
    if form == "paper":
        e = mpmath.exp(2 * max(abs(v) for row in p for v in row))
        return mpmath.sqrt(n * e / (e + n - 1))
    columns = mpmath.sqrt(sum(mpmath.exp(v) / (mpmath.exp(v) + n - 1) for v in r))
    if form == "range":
        return columns
    e = mpmath.exp(max(r))
    u, least = e / (e + n - 1), 1 / (1 + (n - 1) * e)
    half = mpmath.mpf(n // 2) * ((n + 1) // 2) * 2 / n
    return min(columns, mpmath.sqrt(n * (u - least) * (1 - n * least)), mpmath.sqrt(half) * mpmath.tanh(max(r) / 2))


@pytest.mark.parametrize("form", ["paper", "range", "sharp"])
@pytest.mark.parametrize("size", [0.0, 1e-9, 1e-3, 1.0, 30.0, 1e3, 1e6])
@pytest.mark.parametrize("n", [1, 2, 5, 197])
def test_attention_gain_against_fifty_digits(n, size, form):
    logits = size * torch.randn(n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    expected = float(gain_mpmath(logits, form))
    assert float(bounds.attention_gain(logits, form)) == pytest.approx(expected, rel=1e-12, abs=1e-300)


def numpy_kappa(x):
    s = np.linalg.svd(x, compute_uv=False)
    return s[0] / s[-1]


def numpy_hc(x):
    return np.linalg.norm(x - x.mean(axis=0))


def numpy_softmax(p):
    weights = np.exp(p - p.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def norm2(m):
    return np.linalg.norm(m, 2)


def gelu(z):
    return z * (1 + np.vectorize(math.erf)(z / np.sqrt(2))) / 2


c = Case(6, 4, 0, "normal", 3)
x, q, k, v, o, p = (t.numpy() for t in (*square(c), c.weight(4, 4), c.normal(2, 10, 10)))
up, down, b = (t.numpy() for t in (c.weight(4, 9), c.weight(9, 4), c.normal(9)))
t = torch.from_numpy
a = numpy_softmax(p[0])
alpha = np.abs(p[0]).max()
gain = np.sqrt(10 * np.exp(2 * alpha) / (np.exp(2 * alpha) + 9))
gains = [np.sqrt(10 * np.exp(2 * np.abs(h).max()) / (np.exp(2 * np.abs(h).max()) + 9)) for h in p]
tau = max(np.abs(a[i] - a[j]).sum() / 2 for i in range(10) for j in range(10))
centre = np.eye(10) - 0.1
std = x.std(axis=1)
multi = sum(numpy_softmax(h) @ x @ v[:, s] @ o[s] for h, s in zip(p, (slice(0, 2), slice(2, 4)), strict=True))
heads_norm = max(g * norm2(v[:, s]) for g, s in zip(gains, (slice(0, 2), slice(2, 4)), strict=True))
row = np.ptp(p[0], axis=1)
FORMULAS = [
    (
        bounds.cubic_condition(*map(t, (x, q, k, v))),
        numpy_kappa(x @ q @ k.T @ x.T @ x @ v),
        numpy_kappa(q) * numpy_kappa(k) * numpy_kappa(v) * numpy_kappa(x) ** 3,
    ),
    (
        bounds.ffn_condition(*map(t, (x, up, down)), "paper"),
        numpy_kappa(x @ up @ down),
        numpy_kappa(x) * numpy_kappa(up) * numpy_kappa(down),
    ),
    (
        bounds.ffn_condition(*map(t, (x, up, down)), "product"),
        numpy_kappa(x @ up @ down),
        numpy_kappa(x) * numpy_kappa(up @ down),
    ),
    (bounds.skip_condition(t(x), t(q), "paper"), numpy_kappa(x @ q + x), numpy_kappa(x @ q)),
    (
        bounds.skip_condition(t(x), t(q / norm2(q) / 2)),
        numpy_kappa(x @ q / norm2(q) / 2 + x),
        numpy_kappa(x) * 1.5 / 0.5,
    ),
    (bounds.product_low_pass(t(a)[None]), norm2(centre @ a @ centre), np.sqrt(5) * tau),
    (bounds.product_low_pass(torch.stack([t(a)] * 3)), norm2(centre @ a @ a @ a @ centre), np.sqrt(5) * tau**3),
    (bounds.low_pass_rate(t(a), t(x), 2), numpy_hc(a @ a @ x), np.sqrt(5) * tau**2 * numpy_hc(x)),
    (
        bounds.low_pass_rate(t(a), t(x), 2, "paper"),
        numpy_hc(a @ a @ x),
        sorted(np.abs(np.linalg.eigvals(a)))[-2] ** 2 * numpy_hc(x),
    ),
    (bounds.attention_rate(t(x), t(p[0]), t(v)), numpy_hc(a @ x @ v), gain * norm2(v) * numpy_hc(x)),
    (
        bounds.multihead_rate(t(x), t(p), t(v), t(o)),
        numpy_hc(multi),
        2 * heads_norm * max(norm2(o[:2]), norm2(o[2:])) * numpy_hc(x),
    ),
    (
        bounds.multihead_rate(t(x), t(p), t(v), t(o), "root"),
        numpy_hc(multi),
        np.sqrt(2) * heads_norm * norm2(o) * numpy_hc(x),
    ),
    (
        bounds.multihead_rate(t(x), t(p), t(v), t(o), "whole"),
        numpy_hc(multi),
        max(gains) * norm2(v) * norm2(o) * numpy_hc(x),
    ),
    (bounds.residual_rate(t(x), t(2 * x), 2.5), 3 * numpy_hc(x), 3.5 * numpy_hc(x)),
    (bounds.residual_rate(t(x), t(-x / 2), 0.75, "lower"), 0.25 * numpy_hc(x), 0.5 * numpy_hc(x)),
    (
        bounds.ffn_rate(t(x), t(up), t(down), t(b)),
        numpy_hc(gelu(x @ up + b) @ down),
        1.128904 * norm2(up) * norm2(down) * numpy_hc(x),
    ),
    (
        bounds.ffn_rate(t(x), t(up), t(down), activation="relu", skip=True),
        numpy_hc(x + np.maximum(x @ up, 0) @ down),
        (1 + norm2(up) * norm2(down)) * numpy_hc(x),
    ),
    (
        bounds.layer_norm_rate(t(x), t(b[:4])),
        numpy_hc((x - x.mean(1, keepdims=True)) / std[:, None] * b[:4]),
        np.abs(b[:4]).max() / std.min() * numpy_hc(x),
    ),
    (
        bounds.layer_norm_rate(t(x), form="sharp"),
        numpy_hc((x - x.mean(1, keepdims=True)) / std[:, None]),
        numpy_hc(x) / np.sqrt(np.prod(sorted(std)[:2])),
    ),
    (
        bounds.diffuse_rows(t(p[0] / 100)),
        1 / numpy_kappa(numpy_softmax(p[0] / 100)),
        np.sqrt((np.sinh(row / 200) ** 2).sum() / 10 / 9),
    ),
    (
        bounds.logit_check("dot", t(x), t(up), t(up)),
        np.abs(x @ up @ up.T @ x.T).max() / 3,
        (x**2).sum(1).max() * norm2(up @ up.T) / 3,
    ),
    (
        bounds.logit_check("l2", t(x), t(q), t(k)),
        max(((i @ q - j @ k) ** 2).sum() for i in x for j in x) / 2,
        (x**2).sum(1).max() * (norm2(q) + norm2(k)) ** 2 / 2,
    ),
]


@pytest.mark.parametrize(("check", "measured", "bound"), FORMULAS)
def test_measured_and_bound_equal_numpy(check, measured, bound):
    assert check.measured == pytest.approx(measured, rel=1e-9), check.name
    assert check.bound == pytest.approx(bound, rel=1e-6), check.name
