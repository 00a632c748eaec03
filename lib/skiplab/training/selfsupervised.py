"""Masked-autoencoder pre-training: one run, from a configuration to an encoder, resumable at every epoch.

"Masked Autoencoders Are Scalable Vision Learners" (He et al., CVPR 2022, arXiv 2111.06377): hide most patches, encode
the others, let a small decoder predict the pixels of the hidden ones, each patch normalised. Encoder and decoder are
lightly's parts around a timm ViT. `loop.train` fine-tunes the encoder where its `initial` names the pre-training run.
lib/skiplab/training/run.py has what both kinds of run share.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from lightly.models.modules import MaskedVisionTransformerTIMM
from lightly.models.modules.masked_vision_transformer_decoder_timm import MaskedVisionTransformerDecoderTIMM
from lightly.models.utils import get_at_index, normalize_mean_var, repeat_token, set_at_index
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from skiplab import draws
from skiplab.errors import InputError
from skiplab.models import zoo
from skiplab.training.run import (
    EVALUATION_BATCH,
    Run,
    RunConfig,
    build_optimizer,
    dataset,
    finite,
    first_broken,
    refuse_arguments,
    seed_everything,
)
from skiplab.transforms.augment import share
from skiplab.transforms.graying import TokenGraying, patchify


@dataclass(frozen=True)
class MaeConfig(RunConfig):
    """Everything that decides the numbers of one pre-training run (the run store hashes it).

    The model is a ViT of `skiplab.models.zoo`; recipe and graying mean what they do in `loop.TrainConfig`.
    `mask_ratio` is the share of patches hidden. `graying` is Token Graying's method on the whole image that the encoder
    sees part of; the pixels to predict are those of the original image: the paper does not say, and so the task is the
    same with and without it. Raises InputError for a value out of its range.
    """

    warmup: float = 0.1
    augment: str = "none"
    mask_ratio: float = 0.75
    decoder_dim: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16
    graying: str = "none"
    epsilon: float = 1.0
    graying_rescale: bool = True
    accumulation: int = 1

    def __post_init__(self):
        self.check_least(accumulation=1)
        super().__post_init__()
        if not 0 < self.mask_ratio < 1:
            raise InputError(f"mask_ratio is {self.mask_ratio}; it must lie between 0 and 1")
        if self.decoder_dim % 4 or self.decoder_dim % self.decoder_heads:
            raise InputError(
                f"decoder_dim is {self.decoder_dim}; 4 (for its position code) and decoder_heads "
                f"({self.decoder_heads}) must divide it"
            )


class MaskedAutoencoder(nn.Module):
    """Map images (B, C, H, W) and the pixels to predict to the mean squared error on the hidden patches.

    Where the images are a process's share of a batch of `count`, masks are drawn for all of it.
    """

    def __init__(self, vit: VisionTransformer, channels: int, config: MaeConfig, shard: tuple[int, int] = (0, 1)):
        super().__init__()
        self.patch_size, self.mask_ratio, self.shard = vit.patch_embed.patch_size[0], config.mask_ratio, shard
        self.encoder = MaskedVisionTransformerTIMM(vit)  # which draws the ViT's weights anew
        self.encoder.mask_token.requires_grad_(False)  # the encoder never sees a hidden patch
        self.embed = nn.Linear(vit.embed_dim, config.decoder_dim)
        self.decoder = MaskedVisionTransformerDecoderTIMM(
            vit.patch_embed.num_patches,
            config.decoder_dim,
            config.decoder_depth,
            config.decoder_heads,
            num_prefix_tokens=vit.num_prefix_tokens,
        )
        for code in (vit.pos_embed, self.decoder.pos_embed):
            code.data[0, 1:] = position_code(code.shape[1] - 1, code.shape[2])
        self.predict = nn.Linear(config.decoder_dim, channels * self.patch_size**2)

    def forward(self, images: Tensor, originals: Tensor, count: int | None = None) -> Tensor:
        size = len(images), self.encoder.sequence_length
        masks = random_masks(count or size[0], size[1], self.mask_ratio)
        keep, hidden = (share(mask, self.shard).to(images.device) for mask in masks)
        encoded = self.embed(self.encoder.encode(images, idx_keep=keep))
        tokens = repeat_token(self.decoder.mask_token, size).to(encoded.dtype)
        decoded = self.decoder(set_at_index(tokens, keep, encoded))
        predicted = self.predict(get_at_index(decoded, hidden)).float()
        pixels = get_at_index(patchify(originals, self.patch_size), hidden - self.encoder.vit.num_prefix_tokens)
        return nn.functional.mse_loss(predicted, normalize_mean_var(pixels))

    def initial_weights(self) -> dict[str, Tensor]:
        """Return the encoder's weights that fine-tuning starts from: all but the head and the norm before it."""
        return {
            name: tensor
            for name, tensor in self.encoder.vit.state_dict().items()
            if not name.startswith(("head.", "norm.", "fc_norm."))
        }


def position_code(count: int, dim: int) -> Tensor:
    """Return the sines and cosines that encode the places of a square grid of `count` patches, float32 (count, dim).

    As MAE and lightly have them, column before row, but in float64 by the C library, not by float32 vector kernels,
    which differ between processors.
    """
    side, rates = math.isqrt(count), [10000 ** (-4 * k / dim) for k in range(dim // 4)]
    lines = [[f(place * rate) for f in (math.sin, math.cos) for rate in rates] for place in range(side)]
    return torch.tensor([lines[column] + lines[row] for row in range(side) for column in range(side)])


def random_masks(count: int, length: int, ratio: float) -> tuple[Tensor, Tensor]:
    """Draw which tokens to keep and which to hide, (count, kept) and (count, hidden); the first, the class's, is kept.

    From torch's CPU generator. In float64 no two tokens draw the same number, so the order needs no rule for ties.
    """
    chance = draws.uniform(count, length)
    chance[:, 0] = -1
    order = chance.argsort(dim=1)
    kept = 1 + int((length - 1) * (1 - ratio))
    return order[:, :kept], order[:, kept:]


def build_model(config: MaeConfig, shard: tuple[int, int] = (0, 1)) -> MaskedAutoencoder:
    """Create the autoencoder that `config` describes, with the initial weights of its seed.

    Raises InputError for a model that is no ViT with one class token, and for arguments that the data decide.
    """
    data = dataset(config)
    refuse_arguments(config, "num_classes", "img_size", "in_chans")
    torch.manual_seed(config.seed)
    # Pooling and drop path are fine-tuning's: the decoder reads every token, normalised, which pooling would leave out.
    arguments = {
        name: value for name, value in config.model_args.items() if name not in ("global_pool", "drop_path_rate")
    }
    vit = zoo.create_model(config.model, num_classes=0, img_size=data.img_size, in_chans=data.channels, **arguments)
    if not isinstance(vit, VisionTransformer) or vit.num_prefix_tokens != 1:
        raise InputError(f"{config.model} cannot be a masked autoencoder's encoder: it is no ViT with a class token")
    with draws.Portable():
        return MaskedAutoencoder(vit, data.channels, config, shard)


def pretrain(config: MaeConfig, folder: Path, report: Callable[[list[dict]], None] | None = None) -> dict:
    """Pre-train as `config` says, resuming from the checkpoint in `folder` if it holds one; return the result.

        history      a row per epoch
        final_loss   on the validation split, after the last epoch
        divergence   None, or kind, epoch and step of a loss that is not finite; the last whole epoch is kept then
        seconds      of each epoch
        parameters   of encoder and decoder

    The encoder's weights end up in `folder`/model.safetensors. `report` is called as `Run.run` says.
    """
    return _Pretraining(config, folder).run(report)


class _Pretraining(Run):
    """A run of masked-autoencoder pre-training."""

    def __init__(self, config: MaeConfig, folder: Path):
        super().__init__(config, folder)
        net = build_model(config, self.shard).to(self.device)
        self.graying = nn.Identity()
        if config.graying != "none":
            self.graying = TokenGraying(
                config.graying, config.epsilon, net.patch_size, rescale=config.graying_rescale, at_evaluation=True
            )
        self.prepare(net, build_optimizer(config, net, betas=(0.9, 0.95)))

    def train_epoch(self, epoch: int) -> None:
        config = self.config
        before = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}
        losses, size = [], config.batch_size // config.accumulation
        batches = self.data.train.batches(
            size,
            device=self.device,
            seed=config.seed,
            epoch=epoch,
            augment=config.augment,
            drop_last=True,
            train=True,
            shard=self.shard,
        )
        for index, (images, _) in zip(range(self.steps * config.accumulation), batches):
            self.schedule.step_update((epoch - 1) * self.steps + index // config.accumulation)
            with self.accelerator.accumulate(self.model):
                loss = self._loss(images, size)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            losses.append(loss.detach())
        losses = self.losses(losses)
        place = first_broken(losses)
        validation = self._validation_loss() if place is None else None
        if validation is None:  # a loss broke, or the epoch's last step broke the weights
            self.break_off(epoch, self.steps - 1 if place is None else place // config.accumulation)
            self.net.load_state_dict(before)
            validation = self._validation_loss()
        self.history.append(
            {
                "epoch": epoch,
                "train_loss": finite(losses.mean()),
                "learning_rate": self.learning_rate,
                "validation_loss": validation,
            }
        )

    def finish(self) -> dict:
        self.store("model.safetensors", self.net.initial_weights())
        return {
            "history": self.history,
            "final_loss": self.history[-1]["validation_loss"],
            "seconds": self.seconds,
            "divergence": self.divergence,
            "parameters": sum(p.numel() for p in self.net.parameters()),
        }

    def _loss(self, images: Tensor, count: int) -> Tensor:
        with self.autocast():
            return self.model(self.graying(images), images, count)

    @torch.no_grad()
    def _validation_loss(self) -> float | None:
        """Return the mean loss on the validation split, under masks that are the same in every epoch and run."""
        seed_everything(0, 0)
        self.model.eval()
        totals, split = torch.zeros(2, dtype=torch.float64, device=self.device), self.data.validation
        counts = range(split.num_images, 0, -EVALUATION_BATCH)  # what is left before each batch
        batches = split.batches(EVALUATION_BATCH, device=self.device, train=False, shard=self.shard)
        for left, (images, _) in zip(counts, batches):
            loss = self._loss(images, min(left, EVALUATION_BATCH)).item()
            totals += torch.tensor([len(images) * loss, len(images)], device=self.device)
        total, count = self.accelerator.reduce(totals).tolist()
        return finite(total / count)
