"""Running models on fake tensors: peaks, work and time before anything is allocated."""

from __future__ import annotations

from .tracer import MemoryTrace, trace

__all__ = ["MemoryTrace", "trace"]
