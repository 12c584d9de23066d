"""Host memory of streamed weights, and the part that is read when it is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..streaming.host_weights import RING_BYTES, least_host_bytes


@dataclass(frozen=True)
class HostResidentWeights:
    """Bytes of streamed weights in host memory.

    Attributes:
        host_bytes: host memory that they use.
        least_bytes: host memory with which they would work.
        copied_bytes: the part of ``host_bytes`` that is also in a mapped file.
        pinned_bytes: weights that are copied at the bus' rate; None: all. The rest is read while these are copied.
        cached_bytes: the part of that rest that fits the system's cache; None: all of it. What is left is read from
            disk.
    """

    host_bytes: int
    least_bytes: int
    copied_bytes: int = 0
    pinned_bytes: int | None = None
    cached_bytes: int | None = None


def host_resident(weights: int, mapped: int, ram: int, pinnable: int | None) -> HostResidentWeights:
    """Distribute ``weights`` bytes, ``mapped`` of them in mapped files, over ``ram`` bytes of host memory.

    Mapped weights need only the ring through which they pass, and are faster with more memory.

    Args:
        weights: bytes that wait in host memory.
        mapped: the part of them in mapped files.
        ram: budget of the host in bytes.
        pinnable: the most bytes that can be page-locked, ring included; None: all.

    Returns:
        Bytes in pinned memory, in ordinary memory, in the system's cache and on disk.
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
    """Return the bytes of one component that are not held, if ``held`` bytes are filled in ``order``.

    Args:
        component: name of the component.
        order: names of all components, those that are held first at the front.
        weights: bytes by component.
        held: bytes that are held; None: all.
    """
    if held is None or component not in order:
        return 0
    before = sum(weights[name] for name in order[: order.index(component)])
    return weights[component] - min(weights[component], max(0, held - before))
