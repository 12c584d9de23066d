"""What torch's allocator keeps of one call on a GPU is given back before the next, where that would be in its way.

Segments that fit a denoising step are of little use to a decode, and those that many steps have cut up break up the
next one's: plans count on stages, and on steps of a GPU that has no more, that begin with none.
"""

from __future__ import annotations

import weakref

import torch

from .accounts import tracing

_stepping: dict[torch.device, weakref.ref[object]] = {}
"""By device the run of which its last call was a step; none after a call of another kind."""

_settled: set[tuple[torch.device, int]] = set()
"""Devices and their streams on which products have been computed."""


def begin_stage(device: torch.device, steps_of: object | None = None) -> None:
    """Give unused segments back; between two steps of one run only where the GPU could not do without them.

    Args:
        steps_of: of whose steps this is one; None: a stage that runs once. Called in one thread at a time for a device.
    """
    if device.type != "cuda" or tracing():
        return
    last = _stepping.pop(device, None)
    if steps_of is not None:
        _stepping[device] = weakref.ref(steps_of)
        if last is not None and last() is steps_of and not _is_short(device):
            return
    torch.cuda.empty_cache()
    if torch.cuda.is_available():
        _settle_libraries(device)


def _settle_libraries(device: torch.device) -> None:
    """Have cuBLAS take the workspace that it keeps for a stream from its first product on: before tensors of the stage
    are there it lies at the start of a segment, as plans count it. In the midst of one it would leave no room of 10 MiB
    on either side."""
    stream = (device, torch.cuda.current_stream(device).cuda_stream)
    if stream not in _settled:
        _settled.add(stream)
        small = torch.zeros(8, 8, dtype=torch.float16, device=device)
        torch.mm(small, small)


def _is_short(device: torch.device) -> bool:
    """Whether less is free, what is cached aside, than was ever reserved for what is allocated now and more."""
    most = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] < most


def release_segments(device: torch.device) -> None:
    """Give segments of which nothing is in use back to the GPU."""
    if device.type == "cuda" and not tracing():
        torch.cuda.empty_cache()
