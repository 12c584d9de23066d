"""What torch's allocator keeps of one stage on a GPU is given back before the next.

Segments that fit a denoising step are of little use to a decode, and on a small card they are in its way: a plan counts
on each stage to begin with none.
"""

from __future__ import annotations

import weakref

import torch

from .accounts import tracing

_stepping: weakref.WeakSet[object] = weakref.WeakSet()
"""The run of which the last call was a step; empty after a call of another kind."""


def begin_stage(device: torch.device, steps_of: object | None = None) -> None:
    """Give unused segments back, unless the last call was a step of the same run.

    Args:
        steps_of: of whose steps this is one; None: a stage that runs once. Called in one thread at a time.
    """
    if tracing() or steps_of in _stepping:
        return
    release_segments(device)
    _stepping.clear()
    if steps_of is not None:
        _stepping.add(steps_of)


def release_segments(device: torch.device) -> None:
    """Give segments of which nothing is in use back to the GPU."""
    if device.type == "cuda" and not tracing():
        torch.cuda.empty_cache()
