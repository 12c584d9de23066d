"""What may be expected of each kind of device and system: what was tried there, and what cannot work."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import BadInputError, NoSiteError

if TYPE_CHECKING:
    import torch

TESTED, SIMULATED, UNTESTED = "tested", "simulated", "untested"


@dataclass(frozen=True)
class Support:
    """What may be expected of a device or a system.

    Attributes:
        name: for people.
        level: "tested": every test runs there; "simulated": planned by traces, and streamed by a CPU's two accounts;
            "untested": nobody has run it there yet.
        sentence: what follows from it.
        streams: whether weights can be streamed.
        measures: whether a run's memory can be recorded.
    """

    name: str
    level: str
    sentence: str
    streams: bool = True
    measures: bool = True


_CPU = Support("CPU", TESTED, "every test runs on CPUs, where RAM counts as the device")
_CUDA = Support(
    "NVIDIA GPU",
    SIMULATED,
    "not run on one yet: peaks are traced, and the same code streams between the two accounts of a CPU",
)
_ROCM = Support("AMD GPU (ROCm)", UNTESTED, "goes CUDA's ways, but parks maps in memory that is not pinned")
_MPS = Support(
    "Apple GPU (mps)",
    UNTESTED,
    "plans and hooks are meant to work; weights are not streamed (host and GPU share one memory), runs not recorded",
    streams=False,
    measures=False,
)
_XPU = Support(
    "Intel GPU (xpu)",
    UNTESTED,
    "plans and hooks are meant to work; weights are not streamed (that takes CUDA's streams), runs not recorded",
    streams=False,
    measures=False,
)
_WINDOWS = Support("Windows", UNTESTED, "the driver may lend the GPU host memory, and runs crawl then")
_MACOS = Support("macOS", UNTESTED, "meant to work as Linux does")


def support_of(device: torch.device) -> Support:
    """What may be expected of ``device``."""
    import torch

    if device.type == "cuda":
        return _CUDA if torch.version.hip is None else _ROCM
    return {"mps": _MPS, "xpu": _XPU}.get(device.type, _CPU)


def support_of_system(system: str = sys.platform) -> Support | None:
    """What may be expected of another system than Linux, on which all is tested."""
    return {"win32": _WINDOWS, "darwin": _MACOS}.get(system)


def check_streaming(device: torch.device, offload: str | None) -> None:
    """Raise NoSiteError unless weights can be streamed to ``device``; ``offload`` is what asks for it."""
    support = support_of(device)
    if not support.streams:
        raise NoSiteError(
            f"offload {offload}: weights are not streamed to {device.type} ({support.sentence}): take none or component"
        )


def check_measuring(device: torch.device) -> None:
    """Raise BadInputError unless a run's memory on ``device`` can be recorded."""
    if not support_of(device).measures:
        raise BadInputError(f"runs on {device.type} are not recorded: CUDA and CPUs tell what was allocated")
