"""What weights that wait take of the host's memory, and which of them are read when they are copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..streaming.host_weights import RING_BYTES, least_host_bytes


@dataclass(frozen=True)
class HostResidentWeights:
    """Weights that wait in host memory.

    Attributes:
        host_bytes: that they take.
        least_bytes: that they would do with.
        copied_bytes: of ``host_bytes``, those that a mapped file has as well.
        pinned_bytes: of the weights that can be copied at the bus' rate; None: all. The others are read meanwhile.
        cached_bytes: of those others, what the system's cache has room for; None: all. The rest comes from the disk.
    """

    host_bytes: int
    least_bytes: int
    copied_bytes: int = 0
    pinned_bytes: int | None = None
    cached_bytes: int | None = None


def host_resident(weights: int, mapped: int, ram: int, pinnable: int | None) -> HostResidentWeights:
    """Of ``weights`` bytes, ``mapped`` of them in files that are mapped, with ``ram`` bytes for all that waits.

    What stays mapped needs no memory of its own, but for the ring that it passes, and is the better for some.

    Args:
        pinnable: the most that can be page-locked, ring included; None: all.
    """
    mapped = min(mapped, weights)
    least = least_host_bytes(weights, mapped)
    pinned = max(0, min(ram, pinnable if pinnable is not None else ram) - RING_BYTES)
    if pinned >= weights:
        return HostResidentWeights(weights, least, mapped)
    taken = max(least, min(ram, weights + RING_BYTES)) if mapped else weights
    cached = max(0, ram - RING_BYTES - pinned) if mapped and ram < weights + RING_BYTES else None
    return HostResidentWeights(taken, least, max(0, taken - (weights - mapped)), pinned, cached)


def read_bytes(component: str, order: Sequence[str], weights: Mapping[str, int], held: int | None) -> int:
    """Bytes of one component beyond the ``held`` ones of those that come first in ``order``; None: all are held."""
    if held is None or component not in order:
        return 0
    before = sum(weights[name] for name in order[: order.index(component)])
    return weights[component] - min(weights[component], max(0, held - before))
