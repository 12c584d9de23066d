"""Differences of torch before 2.4. AUTOMATIC1111 brings 2.1.2; this file is deleted when that changes."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from .private import COMPILER, without_modes

_probe = torch.empty(1)
STORAGES_ARE_OBJECTS = _probe.untyped_storage() is _probe.untyped_storage()
"""False before 2.2, where each access makes a new Python object for a storage, and a weak reference to it crashes."""


def restrict_kernel(kernel: str) -> contextlib.AbstractContextManager[Any]:
    """Restrict torch to the kernel "flash", "efficient" or "cudnn" within the block; "torch" leaves the choice to it.

    Raises:
        RuntimeError: this version of torch has no such kernel.
    """
    if kernel == "torch":
        return contextlib.nullcontext()
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:  # before 2.3
        flags = {"enable_flash": kernel == "flash", "enable_math": False, "enable_mem_efficient": kernel == "efficient"}
        if not any(flags.values()):
            raise RuntimeError(f"torch {torch.__version__} has no {kernel} attention") from None
        return torch.backends.cuda.sdp_kernel(**flags)
    backend = getattr(SDPBackend, f"{kernel.upper()}_ATTENTION", None)  # cuDNN's since 2.4
    if backend is None:
        raise RuntimeError(f"torch {torch.__version__} has no {kernel} attention")
    return sdpa_kernel(backend)


def is_compiling() -> Callable[[], bool]:
    """A function that returns True while torch's compiler traces the caller; before 2.2 it must be torch's own."""
    owner = torch.compiler if hasattr(torch.compiler, "is_compiling") else sys.modules.get(COMPILER)
    is_compiling: Callable[[], bool] = getattr(owner, "is_compiling", lambda: False)
    return is_compiling


def autocast_dtype(device: str) -> torch.dtype | None:
    """The type that autocast narrows to on this kind of device now, None when it is off."""
    if hasattr(torch, "get_autocast_dtype"):  # 2.4
        try:
            return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        except RuntimeError:  # a device without autocast
            return None
    if device == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


@functools.lru_cache
def computes_on_cpu(dtype: torch.dtype) -> bool:
    """True if torch multiplies matrices of this type on a CPU; versions before 2.2 do not in fp16."""
    with without_modes():
        matrix = torch.ones(1, 1, dtype=dtype)
        try:
            torch.addmm(matrix[0], matrix, matrix)
        except RuntimeError:
            return False
    return True
