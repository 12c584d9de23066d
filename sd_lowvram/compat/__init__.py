"""What torch before 2.4 does in another way: AUTOMATIC1111 brings 2.1.2. It goes when that does."""

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
"""Before 2.2 a storage's Python object is made anew at each look, and a weak reference to it crashes."""


def only_kernel(kernel: str) -> contextlib.AbstractContextManager[Any]:
    """Inside, torch runs "flash", "efficient" or "cudnn" or raises RuntimeError; "torch" leaves the choice to it.

    Raises:
        RuntimeError: this version has no such kernel.
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
    """What tells whether torch's compiler follows the caller; before 2.2 it knows its own function for that alone."""
    owner = torch.compiler if hasattr(torch.compiler, "is_compiling") else sys.modules.get(COMPILER)
    known: Callable[[], bool] = getattr(owner, "is_compiling", lambda: False)
    return known


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
    """Whether torch multiplies matrices of this type there; versions before 2.2 do not in fp16."""
    with without_modes():
        one = torch.ones(1, 1, dtype=dtype)
        try:
            torch.addmm(one[0], one, one)
        except RuntimeError:
            return False
    return True
