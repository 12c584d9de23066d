"""Simple ways to choose what stays on the device, to compare the search with.

Those that keep something leave a ring of two of the largest streamed units where the budget allows it, so that one is
copied while the other computes, and of one where it does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from .schedule import Schedule, WeightGroup, align, lay_out

Policy = Callable[[Sequence[WeightGroup], int], Schedule]


POLICIES: dict[str, Policy] = {
    # what ComfyUI does
    "largest first": lambda units, capacity: _fill(
        units, capacity, sorted(range(len(units)), key=lambda n: -units[n].bytes)
    ),
    "first resident": lambda units, capacity: _fill(units, capacity, range(len(units))),
    "all streamed": lambda units, capacity: lay_out(units, (), capacity),
}
"""Functions from the units of a step and the bytes on the device to a schedule; residents are as many as fit."""


def _fill(units: Sequence[WeightGroup], device_bytes: int, order: Iterable[int]) -> Schedule:
    """Take residents in ``order`` while a ring for the other units remains."""
    order = list(order)
    sizes = [align(units[number].bytes) for number in order]
    largest_left = [*reversed([*itertools.accumulate(reversed(sizes), max)]), 0]
    cumulative = [0, *itertools.accumulate(sizes)]
    for rooms in (2, 1):
        for count in range(len(order), -1, -1):
            if cumulative[count] + rooms * largest_left[count] <= device_bytes:
                return lay_out(units, order[:count], device_bytes - cumulative[count])
    return lay_out(units, (), device_bytes)
