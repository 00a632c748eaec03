"""What every kind of training run shares: the part of its configuration that all have, and its state between epochs.

Three properties hold for all of them (`loop.train`, `selfsupervised.pretrain`, `dino.distil`):

* **Exact resume.** Everything random in an epoch (data order, augmentation, dropout, mixup, masks, crops) is seeded
  from (seed, epoch) alone, so a run resumed at an epoch's start repeats what it would have done, bit for bit.
* **The number of processes does not matter**, but for the order of sums: all draw the same, for the whole batch, and
  take their share. Dropout alone, and the drop path of DINO's student, is drawn for each process's own images.
* **Divergence is a result.** What broke, and at which step, is recorded in the result; it is not an exception.
"""

import abc
import contextlib
import functools
import math
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from timm.layers import DropPath
from timm.optim import create_optimizer_v2, list_optimizers, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from torch import nn

from skiplab.errors import InputError, check_plain, unknown
from skiplab.models.skipless import SkiplessInit
from skiplab.training import checkpoint
from skiplab.training.data import ImageData, load
from skiplab.transforms.augment import share
from skiplab.transforms.graying import METHODS

EVALUATION_BATCH = 500
MOST_SEEDS = 2**32  # numpy takes no more
NON_NEGATIVE = ("weight_decay", "final_weight_decay", "minimum_learning_rate", "mixup", "cutmix")
POSITIVE = ("learning_rate", "clip")
SHARES = ("warmup", "ema", "label_smoothing")  # from 0 up to but without 1
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class RunConfig:
    """The data, the model, the budget and the device of a run, whatever its kind.

    `batch_size` is the global batch: several processes share it. `warmup` is a fraction of all steps. Where a kind of
    run also has an optimizer, a skipless initialisation, micro-batches (`accumulation`) or Token Graying, their values
    are checked here too. Raises InputError for a value out of its range.
    """

    data: str
    model: str
    seed: int
    epochs: int
    learning_rate: float
    model_args: dict = field(default_factory=dict)
    img_size: int | None = None
    channels: int | None = None
    train_images: int | None = None
    test_images: int | None = None
    validation: float = 0.1
    batch_size: int = 64
    weight_decay: float = 0.05
    warmup: float = 0.15
    precision: str = "float32"
    device: str = "cpu"

    def __post_init__(self):
        self._check_numbers()
        self.check_least(seed=0, epochs=1, batch_size=1)
        if not 0 < self.validation <= 0.5:
            raise InputError(f"validation is {self.validation}; it must be a share above 0 and at most 0.5")
        choices = {
            "precision": PRECISIONS,
            "device": ("cpu", "cuda"),
            "optimizer": [*list_optimizers(), "soap"],
            "graying": ("none", *METHODS),
            "graying_place": ("device", "workers"),
        }
        for name, allowed in choices.items():
            if getattr(self, name, None) not in (None, *allowed):
                raise unknown(name, getattr(self, name), allowed)
        _check_optimizer(getattr(self, "optimizer", "adamw"))
        if self.batch_size % getattr(self, "accumulation", 1):
            raise InputError(f"accumulation {self.accumulation} does not divide batch_size {self.batch_size}")
        skipless_init(self)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("device is 'cuda', but this machine shows no GPU to torch; use device 'cpu' or 'auto'")

    def _check_numbers(self) -> None:
        """Raise InputError for a field of another type, and for a number out of its range."""
        for declared in fields(self):
            name, kind, value = declared.name, declared.type, getattr(self, declared.name)
            check_plain(name, value)
            allowed = int | float if kind is float else kind
            if not isinstance(value, allowed) or isinstance(value, bool) and kind is not bool:
                raise InputError(
                    f"{name} is {value!r}, a {type(value).__name__}; it must be of type "
                    f"{getattr(kind, '__name__', kind)}"
                )
            if name in NON_NEGATIVE and value < 0:
                raise InputError(f"{name} is {value}; it must be at least 0")
            if name in POSITIVE and value <= 0:
                raise InputError(f"{name} is {value}; it must be positive")
            if name in SHARES and not 0 <= value < 1:
                raise InputError(f"{name} is {value}; it must be at least 0 and below 1")
        if self.seed >= MOST_SEEDS:
            raise InputError(f"seed is {self.seed}; it must be from 0 to {MOST_SEEDS - 1}")

    def check_least(self, **least: int) -> None:
        """Raise InputError for a number below its least value; other types are refused elsewhere."""
        for name, minimum in least.items():
            value = getattr(self, name)
            check_plain(name, value)
            if isinstance(value, int) and value < minimum:
                raise InputError(f"{name} is {value}; it must be at least {minimum}")


def dataset(config: RunConfig) -> ImageData:
    """Load the data that `config` names."""
    return load(
        config.data,
        img_size=config.img_size,
        channels=config.channels,
        validation=config.validation,
        train_images=config.train_images,
        test_images=config.test_images,
    )


def refuse_arguments(config: RunConfig, *decided: str) -> None:
    """Raise InputError where `model_args` sets what the data and the rest of the configuration decide."""
    for name in decided:
        if name in config.model_args:
            raise InputError(f"model_args sets {name!r}, which the data and the configuration decide; leave it out")


def skipless_init(config: RunConfig) -> SkiplessInit | None:
    """Return the skipless initialisation that `config` asks for, if any."""
    settings = getattr(config, "skipless", {})
    for name in settings:
        if name not in SkiplessInit.__dataclass_fields__:
            raise unknown("setting of skipless", name, SkiplessInit.__dataclass_fields__)
    return SkiplessInit(**settings) if settings else None


def build_optimizer(config: RunConfig, model: nn.Module, **settings: object) -> torch.optim.Optimizer:
    """Create the optimiser that `config` names (AdamW where it has no choice), with weight decay where timm has it.

    With a `layer_decay` each block's rate is that share of the next one's. SOAP (Vyas et al., arXiv 2409.11321) has the
    settings of Cutting the Skip: betas 0.9 and 0.95, a new eigenbasis every 10 steps. Its first step only measures.
    """
    name = getattr(config, "optimizer", "adamw")
    rates = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    layered = {} if getattr(config, "layer_decay", 1.0) == 1 else {"layer_decay": config.layer_decay}
    if name == "soap":
        from pytorch_optimizer import SOAP  # importing it takes as long as the rest of this module together

        left_out = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
        group = param_groups_layer_decay if layered else param_groups_weight_decay
        groups = group(model, config.weight_decay, no_weight_decay_list=left_out, **layered)
        return SOAP(groups, betas=(0.9, 0.95), precondition_frequency=10, **rates)
    fused = {"fused": True} if name == "adamw" else {}  # one kernel for all parameters
    return create_optimizer_v2(model, name, **rates, **layered, **fused, **settings)


@functools.cache
def _check_optimizer(name: str) -> None:
    """Raise InputError for an optimiser that does not go on from a checkpoint as if it had never stopped."""
    if name in ("adamw", "soap"):  # known to, and the second takes seconds to import
        return
    config = SimpleNamespace(optimizer=name, learning_rate=0.01, weight_decay=0.05)
    try:
        with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
            straight, resumed = (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)) for _ in range(2))
            optimizer, file = build_optimizer(config, straight), Path(folder) / "state"
            _tiny_step(straight, optimizer)
            checkpoint.write(file, {"model": straight.state_dict(), "optimizer": optimizer.state_dict()})
            state, again = checkpoint.read(file), build_optimizer(config, resumed)
            resumed.load_state_dict(state["model"])
            again.load_state_dict(state["optimizer"])
            for net, steps in ((straight, optimizer), (resumed, again)):
                _tiny_step(net, steps)
        same = all(map(torch.equal, straight.parameters(), resumed.parameters()))
        reason = "" if same else "its numbers differ after a resume"
    except Exception as error:  # whatever the many optimisers raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if reason:
        raise InputError(
            f"optimizer {name!r} cannot be used: its state must go through a checkpoint and back "
            f"({reason}); take another one, such as 'adamw'"
        )


def _tiny_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(0)
    optimizer.zero_grad()
    net(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()


def _check_environment() -> None:
    """Raise InputError where accelerate is told to split a model over devices, which runs here do not."""
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise InputError(
                f"ACCELERATE_USE_{name} is set; a run here is computed by data parallelism only: unset it, or "
                "choose multi-GPU in accelerate's configuration"
            )


class Run(abc.ABC):
    """The state of one run between epochs.

    A kind of run builds its network and optimiser, hands them to `prepare`, and says how to train an epoch
    (`train_epoch`, which appends to `history`), what to do before the first (`begin`) and what to return (`finish`).
    `kept` names the attributes that a checkpoint must hold besides.
    """

    kept: tuple[str, ...] = ()

    def __init__(self, config: RunConfig, folder: Path):
        _check_environment()
        self.config, self.folder, self.data = config, folder, dataset(config)
        steps = GradientAccumulationPlugin(num_steps=getattr(config, "accumulation", 1))
        # Said in full: what is left out accelerate takes from the environment, which no run's hash knows.
        self.accelerator = Accelerator(
            cpu=config.device == "cpu", mixed_precision="no", dynamo_backend="no", gradient_accumulation_plugin=steps
        )
        self.device = self.accelerator.device
        if self.device.type != config.device:
            raise InputError(
                f"this process already computes on {self.device.type}; restart the kernel to use {config.device}"
            )
        self.shard = (self.accelerator.process_index, self.accelerator.num_processes)
        self.steps = self.data.train.num_images // config.batch_size
        if not self.steps:
            raise InputError(f"batch_size {config.batch_size} exceeds the {self.data.train.num_images} training images")
        self.epoch, self.history, self.divergence, self.seconds = 0, [], None, []

    def prepare(self, net: nn.Module, optimizer: torch.optim.Optimizer, *, compiled: bool = False) -> None:
        """Take the network (on its device) and its optimiser, add the schedule, and resume from any checkpoint."""
        config, updates = self.config, self.config.epochs * self.steps
        if self.shard[1] > 1:
            _share_drop_path(net, self.shard)
        self.net, self.optimizer, self.parameters = net, optimizer, list(net.parameters())
        self.schedule = CosineLRScheduler(
            optimizer,
            t_initial=updates,
            lr_min=getattr(config, "minimum_learning_rate", 0.0),
            warmup_t=round(config.warmup * updates),
            t_in_epochs=False,
        )
        self.model = self.accelerator.prepare(torch.compile(net) if compiled else net)
        saved = self.folder / "checkpoint.safetensors"
        if saved.exists():
            self._resume(checkpoint.read(saved))
        else:
            self.begin()

    def begin(self) -> None:
        """Do what comes before the first epoch."""

    @abc.abstractmethod
    def train_epoch(self, epoch: int) -> None:
        """Train one epoch and append its row to `history`."""

    @abc.abstractmethod
    def finish(self) -> dict:
        """Return the result, and leave the weights in the folder."""

    @property
    def learning_rate(self) -> float:
        """The rate of the last step; with a layer-wise decay, the head's."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    @property
    def broken(self) -> bool:
        """Whether a loss or weight became non-finite, so that going on is pointless."""
        return self.divergence is not None and self.divergence["kind"] == "non-finite"

    def run(self, report: Callable[[list[dict]], None] | None = None) -> dict:
        """Train to the end, or until the run breaks; call `report` with the history each epoch; return the result.

        In several processes each trains on its share of every batch and returns the same result; the first one alone
        writes and reports.
        """
        while self.epoch < self.config.epochs and not self.broken:
            self.advance()
            self.save()
            if report and self.accelerator.is_main_process:
                report(self.history)
        return self.finish()

    def advance(self) -> None:
        """Train one more epoch, seeded by its number alone."""
        start = time.perf_counter()
        self.epoch += 1
        seed_everything(self.config.seed, self.epoch)
        self.model.train()
        self.train_epoch(self.epoch)
        self.seconds.append(time.perf_counter() - start)

    def save(self) -> None:
        """Write the checkpoint from which the run goes on."""
        # Rounding depends on strides and alignment: go on with the tensors laid out as a resumed run will find them.
        for parameter, state in self.optimizer.state.items():
            self.optimizer.state[parameter] = _laid_out_anew(state)
        self.store(
            "checkpoint.safetensors",
            {
                "config": asdict(self.config),
                "epoch": self.epoch,
                "history": self.history,
                "divergence": self.divergence,
                "seconds": self.seconds,
                "model": self.net.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            | {name: getattr(self, name) for name in self.kept},
        )
        self.accelerator.wait_for_everyone()

    def store(self, name: str, state: object) -> None:
        """Write a file into the run's folder, from the first process alone."""
        if self.accelerator.is_main_process:
            checkpoint.write(self.folder / name, state)

    def _resume(self, state: dict) -> None:
        if state.pop("config") != asdict(self.config):
            raise checkpoint.CorruptFile("checkpoint.safetensors belongs to another configuration")
        self.net.load_state_dict(state.pop("model"))
        self.optimizer.load_state_dict(state.pop("optimizer"))
        for name, value in state.items():
            setattr(self, name, value)

    def autocast(self) -> contextlib.AbstractContextManager:
        """Compute in the run's precision within."""
        low = self.config.precision != "float32"
        return torch.autocast(self.device.type, PRECISIONS[self.config.precision], enabled=low)

    def losses(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Return the losses of some micro-batches, each the mean over processes, so that all of them decide alike."""
        return self.accelerator.reduce(torch.stack(losses), "mean")

    def break_off(self, epoch: int, step: int) -> None:
        """Record that the run broke at a step of an epoch, both counted as the history and the steps are."""
        self.divergence = {"kind": "non-finite", "epoch": epoch, "step": (epoch - 1) * self.steps + step}


def first_broken(losses: torch.Tensor) -> int | None:
    """Return the place of the first loss that is not finite, None if there is none."""
    places = (~losses.isfinite()).nonzero()
    return places[0].item() if len(places) else None


class _SharedDropPath(nn.Module):
    """timm's DropPath for a process's share of a batch: drawn for all of it, as one process would."""

    def __init__(self, drop_path: DropPath, shard: tuple[int, int]):
        super().__init__()
        self.drop_path, self.shard = drop_path, shard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = x.new_ones(len(x) * self.shard[1], *[1] * (x.ndim - 1))
        return x * share(self.drop_path(ones), self.shard)


def _share_drop_path(model: nn.Module, shard: tuple[int, int]) -> None:
    """Have every drop path in `model` draw for the whole batch."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, DropPath):
                setattr(parent, name, _SharedDropPath(child, shard))


def seed_everything(seed: int, epoch: int) -> None:
    """Seed every generator from (seed, epoch), so that no generator state need be stored; in all processes alike."""
    state = numpy.random.SeedSequence([seed, epoch]).generate_state(1)[0].item()
    random.seed(state)
    numpy.random.seed(state)
    torch.manual_seed(state)


def finite(value: torch.Tensor | float) -> float | None:
    """Return a plain number, None where it is not finite (JSON has no NaN)."""
    value = float(value)
    return value if math.isfinite(value) else None


def _laid_out_anew(state: object) -> object:
    """Return a nested state with a copy of every tensor, contiguous, as one read from a checkpoint is."""
    if isinstance(state, dict):
        return {key: _laid_out_anew(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_laid_out_anew(value) for value in state]
    return state.clone(memory_format=torch.contiguous_format) if isinstance(state, torch.Tensor) else state
