"""Masked-autoencoder pre-training: one run, from a configuration to an encoder, resumable at every epoch.

"Masked Autoencoders Are Scalable Vision Learners" (He et al., CVPR 2022, arXiv 2111.06377): hide most patches, encode
the others, let a small decoder predict the pixels of the hidden ones, each patch normalised. Encoder and decoder are
lightly's parts around a timm ViT. `loop.train` fine-tunes the encoder where its `initial` names the pre-training run.
As there, everything random in an epoch is seeded from (seed, epoch), so a resumed run repeats itself bit for bit.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from lightly.models.modules import MaskedVisionTransformerTIMM
from lightly.models.modules.masked_vision_transformer_decoder_timm import MaskedVisionTransformerDecoderTIMM
from lightly.models.utils import get_at_index, normalize_mean_var, random_token_mask, repeat_token, set_at_index
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

from lib.errors import InputError
from lib.models import zoo
from lib.training import checkpoint, loop
from lib.transforms.graying import TokenGraying, patchify


@dataclass(frozen=True)
class MaeConfig:
    """Everything that decides the numbers of one pre-training run (the run store hashes it).

    The model is a ViT of `lib.models.zoo`; data, budget and recipe mean what they do in `loop.TrainConfig`.
    `mask_ratio` is the share of patches hidden. `graying` is Token Graying's method on the whole image that the encoder
    sees part of; the pixels to predict are those of the original image: the paper does not say, and so the task is the
    same with and without it. Raises InputError for a value out of its range.
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
    warmup: float = 0.1
    augment: str = "none"
    mask_ratio: float = 0.75
    decoder_dim: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16
    graying: str = "none"
    epsilon: float = 1.0
    graying_rescale: bool = True
    precision: str = "float32"
    accumulation: int = 1
    device: str = "cpu"

    def __post_init__(self):
        # What both kinds of run have is checked in one place; `initial` and the like keep their defaults.
        shared = {name: getattr(self, name) for name in loop.TrainConfig.__dataclass_fields__ if hasattr(self, name)}
        loop.TrainConfig(**shared)
        if not 0 < self.mask_ratio < 1:
            raise InputError(f"mask_ratio is {self.mask_ratio}; it must lie between 0 and 1")
        if self.decoder_dim % 4 or self.decoder_dim % self.decoder_heads:
            raise InputError(f"decoder_dim is {self.decoder_dim}; 4 (for its position code) and decoder_heads "
                             f"({self.decoder_heads}) must divide it")


class MaskedAutoencoder(nn.Module):
    """Map images (B, C, H, W) and the pixels to predict to the mean squared error on the hidden patches."""

    def __init__(self, vit: VisionTransformer, channels: int, config: MaeConfig):
        super().__init__()
        self.patch_size, self.mask_ratio = vit.patch_embed.patch_size[0], config.mask_ratio
        self.encoder = MaskedVisionTransformerTIMM(vit)
        self.encoder.mask_token.requires_grad_(False)  # the encoder never sees a hidden patch
        self.embed = nn.Linear(vit.embed_dim, config.decoder_dim)
        self.decoder = MaskedVisionTransformerDecoderTIMM(
            vit.patch_embed.num_patches, config.decoder_dim, config.decoder_depth, config.decoder_heads,
            num_prefix_tokens=vit.num_prefix_tokens)
        self.predict = nn.Linear(config.decoder_dim, channels * self.patch_size**2)

    def forward(self, images: Tensor, originals: Tensor) -> Tensor:
        size = len(images), self.encoder.sequence_length
        keep, hidden = random_token_mask(size, self.mask_ratio, device=images.device)
        encoded = self.embed(self.encoder.encode(images, idx_keep=keep))
        tokens = repeat_token(self.decoder.mask_token, size).to(encoded.dtype)
        decoded = self.decoder(set_at_index(tokens, keep, encoded))
        predicted = self.predict(get_at_index(decoded, hidden)).float()
        pixels = get_at_index(patchify(originals, self.patch_size), hidden - self.encoder.vit.num_prefix_tokens)
        return nn.functional.mse_loss(predicted, normalize_mean_var(pixels))

    def initial_weights(self) -> dict[str, Tensor]:
        """Return the encoder's weights that fine-tuning starts from: all but the head and the norm before it."""
        return {name: tensor for name, tensor in self.encoder.vit.state_dict().items()
                if not name.startswith(("head.", "norm.", "fc_norm."))}


def build_model(config: MaeConfig) -> MaskedAutoencoder:
    """Create the autoencoder that `config` describes, with the initial weights of its seed.

    Raises InputError for a model that is no ViT with one class token, and for arguments that the data decide.
    """
    data = loop.dataset(config)
    for name in ("num_classes", "img_size", "in_chans"):
        if name in config.model_args:
            raise InputError(f"model_args sets {name!r}, which the data and the configuration decide; leave it out")
    torch.manual_seed(config.seed)
    # Pooling and drop path are fine-tuning's: the decoder reads every token, normalised, which pooling would leave out.
    arguments = {name: value for name, value in config.model_args.items() if name not in ("global_pool", "drop_path_rate")}
    vit = zoo.create_model(config.model, num_classes=0, img_size=data.img_size, in_chans=data.channels, **arguments)
    if not isinstance(vit, VisionTransformer) or vit.num_prefix_tokens != 1:
        raise InputError(f"{config.model} cannot be a masked autoencoder's encoder: it is no ViT with a class token")
    return MaskedAutoencoder(vit, data.channels, config)


def pretrain(config: MaeConfig, folder: Path, report: Callable[[list[dict]], None] | None = None) -> dict:
    """Pre-train as `config` says, resuming from the checkpoint in `folder` if it holds one; return the result.

        history      a row per epoch
        final_loss   on the validation split, after the last epoch
        divergence   None, or kind, epoch and step of a loss that is not finite; the last whole epoch is kept then
        seconds      of each epoch
        parameters   of encoder and decoder

    The encoder's weights end up in `folder`/model.safetensors. `report` is called with the history after each epoch.
    """
    run = _Pretraining(config, folder)
    while run.epoch < config.epochs and not run.divergence:
        run.train_epoch(run.epoch + 1)
        run.save()
        if report:
            report(run.history)
    return run.finish()


class _Pretraining:
    """The state of one run between epochs."""

    def __init__(self, config: MaeConfig, folder: Path):
        self.config, self.folder, self.data = config, folder, loop.dataset(config)
        self.accelerator = Accelerator(cpu=config.device == "cpu", gradient_accumulation_steps=config.accumulation)
        self.device = self.accelerator.device
        if self.device.type != config.device:
            raise InputError(f"this process already computes on {self.device.type}; restart the kernel to use {config.device}")
        self.shard = (self.accelerator.process_index, self.accelerator.num_processes)
        self.steps = self.data.train.num_images // config.batch_size
        if not self.steps:
            raise InputError(f"batch_size {config.batch_size} exceeds the {self.data.train.num_images} training images")
        self.net = build_model(config).to(self.device)
        self.optimizer = create_optimizer_v2(self.net, "adamw", lr=config.learning_rate, betas=(0.9, 0.95),
                                             weight_decay=config.weight_decay, fused=True)
        updates = config.epochs * self.steps
        self.schedule = CosineLRScheduler(self.optimizer, t_initial=updates, t_in_epochs=False,
                                          warmup_t=round(config.warmup * updates))
        self.model, self.stepper = self.accelerator.prepare(self.net, self.optimizer)
        self.graying = nn.Identity()
        if config.graying != "none":
            self.graying = TokenGraying(config.graying, config.epsilon, self.net.patch_size,
                                        rescale=config.graying_rescale, at_evaluation=True)
        self.epoch, self.history, self.divergence, self.seconds = 0, [], None, []
        saved = folder / "checkpoint.safetensors"
        if saved.exists():
            self._resume(checkpoint.read(saved))

    def train_epoch(self, epoch: int) -> None:
        config, start = self.config, time.perf_counter()
        before = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}
        loop.seed_everything(config.seed, epoch, self.shard[0])
        self.model.train()
        losses = []
        batches = self.data.train.batches(
            config.batch_size // config.accumulation, device=self.device, seed=config.seed, epoch=epoch,
            augment=config.augment, drop_last=True, train=True, shard=self.shard)
        for index, (images, _) in zip(range(self.steps * config.accumulation), batches):
            self.schedule.step_update((epoch - 1) * self.steps + index // config.accumulation)
            with self.accelerator.accumulate(self.model):
                loss = self._loss(images)
                self.accelerator.backward(loss)
                self.stepper.step()
                self.stepper.zero_grad()
            losses.append(loss.detach())
        broken = (~torch.stack(losses).isfinite()).nonzero()
        validation = None if len(broken) else self._validation_loss()
        if validation is None:  # a loss broke, or the epoch's last step broke the weights
            step = broken[0].item() // config.accumulation if len(broken) else self.steps - 1
            self.divergence = {"kind": "non-finite", "epoch": epoch, "step": (epoch - 1) * self.steps + step}
            self.net.load_state_dict(before)
            validation = self._validation_loss()
        self.epoch = epoch
        self.history.append({"epoch": epoch, "train_loss": loop.finite(torch.stack(losses).mean()),
                             "learning_rate": self.optimizer.param_groups[0]["lr"], "validation_loss": validation})
        self.seconds.append(time.perf_counter() - start)

    def save(self) -> None:
        if self.accelerator.is_main_process:
            checkpoint.write(self.folder / "checkpoint.safetensors", {
                "config": asdict(self.config), "epoch": self.epoch, "history": self.history,
                "divergence": self.divergence, "seconds": self.seconds, "model": self.net.state_dict(),
                "optimizer": self.optimizer.state_dict()})

    def finish(self) -> dict:
        if self.accelerator.is_main_process:
            checkpoint.write(self.folder / "model.safetensors", self.net.initial_weights())
        return {"history": self.history, "final_loss": self.history[-1]["validation_loss"], "seconds": self.seconds,
                "divergence": self.divergence, "parameters": sum(p.numel() for p in self.net.parameters())}

    def _loss(self, images: Tensor) -> Tensor:
        low = self.config.precision != "float32"
        with torch.autocast(self.device.type, loop.PRECISIONS[self.config.precision], enabled=low):
            return self.model(self.graying(images), images)

    @torch.no_grad()
    def _validation_loss(self) -> float | None:
        """Return the mean loss on the validation split, under masks that are the same in every epoch and run."""
        loop.seed_everything(0, 0, self.shard[0])
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for images, _ in self.data.validation.batches(loop.EVALUATION_BATCH, device=self.device, train=False,
                                                      shard=self.shard):
            totals += torch.tensor([len(images) * self._loss(images).item(), len(images)], device=self.device)
        total, count = self.accelerator.reduce(totals).tolist()
        return loop.finite(total / count)

    def _resume(self, state: dict) -> None:
        if state["config"] != asdict(self.config):
            raise checkpoint.CorruptFile("checkpoint.safetensors belongs to another configuration")
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.history = state["epoch"], state["history"]
        self.divergence, self.seconds = state["divergence"], state["seconds"]
