"""A model of torch's caching allocator for GPUs: bytes that it reserves for allocations of known sizes.

Tensors are cut out of segments that the driver allocates. A segment with one small tensor stays as a whole, and a gap
serves only tensors that fit into it. So tensors that never exceed 4 GiB together may reserve 4.5 GiB. The model is
of torch's ``CUDACachingAllocator``: two pools, segments of 2 and 20 MiB or of whole 2 MiB, best fit, splits and merges,
and the release of unused segments when the card has no more.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from ..units import MIB

LEAST = 512
"""Bytes that every size is rounded up to a multiple of."""
SMALL = MIB
"""Largest tensor of the small pool, in bytes. The remainder of a large block is split off only if it is larger than
this.
"""
SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT, ROUND = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


class CardFullError(Exception):
    """Raised if the GPU cannot give the memory for an allocation, even after all unused segments are freed."""


@dataclass(eq=False)
class _AllocatorBlock:
    """A piece of a segment, with its neighbours in it."""

    address: int
    size: int
    small: bool
    free: bool = True
    before: _AllocatorBlock | None = None
    after: _AllocatorBlock | None = None


class CachingAllocator:
    """The state of torch's caching allocator, on one stream.

    Attributes:
        reserved_bytes: bytes of all segments; ``peak_bytes`` is the most of them.
        allocated_bytes: bytes of all blocks in use, rounded as torch rounds them.
    """

    def __init__(self, card_bytes: float = float("inf"), max_split_bytes: float = float("inf")) -> None:
        """
        Args:
            card_bytes: free memory of the GPU.
            max_split_bytes: segments of at least this size are not split (``max_split_size_mb``).
        """
        self.reserved_bytes = self.peak_bytes = self.allocated_bytes = self.allocated_peak = 0
        self._card_bytes = card_bytes
        self._max_split = max_split_bytes
        self._free: dict[bool, list[tuple[int, int, _AllocatorBlock]]] = {True: [], False: []}
        self._next_address = 0

    def allocate(self, size: int) -> _AllocatorBlock:
        """A block of at least ``size`` bytes, to be given to :meth:`free`.

        Args:
            size: bytes.

        Returns:
            A block, for :meth:`free`.

        Raises:
            CardFullError: the GPU has no memory left.
        """
        size = max(LEAST, -(-size // LEAST) * LEAST)
        small = size <= SMALL
        block = self._best_fit(size, small) or self._segment(size, small)
        rest = block.size - size
        if rest >= LEAST if small else size < self._max_split and rest > SMALL:
            after = _AllocatorBlock(block.address + size, rest, small, True, block, block.after)
            if block.after is not None:
                block.after.before = after
            block.size, block.after = size, after
            self._keep(after)
        block.free = False
        self.allocated_bytes += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated_bytes)
        return block

    def free(self, block: _AllocatorBlock) -> None:
        """Free a block and merge it with its free neighbours."""
        self.allocated_bytes -= block.size
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._drop(other)
                block.address = min(block.address, other.address)
                block.size += other.size
                if other is block.before:
                    block.before = other.before
                    if block.before is not None:
                        block.before.after = block
                else:
                    block.after = other.after
                    if block.after is not None:
                        block.after.before = block
        self._keep(block)

    def release(self) -> None:
        """Free all segments without a block in use, as ``torch.cuda.empty_cache`` does."""
        for pool in self._free.values():
            unused = [entry for entry in pool if entry[2].before is entry[2].after is None]
            self.reserved_bytes -= sum(size for size, _, _ in unused)
            pool[:] = [entry for entry in pool if entry not in unused]

    def _best_fit(self, size: int, small: bool) -> _AllocatorBlock | None:
        pool = self._free[small]
        place = bisect.bisect_left(pool, (size, -1))
        if place == len(pool):
            return None
        fitting = pool[place][0]
        if size < self._max_split <= fitting or (size >= self._max_split and fitting >= size + _LARGE_SEGMENT):
            return None
        return pool.pop(place)[2]

    def _segment(self, size: int, small: bool) -> _AllocatorBlock:
        """A new segment from the card."""
        rounded = -(-size // ROUND) * ROUND
        wanted = SMALL_SEGMENT if small else _LARGE_SEGMENT if size < _OWN_SEGMENT else rounded
        if self.reserved_bytes + wanted > self._card_bytes:
            self.release()
        if self.reserved_bytes + wanted > self._card_bytes:
            raise CardFullError
        self.reserved_bytes += wanted
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        self._next_address += wanted
        return _AllocatorBlock(self._next_address - wanted, wanted, small)

    def _keep(self, block: _AllocatorBlock) -> None:
        bisect.insort(self._free[block.small], (block.size, block.address, block))  # no two have one address

    def _drop(self, block: _AllocatorBlock) -> None:
        pool = self._free[block.small]
        del pool[bisect.bisect_left(pool, (block.size, block.address))]
