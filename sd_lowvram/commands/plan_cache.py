"""Plans that were made before are shown at once: neither torch nor a model's library is imported for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import cache, doors
from ..cache import cache_folder, place_of
from ..planning.wording import Reason
from ..units import GIB, parse_size
from .early import gpu_files, has_no_gpu

_STEP = GIB // 2
_KEPT = 8
"""Plans of one request that are remembered, each for a range of free memory."""

_VARIABLES = (
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "TRITON_INTERPRET"),
)
"""Environment variables that a plan depends on."""

Answer = tuple[dict[str, Any], dict[str, tuple[float, float]]]
"""The answer, and for each budget the smallest and the largest bytes that give the same answer."""


def cached_answer(asked: dict[str, Any], make: Callable[[dict[str, int]], Answer]) -> dict[str, Any]:
    """Result of ``make`` for budgets "vram" and "ram", or the cached result of an equal request on this machine.

    Free memory as a budget may differ, as long as it gives the same plan.
    """
    budgets = _budgets(asked)
    entries = cache.recall(_place(asked)) or []
    for entry in entries:
        if all(entry["alike"][name][0] <= size <= entry["alike"][name][1] for name, size in budgets.items()):
            return _set_budgets(entry["answer"], budgets)
    answer, alike = make(budgets)
    exactly = {name: (size, size) for name, size in budgets.items()}
    entry = {"alike": exactly | alike, "answer": answer}
    cache.remember(_place(asked), [entry, *entries][:_KEPT])  # what was measured for it is part of the place
    return answer


def _budgets(asked: dict[str, Any]) -> dict[str, int]:
    """Bytes as stated, else what is free now; without "vram" where it is that of a named card."""
    sizes = {"ram": parse_size(asked["ram"], "--ram") if asked["ram"] is not None else _free_ram()}
    if asked["vram"] is not None:
        sizes["vram"] = parse_size(asked["vram"], "--vram")
    elif asked["gpu"] is None:
        sizes["vram"] = _free_vram()
    return sizes


def _free_vram() -> int:
    if has_no_gpu():
        return _free_ram()
    from ..devices.info import default_device, free_vram
    from ..devices.this_machine import budget_of

    device = default_device()
    return _free_ram() if device.type == "cpu" else budget_of(device, free_vram(device))


def _free_ram() -> int:
    """Free RAM in whole steps, so that a plan that depends on all of it stays valid for a while."""
    from ..devices.info import available_ram

    return available_ram() // _STEP * _STEP


def _set_budgets(answer: dict[str, Any], budgets: dict[str, int]) -> dict[str, Any]:
    """``answer`` with the current budgets, also in its reasons."""
    if "request" in answer and "vram" in budgets:
        answer["request"] |= budgets
        for reason in answer["reason_values"]:
            reason["values"] |= {name: budgets[name] for name in budgets if name in reason["values"]}
        answer["reasons"] = [str(Reason(reason["kind"], **reason["values"])) for reason in answer["reason_values"]]
    return answer


def _place(asked: dict[str, Any]) -> Path | None:
    return place_of("plans", lambda: (sorted(asked.items()), _model(asked["model"]), _machine()))


def _model(model: str | None) -> list[Any]:
    """Key that changes with the files of a model."""
    path = Path(model) if model is not None else None
    if path is None or not path.exists():
        return []
    files = sorted(file for file in (*path.glob("*"), *path.glob("*/*")) if _tells(file)) if path.is_dir() else [path]
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _tells(file: Path) -> bool:
    """True for a file of a folder on which a plan depends: a configuration, or words of a tokenizer."""
    return file.suffix in (".json", ".txt", ".model") and file.is_file()


def _machine() -> list[Any]:
    """Key that changes with the machine, its measurements, or registered extensions."""
    set_ = [os.environ.get(name) for name in _VARIABLES]
    folder = cache_folder()
    files = [file for kind in ("*-*.json", "overflows/*.json") for file in sorted(folder.glob(kind))] if folder else []
    measured = []
    for file in files:
        with contextlib.suppress(OSError):  # another process has removed it
            measured.append((file.name, file.lstat().st_mtime_ns))
    return [gpu_files(), set_, os.cpu_count(), measured, doors.registered_names()]
