"""Bytes that torch reserves for known allocations, with the allocator that its environment variable selects."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from ..units import MIB
from .caching_allocator import (
    LEAST,
    OWN_SEGMENT,
    PAGE,
    ROUND,
    SMALL,
    SMALL_SEGMENT,
    CachingAllocator,
    CardFullError,
    ExpandableAllocator,
)


class AllocatorSettings(NamedTuple):
    """Settings of torch's allocator that change how much it reserves.

    Attributes:
        max_split_bytes: segments of at least this size are not split (``max_split_size_mb``).
        expandable: True if segments grow (``expandable_segments``).
        graph: True if the allocations of a call are recorded once and repeated (:func:`allocation_graph`).
    """

    max_split_bytes: float
    expandable: bool
    graph: bool = False

    def allocator(self, card_bytes: float = float("inf")) -> CachingAllocator:
        """The allocator of a GPU with ``card_bytes`` of free memory."""
        if self.expandable:
            return ExpandableAllocator(card_bytes)
        return CachingAllocator(card_bytes, self.max_split_bytes)


def allocator_settings() -> AllocatorSettings:
    """Settings from torch's environment variable.

    CUDA's own pools (``cudaMallocAsync``) are counted as torch's plain segments, which is not a proven bound.
    """
    entries: dict[str, str] = {}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        pairs = (entry.partition(":") for entry in os.environ.get(name, "").split(","))
        entries |= {key.strip(): value.strip() for key, _, value in pairs}
    split = entries.get("max_split_size_mb", "")
    expandable = entries.get("expandable_segments", "").lower() == "true" and sys.platform == "linux"
    return AllocatorSettings(int(split) * MIB if split.isdigit() else float("inf"), expandable, _graph.get())


_graph: ContextVar[bool] = ContextVar("graph", default=False)


@contextlib.contextmanager
def allocation_graph(on: bool = True) -> Iterator[None]:
    """Count reserved bytes, within the block, for calls in an allocation graph of comfy-aimdo, ComfyUI's compiler.

    It records the allocations of a call once and repeats them. Tensors that are not alive at the same time share
    pages, and nothing is cached."""
    before = _graph.set(on)
    try:
        yield
    finally:
        _graph.reset(before)


Allocations = Sequence[tuple[int, int]]
"""(number, bytes) for each allocation and (number, -1) for its end, in order."""


class Reserved(NamedTuple):
    """Bytes that torch reserves for allocations.

    Attributes:
        least: if unused segments are freed before torch fails.
        kept: if no segment is freed, as while kernels are recorded.
        segment: one segment for all tensors over 1 MiB of a step that repeats; 0: it would need more than ``least``.
    """

    least: int
    kept: int
    segment: int = 0


def count_reserved(
    allocations: Allocations, held: int = 0, again: bool = False, floor: int = 0, joins: bool = True
) -> Reserved:
    """Bytes that torch reserves for ``allocations`` on one stream, starting without unused segments.

    The small pool is filled well, so its bytes are summed; allocations of the large pool are placed one by one. An
    operator may allocate its output before or after its temporaries, depending on versions of torch and its libraries.
    Several orders are tried and the largest result counts, in some models a fifth more than the given order.

    Args:
        allocations: (number, bytes) for each allocation and (number, -1) for its end, in order.
        held: bytes that a library allocated before, and holds.
        again: True if the allocations repeat, as those of a step do. The first time leaves tensors at arbitrary places
            (weights that are fetched ahead), and the second time finds smaller gaps.
        floor: bytes that are reserved in any case; fewer are not searched for.
        joins: False: one segment for all tensors over 1 MiB is of no use, and not searched for.

    Returns:
        The largest result over the orders tried.
    """
    settings = allocator_settings()
    if settings.graph:
        pages = max(map(_graph_bytes, _orders(_split(allocations, -1)[0]))) + segment(held)
        return Reserved(pages, pages)
    times = [*allocations, *_next_time(allocations)] if again else allocations
    large, small_bytes = _split(times, SMALL)
    if held > SMALL:
        steps = array("q", (held, *large, -len(large) - 1))
    else:
        steps, small_bytes = large, small_bytes + _rounded(held)
    unit = PAGE if settings.expandable else ROUND
    # Growing segments begin where the weights end, anywhere in a page.
    others = settings.expandable * unit + -(-small_bytes // SMALL_SEGMENT) * SMALL_SEGMENT
    least, most_units = max(0, floor - others) // unit, 0
    for order in map(_Course, _orders(steps)):
        most = settings.allocator()
        order.play(most)
        most_units = max(most_units, most.peak_bytes // unit)
        fewest = max(least, -(-most.allocated_peak // unit))
        least = _least(order, fewest, most.peak_bytes // unit, unit, settings.allocator)
    joins = joins and again and not settings.expandable
    one = _one_segment(large, least * unit - segment(held)) if joins else 0
    return Reserved(least * unit + others, most_units * unit + others, one)


def _one_segment(steps: array[int], most: int) -> int:
    """Bytes of one segment for all allocations; 0 if they exceed ``most``."""

    def allocator(size: float) -> CachingAllocator:
        one = allocator_settings().allocator(size)
        one.free(one.allocate(int(size)))
        one.refused_bytes = 0  # with another size, tensors would be at other places
        return one

    units, beyond = OWN_SEGMENT // ROUND, most // ROUND + 1
    changes = (step if step >= 0 else -steps[place + step] for place, step in enumerate(steps))
    alive = max(itertools.accumulate(changes), default=0)  # at the end of a run, so in all orders
    for order in map(_Course, _orders(steps)):
        units = _least(order, units, beyond, ROUND, allocator, alive)
    return units * ROUND if units < beyond else 0


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


def _least(
    order: _Course,
    low: int,
    high: int,
    unit: int,
    allocator_of: Callable[[float], CachingAllocator],
    alive: int = 0,
) -> int:
    """The smallest number of units, from ``low`` to ``high``, in which the allocations of ``order`` fit.

    The search starts near ``low``, because the result is nearly always there and a too small GPU is full soon. Fewer
    bytes than ``alive`` are never enough. On all GPUs from the most bytes that were reserved up to the fewest that were
    refused, every allocation takes the same course.
    """
    known: list[tuple[float, float, bool]] = [(0, alive, False)]
    step = 0
    while low < high:
        middle = min(low + step, (low + high) // 2)
        fits = next((fits for first, beyond, fits in known if first <= middle * unit < beyond), None)
        if fits is None:
            allocator = allocator_of(middle * unit)
            fits = order.fits(allocator)
            known.append((allocator.peak_bytes, allocator.refused_bytes, fits))
        if fits:
            high = middle
        else:
            low, step = middle + 1, 2 * step + 1
    return low


def _orders(steps: array[int]) -> Iterator[array[int]]:
    """``steps`` as they are; and what ends before anything else is made after all that is made with it, before it, and
    the one and the other in turn."""
    yield steps
    ends = {place + step: place for place, step in enumerate(steps) if step < 0}
    runs = [len(list(run)) for _, run in itertools.groupby(steps, (0).__gt__)]
    mixed: list[tuple[int, int, list[int], list[int]]] = []
    stop = 0
    for turn, (made, ended) in enumerate(zip(runs[::2], runs[1::2], strict=True)):
        start, stop = stop, stop + made + ended
        if made > 1:
            soon = [place for place in range(start, start + made) if ends[place] < stop]
            if 0 < len(soon) < made:
                later = [place for place in range(start, start + made) if ends[place] >= stop]
                mixed.append((turn % 2, start, soon, later))
    for behind in ((True, True), (False, False), (True, False)):
        order = steps[:]
        for turn, start, soon, later in mixed:
            for place, before in enumerate(later + soon if behind[turn] else soon + later, start):
                order[place] = steps[before]
                order[ends[before]] = place - ends[before]
        yield order


_GRAPH_PAGE = 8 * MIB
_GRAPH_SMALL = 4 * MIB
_GRAPH_ROUND = 256


def _graph_bytes(steps: array[int]) -> int:
    """Bytes of the pages of an allocation graph.

    A large allocation has whole pages. Small ones share a range of pages: each is placed in the smallest hole that is
    large enough, or at the end."""
    pages: dict[int, int] = {}
    ranges: list[tuple[int, int, int]] = []
    live = most = end = 0
    for place, size in enumerate(steps):
        if size < 0:
            if place + size in pages:
                live -= pages.pop(place + size)
            else:
                ranges = [used for used in ranges if used[2] != place + size]
        elif size >= _GRAPH_SMALL:
            pages[place] = -(-size // _GRAPH_PAGE)
            live += pages[place]
            most = max(most, live)
        else:
            bytes_ = max(1, -(-size // _GRAPH_ROUND)) * _GRAPH_ROUND
            stops = [0, *(stop for _, stop, _ in ranges)]
            starts = [*(start for start, _, _ in ranges), end]
            holes = [(start - stop, stop) for stop, start in zip(stops, starts, strict=True) if start - stop >= bytes_]
            start = min(holes)[1] if holes else end
            end = max(end, start + bytes_)
            bisect.insort(ranges, (start, start + bytes_, place))
    return (most + -(-end // _GRAPH_PAGE)) * _GRAPH_PAGE


def segment(size: int) -> int:
    """Return the bytes that a GPU reserves for one buffer of ``size`` bytes."""
    allocator = allocator_settings().allocator()
    if size:
        allocator.allocate(size)
    return allocator.peak_bytes


def bytes_to_ask_for(size: int) -> int:
    """Return the bytes to allocate for ``size`` bytes of weights: a whole segment if torch would split its end off.

    A tensor there that lives longer, such as the embeddings of several prompts, would hold all of their segment.
    """
    whole = segment(size)
    return whole if size > SMALL and SMALL < whole - size < ROUND else size


def _rounded(size: int) -> int:
    return -(-size // LEAST) * LEAST


def _split(allocations: Allocations, small: int) -> tuple[array[int], int]:
    """Steps of the allocations of more than ``small`` bytes, and the peak bytes of the others.

    A step is the bytes of an allocation; for an end, the place of its allocation less its own. All allocations end.
    """
    steps, made, sizes = array("q"), dict[int, int](), dict[int, int]()
    live = most = 0
    for number, size in allocations:
        if size > small:
            made[number] = len(steps)
            steps.append(size)
        elif number in made:
            steps.append(made.pop(number) - len(steps))
        elif size < 0:
            live -= sizes.pop(number)
        else:
            sizes[number] = _rounded(size)
            live += sizes[number]
            most = max(most, live)
    for place in made.values():
        steps.append(place - len(steps))
    return steps, most


class _Course:
    """Allocations and their ends in one order, in which equal passes that follow each other are found.

    The blocks of a transformer allocate and free equal sizes. Once a pass leaves an allocator in the state in which an
    earlier pass left it, the passes between the two repeat, and further ones are not played.
    """

    def __init__(self, steps: array[int]) -> None:
        """
        Args:
            steps: as :func:`_split` makes them.
        """
        self._steps = steps
        self._loops = [*_loops(steps), (len(steps), 0, 0)]

    def fits(self, allocator: CachingAllocator) -> bool:
        """True if the GPU of ``allocator`` has the memory for all allocations."""
        try:
            self.play(allocator)
        except CardFullError:
            return False
        return True

    def play(self, allocator: CachingAllocator) -> None:
        """Make all allocations.

        Raises:
            CardFullError: the GPU of ``allocator`` is too small.
        """
        live: dict[int, Any] = {}
        place = 0
        for start, length, passes in self._loops:
            self._play_until(start, place, allocator, live)
            place, left, seen = start, passes, dict[Any, int]()
            while left:
                self._play_until(place + length, place, allocator, live)
                place, left = place + length, left - 1
                first = place - length
                blocks = ((made - place if made >= first else made, block.address) for made, block in live.items())
                state = allocator.state(), frozenset(blocks)
                equal = seen.get(state, 0)
                if equal:
                    skipped = left // (equal - left) * (equal - left)
                    live = {made + skipped * length * (made >= first): block for made, block in live.items()}
                    place, left = place + skipped * length, left - skipped
                    seen.clear()
                seen[state] = left

    def _play_until(self, stop: int, place: int, allocator: CachingAllocator, live: dict[int, Any]) -> None:
        allocate, free, pop = allocator.allocate, allocator.free, live.pop
        for at, step in enumerate(self._steps[place:stop], place):
            if step < 0:
                free(pop(at + step))
            else:
                live[at] = allocate(step)


def _loops(steps: array[int]) -> list[tuple[int, int, int]]:
    """Start, length of a pass and number of passes of loops in ``steps``, in order.

    The length of a pass is a distance at which many groups of steps occur again. Without NumPy no loop is found.
    """
    try:
        import numpy
    except ImportError:
        return []
    values = numpy.array(steps)
    if len(values) < 3 * _PASS:
        return []
    groups = values
    for half in _HALVES:
        groups = groups[:-half] * (1_000_003 + 2 * half) + groups[half:]
    order = numpy.argsort(groups, kind="stable")
    again = numpy.diff(order)[numpy.diff(groups[order]) == 0]
    lengths, counts = numpy.unique(again[again >= _PASS], return_counts=True)
    found: list[tuple[int, int, int]] = []
    for length in lengths[numpy.argsort(counts)[-_LENGTHS:]].tolist():
        differs = numpy.flatnonzero(values[length:] != values[:-length])
        starts = numpy.concatenate(([0], differs + 1))
        passes = 1 + (numpy.concatenate((differs, [len(values) - length])) - starts) // length
        many = passes > 3
        found += [
            (start, length, each) for start, each in zip(starts[many].tolist(), passes[many].tolist(), strict=True)
        ]
    chosen: list[tuple[int, int, int]] = []
    for start, length, passes in sorted(found, key=lambda loop: (2 - loop[2]) * loop[1]):
        if all(start + length * passes <= first or start >= first + many * each for first, each, many in chosen):
            chosen.append((start, length, passes))
    return sorted(chosen)


_HALVES = (1, 2, 4, 8)
"""Groups of 16 steps are compared to find how long a pass is; each is hashed from two halves, these from theirs."""

_LENGTHS = 16
"""Lengths of passes that are tried, those first at which most groups occur again."""

_PASS = 32
"""Steps of the shortest pass that is worth a comparison of states."""
