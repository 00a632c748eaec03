"""Check one GPU in minutes: does it compute what a CPU does, how fast, and does the first experiment show what it should?

    make gpu-check                                          the embedded data only
    COMPANION_CIFAR10=path/to/cifar10 make gpu-check        and CIFAR-10 from a local folder

Four parts: every function of the library on the GPU against the CPU; the time of a training step of ViT-B/16 with each
way to gray a batch, with AttnScale both ways, compiled and not; images per second of the training loop against the same
model on one resident batch; and the arms of skip removal, for as many epochs as the minutes allow. Prints tables and
writes data/gpu_check.json; what decides a claim is recorded in data/ledger/gpu, unless notebook 02 has been run there.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch

from benchmarks.graying import dct_dense, photographs, svd_torch
from benchmarks.scaling import block
from lib import files
from lib.companion import ledger, provenance
from lib.companion.graying_survey import interleaved, median_ratio
from lib.errors import InputError, run_command
from lib.models import create_model
from lib.models.skipless import SkiplessInit
from lib.theory import conditioning, jacobian, spectral
from lib.training import loop
from lib.training.run import build_optimizer
from lib.transforms import augment, graying

RESULT = files.ROOT / "data" / "gpu_check.json"
EPSILON = 0.5
TINY = {"num_classes": 10, "img_size": 32, "embed_dim": 96, "depth": 4, "num_heads": 3, "patch_size": 4}
GRAYINGS = {"torch.linalg.svd": svd_torch, "svd": graying.gray_svd, "svd_fast": graying.gray_svd_fast,
            "dct": graying.gray_dct, "dct, dense": dct_dense}  # fmt: skip


def draw(*shape: int) -> torch.Tensor:
    """Draw a Gaussian tensor, the same on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def parity_cases() -> dict[str, tuple[Callable, tuple, float]]:
    """Return {name: (function, its tensors on the CPU, the largest relative difference allowed)}."""
    tokens = graying.patchify(photographs(4, 224), 16)
    attn = draw(2, 3, 65, 65).double().softmax(dim=-1)
    weights = [draw(5, 12).double(), *[draw(12, 12).double() / 3 for _ in range(4)]]
    shifts = augment.draw_crop_flip(4, padding=4, generator=torch.Generator().manual_seed(0))
    pixels = (draw(4, 3, 32, 32).sigmoid() * 255).byte()
    cases = {f"gray, {name}": (lambda x, f=f: f(x, EPSILON), (tokens,), 1e-4 if name == "svd_fast" else 2e-5)
             for name, f in GRAYINGS.items()}
    cases |= {
        "frequency_response": (spectral.frequency_response, (attn,), 1e-10),
        "token_similarity": (spectral.token_similarity, (draw(2, 65, 32).double(),), 1e-10),
        "condition_number": (conditioning.condition_number, (draw(4, 65, 32).double(),), 1e-8),
        "attention_jacobian": (jacobian.attention_jacobian, tuple(weights), 1e-10),
        "crop_flip": (lambda x, d: augment.crop_flip(x, d, padding=4), (pixels, shifts), 0),
        "normalise": (augment.normalise, (pixels, torch.full((3,), 0.5), torch.full((3,), 0.2)), 1e-6),
    }
    for name, settings in {"ViT": {}, "no SAB skip": {"skip": "no_sab"}, "AttnScale": {"scaling": "attnscale"},
                           "FeatScale": {"scaling": "featscale"}, "skipless": {"skip": "none", "init": SkiplessInit()}}.items():
        torch.manual_seed(0)
        model = create_model("vit", **TINY, **settings).eval()
        cases[f"model, {name}"] = (lambda x, model=model: model.to(x.device)(x), (draw(4, 3, 32, 32),), 1e-3)
    return cases


@torch.no_grad()
def parity(device: torch.device) -> list[dict]:
    """Compare every case on `device` with the CPU, in full float32."""
    rows = []
    for name, (function, tensors, allowed) in parity_cases().items():
        expected = function(*tensors).double()
        found = function(*(tensor.to(device) for tensor in tensors)).double().cpu()
        difference = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
        rows.append({"function": name, "difference": difference, "allowed": allowed, "agrees": difference <= allowed})
    return rows


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
    return [about | {"step": name, "ms": 1e3 * statistics.median(times[name]), "to": base,
                     "ratio": median_ratio(times[name], times[base])} for name in steps]


def recipe(device: torch.device, data: str, epochs: int, **other) -> loop.TrainConfig:
    """Return notebook 01's gpu recipe with fewer epochs."""
    small = {} if device.type == "cuda" else {"train_images": 512, "test_images": 200}
    precision = "bfloat16" if device.type == "cuda" else "float32"
    settings = dict(data=data, model="vit_tiny_patch16_224", seed=0, epochs=epochs, learning_rate=1e-3, batch_size=256,
                    augment="crop_flip", precision=precision, device=device.type, model_args={"patch_size": 4, "depth": 12})
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


def skip_removal(device: torch.device, data: str, deadline: float, images_per_second: float) -> list[dict]:
    """Train the four arms for as many epochs as fit before `deadline`, one seed."""
    images = loop.dataset(recipe(device, data, epochs=1)).train.num_images
    epochs = max(1, min(60, int((deadline - time.monotonic()) * 0.7 * images_per_second / images / 4)))
    rows = []
    for skip in ("both", "no_ffn", "no_sab", "none"):
        with tempfile.TemporaryDirectory() as folder:
            result = loop.train(recipe(device, data, epochs, skip=skip), Path(folder))
        rows.append({"skip": skip, "epochs": epochs, "test_top1": result["test_top1"], "divergence": result["divergence"]})
    return rows


def record(found: dict) -> str:
    """Put what decides a claim into the ledger; return what was done."""
    target = ledger.LEDGER / "gpu" / "02_token_graying.json"
    if found["device"]["device"] != "cuda" or target.exists():
        return "nothing recorded in the ledger: no GPU, or notebook 02 has been run on one"
    ratios = {row["step"]: row["ratio"] for row in found["steps"]}
    note = f"gpu-check, {found['device']['device_name']}, {found['steps'][0]['model']} in bfloat16"
    values = {"asa.time.svd.ratio": ratios["gray, torch.linalg.svd"], "asa.time.dct.ratio": ratios["gray, dct"],
              "asa.time.gpu.ours": min(ratios["gray, svd"], ratios["gray, svd_fast"])}
    verdicts = ledger.record({name: ledger.Measurement((value,), (), note) for name, value in values.items()},
                             notebook="02_token_graying", preset="gpu")
    return "\n".join(str(verdict) for verdict in verdicts)


def table(rows: list[dict]) -> str:
    """Return rows as a Markdown table."""
    def cell(value):
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = [list(rows[0]), ["---"] * len(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def check(device: torch.device, minutes: float) -> str:
    """Do all of it, printing as it goes; return what was recorded. Raises InputError without a GPU, or where it disagrees."""
    deadline = time.monotonic() + 60 * minutes
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("this machine shows no GPU to torch; nothing was checked")
    data = "cifar10" if "COMPANION_CIFAR10" in os.environ else "fashion_mnist"
    batch, rounds, model = (256, 9, "vit_base_patch16_224") if device.type == "cuda" else (1, 1, "vit_tiny_patch16_224")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found = {"device": provenance.machine(device.type), "versions": provenance.versions(), "git": provenance.git_state(),
             "data": data}
    parts = {
        "parity": lambda: parity(device), "steps": lambda: step_times(device, batch, rounds, model),
        "attention": lambda: attention_times(device, batch, rounds), "images_per_second": lambda: [throughput(device, data)],
        "skip_removal": lambda: skip_removal(device, data, deadline, found["images_per_second"][0]["loop"])}
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
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the script itself, in small")
    parser.add_argument("--minutes", type=float, default=8.0)
    arguments = parser.parse_args()
    return run_command(check, torch.device(arguments.device), arguments.minutes)


if __name__ == "__main__":
    sys.exit(main())
