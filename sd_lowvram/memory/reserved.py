"""What a card must give for allocations that are known, by whichever of torch's allocators its variable asks for."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..units import MIB
from .caching_allocator import LEAST, ROUND, SMALL, SMALL_SEGMENT, CachingAllocator, CardFullError
from .expandable_segments import PAGE, ExpandableAllocator


class AllocatorSettings(NamedTuple):
    """Of what is set for torch's allocator, that on which it hangs what a card must give.

    Attributes:
        max_split_bytes: from what size on segments are left whole (``max_split_size_mb``).
        expandable: whether segments grow (``expandable_segments``).
    """

    max_split_bytes: float
    expandable: bool

    def allocator(self, card_bytes: float = float("inf")) -> CachingAllocator | ExpandableAllocator:
        """That of a card that can give so much."""
        if self.expandable:
            return ExpandableAllocator(card_bytes)
        return CachingAllocator(card_bytes, self.max_split_bytes)


def allocator_settings() -> AllocatorSettings:
    """As torch's variable says.

    CUDA's own pools as backend are counted as torch's plain segments, which is no proven bound.
    """
    entries: dict[str, str] = {}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        pairs = (entry.partition(":") for entry in os.environ.get(name, "").split(","))
        entries |= {key.strip(): value.strip() for key, _, value in pairs}
    split = entries.get("max_split_size_mb", "")
    expandable = entries.get("expandable_segments", "").lower() == "true" and sys.platform == "linux"
    return AllocatorSettings(int(split) * MIB if split.isdigit() else float("inf"), expandable)


Allocations = Sequence[tuple[int, int]]
"""In their order a number and bytes for what is made, the number and -1 for its end."""


class Reserved(NamedTuple):
    """What a card must give for allocations.

    Attributes:
        least: bytes, where unused segments are given back before torch fails.
        kept: bytes, where none is given back, as while kernels are recorded.
    """

    least: int
    kept: int


def reserved(allocations: Allocations, held: int = 0, again: bool = False) -> Reserved:
    """Bytes that a card must give for ``allocations`` on one stream, which begin with no unused segment.

    Small tensors have a pool of their own, which is filled well: of them the bytes are counted, of the others every
    place. Whether what an operator makes for itself comes before or behind what it makes for others hangs on versions
    of torch and of libraries, and changes places: of several orders the one is counted for which the card must give
    most, in some models a fifth more than in the order of ``allocations``.

    Args:
        held: bytes that a library took before, and keeps.
        again: whether they come more than once, as those of a step do: what the first time leaves, such as weights that
            are fetched ahead, lies anywhere, and the second time finds less room beside it than the first.
    """
    times = [*allocations, *_next_time(allocations)] if again else allocations
    large, small_bytes = _by_pool([(-1, held), *times])
    settings = allocator_settings()
    unit = PAGE if settings.expandable else ROUND
    least = kept = 0
    for order in _orders(large):
        most = settings.allocator()
        _play(order, most)
        kept = max(kept, most.peak_bytes // unit)
        least = _least(order, max(least, -(-most.allocated_peak // unit)), most.peak_bytes // unit, unit)
    # Growing segments begin where the weights end, anywhere in a page.
    others = settings.expandable * unit + -(-small_bytes // SMALL_SEGMENT) * SMALL_SEGMENT
    return Reserved(least * unit + others, kept * unit + others)


def _next_time(allocations: Allocations) -> Iterator[tuple[int, int]]:
    """``allocations`` once more, after which as much is left as before: of what was left, each takes the place of the
    first that is made of its size."""
    live: dict[int, int] = {}
    for number, size in allocations:
        if size < 0:
            del live[number]
        else:
            live[number] = size
    left: dict[int, list[int]] = {}
    for number, size in live.items():
        left.setdefault(size, []).append(number)
    new = itertools.count(max((number for number, _ in allocations), default=0) + 1)
    now: dict[int, int] = {}
    for number, size in allocations:
        if size < 0:
            yield now.pop(number), -1
        elif left.get(size):
            now[number] = left[size].pop(0)
        else:
            now[number] = next(new)
            yield now[number], size


def _least(allocations: Allocations, low: int, high: int, unit: int) -> int:
    """On how many units, ``low`` and more, ``allocations`` fit, which fit on ``high``.

    Nearly always that is near the lowest, and a card that is too small is full soon.
    """
    step = 0
    while low < high:
        middle = min(low + step, (low + high) // 2)
        if _fits(allocations, allocator_settings().allocator(middle * unit)):
            high = middle
        else:
            low, step = middle + 1, 2 * step + 1
    return low


def _orders(allocations: Allocations) -> Iterator[Allocations]:
    """``allocations`` as they are; and what ends before anything else is made after all that is made with it, before
    it, and the one and the other in turn."""
    yield allocations
    runs = [list(run) for _, run in itertools.groupby(allocations, key=lambda one: one[1] < 0)]
    for behind in (itertools.repeat(True), itertools.repeat(False), itertools.cycle((True, False))):
        order: list[tuple[int, int]] = []
        for made, ended, last in zip(runs[::2], runs[1::2], behind, strict=False):
            ends = {number for number, _ in ended}
            order += sorted(made, key=lambda one: (one[0] in ends) == last)
            order += ended
        yield order


def segment(size: int) -> int:
    """Bytes that a card gives for one buffer."""
    allocator = allocator_settings().allocator()
    if size:
        allocator.allocate(size)
    return allocator.peak_bytes


def _by_pool(allocations: Allocations) -> tuple[list[tuple[int, int]], int]:
    """Those of the pool of large tensors, all of which end; and most bytes of the other pool."""
    sizes: dict[int, int] = {}
    large, small, most = [], 0, 0
    for number, size in allocations:
        ends = size < 0
        bytes_ = sizes.pop(number) if ends else sizes.setdefault(number, -(-size // LEAST) * LEAST)
        if bytes_ > SMALL:
            large.append((number, size))
        else:
            small += -bytes_ if ends else bytes_
            most = max(most, small)
    return [*large, *((number, -1) for number, size in sizes.items() if size > SMALL)], most


def _fits(allocations: Allocations, allocator: CachingAllocator | ExpandableAllocator) -> bool:
    try:
        _play(allocations, allocator)
    except CardFullError:
        return False
    return True


def _play(allocations: Allocations, allocator: CachingAllocator | ExpandableAllocator) -> None:
    blocks: dict[int, Any] = {}
    for number, size in allocations:
        if size < 0:
            allocator.free(blocks.pop(number))
        else:
            blocks[number] = allocator.allocate(size)
