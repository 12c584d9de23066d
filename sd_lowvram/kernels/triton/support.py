"""Devices and types on which Triton's kernels can run."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from ...compat.private import without_modes
from ..attention.problem import capability, device_of_run, has_bf16, is_fake, is_planned_elsewhere

TYPES = (torch.float32, torch.float16, torch.bfloat16)
_OLDEST_TORCH, _OLDEST_CARD = (2, 4), (7, 5)

FUSED_DENOISER, FUSED_AUTOENCODER = ("group_norm, denoise", "geglu"), ("group_norm, decode",)
"""Prefixes of the names of measured kernels that ``fused_kernels`` uses, at the shapes of each model."""


def why_not(device: torch.device) -> str | None:
    """Return the reason why Triton's kernels cannot run on ``device``; None if they can.

    A plan for a GPU of another machine assumes that they can. Triton is imported once, if all else allows it.
    """
    if device.type == "cuda" and is_planned_elsewhere():
        return None
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"Triton's kernels run on CUDA, not on {device.type}"
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST_TORCH:
        return f"Triton's kernels need torch 2.4 or newer, this is {torch.__version__}"
    if not _is_installed():
        return "Triton is not installed (on Linux: pip install triton; on Windows: pip install triton-windows)"
    if interpreted:
        return None
    if torch.cuda.is_available() and capability(device) < _OLDEST_CARD:
        return f"Triton's kernels need compute capability 7.5 or newer, {torch.cuda.get_device_name(device)} is older"
    return _failure(device.index or 0) if torch.cuda.is_available() else None


@functools.cache
def _failure(card: int) -> str | None:
    """Why a first kernel fails on the card: Triton compiles at run time, for which a C compiler and the driver's own
    library must be found. None where it runs."""
    try:
        with without_modes():  # a trace may be under way
            from .geglu import geglu

            geglu(torch.zeros(1, 128, device=torch.device("cuda", card), dtype=torch.float16))
    except Exception as error:  # of any kind: Triton's compiler raises what it has
        return f"Triton's kernels fail here ({' '.join(str(error).split())[:200]})"
    return None


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def takes(x: Tensor) -> bool:
    """True if the kernels support ``x``: its type, and its device or the traced one."""
    device = device_of_run(x.device) if is_fake(x) else x.device
    computed = x.dtype in TYPES and (x.dtype != torch.bfloat16 or has_bf16(device))
    return computed and x.numel() > 0 and why_not(device) is None
