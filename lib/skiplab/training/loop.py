"""The training loop: one supervised run, from a configuration to its metrics, resumable at every epoch.

Built on accelerate (devices, several processes, gradient accumulation) and timm's factories (optimiser, cosine
schedule with warm-up, EMA, mixup). It resumes exactly, and removing skips is meant to break training: what broke, and
at which step, is recorded in the result. lib/skiplab/training/run.py has what it shares with the other kinds of run.
"""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.utils import ModelEmaV3
from torch import nn

from skiplab.errors import InputError
from skiplab.models import probe, scaling, zoo
from skiplab.theory.conditioning import condition_number, summarise_log_kappa
from skiplab.training import checkpoint
from skiplab.training.ambient import isolated
from skiplab.training.run import (
    EVALUATION_BATCH,
    PRECISIONS,
    Run,
    RunConfig,
    build_optimizer,
    dataset,
    finite,
    first_broken,
    refuse_arguments,
    skipless_init,
)
from skiplab.training.splits import Split
from skiplab.transforms.graying import METHODS, TokenGraying

__all__ = [
    "PLACES",
    "PRECISIONS",
    "TrainConfig",
    "block_conditions",
    "branch_kappas",
    "build_model",
    "dataset",
    "train",
]

EXPLOSION_WINDOW = 20  # steps over which the loss is averaged before it is called exploded
EXPLOSION_FACTOR = 2.0  # times ln(classes), the loss of a constant guess
PLACES = ("sab", "sab_with_input", "ffn", "ffn_with_input")


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """Everything that decides the numbers of one run (the run store hashes it).

    `accumulation` splits the global batch into that many micro-batches. `optimizer` is a name of timm's, or "soap".
    `skipless` holds the arguments of a SkiplessInit, {} leaves timm's initial weights. `ema` is the decay of the
    averaged weights, 0 for none; with it the averaged model is the one evaluated. `probe_images` is the number of
    validation images on which κ of every block is measured each epoch, 0 for none. `graying` is Token Graying's method
    ("svd", "svd_fast", "dct") on the training images, with exponent `epsilon` on patches of `graying_patch_size`, or
    before the blocks numbered in `graying_blocks` on their tokens instead. `graying_place` is "device" (the batch,
    after mixup) or "workers" (each image, before it; on streamed data). `layer_decay` is each block's learning rate as
    a share of the next one's. `initial` is the run whose weights to start from, "function/hash" in the same store;
    parameters that it lacks keep their initial values. Raises InputError for a value out of its range.
    """

    skip: str = "both"
    skipless: dict = field(default_factory=dict)
    optimizer: str = "adamw"
    layer_decay: float = 1.0
    minimum_learning_rate: float = 0.0
    clip: float = 1.0
    augment: str = "none"
    mixup: float = 0.0
    cutmix: float = 0.0
    label_smoothing: float = 0.0
    ema: float = 0.0
    initial: str = ""
    graying: str = "none"
    epsilon: float = 1.0
    graying_patch_size: int = 0
    graying_rescale: bool = True
    graying_blocks: list = field(default_factory=list)
    graying_place: str = "device"
    compile: bool = False
    accumulation: int = 1
    probe_images: int = 20

    def __post_init__(self):
        self.check_least(accumulation=1, probe_images=0)
        super().__post_init__()
        if not 0 < self.layer_decay <= 1:
            raise InputError(f"layer_decay is {self.layer_decay}; it must lie above 0 and be at most 1, which is off")
        if self.graying_place == "workers" and (self.graying == "none" or self.graying_blocks):
            raise InputError("graying_place is 'workers', who gray images: give a graying method and no graying_blocks")


def build_model(config: TrainConfig) -> nn.Module:
    """Create the model that `config` describes, with the initial weights of its seed."""
    data = dataset(config)
    refuse_arguments(config, "num_classes", "img_size", "in_chans", "skip", "init")
    torch.manual_seed(config.seed)
    model = zoo.create_model(
        config.model,
        num_classes=data.num_classes,
        img_size=data.img_size,
        skip=config.skip,
        init=skipless_init(config),
        in_chans=data.channels,
        **config.model_args,
    )
    blocks = zoo.blocks(model) if config.graying_blocks else []
    for index in config.graying_blocks:
        if not 0 <= index < len(blocks):
            raise InputError(f"graying_blocks names block {index}; the model has blocks 0 to {len(blocks) - 1}")
        blocks[index][1].register_forward_pre_hook(functools.partial(_gray_tokens, config))
    return model


def _gray_tokens(config: TrainConfig, block: nn.Module, inputs: tuple) -> tuple:
    """Gray the tokens (B, n, d) that enter a block, while it trains."""
    if not block.training:
        return inputs
    return METHODS[config.graying](inputs[0], config.epsilon, rescale=config.graying_rescale), *inputs[1:]


@isolated()
def train(config: TrainConfig, folder: Path, report: Callable[[list[dict]], None] | None = None) -> dict:
    """Train as `config` says, resuming from the checkpoint in `folder` if it holds one; return the result.

    Scores are read at the epoch with the best validation top-1, so that a run that breaks late is judged by the best
    model it had. The result:

        history           a row per epoch, row 0 at initialisation
        best_epoch, validation_top1, test_top1, test_top5 (percent), test_loss
        final_test_top1, final_test_top5, final_test_loss
                          of the last epoch; None where the loss became non-finite, and training stopped
        final_test_top1_grayed
                          the same, with Token Graying at evaluation too, where it was used in training
        parameters        their number
        divergence        None, or its kind, epoch and step
        seconds           of each epoch

    The best epoch's weights end up in `folder`/model.safetensors. `report` is called as `Run.run` says.
    """
    return _Run(config, folder).run(report)


class _Run(Run):
    """A run of supervised training."""

    kept = ("best", "averaged")

    def __init__(self, config: TrainConfig, folder: Path):
        super().__init__(config, folder)
        net = build_model(config).to(self.device)
        if config.initial:
            _start_from(net, folder.parent.parent / config.initial / "model.safetensors")
        self.ema = ModelEmaV3(net, decay=config.ema) if config.ema else None
        self.mixup = self._mixup()
        self.graying = nn.Identity()
        if config.graying != "none" and not config.graying_blocks:
            self.graying = TokenGraying(
                config.graying,
                config.epsilon,
                config.graying_patch_size,
                rescale=config.graying_rescale,
                at_evaluation=True,
            )
        self.worker_graying = self.graying if config.graying_place == "workers" else None
        self.best = {}
        self.prepare(net, build_optimizer(config, net), compiled=config.compile)

    @property
    def averaged(self) -> dict | None:
        """The averaged weights, for the checkpoint."""
        return self.ema.module.state_dict() if self.ema else None

    @averaged.setter
    def averaged(self, weights: dict | None) -> None:
        if self.ema:
            self.ema.module.load_state_dict(weights)

    def begin(self) -> None:
        self.history.append({"epoch": 0, "train_loss": None, "learning_rate": 0.0} | self._evaluate_epoch())

    def train_epoch(self, epoch: int) -> None:
        config = self.config
        criterion = (
            SoftTargetCrossEntropy() if self.mixup else nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
        )
        losses, norms, block_norms = [], [], {}
        batches = self.data.train.batches(
            config.batch_size // config.accumulation,
            device=self.device,
            seed=config.seed,
            epoch=epoch,
            augment=config.augment,
            drop_last=True,
            train=True,
            shard=self.shard,
            transform=self.worker_graying,
        )
        for index, (images, labels) in zip(range(self.steps * config.accumulation), batches):
            step, last = divmod(index, config.accumulation)
            self.schedule.step_update((epoch - 1) * self.steps + step)
            if self.mixup:
                images, labels = self.mixup(images, labels)
            with self.accelerator.accumulate(self.model):
                if not self.worker_graying:
                    images = self.graying(images)
                with self.autocast():
                    loss = criterion(self.model(images), labels)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    if step == self.steps - 1:
                        block_norms = self._block_gradient_norms()
                    norms.append(nn.utils.clip_grad_norm_(self.parameters, config.clip))
                    if config.optimizer == "soap" and not norms[-1].isfinite():  # it decomposes its gradients
                        losses.append(norms[-1] * math.nan)
                        break
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            losses.append(loss.detach())
            if last == config.accumulation - 1 and self.ema:
                self.ema.update(self.net)
            if (step + 1) % EXPLOSION_WINDOW == 0 and self._diverged(epoch, losses):
                break
        self._diverged(epoch, losses)
        row = {
            "epoch": epoch,
            "train_loss": finite(self.losses(losses).mean()),
            "learning_rate": self.learning_rate,
            "gradient_norm": finite(torch.stack(norms).mean()),
            "block_gradient_norm": block_norms,
        }
        row |= self._evaluate_epoch()
        if row["validation_loss"] is None and not self.divergence:  # the epoch's last step broke the weights
            self.break_off(epoch, self.steps - 1)
        self.history.append(row)

    def finish(self) -> dict:
        """Score the last and the best epoch on the test split; keep the best epoch's weights."""
        best = final = {} if self.broken else self._evaluate(self.data.test)
        grayed = None
        if final and isinstance(self.graying, TokenGraying):
            grayed = self._evaluate(self.data.test, self.graying)["top1"]
        if self.broken or self.best["epoch"] != self.epoch:
            self._evaluated_model().load_state_dict(self.best["weights"])
            best = self._evaluate(self.data.test)
        self.store("model.safetensors", self.best["weights"])
        scores = {f"test_{name}": value for name, value in best.items()}
        scores |= {f"final_test_{name}": final.get(name) for name in best} | {"final_test_top1_grayed": grayed}
        return scores | {
            "history": self.history,
            "best_epoch": self.best["epoch"],
            "seconds": self.seconds,
            "validation_top1": self.best["top1"],
            "parameters": sum(parameter.numel() for parameter in self.parameters),
            "divergence": self.divergence or _collapse(self.history),
        }

    def _mixup(self) -> Mixup | None:
        config = self.config
        if not config.mixup and not config.cutmix:
            return None
        share = config.batch_size // config.accumulation // self.shard[1]
        if share % 2:  # timm mixes each image of a batch with another
            raise InputError(f"mixup and cutmix pair images: each process needs an even number at a time, not {share}")
        return Mixup(
            mixup_alpha=config.mixup,
            cutmix_alpha=config.cutmix,
            label_smoothing=config.label_smoothing,
            num_classes=self.data.num_classes,
        )

    def _evaluated_model(self) -> nn.Module:
        return self.ema.module if self.ema else self.net

    @torch.no_grad()
    def _evaluate(self, split: Split, transform: nn.Module = nn.Identity()) -> dict:
        """Return the mean cross-entropy, the top-1 and the top-5 in percent on a whole split."""
        model, kept = self._evaluated_model().eval(), min(5, self.data.num_classes)
        totals = torch.zeros(4, dtype=torch.float64, device=self.device)
        for images, labels in split.batches(EVALUATION_BATCH, device=self.device, train=False, shard=self.shard):
            with self.autocast():
                logits = model(transform(images)).float()
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
            right = logits.topk(kept).indices == labels[:, None]
            counts = torch.stack([right[:, 0].sum(), right.sum(), torch.tensor(len(labels), device=self.device)])
            totals += torch.cat([loss[None], counts]).double()
        loss, first, among, count = self.accelerator.reduce(totals).tolist()
        return {"loss": finite(loss / count), "top1": 100 * first / count, "top5": 100 * among / count}

    def _evaluate_epoch(self) -> dict:
        """Return the part of an epoch's row that the model as it stands decides."""
        validation = self._evaluate(self.data.validation)
        row = {"validation_loss": validation["loss"], "validation_top1": validation["top1"]}
        if not self.best or validation["top1"] > self.best["top1"]:
            weights = {name: tensor.clone() for name, tensor in self._evaluated_model().state_dict().items()}
            self.best = {"epoch": self.epoch, "top1": validation["top1"], "weights": weights}
        if self.config.probe_images:
            images, _ = next(
                iter(self.data.validation.batches(self.config.probe_images, device=self.device, train=False))
            )
            row["log_kappa"] = block_conditions(self.net, images)
        return row

    def _block_gradient_norms(self) -> dict[str, float | None]:
        return {
            name: finite(torch.stack([p.grad.norm() for p in block.parameters() if p.grad is not None]).norm())
            for name, block in zoo.blocks(self.net)
        }

    def _diverged(self, epoch: int, losses: list[torch.Tensor]) -> bool:
        """Record a non-finite or exploded loss, the same in all processes; return whether training must stop."""
        window = self.losses(losses[-EXPLOSION_WINDOW * self.config.accumulation :])
        place = first_broken(window)
        if place is not None:
            self.break_off(epoch, (len(losses) - len(window) + place) // self.config.accumulation)
            return True
        limit = EXPLOSION_FACTOR * math.log(self.data.num_classes)
        if not self.divergence and window.mean() > limit:
            self.divergence = {
                "kind": "explosion",
                "epoch": epoch,
                "step": (epoch - 1) * self.steps + (len(losses) - 1) // self.config.accumulation,
            }
        return False


def _start_from(model: nn.Module, path: Path) -> None:
    """Load the stored weights that a model starts from; only its scaling and what follows its blocks may be new."""
    if not path.exists():
        raise InputError(f"initial weights: {path} does not exist; compute that run first")
    try:
        scaling.load_weights(model, checkpoint.read(path), optional=("head.", "norm.", "fc_norm."))
    except InputError as error:
        raise InputError(f"initial weights {path}: {error}") from error


@torch.no_grad()
def branch_kappas(model: nn.Module, images: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    """Measure κ of every block's branch outputs, with and without the branch's input added.

    `images` is (B, C, H, W). Returns κ of the (n, d) token matrices, a (B,) tensor for each place of PLACES and block.
    The model is run in float64: in float32, rounding alone makes a matrix of κ > 10⁵ look rank-deficient.
    """
    traces = probe.branch_outputs(copy.deepcopy(model).double(), images.double())
    return {
        place: {
            trace.name: condition_number(getattr(trace, place)) for trace in traces if getattr(trace, place) is not None
        }
        for place in PLACES
    }


def block_conditions(model: nn.Module, images: torch.Tensor) -> list[dict]:
    """Summarise `branch_kappas`: a row per place and block with the median ln κ (None: none finite) and counts."""
    rows = []
    for place, kappas in branch_kappas(model, images).items():
        for index, kappa in enumerate(kappas.values()):
            summary = summarise_log_kappa(kappa)
            rows.append(
                {"place": place, "block": index} | summary | {"median_log_kappa": finite(summary["median_log_kappa"])}
            )
    return rows


def _collapse(history: list[dict]) -> dict | None:
    """Find a collapse: validation top-1 ends below half of its best, the best being at least twice the initial one."""
    scores = [row["validation_top1"] for row in history]
    best = max(range(len(scores)), key=scores.__getitem__)
    if scores[best] < 2 * scores[0] or scores[-1] >= scores[best] / 2:
        return None
    epoch = next(e for e in range(best, len(scores)) if max(scores[e:]) < scores[best] / 2)
    return {"kind": "collapse", "epoch": epoch, "step": None}
