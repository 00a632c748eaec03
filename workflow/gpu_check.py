"""Check one GPU in minutes: does it compute as a CPU does, how fast, and does the first experiment show what it should?

    make gpu-check                                          the embedded data only
    COMPANION_CIFAR10=path/to/cifar10 make gpu-check        and CIFAR-10 from a local folder

Four parts: every function of the library on the GPU against the CPU; the time of a training step of ViT-B/16 with each
way to gray a batch, with AttnScale both ways, compiled and not; images per second of the training loop against the same
model on one resident batch; and the arms of skip removal, for as many epochs as the minutes allow. Prints tables and
writes data/gpu_check.json; what measures a claim goes to data/ledger/gpu, unless the notebook has been run there
(`record`).
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import timm
import torch

from benchmarks.graying import photographs
from benchmarks.scaling import block
from skiplab import files
from skiplab.companion import ledger, provenance
from skiplab.companion.timing import interleaved, median_ratio
from skiplab.errors import InputError, run_command
from skiplab.studies.token_graying.costs import step_ratios
from skiplab.training import loop
from skiplab.training.run import build_optimizer
from skiplab.transforms import graying
from workflow import costs
from workflow.parity import EPSILON, GRAYINGS, draw, parity

RESULT = files.ROOT / "data" / "gpu_check.json"
MARK = "gpu-check, "  # begins the note of every entry of the ledger that comes from here


def training_step(model: torch.nn.Module, images: torch.Tensor, gray: Callable = lambda x: x) -> Callable[[], None]:
    """Return a step of AdamW in bfloat16 on one batch that stays where it is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step():
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = model(gray(images)).float().square().mean()
        loss.backward()
        optimizer.step()

    return step


def step_times(device: torch.device, batch: int, rounds: int, name: str) -> list[dict]:
    """Time a training step plain, with each way to gray its images, and compiled; ratios to the plain step."""
    images = photographs(min(batch, 8), 224).repeat(-(-batch // 8), 1, 1, 1)[:batch].to(device)
    model = timm.create_model(name, num_classes=1000).to(device)

    def gray(method):
        return lambda x: graying.unpatchify(method(graying.patchify(x, 16), EPSILON), 16, *x.shape[1:])

    steps = {"plain": training_step(model, images)}
    steps |= {f"gray, {label}": training_step(model, images, gray(method)) for label, method in GRAYINGS.items()}
    steps["plain, compiled"] = training_step(torch.compile(model), images)
    return _ratios(steps, device, rounds, "plain", {"model": name, "batch": batch})


def attention_times(device: torch.device, batch: int, rounds: int) -> list[dict]:
    """Time a block of DeiT-S with AttnScale as its formula reads, and as the library computes it."""
    rows = []
    for n in (197, 1569):
        tokens = draw(max(1, batch * 197 // n), n, 384).to(device)
        steps = {kind: training_step(block(kind).to(device), tokens) for kind in ("materialised", "attnscale", "plain")}
        rows += _ratios(steps, device, rounds, "attnscale", {"model": f"block, {n} tokens", "batch": len(tokens)})
    return rows


def _ratios(steps: dict, device: torch.device, rounds: int, base: str, about: dict) -> list[dict]:
    times = interleaved(steps, device.type, rounds)
    return [
        about
        | {
            "step": name,
            "ms": 1e3 * statistics.median(times[name]),
            "to": base,
            "ratio": median_ratio(times[name], times[base]),
        }
        for name in steps
    ]


def recipe(device: torch.device, data: str, epochs: int, **other) -> loop.TrainConfig:
    """Return notebook 01's gpu recipe with fewer epochs."""
    small = {} if device.type == "cuda" else {"train_images": 512, "test_images": 200}
    precision = "bfloat16" if device.type == "cuda" else "float32"
    settings = dict(
        data=data,
        model="vit_tiny_patch16_224",
        seed=0,
        epochs=epochs,
        learning_rate=1e-3,
        batch_size=256,
        augment="crop_flip",
        precision=precision,
        device=device.type,
        model_args={"patch_size": 4, "depth": 12},
    )
    return loop.TrainConfig(**settings | small | other)


def throughput(device: torch.device, data: str) -> dict:
    """Return images per second of an epoch of the loop, and of the same steps on one resident batch."""
    config = recipe(device, data, epochs=2, probe_images=0)
    with tempfile.TemporaryDirectory() as folder:
        run = loop._Run(config, Path(folder))
        run.advance()  # warm up
        evaluating = _seconds(run._evaluate_epoch, device)
        training = _seconds(run.advance, device) - evaluating
    images, labels = next(loop.dataset(config).train.batches(config.batch_size, device=device, train=True))
    model = loop.build_model(config).to(device).train()
    optimizer = build_optimizer(config, model)

    def compute():
        for _ in range(run.steps):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    compute()
    count, alone = run.steps * config.batch_size, _seconds(compute, device)
    return {"loop": count / training, "compute": count / alone, "share": alone / training}


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def rates(steps: list[dict], speed: dict, device: torch.device, data: str) -> dict:
    """Return what `workflow/rates.yaml` should say of this device, from a large model's step and a small one's."""
    plain, small = next(row for row in steps if row["step"] == "plain"), recipe(device, data, epochs=1)
    large = recipe(device, data, epochs=1, model=plain["model"], model_args={}, img_size=224, channels=3)
    counts = [plain["batch"], small.batch_size]
    flops = [count * costs.image_flops(loop.train, config) for count, config in zip(counts, (large, small))]
    seconds = [plain["ms"] / 1e3, small.batch_size / speed["loop"]]
    a_flop = (seconds[0] - seconds[1]) / (flops[0] - flops[1])
    return {"teraflops": 1e-12 / a_flop, "step": max(0.0, seconds[1] - flops[1] * a_flop)}


def skip_removal(device: torch.device, data: str, deadline: float, images_per_second: float) -> list[dict]:
    """Train the four arms for as many epochs as fit before `deadline`, one seed."""
    images = loop.dataset(recipe(device, data, epochs=1)).train.num_images
    epochs = max(1, min(60, int((deadline - time.monotonic()) * 0.7 * images_per_second / images / 4)))
    rows = []
    for skip in ("both", "no_ffn", "no_sab", "none"):
        with tempfile.TemporaryDirectory() as folder:
            result = loop.train(recipe(device, data, epochs, skip=skip), Path(folder))
        rows.append(
            {"skip": skip, "epochs": epochs, "test_top1": result["test_top1"], "divergence": result["divergence"]}
        )
    return rows


def record(found: dict, folder: Path = ledger.LEDGER) -> str:
    """Put the time ratios into the ledger, in place of an earlier check's; return what was done.

    They are measured by notebook 02's own function, in fewer rounds. The arms of skip removal stay in
    data/gpu_check.json: one seed decides no claim. What the notebook itself recorded is never touched.
    """
    if found["device"]["device"] != "cuda":
        return "nothing recorded in the ledger: no GPU"
    name, notebook = found["device"]["device_name"], "02_token_graying"
    path = folder / "gpu" / f"{notebook}.json"
    entries = json.loads(path.read_text(encoding="utf-8"))["claims"].values() if path.exists() else ()
    if not all(entry["note"].startswith(MARK) for entry in entries):
        return f"{notebook}: not recorded, the notebook has been run on a GPU"
    ratios = {
        claim: replace(one, processors=(name,)) for claim, one in time_ratios(found["ratios"], f"{MARK}{name}").items()
    }
    return "\n".join(map(str, ledger.record(ratios, notebook=notebook, preset="gpu", folder=folder)))


def time_ratios(rows: list[dict], note: str) -> dict[str, ledger.Measurement]:
    """Return notebook 02's claims on times, a value a repetition, from the rows of `step_ratios`."""
    ways = {row["way"]: [other["ratio"] for other in rows if other["way"] == row["way"]] for row in rows}
    fastest = min(("ours", "ours, products only"), key=lambda way: statistics.fmean(ways[way]))
    return {
        "asa.time.svd.ratio": ledger.Measurement(ways["torch.linalg.svd"], (), note),
        "asa.time.dct.ratio": ledger.Measurement(ways["DCT"], (), note),
        "asa.time.gpu.ours": ledger.Measurement(ways[fastest], (), f"{note}, {fastest}"),
    }


def table(rows: list[dict]) -> str:
    """Return rows as a Markdown table."""

    def cell(value):
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = [list(rows[0]), ["---"] * len(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def check(device: torch.device, minutes: float) -> str:
    """Do all of it, printing as it goes; return what was recorded.

    Raises InputError without a GPU, or where it disagrees.
    """
    deadline = time.monotonic() + 60 * minutes
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("this machine shows no GPU to torch; nothing was checked")
    data = "cifar10" if "COMPANION_CIFAR10" in os.environ else "fashion_mnist"
    batch, rounds, model = (256, 9, "vit_base_patch16_224") if device.type == "cuda" else (1, 1, "vit_tiny_patch16_224")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found = {
        "device": provenance.machine(device.type),
        "versions": provenance.versions(),
        "git": provenance.git_state(),
        "data": data,
    }
    parts = {
        "parity": lambda: parity(device),
        "ratios": lambda: step_ratios(model, device.type, rounds=3 if rounds > 1 else 1, batch=batch).to_dict(
            "records"
        ),
        "steps": lambda: step_times(device, batch, rounds, model),
        "attention": lambda: attention_times(device, batch, rounds),
        "images_per_second": lambda: [throughput(device, data)],
        "rates": lambda: [rates(found["steps"], found["images_per_second"][0], device, data)],
        "skip_removal": lambda: skip_removal(device, data, deadline, found["images_per_second"][0]["loop"]),
    }
    for name, part in parts.items():
        found[name] = part()
        print(table(found[name]), flush=True)
    if device.type == "cuda":
        files.write(RESULT, json.dumps(found, indent=1) + "\n")
    wrong = [row["function"] for row in found["parity"] if not row["agrees"]]
    if wrong:
        raise InputError(f"on this GPU {', '.join(wrong)} differ from the CPU by more than allowed")
    return record(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the script itself, in small"
    )
    parser.add_argument("--minutes", type=float, default=8.0)
    arguments = parser.parse_args()
    return run_command(check, torch.device(arguments.device), arguments.minutes)


if __name__ == "__main__":
    sys.exit(main())
