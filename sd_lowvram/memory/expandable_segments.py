"""A model of torch's expandable segments: bytes that they reserve for allocations of known sizes.

With ``expandable_segments:True`` each pool is one range of addresses, to which memory is mapped by pages: the range
grows at its end and does not fragment into segments. A page is unmapped when nothing is stored in it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from ..units import MIB
from .caching_allocator import LEAST, SMALL, CardFullError

PAGE = 20 * MIB
"""Page of the pool of large tensors, in bytes."""
_PAGES = {True: 2 * MIB, False: PAGE}
_ENDLESS = 1 << 50


@dataclass(eq=False)
class _AddressRange:
    """Some addresses of a pool, with their neighbours: in use, free, or not mapped."""

    address: int
    size: int
    small: bool
    mapped: bool = False
    used: bool = False
    before: _AddressRange | None = None
    after: _AddressRange | None = None


class ExpandableAllocator:
    """The state of torch's allocator with expandable segments, on one stream.

    Attributes:
        reserved_bytes: bytes of all mapped pages; ``peak_bytes`` is the most of them.
        allocated_bytes: bytes in use, rounded as torch rounds them; ``allocated_peak`` is the most of them.
    """

    def __init__(self, card_bytes: float = float("inf")) -> None:
        """
        Args:
            card_bytes: free memory of the GPU.
        """
        self.reserved_bytes = self.peak_bytes = self.allocated_bytes = self.allocated_peak = 0
        self._card_bytes = card_bytes
        self._first = {small: _AddressRange(0, _ENDLESS, small) for small in _PAGES}
        self._free: dict[bool, list[tuple[int, int, _AddressRange]]] = {small: [] for small in _PAGES}

    def allocate(self, size: int) -> _AddressRange:
        """Allocate at least ``size`` bytes.

        Returns:
            A span, for :meth:`free`.

        Raises:
            CardFullError: the GPU has no memory left.
        """
        size = max(LEAST, -(-size // LEAST) * LEAST)
        small = size <= SMALL
        span = self._best_fit(size, small) or self._expand(size, small)
        if span is None:
            self.release()
            span = self._expand(size, small)
        if span is None:
            raise CardFullError
        self._drop(span)
        if span.size > size:
            self._keep(self._cut(span, size))
        span.used = True
        self.allocated_bytes += span.size
        self.allocated_peak = max(self.allocated_peak, self.allocated_bytes)
        return span

    def free(self, span: _AddressRange) -> None:
        """Free a span and merge it with its free neighbours."""
        self.allocated_bytes -= span.size
        span.used = False
        self._keep(self._merge(span))

    def release(self) -> None:
        """Free all pages without anything in use, as ``torch.cuda.empty_cache`` does."""
        for small, page in _PAGES.items():
            for _, _, span in list(self._free[small]):
                start = -(-span.address // page) * page
                end = (span.address + span.size) // page * page
                if start < end:
                    self._unmap(span, start, end)

    def _unmap(self, span: _AddressRange, start: int, end: int) -> None:
        self._drop(span)
        if span.address < start:
            inside = self._cut(span, start - span.address)
            self._keep(span)
            span = inside
        if span.address + span.size > end:
            self._keep(self._cut(span, end - span.address))
        self.reserved_bytes -= span.size
        span.mapped = False
        self._merge(span)

    def _best_fit(self, size: int, small: bool) -> _AddressRange | None:
        """Best fit; spans at which the pool can grow count with the size that they would have."""
        pool = self._free[small]
        place = bisect.bisect_left(pool, (size, -1))
        while place + 1 < len(pool) and _grown_size(pool[place + 1][2]) < _grown_size(pool[place][2]):
            place += 1
        return pool[place][2] if place < len(pool) else None

    def _expand(self, size: int, small: bool) -> _AddressRange | None:
        """Map pages for a free span of ``size`` bytes; return None if the GPU has no memory left for them."""
        span: _AddressRange | None = next(
            candidate for candidate in self._unmapped_spans(small) if _room_from(candidate) >= size
        )
        assert span is not None
        if not span.mapped:
            span = self._map(span, size)
        while span is not None and span.size < size and span.after is not None:
            span = self._map(span.after, size - span.size)
        return span

    def _unmapped_spans(self, small: bool) -> Iterator[_AddressRange]:
        """Unmapped spans by address, each with the free bytes before it."""
        span: _AddressRange | None = self._first[small]
        while span is not None:
            if not span.mapped:
                yield span.before if span.before is not None and not span.before.used else span
            span = span.after

    def _map(self, span: _AddressRange, size: int) -> _AddressRange | None:
        """Map pages to as much of ``span`` as ``size`` takes; returns all that is free there."""
        page = _PAGES[span.small]
        wanted = -(-min(size, span.size) // page) * page
        if self.reserved_bytes + wanted > self._card_bytes:
            return None
        self.reserved_bytes += wanted
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        if span.size > wanted:
            self._cut(span, wanted)
        span.mapped = True
        span = self._merge(span)
        self._keep(span)
        return span

    def _cut(self, span: _AddressRange, size: int) -> _AddressRange:
        """Leave ``size`` bytes of ``span``; returns the rest, which is as it was."""
        rest = _AddressRange(span.address + size, span.size - size, span.small, span.mapped, False, span, span.after)
        if span.after is not None:
            span.after.before = rest
        span.size, span.after = size, rest
        return rest

    def _merge(self, span: _AddressRange) -> _AddressRange:
        """``span`` with those of its neighbours that are like it, which are free spans no more."""
        for other in (span.before, span.after):
            if other is None or other.used or other.mapped != span.mapped:
                continue
            if other.mapped:
                self._drop(other)
            first, second = (other, span) if other is span.before else (span, other)
            first.size += second.size
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            span = first
        return span

    def _keep(self, span: _AddressRange) -> None:
        bisect.insort(self._free[span.small], (span.size, span.address, span))  # no two have one address

    def _drop(self, span: _AddressRange) -> None:
        pool = self._free[span.small]
        del pool[bisect.bisect_left(pool, (span.size, span.address))]


def _grown_size(span: _AddressRange) -> int:
    return span.size + (span.after.size if span.after is not None and not span.after.mapped else 0)


def _room_from(span: _AddressRange | None) -> int:
    """Bytes that are free or unmapped from ``span`` on."""
    capacity = 0
    while span is not None and not span.used:
        capacity += span.size
        span = span.after
    return capacity
