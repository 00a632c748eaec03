"""Time the dense Jacobian, TokenCut and the skipless initialisation of a ViT-B: `python benchmarks/skipless.py`.

Times are processor times on one thread, the median of `--rounds`; the initialisation is also timed on two threads, by
the clock, which wants a machine with nothing else to do.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from skiplab.models import create_model
from skiplab.models.skipless import SkiplessInit
from skiplab.studies.skipless import inside
from skiplab.theory.conditioning import condition_number
from skiplab.training.dense import token_cut


def median(function: Callable[[], object], rounds: int, clock: Callable[[], float] = time.process_time) -> float:
    """Return the median time of one call, after a first that is not counted."""
    function()
    times = []
    for _ in range(rounds):
        start = clock()
        function()
        times.append(clock() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| measured | time | wanted |\n|---|---|---|")

    block = (
        create_model(
            "vit",
            num_classes=0,
            img_size=224,
            patch_size=28,
            embed_dim=32,
            num_heads=2,
            depth=1,
            skip="none",
            init=SkiplessInit(),
        )
        .double()
        .blocks[0]
    )
    tokens = torch.randn(64, 32, dtype=torch.float64)
    with torch.no_grad():
        seconds = median(lambda: inside.jacobian(block, block.norm1(tokens), skip=False), arguments.rounds)
        print(f"| dense K, n·d = 64·32, 2 heads | {seconds:.2f} s | ≤ 10 s |")
        k = inside.jacobian(block, block.norm1(tokens), skip=False)
        print(f"| … and κ(K), its SVD in float64 | {median(lambda: condition_number(k), 1):.2f} s | |")

    for d in (384, 768):
        grid = torch.randn(14, 14, d)
        seconds = median(lambda grid=grid: token_cut(grid), 4 * arguments.rounds)
        print(
            f"| TokenCut, 14×14 patches (197 tokens with the class token), width {d} "
            f"| {1e3 * seconds:.1f} ms | ≤ 50 ms |"
        )

    for threads, clock in ((1, time.process_time), (2, time.perf_counter)):
        torch.set_num_threads(threads)
        start = clock()
        create_model("vit_base_patch16_224", num_classes=1000, skip="none", init=SkiplessInit())
        print(
            f"| initialising ViT-B on {threads} thread{'s' * (threads > 1)} | {clock() - start:.1f} s |"
            f"{' ≤ 30 s' if threads == 2 else ''} |"
        )


if __name__ == "__main__":
    main()
