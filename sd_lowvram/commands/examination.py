"""Examines the machine: what it has, what runs on it, what is missing and how to get it."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checkpoints.inspection import DEMO
from ..devices.disk import disk_rate
from ..devices.info import default_device, gpus, host_memory
from ..devices.support import support_of, support_of_system

_PACKAGES = {
    "psutil": ("free RAM is only guessed", "pip install psutil"),
    "pynvml": ("free VRAM is read from torch, which may not see other programs", "pip install nvidia-ml-py"),
    "diffusers": ("no picture can be made here", 'pip install "sd-lowvram[standalone]"'),
    "transformers": ("no prompt can be read", 'pip install "sd-lowvram[standalone]"'),
    "accelerate": ("models load slower and in more memory", 'pip install "sd-lowvram[standalone]"'),
    "matplotlib": ("no plots", 'pip install "sd-lowvram[plots]"'),
}
_SPILLS = (
    "this driver uses RAM when VRAM is full: a run that is too large becomes very slow instead of stopping; "
    'in the NVIDIA control panel set "CUDA - Sysmem Fallback Policy" to "Prefer No Sysmem Fallback"'
)


def examine(probe: bool = True) -> dict[str, Any]:
    """Examine the machine; return plain values: "support", "gpus", "ram", "torch", "python", "attention", "warnings",
    "missing".

    Sizes are bytes. ``probe`` runs every attention backend 20 times and compares the bits (some seconds).
    """
    import torch

    device = default_device()
    cards = gpus()
    missing = [
        {"what": name, "effect": effect, "remedy": remedy}
        for name, (effect, remedy) in _PACKAGES.items()
        if importlib.util.find_spec(name) is None
    ]
    return {
        "device": str(device),
        "support": [asdict(support) for support in (support_of(device), support_of_system()) if support],
        "gpus": [asdict(gpu) for gpu in cards],
        "ram": asdict(host_memory()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "attention": _attention(device, probe),
        "warnings": _warnings(cards),
        "missing": missing + _missing_parts(device),
    }


def disk_of(path: Path, again: bool) -> dict[str, Any]:
    """The disk on which ``path`` lies: "path", and "rate", bytes a second past the system's cache; None: not measured.

    Args:
        again: measure what was remembered anew.
    """
    return {"path": str(path), "rate": disk_rate(path, again)}


def calibrate_machine() -> dict[str, Any]:
    """The machine's rates, and on a GPU its overhead, measured now and remembered for plans. Bytes and seconds."""
    device = default_device()
    return {what: measure(device) for what, measure in MEASURED.items()}


def _rates(device: Any) -> dict[str, Any]:
    from ..devices.this_machine import rates_of

    if importlib.util.find_spec("diffusers") is not None:
        import diffusers  # noqa: F401  # whose own time in each operator counts too

    return asdict(rates_of(device, recalibrate=True))


def _overhead(device: Any) -> dict[str, Any] | None:
    from ..devices.this_machine import overhead_of

    return asdict(overhead_of(device, recalibrate=True)) if device.type == "cuda" else None


def _host_time(device: Any) -> dict[str, float] | None:
    """Host time of our hooks, measured and remembered; None if it cannot be measured."""
    if importlib.util.find_spec("diffusers") is None:
        return None
    from ..devices.this_machine import rates_of, remember_host_time
    from ..planning.host_time import host_time

    measured = host_time(rates_of(device), device)
    remember_host_time(device, measured)
    return measured


def _compiling(device: Any) -> dict[str, float] | None:
    """Gain of torch.compile, measured and cached; None if it cannot run."""
    from ..devices.compiling import remember_compiling
    from ..kernels.compiler import why_not

    if why_not(device) is not None or importlib.util.find_spec("diffusers") is None:
        return None
    from ..planning.compile_gain import measured_compiling

    compiling = measured_compiling(device)
    remember_compiling(device, compiling)
    return asdict(compiling)


def _kernel_gains(device: Any) -> dict[str, float]:
    """Measured and remembered; empty where the kernels cannot run."""
    from ..devices.this_machine import remember_kernel_gains
    from ..kernels.triton.support import why_not

    gains: dict[str, float] = {}
    if device.type == "cpu":
        from ..kernels.winograd import gains as of_winograd

        gains |= of_winograd(device)
    elif device.type == "cuda":
        if why_not(device) is None:
            from ..kernels.triton.measure import gains as of_triton

            gains |= of_triton(device)
        if importlib.util.find_spec("diffusers") is not None:
            from ..planning.compile_gain import measured_recording

            gains |= measured_recording(device)
    remember_kernel_gains(device, gains)
    return gains


MEASURED: dict[str, Callable[[Any], dict[str, Any] | None]] = {
    "rates": _rates,
    "overhead": _overhead,  # before anything is recorded, for which the driver takes memory of its own
    "host": _host_time,
    "kernels": _kernel_gains,
    "compile": _compiling,
}
"""Functions that measure and cache facts on a device, by name; a result of None means that it does not apply."""


def _warnings(cards: list[Any]) -> list[str]:
    warnings = [_SPILLS] if any(gpu.spills for gpu in cards) else []
    if any("GTX 16" in gpu.name for gpu in cards):
        warnings.append("GTX 16xx cards may paint black or green in fp16: use --precision fp16-storage")
    return warnings


def _missing_parts(device: Any) -> list[dict[str, str]]:
    missing = []
    if device.type == "cpu" and shutil.which("nvidia-smi"):
        remedy = "install the build of torch for your CUDA version (pytorch.org shows the command)"
        missing.append({"what": "CUDA in torch", "effect": "the NVIDIA GPU is not used", "remedy": remedy})
    if not (DEMO / "model_index.json").is_file():
        effect, remedy = "generate needs --model", "install sd-lowvram again"
        missing.append({"what": "the demo model", "effect": effect, "remedy": remedy})
    if device.type == "cuda" and importlib.util.find_spec("xformers") is None:
        effect, remedy = "one attention backend less", 'pip install "sd-lowvram[xformers]" (not needed)'
        missing.append({"what": "xformers", "effect": effect, "remedy": remedy})
    if device.type == "cuda" and sys.platform == "linux" and importlib.util.find_spec("triton") is None:
        missing.append({"what": "triton", "effect": "no fused kernels", "remedy": "pip install triton"})
    return missing


def _attention(device: Any, probe: bool) -> list[dict[str, Any]]:
    """Each backend: whether it runs here, why not, and whether it gave the same bits every time (None: not probed)."""
    from ..kernels.attention.determinism import probe as probe_determinism
    from ..kernels.attention.registry import available_backends

    results = probe_determinism(device) if probe else {}
    rows = []
    for name, reason in available_backends(device).items():
        result = results.get(name)
        proved = None if result is None else result.deterministic
        rows.append({"name": name, "runs": reason is None, "reason": reason, "deterministic": proved})
    return rows
