"""Where and with what a result was computed: versions, checkout, machine."""

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from skiplab.files import ROOT

NUMERICAL_PACKAGES = ("torch", "torchvision", "timm", "accelerate", "lightly", "numpy", "pytorch-optimizer", "scipy")


ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide numbers."""
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in NUMERICAL_PACKAGES
    }


def lock_hash() -> str:
    """Return the digest of requirements.lock."""
    return hashlib.sha256((ROOT / "requirements.lock").read_bytes()).hexdigest()[:16]


def git_state() -> dict:
    """Return the commit of the checkout and whether tracked files differ from it; None where git cannot say.

    Neither a repository around a copy without one of its own counts, nor one that GIT_DIR names, as in a hook.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", ROOT, *arguments], capture_output=True, check=True, encoding="utf-8", env=environment
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != ROOT:
        return {"commit": None, "dirty": None}
    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def machine(device: str) -> dict:
    """Describe the machine and the device a result was computed on."""
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    arithmetic = torch.backends.cpu.get_cpu_capability()
    return {
        "device": device,
        "device_name": name,
        "arithmetic": arithmetic,
        "cores": os.cpu_count(),
        "system": platform.system(),
    }


def _processor() -> str:
    """Return the processor's name; on Linux platform.processor() knows the architecture at best.

    In a cloud many bear the name "Intel(R) Xeon(R) Processor" or "AMD EPYC": family and model tell them apart.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    if "model name" not in said:
        return platform.machine()
    kind = ", ".join(f"{name.split()[-1]} {said[name]}" for name in ("cpu family", "model") if name in said)
    return f"{said['model name']} ({kind})" if kind else said["model name"]
