"""Stable Diffusion in the memory that you have.

State a budget, get the fastest settings that fit, know the peak before the start, keep the same picture::

    plan = sd_lowvram.optimize(pipe, vram="4GB", width=1024, height=1024)
    image = pipe("a red apple").images[0]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from .files import __version__ as __version__

if TYPE_CHECKING:
    from .api import decode, encode, max_size, optimize, plan
    from .doors import register
    from .kernels.attention.backend import AttentionBackend
    from .knob import Knob
    from .planning.memory_profile import measured
    from .planning.search import Plan
    from .saved_latents.resumable import resumable
    from .session import attached, restore
    from .settings import Fidelity, Settings
    from .tracing import MemoryTrace, trace

__all__ = [
    "AttentionBackend",
    "Fidelity",
    "Knob",
    "MemoryTrace",
    "Plan",
    "Settings",
    "attached",
    "decode",
    "encode",
    "errors",
    "max_size",
    "measured",
    "optimize",
    "plan",
    "register",
    "restore",
    "resumable",
    "trace",
]

_HOMES = {
    ".api": ("decode", "encode", "max_size", "optimize", "plan"),
    ".doors": ("register",),
    ".kernels.attention.backend": ("AttentionBackend",),
    ".knob": ("Knob",),
    ".planning.memory_profile": ("measured",),
    ".planning.plan": ("Plan",),
    ".saved_latents.resumable": ("resumable",),
    ".session": ("attached", "restore"),
    ".settings": ("Fidelity", "Settings"),
    ".tracing": ("MemoryTrace", "trace"),
}


def __getattr__(name: str) -> Any:
    """Import on first use: the command line's --help need not wait for torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
