"""Interrupt a run after one of its epochs, and compare what two runs left."""

import contextlib

import pytest
import torch

from skiplab.training import checkpoint
from skiplab.training.run import Run


@contextlib.contextmanager
def interrupted(monkeypatch, after=1):
    """Within, every kind of run is interrupted, as by a crash, once it has saved epoch `after`."""
    save = Run.save

    def save_and_stop(self):
        save(self)
        if self.epoch == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            yield
    torch.rand(7)  # the generator's state must not matter to what comes next


def weights(folder):
    """Return the weights that a run left in its folder."""
    return checkpoint.read(folder / "model.safetensors")


def last_state(folder):
    """Return the bytes of a run's last checkpoint, all but its times."""
    state = checkpoint.read(folder / "checkpoint.safetensors")
    del state["seconds"]
    checkpoint.write(folder / "timeless.safetensors", state)
    return (folder / "timeless.safetensors").read_bytes()


def equal(one, other):
    """Tell whether two state dicts are the same, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
