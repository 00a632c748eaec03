"""DINO pre-training: one run, from a configuration to a teacher, resumable at every epoch.

"Emerging Properties in Self-Supervised Vision Transformers" (Caron et al., ICCV 2021, arXiv 2104.14294): a student sees
large and small crops of an image and learns to say of each what a teacher says of the other large ones; the teacher is
the student's moving average, its outputs are centred and sharpened. Heads, loss with its centre, and averaging are
lightly's parts, around a timm ViT with any skip policy and initialisation of `skiplab.models`. `run` has what all kinds
of run share.
"""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lightly.loss import DINOLoss
from lightly.models.modules import DINOProjectionHead
from lightly.models.utils import update_momentum
from lightly.utils.scheduler import cosine_schedule
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from skiplab import draws
from skiplab.errors import InputError, indivisible
from skiplab.training import checkpoint, loop
from skiplab.training.run import EVALUATION_BATCH, Run, RunConfig, build_optimizer, finite, first_broken
from skiplab.training.splits import Split
from skiplab.transforms.multicrop import multi_crop

NEIGHBOURS, NEIGHBOUR_TEMPERATURE = 20, 0.07  # the published k-NN classifier
NEIGHBOUR_IMAGES = 20_000  # training images that it looks among, at most


@dataclass(frozen=True)
class DinoConfig(RunConfig):
    """Everything that decides the numbers of one pre-training run (the run store hashes it).

    The model is a ViT of `skiplab.models.zoo`; data, budget and recipe mean what they do in `loop.TrainConfig`; the
    defaults are the published ones for a ViT-S at batch 256. Weight decay goes from `weight_decay` to
    `final_weight_decay` and the teacher's momentum from `momentum` to 1 by a cosine over all steps; the teacher's
    temperature rises from `first_temperature` to `teacher_temperature` over the share `temperature_warmup` of the
    epochs. `global_scale` and `local_scale` are [low, high] shares of the image's area, `local_size` is in pixels. The
    head's last layer, of `outputs` rows, is frozen for `frozen_epochs`. Raises InputError for a value out of its range.
    """

    batch_size: int = 256
    weight_decay: float = 0.04
    warmup: float = 0.1
    skip: str = "both"
    skipless: dict = field(default_factory=dict)
    optimizer: str = "adamw"
    minimum_learning_rate: float = 1e-6
    clip: float = 3.0
    final_weight_decay: float = 0.4
    momentum: float = 0.996
    first_temperature: float = 0.04
    teacher_temperature: float = 0.07
    temperature_warmup: float = 0.1
    student_temperature: float = 0.1
    outputs: int = 65536
    hidden_dim: int = 2048
    bottleneck_dim: int = 256
    frozen_epochs: int = 1
    local_crops: int = 8
    local_size: int = 96
    global_scale: list = field(default_factory=lambda: [0.4, 1.0])
    local_scale: list = field(default_factory=lambda: [0.05, 0.4])

    def __post_init__(self):
        super().__post_init__()
        self.check_least(local_crops=0, frozen_epochs=0, local_size=1, hidden_dim=1, bottleneck_dim=1, outputs=2)
        for name in ("first_temperature", "teacher_temperature", "student_temperature"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}; it must be positive")
        for name in ("momentum", "temperature_warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must lie between 0 and 1")
        for name in ("global_scale", "local_scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise InputError(f"{name} is {[low, high]}; it must be [low, high] with 0 < low <= high <= 1")


class Dino(nn.Module):
    """Student, teacher and loss: map large views, small views (lists of (B, C, H, W)) and a temperature to the loss."""

    def __init__(self, vits: tuple[VisionTransformer, VisionTransformer], config: DinoConfig):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # lightly's head uses torch's older weight norm
            self.student, self.teacher = (
                nn.ModuleDict(
                    {
                        "vit": vit,
                        "head": DINOProjectionHead(
                            vit.embed_dim,
                            config.hidden_dim,
                            config.bottleneck_dim,
                            config.outputs,
                            freeze_last_layer=config.frozen_epochs,
                        ),
                    }
                )
                for vit in vits
            )
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.criterion = DINOLoss(config.outputs, student_temp=config.student_temperature)

    def forward(self, large: list[Tensor], small: list[Tensor], temperature: float) -> Tensor:
        with torch.no_grad():
            taught = _run(self.teacher, large)
        said = _run(self.student, large) + (_run(self.student, small) if small else [])
        return self.criterion(
            [view.float() for view in taught], [view.float() for view in said], teacher_temp=temperature
        )

    def train(self, mode: bool = True) -> "Dino":
        """Switch the student's drop path on or off; the teacher never has any."""
        super().train(mode)
        self.teacher.eval()
        return self


def _run(network: nn.ModuleDict, views: list[Tensor]) -> list[Tensor]:
    return list(network["head"](network["vit"](torch.cat(views))).chunk(len(views)))


def build_vit(config: DinoConfig) -> VisionTransformer:
    """Create the ViT that `config` describes, without a classifier, for images of any size, in its initial state.

    Raises InputError for a model that is no ViT, for a crop that patches do not tile, and as `loop.build_model` does.
    """
    shared = {name: getattr(config, name) for name in loop.TrainConfig.__dataclass_fields__ if hasattr(config, name)}
    arguments = {**config.model_args, "dynamic_img_size": True}
    vit = loop.build_model(loop.TrainConfig(**shared | {"model_args": arguments}))
    if not isinstance(vit, VisionTransformer):
        raise InputError(f"{config.model} cannot be DINO's backbone: it is no ViT")
    patch = vit.patch_embed.patch_size[0]
    if config.local_size % patch:
        raise indivisible("local_size", config.local_size, f"{config.model}'s patch size", patch)
    vit.reset_classifier(0)
    return vit


def build_network(config: DinoConfig) -> Dino:
    """Create student and teacher, alike, with the initial weights of the configuration's seed."""
    with draws.Portable():  # of the heads
        return Dino((build_vit(config), build_vit(config)), config)


def load_teacher(folder: Path) -> tuple[DinoConfig, VisionTransformer]:
    """Return the configuration and the teacher's ViT, on the CPU in evaluation mode, of the run stored in `folder`."""
    config = DinoConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
    vit = build_vit(config)
    vit.load_state_dict(checkpoint.read(folder / "model.safetensors"))
    return config, vit.eval()


def distil(config: DinoConfig, folder: Path, report: Callable[[list[dict]], None] | None = None) -> dict:
    """Pre-train as `config` says, resuming from the checkpoint in `folder` if it holds one; return the result.

        history          a row per epoch
        final_loss       of the last epoch's training; None where none was finished
        validation_top1  percent of validation images that a k-NN classifier on the teacher's features gets right
        divergence       None, or kind, epoch and step of a loss or (SOAP) gradient that is not finite; the last whole
                         epoch is kept then
        seconds          of each epoch
        parameters       of the ViT, without its head

    The teacher's ViT ends up in `folder`/model.safetensors. `report` is called as `Run.run` says.
    """
    return _Distillation(config, folder).run(report)


class _Distillation(Run):
    """A run of DINO pre-training."""

    def __init__(self, config: DinoConfig, folder: Path):
        super().__init__(config, folder)
        net = build_network(config).to(self.device)
        optimizer = build_optimizer(config, net.student)
        self.decayed = [index for index, group in enumerate(optimizer.param_groups) if group["weight_decay"]]
        self.mean, self.std = torch.tensor([self.data.mean, self.data.std], device=self.device)
        self.prepare(net, optimizer)

    def train_epoch(self, epoch: int) -> None:
        config = self.config
        before = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}
        losses = []
        batches = self.data.train.batches(
            config.batch_size,
            device=self.device,
            seed=config.seed,
            epoch=epoch,
            drop_last=True,
            train=True,
            shard=self.shard,
        )
        for step, (images, _) in enumerate(batches, start=(epoch - 1) * self.steps):
            losses.append(self._step(images, step, epoch))
            if config.optimizer == "soap" and not losses[-1].isfinite():  # it decomposes its gradients
                break
        losses = self.losses(losses)
        place = first_broken(losses)
        if place is not None or not all(tensor.isfinite().all() for tensor in self.net.state_dict().values()):
            self.break_off(epoch, self.steps - 1 if place is None else place)
            self.net.load_state_dict(before)
        self.history.append(
            {
                "epoch": epoch,
                "train_loss": finite(losses.mean()),
                "learning_rate": self.learning_rate,
                "temperature": self._temperature(epoch),
            }
        )

    def finish(self) -> dict:
        teacher = self.net.teacher["vit"]
        self.store("model.safetensors", teacher.state_dict())
        found, known = self._features(self.data.validation), self._features(self.data.train, NEIGHBOUR_IMAGES)
        return {
            "history": self.history,
            "final_loss": self.history[-1]["train_loss"],
            "seconds": self.seconds,
            "validation_top1": neighbour_top1(*known, *found),
            "divergence": self.divergence,
            "parameters": sum(parameter.numel() for parameter in teacher.parameters()),
        }

    def _step(self, images: Tensor, step: int, epoch: int) -> Tensor:
        """Take one step; return its loss, NaN where the gradient is not finite and SOAP would decompose it."""
        config, last = self.config, self.config.epochs * self.steps
        self.schedule.step_update(step)
        for index in self.decayed:
            self.optimizer.param_groups[index]["weight_decay"] = cosine_schedule(
                step, last, config.weight_decay, config.final_weight_decay
            )
        large, small = multi_crop(
            images,
            self.mean,
            self.std,
            size=self.data.img_size,
            local_size=config.local_size,
            local_crops=config.local_crops,
            scale=config.global_scale,
            local_scale=config.local_scale,
            shard=self.shard,
        )
        with self.autocast():
            loss = self.model(large, small, self._temperature(epoch))
        self.accelerator.backward(loss)
        self.net.student["head"].cancel_last_layer_gradients(epoch - 1)
        norm = nn.utils.clip_grad_norm_(self.parameters, config.clip)
        if config.optimizer == "soap" and not norm.isfinite():
            return loss.detach() * torch.nan
        self.optimizer.step()
        self.optimizer.zero_grad()
        update_momentum(self.net.student, self.net.teacher, cosine_schedule(step, last, config.momentum, 1.0))
        return loss.detach()

    def _temperature(self, epoch: int) -> float:
        rising = self.config.temperature_warmup * self.config.epochs
        share = min(1.0, (epoch - 1) / rising) if rising else 1.0
        return self.config.first_temperature + share * (self.config.teacher_temperature - self.config.first_temperature)

    @torch.no_grad()
    def _features(self, split: Split, most: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the teacher's features (N, d) and labels (N,) of a split's first images, on the CPU."""
        features, labels = [], []
        for images, classes in split.batches(EVALUATION_BATCH, device=self.device, train=False):
            features.append(self.net.teacher["vit"](images).float().cpu())
            labels.append(classes.cpu())
            if most and len(labels) * EVALUATION_BATCH >= most:
                break
        return torch.cat(features), torch.cat(labels)


def neighbour_top1(known: Tensor, labels: Tensor, features: Tensor, truth: Tensor) -> float:
    """Return the percentage of `features` (N, d) whose class a weighted vote of the nearest `known` (M, d) gets right.

    The published k-NN classifier: cosine similarity s, the 20 nearest, votes of exp(s / 0.07).
    """
    known, features = (nn.functional.normalize(x, dim=1) for x in (known, features))
    right = 0
    for batch, classes in zip(features.split(1000), truth.split(1000)):
        near = (batch @ known.mT).topk(min(NEIGHBOURS, len(known)), dim=1)
        votes = torch.zeros(len(batch), int(labels.max()) + 1)
        votes.scatter_add_(1, labels[near.indices], (near.values / NEIGHBOUR_TEMPERATURE).exp())
        right += int((votes.argmax(dim=1) == classes).sum())
    return 100 * right / len(truth)
