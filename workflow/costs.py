"""What a preset would train, and how long that takes: a notebook's runs, named without being computed, and their FLOPs.

The cells tagged `rehearsed` are executed within `skiplab.companion.runs.rehearsing`. They ask for the runs that the
notebook computes, except that the first learning rate of a grid wins. A training step of each model is counted by
torch's FlopCounterMode; `workflow/rates.yaml` says how many FLOPs a device gets done in a second. What notebooks
measure besides (condition numbers, times, scores of frozen features) is not counted.
"""

import contextlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import yaml
from IPython.core.interactiveshell import InteractiveShell
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from traitlets.config import Config

from skiplab import files
from skiplab.companion import fingerprint, params, runs
from skiplab.errors import InputError
from skiplab.training import dino, loop, selfsupervised
from skiplab.training.run import RunConfig

RATES = files.ROOT / "workflow" / "rates.yaml"
TAG = "rehearsed"
INJECTED = {"device": "cpu", "published": ["none"]}  # no GPU and no network is needed to name the runs
# Training images, pixels and channels of the data sets that may be out of reach here.
SIZES = {"cifar10": (50_000, 32, 3), "tiny-imagenet": (100_000, 64, 3), "imagenet-1k": (1_281_167, 224, 3)}


@dataclass(frozen=True)
class Expected:
    """How many runs, how many FLOPs, and how many seconds they take one after the other on one device."""

    runs: int
    flops: float
    seconds: float


def expected(preset: str, folder: Path) -> dict[str, Expected]:
    """Return what each notebook would train in a preset, from an empty store; a run several ask for is the first's.

    Counting takes up to a minute, so the answer is kept in `folder`/plan.json until a notebook, a preset or a rate
    changes.
    """
    made_of = fingerprint.digest(
        [
            RATES.read_text(encoding="utf-8"),
            *[fingerprint.inputs_fingerprint(name, preset) for name in fingerprint.notebooks()],
        ]
    )
    path = folder / "plan.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["made_of"] == made_of:
            return {name: Expected(**values) for name, values in kept["expected"].items()}
    found = _expected(preset)
    files.write(
        path, json.dumps({"made_of": made_of, "expected": {name: asdict(value) for name, value in found.items()}})
    )
    return found


def _expected(preset: str) -> dict[str, Expected]:
    rates, known, found = yaml.safe_load(RATES.read_text(encoding="utf-8")), set(), {}
    for notebook in fingerprint.notebooks():
        new = {name: run for name, run in configurations(notebook, preset).items() if name not in known}
        known |= new.keys()
        device = "cuda" if _values(notebook, preset).get("device") == "cuda" else "cpu"
        costs = [cost(*run, rates[device]) for run in new.values()]
        found[notebook] = Expected(len(new), sum(flops for flops, _ in costs), sum(seconds for _, seconds in costs))
    return found


def configurations(notebook: str, preset: str) -> dict[str, tuple[Callable, RunConfig]]:
    """Return (function, configuration) of every run that a notebook trains in a preset.

    Raises InputError where a cell fails.
    """
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    before = os.environ.get(params.PRESET_VARIABLE)
    os.environ[params.PRESET_VARIABLE] = preset
    try:
        with runs.rehearsing() as found:
            for source, tags in fingerprint.notebook_code_cells(notebook):
                if "parameters" in tags or TAG in tags:
                    _execute(shell, notebook, source)
                if "parameters" in tags:
                    declared = params.declarations(source)
                    _execute(
                        shell,
                        notebook,
                        "# Parameters\n"
                        + "\n".join(f"{name} = {value!r}" for name, value in INJECTED.items() if name in declared),
                    )
    finally:
        InteractiveShell.clear_instance()
        del os.environ[params.PRESET_VARIABLE]
        if before is not None:
            os.environ[params.PRESET_VARIABLE] = before
    return found


def _execute(shell: InteractiveShell, notebook: str, source: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        result = shell.run_cell(source, store_history=True)
    if not result.success:
        error = result.error_in_exec or result.error_before_exec
        raise InputError(f"{notebook} cannot be rehearsed: {type(error).__name__}: {error}")


def _values(notebook: str, preset: str) -> dict:
    return params.preset_values(notebook, preset, params.stored_declarations(notebook))


def cost(function: Callable, config: RunConfig, rate: dict) -> tuple[float, float]:
    """Return the FLOPs of a run and its seconds on one device; `rate` gives teraflops a second and what a step adds."""
    images = config.train_images or _sizes(config)[0]
    trained = images * (1 - config.validation)
    # What is validated only passes forward, a third of a step.
    flops = config.epochs * image_flops(function, config) * (trained + images * config.validation / 3)
    steps = config.epochs * trained / config.batch_size * getattr(config, "accumulation", 1)
    return flops, flops / (1e12 * rate["teraflops"]) + steps * rate["step"]


def _sizes(config: RunConfig) -> tuple[int, int, int]:
    """Return how many training images there are, validation included, their pixels and channels."""
    if config.data in SIZES:
        return SIZES[config.data]
    data = loop.dataset(config)
    return data.train.num_images + data.validation.num_images, data.img_size, data.channels


def image_flops(function: Callable, config: RunConfig) -> float:
    """Return the FLOPs of a training step, forward and backward, on one image."""
    _, side, channels = _sizes(config)
    counted = {name: value for name, value in COUNTED.items() if hasattr(config, name)}
    config = replace(config, img_size=config.img_size or side, channels=config.channels or channels, **counted)
    key = json.dumps([function.__name__, asdict(config)], sort_keys=True)
    if key not in _counted:
        images = torch.zeros(1, config.channels, config.img_size, config.img_size)
        loss = _step(function, config, images)
        with (
            FlopCounterMode(display=False) as counter,
            sdpa_kernel(SDPBackend.MATH),
        ):  # a CPU's fused attention is not counted
            loss().backward()
        _counted[key] = counter.get_total_flops()
    return _counted[key]


_counted: dict[str, float] = {}
# The embedded pictures stand for the data, and what does not change a step's FLOPs is left out.
COUNTED = {
    "data": "fashion_mnist",
    "train_images": 20,
    "test_images": 20,
    "seed": 0,
    "epochs": 1,
    "learning_rate": 1.0,
    "batch_size": 1,
    "accumulation": 1,
    "validation": 0.1,
    "skipless": {},
    "initial": "",
    "optimizer": "adamw",
    "layer_decay": 1.0,
    "graying": "none",
    "graying_blocks": [],
    "graying_place": "device",
    "epsilon": 1.0,
    "weight_decay": 0.0,
    "warmup": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
    "label_smoothing": 0.0,
    "precision": "float32",
}


def _step(function: Callable, config: RunConfig, images: Tensor) -> Callable[[], Tensor]:
    """Return what computes a run's loss on the images; building the model is not part of a step."""
    if function is selfsupervised.pretrain:
        model = selfsupervised.build_model(config)
        return lambda: model(images, images)
    if function is dino.distil:
        small = torch.zeros(len(images), config.channels, config.local_size, config.local_size)
        model = dino.Dino((dino.build_vit(config), dino.build_vit(config)), config)
        return lambda: model([images] * 2, [small] * config.local_crops, config.teacher_temperature)
    model = loop.build_model(config)
    return lambda: model(images).sum()
