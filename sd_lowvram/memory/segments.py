"""Free cached segments of torch's allocator between stages on a GPU, where they would be in the way.

Segments of a denoising step do not fit a decode. Plans count on stages that start without cached segments, and on steps
that find those of the step before; where the allocator ran short in a step, those that follow start without.
"""

from __future__ import annotations

import sys
import weakref
from typing import NamedTuple

import torch

from ..compat.private import take_matrix_workspaces
from .accounts import tracing
from .limit import libraries_noted


class _Steps(NamedTuple):
    """The steps of a run.

    Attributes:
        retries: how often torch's allocator had freed segments to go on, when the last step began.
        short: True if it did so in a step.
    """

    run: weakref.ref[object]
    retries: int
    short: bool


_stepping: dict[torch.device, _Steps] = {}
"""The run whose step was the last call on each device; none after a call of another kind."""


def begin_stage(device: torch.device, steps_of: object | None = None) -> None:
    """Free unused segments, but not between two steps of one run, each of which would allocate them anew.

    Where the allocator had to free segments within a step, those that are left are too scattered, and all later steps
    of the run begin without.

    Args:
        device: a GPU. Call this in one thread at a time for a device.
        steps_of: the run of whose steps this is one; None: a stage that runs once.
    """
    if device.type != "cuda" or tracing():
        return
    last = _stepping.pop(device, None)
    if steps_of is not None:
        _refresh_locals()
        retries = int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))
        known = last if last is not None and last.run() is steps_of else None
        short = known is not None and (known.short or retries > known.retries)
        _stepping[device] = _Steps(weakref.ref(steps_of), retries, short)
        if known is not None and not short:
            return
    torch.cuda.empty_cache()
    if torch.cuda.is_available():
        # Allocated before the tensors of the stage, the workspaces are at the start of a segment, as plans count them.
        # In the middle of a segment they would leave less than 10 MiB on either side.
        with libraries_noted(device):
            take_matrix_workspaces(device)


def _refresh_locals() -> None:
    """Make the pipeline that runs hold only the tensors that its variables hold now.

    For ``callback_on_step_end`` a pipeline calls ``locals()``. Until Python 3.13 the interpreter keeps what that
    returned, with the maps of a ControlNet, until the variables are read again.
    """
    frame = sys._getframe(1) if sys.version_info < (3, 13) else None
    while frame is not None:
        if "callback_on_step_end" in frame.f_code.co_varnames:
            _ = frame.f_locals
        frame = frame.f_back


def release_segments(device: torch.device) -> None:
    """Free all unused segments of the GPU."""
    if device.type == "cuda" and not tracing():
        torch.cuda.empty_cache()
