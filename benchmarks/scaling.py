"""What AttnScale and FeatScale cost, at the width of DeiT-S (384, 6 heads), forward and backward; one CPU thread.

    python benchmarks/scaling.py [--pairs 15] [--json FILE]

The whole attention module with AttnScale, projections included, is timed against the formula read directly, which
forms L + (1 + ω)(A − L), and against attention without it. The methods take turns, and the median of the ratios of
each turn is reported, so that a machine that changes its speed does not matter. Times are processor times. Peak
memory is what one forward and backward add to the resident memory of a fresh process (Linux), in which the same ran
on few tokens before.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer

from skiplab.models.scaling import apply_scaling

SHORT, MIDDLE, LONG = 197, 785, 1569  # tokens: 14², 28² and (two frames) 2 · 28² patches and a class token
BATCH = {SHORT: 16, LONG: 1}  # images a step


class Materialised(Attention):
    """AttnScale as its formula says it, with n×n maps."""

    def forward(self, x, attn_mask=None, is_causal=False):
        batch, n, d = x.shape
        query, key, value = self.qkv(x).reshape(batch, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attn = (query * self.scale @ key.mT).softmax(dim=-1)
        low_pass = torch.full((n, n), 1 / n)
        attn = low_pass + (1 + self.omega[:, None, None]) * (attn - low_pass)
        return self.proj((attn @ value).transpose(1, 2).reshape(batch, n, d))


def block(kind: str) -> torch.nn.Module:
    """Return a block of DeiT-S: "plain", "materialised", "attnscale" or "featscale", with scales that are not zero."""
    torch.manual_seed(0)
    model = VisionTransformer(embed_dim=384, depth=1, num_heads=6)
    attention = model.blocks[0].attn
    if kind == "materialised":
        attention.__class__ = Materialised
        attention.omega = torch.nn.Parameter(torch.zeros(6))
    elif kind != "plain":
        apply_scaling(model, kind)
    for name, parameter in model.named_parameters():
        if name.endswith((".omega", ".s", ".t")):
            torch.nn.init.constant_(parameter, 0.3)
    return model.blocks[0]


def step(module: torch.nn.Module, n: int, batch: int) -> None:
    """Run forward and backward on `batch` sequences of `n` tokens."""
    tokens = torch.randn(batch, n, 384, requires_grad=True)
    module(tokens).square().sum().backward()


def ratios(first: Callable[[], None], second: Callable[[], None], pairs: int) -> list[float]:
    """Return how many times as long `first` takes, for each turn."""

    def seconds(function):
        start = time.process_time()
        function()
        return time.process_time() - start

    first(), second()  # warm up
    return [seconds(first) / seconds(second) for _ in range(pairs)]


def peak(kind: str, n: int) -> float:
    """Return the peak memory in MB of attention with AttnScale on one sequence, in a process of its own."""
    run = subprocess.run(
        [sys.executable, __file__, "--peak", kind, str(n)], capture_output=True, check=True, encoding="utf-8"
    )
    return float(run.stdout)


def print_peak(kind: str, n: int) -> None:
    attention = block(kind).attn
    step(attention, 8, 1)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak of importing
    before = resident("VmRSS")
    step(attention, n, 1)
    print(resident("VmHWM") - before)


def resident(field: str) -> float:
    """Return this process's resident memory, now ("VmRSS") or at its highest ("VmHWM"), in MB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        return print_peak(arguments.peak[0], int(arguments.peak[1]))

    blocks = {kind: block(kind) for kind in ("plain", "materialised", "attnscale", "featscale")}
    raw = {}
    for n in (SHORT, LONG):
        runs = {kind: (lambda kind=kind, n=n: step(blocks[kind].attn, n, BATCH[n])) for kind in blocks}
        for title, first, second in (
            ("formula / AttnScale", "materialised", "attnscale"),
            ("AttnScale / plain", "attnscale", "plain"),
        ):
            raw[f"attention, n = {n}: {title}"] = ratios(runs[first], runs[second], arguments.pairs)
    whole = {kind: (lambda kind=kind: step(blocks[kind], SHORT, BATCH[SHORT])) for kind in ("featscale", "plain")}
    raw[f"block, n = {SHORT}: FeatScale / plain"] = ratios(whole["featscale"], whole["plain"], arguments.pairs)
    results = {name: statistics.median(values) for name, values in raw.items()}
    for kind, title in (("attnscale", "AttnScale"), ("materialised", "formula")):
        middle, long = peak(kind, MIDDLE), peak(kind, LONG)
        results[f"peak memory of {title}, n = {MIDDLE} (MB)"] = middle
        results[f"peak memory of {title}, n = {LONG} (MB)"] = long
        results[f"peak memory of {title}, n = {LONG} / {MIDDLE}"] = long / middle
    print(f"| measured | median of {arguments.pairs} |\n|---|---|")
    for name, value in results.items():
        print(f"| {name} | {value:.3f} |")
    if arguments.json:
        report = {"pairs": arguments.pairs, "results": results, "ratios": raw}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
