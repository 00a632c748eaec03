"""What the training loop costs beside a bare loop doing the same arithmetic; one CPU thread.

    python -m benchmarks.loop [--pairs 15]

Both train the same model on the same batches for one epoch and evaluate it as often; they take turns, and the median
of the ratios of each turn is reported, so that a machine that changes its speed does not matter. Times are processor
times. Pure compute is the bare loop on batches that lie ready in memory.
"""

import argparse
import dataclasses
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks import workflow
from skiplab.training import loop

CONFIG = dataclasses.replace(workflow.CONFIG, probe_images=0)  # nothing but training and evaluation


def batches(config: loop.TrainConfig) -> tuple[Iterator, ...]:
    """Return what a run of one epoch reads: training, validation (twice) and test batches, loaded when asked for."""
    data = loop.dataset(config)
    training = data.train.batches(config.batch_size, device="cpu", drop_last=True, train=True)
    return training, *(split.batches(loop.EVALUATION_BATCH) for split in (data.validation, data.validation, data.test))


def bare(config: loop.TrainConfig, training: Iterable, before: Iterable, after: Iterable, test: Iterable) -> None:
    """Train and evaluate with nothing but torch."""
    model, total = loop.build_model(config), loop.dataset(config).train.num_images // config.batch_size
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
    criterion = torch.nn.CrossEntropyLoss()
    evaluate(model, before)
    model.train()
    for step, (images, labels) in enumerate(training):
        optimizer.param_groups[0]["lr"] = config.learning_rate * (1 + math.cos(math.pi * step / total)) / 2
        criterion(model(images), labels).backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step()
        optimizer.zero_grad()
    evaluate(model, after)
    evaluate(model, test)


@torch.no_grad()
def evaluate(model: torch.nn.Module, batches: Iterable) -> float:
    model.eval()
    return sum((model(images).argmax(1) == labels).sum().item() for images, labels in batches)


def ours(config: loop.TrainConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        loop.train(config, Path(folder))


def seconds(function, *arguments) -> float:
    start = time.process_time()
    function(*arguments)
    return time.process_time() - start


def import_seconds() -> float:
    """Return what importing the library costs beyond torch and timm."""
    code = (
        "import time, torch, timm; start = time.process_time(); "
        "import skiplab.companion.runs, skiplab.training.loop; print(time.process_time() - start)"
    )
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, encoding="utf-8").stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    probing = dataclasses.replace(CONFIG, probe_images=loop.TrainConfig.probe_images)
    ours(CONFIG)  # warm up
    ready = [list(part) for part in batches(CONFIG)]
    loop_ratios, throughputs, probe_ratios, imports = [], [], [], []
    for _ in range(arguments.pairs):
        reference, plain, probed = (
            seconds(bare, CONFIG, *batches(CONFIG)),
            seconds(ours, CONFIG),
            seconds(ours, probing),
        )
        loop_ratios.append(plain / reference)
        throughputs.append(seconds(bare, CONFIG, *ready) / plain)
        probe_ratios.append(probed / plain)
        imports.append(import_seconds())
    results = {
        "loop / bare loop": statistics.median(loop_ratios),
        "images a second, loop / pure compute": statistics.median(throughputs),
        "with κ of every block at initialisation and after the epoch / without": statistics.median(probe_ratios),
        "import beyond torch and timm (s)": statistics.median(imports),
    }
    print(f"| measured | median of {arguments.pairs} |\n|---|---|")
    for name, value in results.items():
        print(f"| {name} | {value:.3f} |")


if __name__ == "__main__":
    main()
