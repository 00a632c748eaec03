"""Time attention spectra and the matrix-free Jacobian on one thread: `python benchmarks/spectral.py`.

Ratios are medians over rounds that time both sides one after the other, so that a busy machine slows both.
"""

import resource
import statistics
import time
from collections.abc import Callable

import torch

from skiplab.theory.jacobian import attention, attention_jacobian, autograd_jacobian, jacobian_extremes
from skiplab.theory.spectral import frequency_response


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def maps(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.softmax(torch.randn(*shape, shape[-1], dtype=dtype), dim=-1)


def explicit(attn: torch.Tensor) -> torch.Tensor:
    """Form Λ = F A F⁻¹ and take the norms of its rows."""
    n = attn.shape[-1]
    dft = torch.fft.fft(torch.eye(n, dtype=attn.dtype), norm="ortho")
    return torch.linalg.vector_norm(dft @ attn.to(dft.dtype) @ dft.conj().mT, dim=-1)


def layer(n: int, d: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(n, d, dtype=dtype)] + [torch.randn(d, d, dtype=dtype) / d**0.5 for _ in range(4)]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    arrays = layer(197, 192, torch.float32)
    tiny = layer(3, 3, torch.float32)
    jacobian_extremes(lambda z: attention(z, *tiny[1:]), tiny[0])  # loads what torch loads on first use
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for skip in (0, 1):
        start = time.perf_counter()
        found = jacobian_extremes(lambda z: skip * z + attention(z, *arrays[1:], heads=3), arrays[0])
        print(
            f"extremes of K{' + I' if skip else ''}, n·d = 197·192, 3 heads: "
            f"{time.perf_counter() - start:.1f} s (wanted ≤ 60 s), {found}"
        )
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"peak memory beyond what was in use before: {more:.0f} MiB "
        f"(dense K would take {(197 * 192) ** 2 * 4 / 2**20:.0f} MiB)"
    )
    longer = jacobian_extremes(lambda z: attention(z, *arrays[1:], heads=3), arrays[0], max_steps=150, tolerance=1e-6)
    first = jacobian_extremes(lambda z: attention(z, *arrays[1:], heads=3), arrays[0], seed=1)
    print(f"σ_max against 150 steps from another start: {first.sigma_max / longer.sigma_max - 1:.1e}")

    for dtype in (torch.float32, torch.float64):
        deit = maps(12, 6, 197, dtype=dtype)
        times = [seconds(lambda: frequency_response(deit)) for _ in range(7)]
        print(f"spectra of 12×6 maps, n = 197, {dtype}: median {statistics.median(times):.3f} s (wanted ≤ 0.5 s)")
    large = maps(785, dtype=torch.float64)
    rounds = [(seconds(lambda: explicit(large)), seconds(lambda: frequency_response(large))) for _ in range(9)]
    ratio = statistics.median(slow / fast for slow, fast in rounds)
    difference = (explicit(large) - frequency_response(large)).abs().max()
    print(
        f"explicit F A F⁻¹ / FFT, n = 785, float64: {ratio:.1f}× (wanted ≥ 5×), "
        f"largest difference {difference:.1e} (wanted ≤ 1e-10)"
    )

    for n, d in ((64, 32), (197, 10), (16, 128)):
        arrays = layer(n, d, torch.float64)
        formula, by_autograd = (
            attention_jacobian(*arrays),
            autograd_jacobian(lambda z: attention(z, *arrays[1:]), arrays[0]),
        )
        taken = seconds(lambda: attention_jacobian(*arrays))
        error = (formula - by_autograd).abs().max() / formula.abs().max()
        print(
            f"dense K, n·d = {n}·{d}: {taken:.2f} s (wanted ≤ 10 s), "
            f"formula against autograd {error:.1e} (wanted ≤ 1e-6)"
        )
        found = jacobian_extremes(lambda z: attention(z, *arrays[1:]), arrays[0])
        exact = torch.linalg.svdvals(formula)
        print(f"    σ_max matrix-free / exact − 1: {found.sigma_max / exact[0] - 1:.1e} (wanted ≤ 0.01);", end=" ")
        print(f"σ_min ≤ {found.sigma_min:.2g}, exact {exact[-1]:.2g}, converged {found.sigma_min_converged}")


if __name__ == "__main__":
    main()
