"""Free cached segments of torch's allocator between stages on a GPU, where they would be in the way.

Segments of a denoising step do not fit a decode. Plans count on stages that start without cached segments, and on steps
that find those of the step before. Where the allocator ran short in steps, those that follow share one segment for all
of their large tensors, if the plan says that they fit; else they start without.
"""

from __future__ import annotations

import sys
import weakref
from typing import NamedTuple

import torch

from .accounts import tracing
from .limit import fraction_of, take_workspaces


class _Steps(NamedTuple):
    """The steps of a run.

    Attributes:
        retries: how often torch's allocator had freed segments to go on, when the last step began.
        freed: number of steps in which it did so.
    """

    run: weakref.ref[object]
    retries: int
    freed: int


_JOINED = 2
"""Number of such steps after which one segment is cached: in the second step, weights have taken their places."""

_stepping: dict[torch.device, _Steps] = {}
"""The run whose step was the last call on each device; none after a call of another kind."""


def begin_stage(device: torch.device, steps_of: object | None = None, segment_bytes: int = 0) -> None:
    """Free unused segments, but not between two steps of one run, each of which would allocate them anew.

    Where the allocator had to free segments within a step, those that are left are too scattered, and the next step
    begins without; what it allocates serves the steps after it. After two such steps, later ones share one segment; if
    it is not enough, each begins without.

    Args:
        device: a GPU. Call this in one thread at a time for a device.
        steps_of: the run of whose steps this is one; None: a stage that runs once.
        segment_bytes: one segment for the large tensors of a step; 0: several need less.
    """
    if device.type != "cuda" or tracing():
        return
    last, freed = _stepping.pop(device, None), 0
    if steps_of is not None:
        _refresh_locals()
        retries = _retries(device)
        known = last if last is not None and last.run() is steps_of else None
        short = known is not None and retries > known.retries
        freed = short + (known.freed if known is not None else 0)
        _stepping[device] = _Steps(weakref.ref(steps_of), retries, freed)
        if known is not None and not short and freed <= _JOINED:
            return
    cached = _small_bytes(device)
    torch.cuda.empty_cache()
    if freed == _JOINED and not _join_segments(device, segment_bytes, cached - _small_bytes(device)):
        _stepping[device] = _stepping[device]._replace(freed=_JOINED + 1)
    if torch.cuda.is_available():
        # Allocated before the tensors of the stage, the workspaces are at the start of a segment, as plans count them.
        # In the middle of a segment they would leave less than 10 MiB on either side.
        take_workspaces(device)


def has_run_short(device: torch.device) -> bool:
    """True if torch's allocator has freed segments in the step that ends now, and in one before: what is fetched for
    the next step would lie scattered among segments that the next step needs."""
    last = _stepping.get(device)
    return last is not None and last.freed > 0 and _retries(device) > last.retries


def _retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))


def _join_segments(device: torch.device, size: int, small_bytes: int) -> bool:
    """Cache one segment of ``size`` bytes; return False if it is 0, or would leave less than ``small_bytes``."""
    total = torch.cuda.get_device_properties(device).total_memory
    left = int(total * fraction_of(device)) - torch.cuda.memory_reserved(device)
    if not size or min(left, torch.cuda.mem_get_info(device)[0]) < size + small_bytes:
        return False
    torch.empty(size, dtype=torch.uint8, device=device)
    return True


def _small_bytes(device: torch.device) -> int:
    """Bytes of segments for tensors of at most 1 MiB."""
    return int(torch.cuda.memory_stats(device).get("reserved_bytes.small_pool.current", 0))


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
