"""What torch's allocator keeps of one call on a GPU is given back before the next, where that would be in its way.

Segments that fit a denoising step are of little use to a decode, and those that many steps have cut up break up the
next one's: plans count on stages, and on steps of a GPU that has no more, that begin with none.
"""

from __future__ import annotations

import weakref

import torch

from ..compat.private import take_matrix_workspaces
from .accounts import tracing

_stepping: dict[torch.device, weakref.ref[object]] = {}
"""By device the run of which its last call was a step; none after a call of another kind."""


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
        # Before tensors of the stage are there these lie at the start of a segment, as plans count them. In the midst
        # of one they would leave no room of 10 MiB on either side.
        take_matrix_workspaces(device)


def _is_short(device: torch.device) -> bool:
    """Whether less is free, what is cached aside, than was ever reserved for what is allocated now and more; a process
    that is kept to a part of the GPU has no more free than that part has."""
    most = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    part = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device.index)
    return min(free, int(part * total) - torch.cuda.memory_reserved(device)) < most


def release_segments(device: torch.device) -> None:
    """Give segments of which nothing is in use back to the GPU."""
    if device.type == "cuda" and not tracing():
        torch.cuda.empty_cache()
