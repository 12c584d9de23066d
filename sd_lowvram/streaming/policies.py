"""Simple ways to choose what stays on the device, to compare the search with.

Those that keep something leave a ring of two of the largest streamed units where the budget allows it, so that one is
copied while the other computes, and of one where it does not.
"""

from __future__ import annotations

import itertools
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


POLICIES: dict[str, Policy] = {
    "largest first": largest_first,
    "first resident": first_resident,
    "all streamed": all_streamed,
}


def _filled(units: Sequence[Unit], device_bytes: int, order: Iterable[int]) -> Schedule:
    """As many residents, taken in ``order``, as leave a ring for the others."""
    order = list(order)
    sizes = [aligned(units[number].bytes) for number in order]
    largest_left = [*reversed([*itertools.accumulate(reversed(sizes), max)]), 0]
    kept = [0, *itertools.accumulate(sizes)]
    for rooms in (2, 1):
        for count in range(len(order), -1, -1):
            if kept[count] + rooms * largest_left[count] <= device_bytes:
                return lay_out(units, order[:count], device_bytes - kept[count])
    return lay_out(units, (), device_bytes)
