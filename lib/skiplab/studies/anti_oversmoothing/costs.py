"""What AttnScale and FeatScale cost: a training step's time, and the memory kept for backward."""

import statistics
from collections.abc import Callable, Mapping

import pandas
import torch
from torch import Tensor, nn

from skiplab.companion import runs
from skiplab.companion.timing import interleaved


def kept_for_backward(model: nn.Module, images: Tensor) -> float:
    """Return how many MB (10⁶ bytes) a forward pass keeps for the backward pass, the parameters aside."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(images)  # holds what it keeps, so that no two share an address
    del output
    return sum(kept.values()) / 1e6


def step_costs(models: Mapping[str, nn.Module], images: Tensor, device: str, rounds: int) -> pandas.DataFrame:
    """Time a training step (forward, backward, AdamW) of every model in turn: a row per model.

    Columns: `ms`, the median over `rounds`; `ratio`, the median over rounds of its time over the first model's; and
    `kept_mb` as `kept_for_backward` counts. On a CPU one thread's processor time. A GPU's process gets copies of the
    models, which must be picklable: those with both skips are.
    """
    return runs.on_device(device, _step_costs, models, images, device, rounds)


def _step_costs(models: Mapping[str, nn.Module], images: Tensor, device: str, rounds: int) -> pandas.DataFrame:
    images = images.to(device)
    models = {name: model.to(device).train() for name, model in models.items()}
    kept = {name: kept_for_backward(model, images) for name, model in models.items()}
    times = interleaved({name: _step(model, images) for name, model in models.items()}, device, rounds)
    first = times[next(iter(models))]
    return pandas.DataFrame(
        [
            {
                "model": name,
                "ms": 1e3 * statistics.median(times[name]),
                "kept_mb": kept[name],
                "ratio": statistics.median(
                    time / reference for time, reference in zip(times[name], first, strict=True)
                ),
            }
            for name in models
        ]
    )


def _step(model: nn.Module, images: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    return step
