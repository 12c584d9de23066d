"""The peak of a run as the allocator saw it. Shares nothing with the trace that predicts it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


def measured_peak(function: Callable[[], Any]) -> int:
    """Run ``function`` and return the most bytes that it held at once above what was held at its start.

    On a GPU the figure is that of ``torch.cuda``'s caching allocator (requested sizes rounded to 512 bytes), for the
    current device. Without one it is summed over the events of the CPU allocator, as ``torch.profiler`` records them;
    what is freed but was allocated earlier is not subtracted. Measure in a fresh process to be sure of the figure.
    """
    gc.collect()
    return _peak_on_gpu(function) if torch.cuda.is_available() else _peak_on_cpu(function)


def _peak_on_gpu(function: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_on_cpu(function: Callable[[], Any]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        function()
    live = peak = 0
    for _, change in sorted(_allocator_events(profiler), key=lambda event: event[0]):
        live += change
        peak = max(peak, live)
    return peak


def _allocator_events(profiler: torch.profiler.profile) -> list[tuple[int, int]]:
    """Time and change in bytes of every allocation and release on the CPU."""
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    clock = "start_ns" if events and hasattr(events[0], "start_ns") else "start_us"
    return [(getattr(event, clock)(), event.nbytes()) for event in events]
