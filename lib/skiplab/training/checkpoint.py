"""Checkpoints: any nested state as one safetensors file, checked against its own digest when read.

Tensors are stored as tensors; everything else (numbers, strings, the shape of the nesting) goes into the
file's JSON header. Nothing is pickled, so a checkpoint cannot run code.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from skiplab import files
from skiplab.errors import InputError


class CorruptFile(InputError):
    """Say that a stored file is damaged."""


def write(path: Path, state: object) -> None:
    """Write nested dicts and lists of tensors and plain values to `path`, whole or not at all."""
    tensors: dict[str, torch.Tensor] = {}
    outline = json.dumps(_outline(state, tensors))
    header = json.dumps([outline, _digest(tensors, outline)])  # one entry: safetensors would shuffle several
    files.write(path, save(tensors, {"state": header}))


def read(path: Path) -> object:
    """Read what `write` stored; tensors come back on the CPU. Raises CorruptFile where the digest does not match."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
            outline, digest = json.loads((file.metadata() or {})["state"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise CorruptFile(f"{path.name} is not a whole checkpoint ({error})") from error
    if digest != _digest(tensors, outline):
        raise CorruptFile(f"{path.name} does not match its own digest")
    return _restore(json.loads(outline), tensors)


def _outline(state: object, tensors: dict[str, torch.Tensor]) -> object:
    """Move every tensor of `state` into `tensors`; return the rest as JSON, dicts as pairs to keep integer keys."""
    if isinstance(state, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = state.detach().cpu().clone(memory_format=torch.contiguous_format)  # strides of a size 1 too
        return {"tensor": name}
    if isinstance(state, dict):
        return {"dict": [[key, _outline(value, tensors)] for key, value in state.items()]}
    if isinstance(state, (list, tuple)):
        return {"list": [_outline(value, tensors) for value in state]}
    return {"value": state}


def _restore(outline: dict, tensors: dict[str, torch.Tensor]) -> object:
    ((kind, content),) = outline.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _restore(value, tensors) for key, value in content}
    if kind == "list":
        return [_restore(value, tensors) for value in content]
    return content


def _digest(tensors: dict[str, torch.Tensor], outline: str) -> str:
    digest = hashlib.sha256(outline.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
