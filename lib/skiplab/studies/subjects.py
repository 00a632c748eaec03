"""The models that several notebooks measure, trained, untrained or published, and the pictures they see."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from skiplab.models import zoo
from skiplab.models.matrices import check_block
from skiplab.training import loop
from skiplab.training.photographs import photographs
from skiplab.transforms.augment import normalise


@torch.no_grad()
def check(config: loop.TrainConfig) -> None:
    """Raise InputError where the theorems say nothing about the blocks of `config`'s model: call it before training."""
    arguments = {name: value for name, value in config.model_args.items() if name != "pretrained"}
    for _, block in zoo.blocks(zoo.create_model(config.model, num_classes=2, **arguments).double().eval()):
        for parameter in block.parameters():
            parameter += 0.1  # what starts without effect shows
        check_block(block)


def published(names: list[str], data: str, report: Callable[[str], None]) -> list[loop.TrainConfig]:
    """Return what builds each timm model of `names` with its published weights, for images of `data` at 224 pixels.

    Empty for ["none"], and where a model cannot be fetched, which `report` is told: the notebook then does without.
    """
    if names == ["none"]:
        return []
    configs = [
        loop.TrainConfig(
            data, name, seed=0, epochs=1, learning_rate=1.0, img_size=224, channels=3, model_args={"pretrained": True}
        )
        for name in names
    ]
    for config in configs:
        try:
            loop.build_model(config)
        except Exception as error:  # whatever a network, a hub or a proxy does
            report(
                f"published weights of {config.model} are not available here ({type(error).__name__}): models trained "
                "here take their place"
            )
            return []
    return configs


def untrained(config: loop.TrainConfig) -> nn.Module:
    """Return the model of `config` with its initial weights."""
    arguments = {name: value for name, value in config.model_args.items() if name != "pretrained"}
    return loop.build_model(replace(config, model_args=arguments)).eval()


def natural_images(config: loop.TrainConfig) -> Tensor:
    """Return the embedded photographs (8, C, H, W) in the size, channels and scale that the model of `config` takes."""
    data = loop.dataset(config)
    images = torch.stack(list(photographs(data.img_size).values()))
    if data.channels == 1:
        images = images.float().mean(dim=1, keepdim=True).round().byte()
    return normalise(images, torch.tensor(data.test.mean), torch.tensor(data.test.std))
