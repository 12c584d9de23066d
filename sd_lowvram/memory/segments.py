"""Free cached segments of torch's allocator between stages on a GPU, where they would be in the way.

Segments of a denoising step do not fit a decode. Plans count on stages that start without cached segments, and on steps
that find those of the step before.
"""

from __future__ import annotations

import weakref

import torch

from ..compat.private import take_matrix_workspaces
from .accounts import tracing
from .limit import libraries_noted

_stepping: dict[torch.device, weakref.ref[object]] = {}
"""The run whose step was the last call on each device; none after a call of another kind."""


def begin_stage(device: torch.device, steps_of: object | None = None) -> None:
    """Free unused segments, but not between two steps of one run, each of which would allocate them anew.

    Args:
        device: a GPU. Call this in one thread at a time for a device.
        steps_of: the run of whose steps this is one; None: a stage that runs once.
    """
    if device.type != "cuda" or tracing():
        return
    last = _stepping.pop(device, None)
    if steps_of is not None:
        _stepping[device] = weakref.ref(steps_of)
        if last is not None and last() is steps_of:
            return
    torch.cuda.empty_cache()
    if torch.cuda.is_available():
        # Allocated before the tensors of the stage, the workspaces are at the start of a segment, as plans count them.
        # In the middle of a segment they would leave less than 10 MiB on either side.
        with libraries_noted(device):
            take_matrix_workspaces(device)


def release_segments(device: torch.device) -> None:
    """Free all unused segments of the GPU."""
    if device.type == "cuda" and not tracing():
        torch.cuda.empty_cache()
