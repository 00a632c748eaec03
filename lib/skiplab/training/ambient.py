"""Compute as torch does when it has just been imported, whatever the caller has set around the call.

A run's hash covers its configuration, data, code and versions, so nothing else may change its bits. What is set here
decides bits, or whether training works at all; the number of threads is the run store's affair.
"""

import contextlib
from collections.abc import Callable, Iterator

import timm.layers
import torch

# For each switch of a whole process: how to read it, how to set it, and its value in a fresh one.
SWITCHES: tuple[tuple[Callable, Callable, object], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    (timm.layers.use_fused_attn, timm.layers.set_fused_attn, True),  # also by TIMM_FUSED_ATTN
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, True),  # these hold for CPUs too
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp, True),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, True),
)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Compute in float32 on the CPU with gradients, fused attention and no autocast within; put all back afterwards."""
    with contextlib.ExitStack() as undo:
        for read, write, usual in SWITCHES:
            if read() != usual:
                undo.callback(write, read())
                write(usual)
        if torch.get_default_device().type != "cpu":
            undo.enter_context(torch.device("cpu"))
        undo.enter_context(torch.inference_mode(False))
        undo.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            undo.enter_context(torch.autocast(device, enabled=False))
        yield
