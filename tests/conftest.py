"""Settings of every test: one CPU thread, a run store of its own, no network."""

import os

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", OMP_NUM_THREADS="1")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty run store."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("COMPANION_RUNS", str(folder))
    return folder
