"""Support of each kind of device and system: what was tested there, and what cannot work."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import BadInputError, NoSiteError
from .info import default_device

if TYPE_CHECKING:
    import torch

TESTED, SIMULATED, UNTESTED = "tested", "simulated", "untested"


@dataclass(frozen=True)
class Support:
    """Support of a device or a system.

    Attributes:
        name: name for people.
        level: "tested": every test runs there; "simulated": planned by traces, and streamed by a CPU's two accounts;
            "untested": it has not run there yet.
        sentence: the consequence for users.
        streams: True if weights can be streamed.
        measures: True if a run's memory can be recorded.
    """

    name: str
    level: str
    sentence: str
    streams: bool = True
    measures: bool = True


_CPU = Support("CPU", TESTED, "every test runs on CPUs, with RAM in place of VRAM")
_CUDA = Support(
    "NVIDIA GPU",
    SIMULATED,
    "run for half an hour on an H100: same bits, allocated bytes as predicted; otherwise tested on a simulated GPU",
)
_ROCM = Support(
    "AMD GPU (ROCm)",
    UNTESTED,
    "the same code as for NVIDIA; what waits in RAM is copied more slowly",
)
_MPS = Support(
    "Apple GPU (mps)",
    UNTESTED,
    "plans and hooks should work; weights are not streamed, as host and GPU share one memory",
    streams=False,
    measures=False,
)
_XPU = Support(
    "Intel GPU (xpu)",
    UNTESTED,
    "plans and hooks should work; weights are not streamed, as that needs CUDA",
    streams=False,
    measures=False,
)
_WINDOWS = Support("Windows", UNTESTED, "the driver may use RAM as VRAM, and runs become very slow")
_MACOS = Support("macOS", UNTESTED, "should work like Linux")


def support_of(device: torch.device) -> Support:
    """Support of ``device``."""
    import torch

    if device.type == "cuda":
        return _CUDA if torch.version.hip is None else _ROCM
    return {"mps": _MPS, "xpu": _XPU}.get(device.type, _CPU)


def support_of_system(system: str = sys.platform) -> Support | None:
    """Support of a system other than Linux, on which everything is tested."""
    return {"win32": _WINDOWS, "darwin": _MACOS}.get(system)


DEVICES = ("cpu", "cuda", "mps", "xpu")
"""The kinds of devices that are known here, by torch's names."""


def check_device_name(name: str, what: str = "device") -> None:
    """Raise BadInputError unless ``name`` is of a kind of device that is known here; ``what`` names it for people."""
    kind, colon, number = name.partition(":")
    if kind not in DEVICES or (colon and not (number.isascii() and number.isdigit())):
        raise BadInputError(
            f"{what} {name!r} is unknown: choose one of {', '.join(DEVICES)}, or cuda:1; cpu always can"
        )


def device_of(requested: torch.device | str | None, what: str = "device") -> torch.device:
    """The device that a caller names; for None a GPU if there is one, else the CPU.

    Raises:
        BadInputError: ``requested`` is not a device, or torch cannot compute there.
    """
    import torch

    if requested is None:
        return default_device()
    if not isinstance(requested, (str, torch.device)):
        raise BadInputError(f'{what} {requested!r} is not a device: give its name, "cuda:0" or "cpu" for example')
    check_device_name(str(requested), what)
    device = torch.device(requested)
    try:
        torch.zeros(1, device=device).cpu()  # which under fake tensors asks for no number
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise BadInputError(f"{what} {str(requested)!r} cannot be used ({reason[:120]}): cpu always can") from error
    return device


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
        raise BadInputError(f"runs on {device.type} are not recorded: only CUDA and CPUs report what was allocated")
