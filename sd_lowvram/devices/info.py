"""Facts on the machine: graphics memory, host memory, the GPU and its driver.

NVML and psutil are used if they are installed; otherwise torch's and the system's own figures, after one warning. All
sizes are bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Memory:
    """Bytes in all and bytes free now."""

    total: int
    free: int


@dataclass(frozen=True)
class Gpu:
    """A GPU. ``driver`` is "" without NVML; ``spills`` is True if the driver lends it host memory."""

    name: str
    memory: Memory
    driver: str
    capability: tuple[int, int]
    spills: bool


def default_device() -> torch.device:
    """CUDA (or ROCm) when torch can use it, else Apple's or Intel's GPU, else the CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return torch.device("xpu")
    return torch.device("cpu")


def dtype_on(device: torch.device) -> torch.dtype:
    """The type in which models compute there where no other is asked for."""
    import torch

    return torch.float32 if device.type == "cpu" else torch.float16


@functools.cache
def _warn_missing(package: str, instead: str) -> None:
    warnings.warn(f"{package} is not installed: {instead} (pip install {package})", stacklevel=3)


def device_memory(device: torch.device) -> Memory:
    """Memory of ``device``: of a GPU, of the part of the host's that an Apple GPU may use, or of the host for a CPU."""
    import torch

    if device.type == "mps":
        return _apple_memory()
    if device.type == "xpu":
        return _intel_memory(device)
    if device.type != "cuda":
        return host_memory()
    free, total = torch.cuda.mem_get_info(device)
    seen = _nvml_memory(device)
    if seen is not None:
        total, free = min(total, seen.total), min(free, seen.free)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Memory(total, min(total, free + cached))


def _apple_memory() -> Memory:
    """An Apple GPU's share of the memory that it has in common with the host."""
    import torch

    host = host_memory()
    share = getattr(torch.mps, "recommended_max_memory", lambda: host.total)()  # from torch 2.5 on
    total = min(share, host.total)
    taken = torch.mps.driver_allocated_memory() - torch.mps.current_allocated_memory()
    return Memory(total, min(total, max(0, share - torch.mps.current_allocated_memory()), host.free + taken))


def _intel_memory(device: torch.device) -> Memory:
    import torch

    total = int(torch.xpu.get_device_properties(device).total_memory)
    taken = torch.xpu.memory_reserved(device)
    if hasattr(torch.xpu, "mem_get_info"):  # torch 2.8; before, other programs are not seen
        taken = total - torch.xpu.mem_get_info(device)[0]
    cached = torch.xpu.memory_reserved(device) - torch.xpu.memory_allocated(device)
    return Memory(total, min(total, max(0, total - taken + cached)))


def free_vram(device: torch.device) -> int:
    """Bytes that a run on ``device`` can take now; on a CPU those of the host."""
    return device_memory(device).free


def available_ram() -> int:
    """Bytes of host memory that this process can take now, its container's limits counted."""
    return host_memory().free


def own_ram() -> int:
    """Bytes of host memory of this process, without mapped files; 0 if unknown."""
    with contextlib.suppress(OSError):
        rows = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
        sizes = [row.split()[1] for row in rows if row.startswith("RssAnon:")]
        return int(sizes[0]) << 10 if sizes else 0
    with contextlib.suppress(ImportError):
        import psutil

        return int(getattr(psutil.Process().memory_info(), "private", 0))  # Windows
    return 0


_Answer = TypeVar("_Answer")


def _ask_nvml(question: Callable[[Any], _Answer]) -> _Answer | None:
    """Answer of NVML; None without NVML or an answer: other makers' GPUs, MIG slices, containers, virtual machines."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return question(pynvml)
    except ImportError:
        _warn_missing("nvidia-ml-py", "free VRAM is read from torch, which may not see other programs")
    except Exception:
        pass
    return None


def _nvml_handle(nvml: Any, device: torch.device) -> Any:
    import torch

    # torch may number GPUs otherwise than the driver does, and CUDA_VISIBLE_DEVICES hides some.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is not None:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = device.index or 0
    physical = visible[index] if index < len(visible) and visible[index].isdigit() else index
    return nvml.nvmlDeviceGetHandleByIndex(int(physical))


def _nvml_memory(device: torch.device) -> Memory | None:
    info = _ask_nvml(lambda nvml: nvml.nvmlDeviceGetMemoryInfo(_nvml_handle(nvml, device)))
    return None if info is None else Memory(int(info.total), int(info.free))


def process_memory(device: torch.device) -> int | None:
    """Bytes that this process has taken on a GPU, its context included; None if the driver does not report them."""
    running = _ask_nvml(lambda nvml: nvml.nvmlDeviceGetComputeRunningProcesses(_nvml_handle(nvml, device)))
    return next((process.usedGpuMemory for process in running or () if process.pid == os.getpid()), None)


def context_memory(device: torch.device, assumed: int) -> int:
    """Bytes that the driver's context of this process takes on a GPU.

    Args:
        assumed: its bytes if the driver does not separate processes. What the card holds besides may then be
            another program's, so this is the most that is answered.
    """
    import torch

    tensors = torch.cuda.memory_reserved(device)
    own = process_memory(device)
    if own is not None:
        return max(0, own - tensors)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, min(assumed, total - free - tensors))


def driver_version() -> str:
    """NVIDIA's driver, or "" where NVML does not say."""
    version: str | bytes | None = _ask_nvml(lambda nvml: nvml.nvmlSystemGetDriverVersion())
    return version.decode() if isinstance(version, bytes) else version or ""


def gpus() -> list[Gpu]:
    """The GPUs that torch can use (CUDA and ROCm)."""
    import torch

    if not torch.cuda.is_available():
        return []
    cards = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = device_memory(torch.device("cuda", index))
        capability = (properties.major, properties.minor)
        cards.append(Gpu(properties.name, memory, driver_version(), capability, spills_to_host()))
    return cards


def spills_to_host(system: str = sys.platform, release: str | None = None) -> bool:
    """True if the driver silently lends the GPU host memory when its own is full, instead of failing.

    NVIDIA's Windows drivers do since 536.40, in WSL too; a run that spills continues, many times slower.
    """
    release = platform.release() if release is None else release
    return system == "win32" or "microsoft" in release.lower()


def host_memory(cgroups: Path = _CGROUPS) -> Memory:
    """Host memory that this process may use: the machine's, or its container's (cgroup v1 or v2) where that is less."""
    machine = _machine_memory()
    total, free = machine.total, machine.free
    for limit, used in _cgroup_limits(cgroups):
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return Memory(total, free)


def _machine_memory() -> Memory:
    try:
        import psutil

        memory = psutil.virtual_memory()
        return Memory(int(memory.total), int(memory.available))
    except ImportError:
        _warn_missing("psutil", "free RAM is read from the system, if possible")
    kib = _table(Path("/proc/meminfo"))
    total = kib.get("MemTotal:", 8 << 20) << 10
    return Memory(total, min(total, kib.get("MemAvailable:", 4 << 20) << 10))


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be given back) of every control group above this process."""
    limits = []
    for folder in _cgroup_folders(root):
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            bound = _number(folder / limit)
            if bound is not None and bound < _UNLIMITED:
                in_use = (_number(folder / used) or 0) - _table(folder / "memory.stat").get(cache, 0)
                limits.append((bound, max(in_use, 0)))
    return limits


def _cgroup_folders(root: Path) -> list[Path]:
    folders = {root, root / "memory"}
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return sorted(folders)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        base = root if controllers == "" else root / "memory"
        inner = base / path.lstrip("/")
        folders.update(folder for folder in (inner, *inner.parents) if folder.is_relative_to(base))
    return sorted(folders)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # not there, or the word "max"
        return None


def _table(file: Path) -> dict[str, int]:
    """The lines of a file of the kernel's, each a name and a number; none where it cannot be read."""
    try:
        rows = map(str.split, file.read_text(encoding="ascii").splitlines())
        return {name: int(number) for name, number, *_ in rows}
    except (OSError, ValueError):
        return {}
