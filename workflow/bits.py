"""Digests of what a run consists of, to be compared between processors: `python -m workflow.bits` prints them as JSON.

`make test-cpus` compares them. What stands in DRAWN must be the same bits on every machine.
"""

import hashlib
import json
import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy
import torch
from torch import Tensor, nn

from skiplab import draws
from skiplab.models import create_model
from skiplab.models.skipless import SkiplessInit
from skiplab.theory.conditioning import condition_number
from skiplab.theory.spectral import frequency_response, token_similarity
from skiplab.training import data, dino, run, selfsupervised
from skiplab.transforms.augment import draw_crop_flip
from skiplab.transforms.graying import gray_dct, gray_svd

MODELS = {
    "ViT": ("vit", {"embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 7}),
    "Swin": ("swin", {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "patch_size": 2, "window_size": 7}),
    "CaiT": ("cait", {"embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 7}),
    "PVT v2": ("pvt_v2", {"embed_dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1), "img_size": 32}),
    "ConvMixer": ("convmixer", {"dim": 16, "depth": 2, "kernel_size": 3, "patch_size": 7}),
}
STEPS = 8


def digest(*tensors: Tensor) -> str:
    """Return a short digest of the bits of tensors."""
    content = b"".join(tensor.detach().contiguous().cpu().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(content).hexdigest()[:12]


def build(name: str = "ViT", **changes: object) -> nn.Module:
    """Create one of MODELS with the weights of seed 0."""
    family, arguments = MODELS[name]
    torch.manual_seed(0)
    return create_model(family, **{"num_classes": 10, "img_size": 28, "in_chans": 1} | arguments | changes)


def pictures() -> tuple[Tensor, Tensor]:
    """Return the first training batch, 64 images, of the embedded data."""
    return next(iter(data.load("fashion_mnist", img_size=28).train.batches(64, train=True, augment="crop_flip")))


def trained(optimizer: str, **changes: object) -> nn.Module:
    """Take a few steps on the first batch and return the model."""
    model, (images, labels) = build(**changes), pictures()
    settings = SimpleNamespace(optimizer=optimizer, learning_rate=1e-3, weight_decay=0.05, layer_decay=1.0)
    updates = run.build_optimizer(settings, model)
    for _ in range(STEPS):
        nn.functional.cross_entropy(model(images), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        updates.step()
        updates.zero_grad()
    return model


def first_step() -> list[Tensor]:
    """Return the loss and the gradients of the first step."""
    model, (images, labels) = build(), pictures()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters())]


def mixing() -> list[Tensor]:
    """Draw as mixup does: with numpy's and Python's generators, seeded as an epoch's."""
    run.seed_everything(0, 1)
    return [torch.from_numpy(numpy.random.beta(0.8, 0.8, 100)), torch.tensor([random.gauss(0, 1) for _ in range(100)])]


def dropped() -> Tensor:
    torch.manual_seed(0)
    return torch.cat([nn.functional.dropout(torch.ones(1000), 0.1), torch.empty(1000).bernoulli_(0.8)])


def splits() -> list[Tensor]:
    found = data.load("fashion_mnist")
    return [split.labels for split in (found.train, found.validation, found.test)]


def tokens() -> Tensor:
    return draws.normal(8, 16, 24, generator=torch.Generator().manual_seed(0))


def crops() -> Tensor:
    return draw_crop_flip(500, padding=3, generator=torch.Generator().manual_seed(0))


def dino_heads() -> list[Tensor]:
    config = dino.DinoConfig(
        "fashion_mnist",
        "vit",
        0,
        1,
        1e-3,
        model_args=MODELS["ViT"][1],
        outputs=32,
        hidden_dim=16,
        bottleneck_dim=8,
        local_size=14,
    )
    return list(dino.build_network(config).parameters())


def autoencoder() -> list[Tensor]:
    config = selfsupervised.MaeConfig(
        "fashion_mnist", "vit", 0, 1, 1e-3, model_args=MODELS["ViT"][1], decoder_dim=32, decoder_heads=2
    )
    return list(selfsupervised.build_model(config).parameters())


def masks() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return selfsupervised.random_masks(64, 17, 0.75)


def attention() -> Tensor:
    return torch.softmax(draws.normal(4, 16, 16, generator=torch.Generator().manual_seed(1)), dim=-1)


DRAWN: dict[str, Callable[[], Tensor | list[Tensor] | tuple[Tensor, ...]]] = {
    **{f"initial weights, {name}": lambda name=name: list(build(name).parameters()) for name in MODELS},
    "initial weights, skipless": lambda: list(build(init=SkiplessInit()).parameters()),
    "initial weights, masked autoencoder": autoencoder,
    "initial weights, DINO": dino_heads,
    "splits": splits,
    "order and crops of a batch": pictures,
    "crops": crops,
    "masks": masks,
    "cases of theorems": tokens,
}
COMPUTED: dict[str, Callable[[], Tensor | list[Tensor] | tuple[Tensor, ...]]] = {
    "draws of mixup and RandAugment": mixing,
    "dropout and drop path": dropped,
    "loss and gradients of the first step": first_step,
    f"{STEPS} steps of AdamW": lambda: list(trained("adamw").parameters()),
    f"{STEPS} steps of AdamW, skipless": lambda: list(trained("adamw", skip="none", init=SkiplessInit()).parameters()),
    f"{STEPS} steps of SOAP": lambda: list(trained("soap").parameters()),
    "a grayed batch, DCT": lambda: gray_dct(pictures()[0][:, 0], 0.7),
    "a grayed batch, SVD": lambda: gray_svd(pictures()[0][:, 0], 0.7),
    "condition numbers, float64": lambda: condition_number(tokens()),
    "token similarity, float64": lambda: token_similarity(tokens()),
    "frequency response, float64": lambda: frequency_response(attention()),
}


def digests() -> dict[str, str]:
    """Return the digest of each part, on one thread."""
    torch.set_num_threads(1)
    found = {}
    for name, compute in (DRAWN | COMPUTED).items():
        result = compute()
        found[name] = digest(result) if isinstance(result, Tensor) else digest(*result)
    return found


if __name__ == "__main__":
    print(json.dumps(digests()))
