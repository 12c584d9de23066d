"""Models of torch's caching allocator for GPUs: bytes that it reserves for allocations of known sizes.

By default (:class:`CachingAllocator`) tensors are cut out of segments that the driver allocates. A segment with one
small tensor stays as a whole, and a gap serves only tensors that fit into it. So tensors that never exceed 4 GiB
together may reserve 4.5 GiB. With ``expandable_segments:True`` (:class:`ExpandableAllocator`) each pool is one range of
addresses, to which memory is mapped by pages: it grows at its end, and a page is unmapped when nothing is stored in it.

The models are of torch's ``CUDACachingAllocator``: two pools, best fit, splits and merges, and the release of what is
unused when the GPU has no more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..units import MIB

LEAST = 512
"""Bytes that every size is rounded up to a multiple of."""
SMALL = MIB
"""Largest tensor of the small pool, in bytes. The remainder of a large block is split off only if it is larger than
this.
"""
SMALL_SEGMENT, _LARGE_SEGMENT, OWN_SEGMENT, ROUND = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB

PAGE = 20 * MIB
"""Page of an expandable pool of large tensors, in bytes."""
_PAGES = {True: 2 * MIB, False: PAGE}
_ENDLESS = 1 << 50


class CardFullError(Exception):
    """Raised if the GPU cannot give the memory for an allocation, even after all unused memory is freed."""


@dataclass(eq=False, slots=True)
class _Block:
    """Some addresses of a segment, with their neighbours in it: in use, free, or not mapped."""

    address: int
    size: int
    small: bool
    mapped: bool = True
    used: bool = False
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """The state of the allocator on one stream: blocks in use, and free ones by pool and size.

    Segments have 2 MiB, 20 MiB, or whole 2 MiB for large tensors.

    Attributes:
        reserved_bytes: bytes of all segments or mapped pages; ``peak_bytes`` is the most of them.
        allocated_bytes: bytes of all blocks in use, rounded as torch rounds them; ``allocated_peak`` is the most of
            them.
        refused_bytes: the fewest bytes that a refused segment would have raised ``reserved_bytes`` to; infinite if none
            was refused.
    """

    def __init__(self, card_bytes: float = float("inf"), max_split_bytes: float = float("inf")) -> None:
        """
        Args:
            card_bytes: free memory of the GPU.
            max_split_bytes: segments of at least this size are not split (``max_split_size_mb``).
        """
        self.reserved_bytes = self.peak_bytes = self.allocated_bytes = self.allocated_peak = 0
        self.refused_bytes = float("inf")
        self._card_bytes = card_bytes
        self._max_split = max_split_bytes
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._next_address = 0
        self._least_rest = {True: LEAST, False: SMALL + LEAST}
        """Bytes of a block beyond those of a tensor that become a free block, by pool."""

    def allocate(self, size: int) -> _Block:
        """Allocate at least ``size`` bytes.

        Args:
            size: bytes.

        Returns:
            A block, for :meth:`free`.

        Raises:
            CardFullError: the GPU has no memory left.
        """
        size = -(-size // LEAST) * LEAST or LEAST
        small = size <= SMALL
        block = self._best_fit(size, small) or self._grow(size, small)
        if block is None:
            self.release()
            block = self._grow(size, small)
        if block is None:
            raise CardFullError
        if block.size - size >= self._least_rest[small] and (small or size < self._max_split):
            self._keep(self._cut(block, size))
        block.used = True
        self.allocated_bytes += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated_bytes)
        return block

    def free(self, block: _Block) -> None:
        """Free a block and merge it with its free neighbours."""
        self.allocated_bytes -= block.size
        block.used = False
        self._keep(self._merge(block))

    def release(self) -> None:
        """Free what holds no block in use, as ``torch.cuda.empty_cache`` does."""
        for pool in self._free.values():
            parts = [entry for entry in pool if entry[2].before is not None or entry[2].after is not None]
            self.reserved_bytes -= sum(size for size, _, _ in pool) - sum(size for size, _, _ in parts)
            pool[:] = parts

    def state(self) -> tuple[Any, ...]:
        """Values that decide, with the addresses of the blocks in use, where the next blocks are placed."""
        free = tuple((size, address) for pool in self._free.values() for size, address, _ in pool)
        return self.reserved_bytes, self._next_address, free

    def _best_fit(self, size: int, small: bool) -> _Block | None:
        """Take a free block of at least ``size`` bytes; return None if there is none."""
        pool = self._free[small]
        place = bisect_left(pool, (size,))
        if place == len(pool):
            return None
        fitting = pool[place][0]
        if fitting >= self._max_split and (size < self._max_split or fitting >= size + _LARGE_SEGMENT):
            return None
        return pool.pop(place)[2]

    def _grow(self, size: int, small: bool) -> _Block | None:
        """Reserve memory for a block of at least ``size`` bytes; return None if the GPU has too little left."""
        rounded = -(-size // ROUND) * ROUND
        wanted = SMALL_SEGMENT if small else _LARGE_SEGMENT if size < OWN_SEGMENT else rounded
        if not self._reserve(wanted):
            return None
        self._next_address += wanted
        return _Block(self._next_address - wanted, wanted, small)

    def _reserve(self, size: int) -> bool:
        """Count ``size`` more bytes of the GPU as reserved; return False if it has too little left."""
        if self.reserved_bytes + size > self._card_bytes:
            self.refused_bytes = min(self.refused_bytes, self.reserved_bytes + size)
            return False
        self.reserved_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        return True

    def _cut(self, block: _Block, size: int) -> _Block:
        """Leave ``size`` bytes of ``block``; return the rest, which is mapped as it was, and free."""
        rest = _Block(block.address + size, block.size - size, block.small, block.mapped, False, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        return rest

    def _merge(self, block: _Block) -> _Block:
        """Return ``block`` with those of its neighbours that are like it, which are free blocks no more."""
        before, after = block.before, block.after
        if before is not None and not before.used and before.mapped == block.mapped:
            block = self._join(before, block, before)
        if after is not None and not after.used and after.mapped == block.mapped:
            block = self._join(block, after, after)
        return block

    def _join(self, first: _Block, second: _Block, kept: _Block) -> _Block:
        """Return two neighbours as one block, ``first``; ``kept`` is the one among the free blocks, if it is mapped."""
        if kept.mapped:
            self._drop(kept)
        first.size += second.size
        first.after = after = second.after
        if after is not None:
            after.before = first
        return first

    def _keep(self, block: _Block) -> None:
        insort(self._free[block.small], (block.size, block.address, block))  # no two have one address

    def _drop(self, block: _Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, block.address))]


class ExpandableAllocator(CachingAllocator):
    """Two ranges of addresses, of small and of large tensors, to which pages are mapped."""

    def __init__(self, card_bytes: float = float("inf")) -> None:
        super().__init__(card_bytes)
        self._least_rest = {True: LEAST, False: LEAST}
        self._first = {small: _Block(0, _ENDLESS, small, mapped=False) for small in _PAGES}

    def release(self) -> None:
        for small, page in _PAGES.items():
            for _, _, block in list(self._free[small]):
                start = -(-block.address // page) * page
                end = (block.address + block.size) // page * page
                if start < end:
                    self._unmap(block, start, end)

    def _unmap(self, block: _Block, start: int, end: int) -> None:
        self._drop(block)
        if block.address < start:
            inside = self._cut(block, start - block.address)
            self._keep(block)
            block = inside
        if block.address + block.size > end:
            self._keep(self._cut(block, end - block.address))
        self.reserved_bytes -= block.size
        block.mapped = False
        self._merge(block)

    def _best_fit(self, size: int, small: bool) -> _Block | None:
        """Best fit; blocks at which the pool can grow count with the size that they would have."""
        pool = self._free[small]
        place = bisect_left(pool, (size, -1))
        while place + 1 < len(pool) and _grown_size(pool[place + 1][2]) < _grown_size(pool[place][2]):
            place += 1
        return pool.pop(place)[2] if place < len(pool) else None

    def _grow(self, size: int, small: bool) -> _Block | None:
        block: _Block | None = next(one for one in self._growing(small) if _bytes_from(one) >= size)
        assert block is not None
        if not block.mapped:
            block = self._map(block, size)
        while block is not None and block.size < size and block.after is not None:
            block = self._map(block.after, size - block.size)
        if block is not None:
            self._drop(block)
        return block

    def _growing(self, small: bool) -> Iterator[_Block]:
        """Yield unmapped blocks by address, each with the free block before it."""
        block: _Block | None = self._first[small]
        while block is not None:
            if not block.mapped:
                yield block.before if block.before is not None and not block.before.used else block
            block = block.after

    def _map(self, block: _Block, size: int) -> _Block | None:
        """Map pages to as much of ``block`` as ``size`` takes; return all that is free there."""
        page = _PAGES[block.small]
        wanted = -(-min(size, block.size) // page) * page
        if not self._reserve(wanted):
            return None
        if block.size > wanted:
            self._cut(block, wanted)
        block.mapped = True
        block = self._merge(block)
        self._keep(block)
        return block


def _grown_size(block: _Block) -> int:
    return block.size + (block.after.size if block.after is not None and not block.after.mapped else 0)


def _bytes_from(block: _Block | None) -> int:
    """Return the bytes that are free or unmapped from ``block`` on."""
    count = 0
    while block is not None and not block.used:
        count += block.size
        block = block.after
    return count
