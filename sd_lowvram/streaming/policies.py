"""Simple ways to choose what stays on the device, to compare the search with.

All leave room for a ring of two of the largest streamed units where the budget allows it, so that one is copied while
the other computes, and for one where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .schedule import Schedule, Unit, aligned, lay_out

Policy = Callable[[Sequence[Unit], int], Schedule]


def first_resident(units: Sequence[Unit], device_bytes: int) -> Schedule:
    """The first units of a step stay, as many as fit."""
    return _filled(units, device_bytes, range(len(units)))


def largest_first(units: Sequence[Unit], device_bytes: int) -> Schedule:
    """The largest units stay, as many as fit: what ComfyUI does."""
    return _filled(units, device_bytes, sorted(range(len(units)), key=lambda number: -units[number].bytes))


def all_streamed(units: Sequence[Unit], device_bytes: int) -> Schedule:
    """Nothing stays, and the whole budget is the ring."""
    return lay_out(units, (), device_bytes)


def _filled(units: Sequence[Unit], device_bytes: int, order: Iterable[int]) -> Schedule:
    """Residents taken in ``order`` while they and the ring that the others need fit."""
    sizes = [aligned(unit.bytes) for unit in units]
    total = sum(sizes)
    if total <= device_bytes:
        return lay_out(units, range(len(units)), 0)
    two = min(2 * max(sizes), total)
    ring = two if two <= device_bytes else device_bytes
    left, resident = device_bytes - ring, set()
    for number in order:
        if sizes[number] > left:
            break
        left -= sizes[number]
        resident.add(number)
    return lay_out(units, resident, device_bytes - sum(sizes[number] for number in resident))


POLICIES: dict[str, Policy] = {
    "largest first": largest_first,
    "first resident": first_resident,
    "all streamed": all_streamed,
}
