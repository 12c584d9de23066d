"""Plans that were made before are told at once: neither torch nor a model's library is imported for them."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import cache
from ..cache import cache_folder, code_digest
from ..units import GIB

_STEP = GIB // 2
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri")
"""What a Linux machine has where it has a GPU; another one later means another plan."""


def remembered(asked: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``make`` gives, or gave when the same was asked for on the same machine.

    Nothing is remembered where the budget is what is free now on a GPU.
    """
    known: dict[str, Any] | None = cache.remembered(_place(asked))
    if known is None:
        known = make()
        cache.remember(_place(asked), known)  # the machine may have been measured for it
    return known


def _place(asked: dict[str, Any]) -> Path | None:
    folder = cache_folder()
    stated = asked["vram"] is not None or asked["gpu"] is not None
    if folder is None or not (stated or _has_no_gpu()):
        return None
    free = None if stated and asked["ram"] is not None else free_ram()
    facts = (asked, free, _model(asked["model"]), _machine(folder), code_digest())
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return folder / "plans" / f"{name}.json"


def free_ram() -> int:
    """Free host memory in whole steps, so that what is asked for twice is mostly the same."""
    from ..devices.info import available_ram

    return available_ram() // _STEP * _STEP


def _has_no_gpu() -> bool:
    """Whether that is certain without torch."""
    return sys.platform == "linux" and not any(map(os.path.exists, _GPUS))


def _model(model: str | None) -> list[Any]:
    """What changes when the files of a model do."""
    path = Path(model) if model is not None else None
    if path is None or not path.exists():
        return []
    files = sorted(path.glob("*/config.json")) if path.is_dir() else [path]
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _machine(folder: Path) -> list[Any]:
    """What changes when the machine does, or what was measured on it."""
    threads = [os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")]
    measured = [(file.name, file.stat().st_mtime_ns) for file in sorted(folder.glob("*-*.json"))]
    return [[path for path in _GPUS if os.path.exists(path)], threads, os.cpu_count(), measured]
