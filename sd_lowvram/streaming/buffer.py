"""The blocks of a device buffer: which are on the device, which are lent, and what a call of a layer moves.

A block is *there* from its fetch until its bytes are needed for another block. What a call of a layer moves depends
only on which blocks are there, passing, running and held. It is searched for once and stored as a :class:`Move`. A step
like an earlier one only looks up what to take back and which blocks to fetch.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..compat.private import storage_key, writes
from ..errors import LowVRAMError
from ..weights import ordinary_mode
from . import weight_scopes as lending
from .copier import Copied, Copier, Copy
from .host_weights import HostWeights
from .layout import STAYING, DeviceLayout, LentLink, WeightSlot

_MOST_MOVES = 8
"""Stored moves for each block. A steady step needs one; models that run in pieces, or in two orders, need a few."""


class BlockState:
    """A block of weights, or with the number :data:`STAYING` the weights that always stay.

    Attributes:
        number: of the block.
        bit: its place in a set of blocks, which is a whole number.
        streamed: True if it passes through the ring.
        overlapping: blocks that share bytes of the ring with it; ``overlapping_bits``: the set of them.
        copies: the copies that bring it there.
        busy: layers of it that are running.
        held: number of :func:`repeated_calls` that need it.
        copied: the end of its copies, until the stream that owns the memory waits for it.
        ended: the event of its last copies, which the next ones record again.
        used: the end of its last use.
        versions: versions of its weights when they were lent; None while they are not.
    """

    def __init__(self, number: int, streamed: bool) -> None:
        self.number, self.bit, self.streamed = number, 1 << (number + 1), streamed
        self.overlapping: tuple[BlockState, ...] = ()
        self.overlapping_bits = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything that belongs to a buffer."""
        self.busy = self.held = 0
        self.copied: Copied | None = None
        self.ended: torch.cuda.Event | None = None
        self.used: torch.cuda.Event | None = None
        self.versions: list[int] | None = None
        self.place((), (), ())

    def place(self, slots: Sequence[WeightSlot], links: Sequence[LentLink], copies: Sequence[Copy]) -> None:
        """Take the places of the weights, the links of quantised ones, and the copies that bring them there."""
        self.copies = copies
        self._links = links
        whole = [slot for slot in slots if slot.lent is slot.tensor]
        self._lent = [(slot.tensor, slot.view) for slot in whole]
        self._returned = [(slot.tensor, slot.host) for slot in whole]
        self._packed = [slot for slot in whole if "quant_state" in vars(slot.tensor)] if links else []
        self._tensors = [slot.lent for slot in slots]
        counted = [slot for slot in slots if not slot.lent.is_inference()]
        self._counted = [slot.lent for slot in counted]
        self._sources = [slot.source for slot in counted]

    def lend(self) -> None:
        """Point the weights at the buffer. No mode is needed: contents are exchanged, and nothing is made."""
        self.versions = []
        for tensor, view in self._lent:
            tensor.data = view
        for link in self._links:
            link.lend()
        self.versions = list(map(writes, self._counted))

    def take_back(self) -> bool:
        """Point the weights at host memory again, and copy back what was written on the device.

        Returns:
            True if anything was written.
        """
        before, self.versions = self.versions, None
        lending.give_back(self._tensors)
        now = list(map(writes, self._counted))
        written = before != now and bool(before)  # no versions: lending was interrupted
        if written:
            self._copy_back(before or [], now)
        replaced = [(slot.tensor, slot.tensor.data) for slot in self._packed if not _is_at(slot.tensor, slot.view)]
        for tensor, host in (*self._returned, *replaced) if replaced else self._returned:
            tensor.data = host
        for link in self._links:
            link.take_back()
        return written or bool(replaced)

    def _copy_back(self, before: Iterable[int], now: Iterable[int]) -> None:
        with ordinary_mode():
            for source, lent, *versions in zip(self._sources, self._counted, before, now, strict=True):
                if versions[0] != versions[1]:
                    source.copy_(lent.data)


def _is_at(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """False if a layer has packed its weight anew, in other memory."""
    return storage_key(tensor) == storage_key(view)


class Fetch(NamedTuple):
    """Copies of a block to the device.

    Attributes:
        block: the block.
        evicted: blocks whose bytes it overwrites.
    """

    block: BlockState
    evicted: tuple[BlockState, ...]


class Move(NamedTuple):
    """The steps of a call, in this order.

    Attributes:
        left: blocks that are no longer in use.
        own: the fetch of the block that is called, if it is not there.
        ahead: fetches for later calls.
        there: the blocks that are there afterwards; ``passing``: streamed ones that have not left yet.
    """

    left: tuple[BlockState, ...]
    own: tuple[Fetch, ...]
    ahead: tuple[Fetch, ...]
    there: int
    passing: int


class DeviceBuffer:
    """The device buffer of one or more models.

    Attributes:
        layout: the places of the blocks.
        blocks: states of the blocks, in the order of a run.
        staying: state of the weights that always stay.
    """

    def __init__(
        self, layout: DeviceLayout, host_weights: HostWeights, repeats: bool, written: Callable[[], None]
    ) -> None:
        """
        Args:
            layout: places of the blocks.
            host_weights: where the weights are while they are not lent.
            repeats: True if fetches run ahead into the next step.
            written: is called when weights were written on the device and have been copied back.
        """
        self.layout = layout
        streamed = set(layout.streamed)
        self.blocks = [BlockState(number, number in streamed) for number in range(len(layout.blocks))]
        self.staying = BlockState(STAYING, streamed=False)
        self._host_weights, self._repeats, self._written = host_weights, repeats, written
        self._device = torch.device("cpu")
        self._copier = Copier(host_weights, self._device)
        for number, others in layout.overlapping.items():
            self.blocks[number].overlapping = tuple(self.blocks[other] for other in others)
            self.blocks[number].overlapping_bits = sum(other.bit for other in self.blocks[number].overlapping)
        self._residents = sum(self.blocks[number].bit for number in layout.residents)
        whole = [number for number in sorted(layout.residents) if layout.blocks[number].rows is None]
        self._whole = [self.blocks[number] for number in whole]
        self._moves: dict[tuple[int, ...], Move] = {}
        self._clear()

    def _clear(self) -> None:
        self._there = self._passing = self._busy = self._held = 0  # sets of blocks, by their bits
        self._joined = 0  # the residents that ``staying`` lends
        self._last: BlockState | None = None  # the block entered last
        self._begun: torch.cuda.Event | None = None  # the buffer's allocation, or a replay: the next copy waits for it

    def roles(self) -> dict[int, tuple[BlockState, ...] | None]:
        """Map the id of a layer's module to its blocks: () if it stays, None if it is a table."""
        roles = self.layout.roles().items()
        return {key: None if role is None else tuple(self.blocks[number] for number in role) for key, role in roles}

    # A run

    def begin(self, device: torch.device, fake: bool) -> None:
        """Allocate the buffer if there is none, and lend what always stays; from the second run on, all residents.

        Args:
            device: where the models compute.
            fake: True in a trace.
        """
        layout, staying = self.layout, self.staying
        if layout.open and not self._copier.is_home_stream:
            self.evict()  # the allocator ties memory to the compute stream on which it was allocated
        if not layout.open:
            layout.take_room(device)
            self._device = device
            self._copier = Copier(self._host_weights, torch.device("cpu") if fake else device)
            self._begun = self._copier.mark()
            for block in (staying, *self.blocks):
                if block.number in layout.places:
                    block.place(*layout.placed(block.number))
        if not self._there & staying.bit:
            self._fetch(staying, ())
            self._there |= staying.bit
        if self._whole and not self._joined and self._there & self._residents == self._residents:
            self._join()
        self._lend(staying)

    def _join(self) -> None:
        """Make ``staying`` lend the residents, too: one loop takes less time than a call for each block.

        Parts of a split layer are left out, because they are lent one after the other.
        """
        slots, links, copies = self.layout.placed(STAYING)
        slots, links = slots.copy(), links.copy()
        for block in self._whole:
            self._wait(block)
            self._joined |= block.bit
            slots += self.layout.places[block.number]
            links += self.layout.links[block.number]
        self.staying.place(slots, links, copies)

    def end(self) -> None:
        """Take back all weights, and fetch for the next step."""
        self._take_back_all()
        self._make(self._move(None), None)
        self._last = None

    # A recorded run

    @property
    def state(self) -> tuple[int, ...] | None:
        """The blocks that are there between two runs; None if the next run can neither be recorded nor be replayed:
        without a buffer, on another stream, with blocks that are allocated anew, or copied from unpinned memory."""
        fixed = self.layout.open and not self.layout.rooms and self._host_weights.all_pinned
        return self._sets() if fixed and self._copier.is_home_stream else None

    def _sets(self) -> tuple[int, ...]:
        return self._there, self._passing, self._busy, self._held

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record a run and its copies within the block, in the capture on the current stream. The device is idle.

        Raises:
            RuntimeError: the run leaves other blocks than it found, so that it cannot be repeated.
        """
        before = self._sets()
        self._forget_events()  # of before, for which no capture may wait
        try:
            with self._copier.recorded():
                yield
        finally:
            self._forget_events()  # of the capture, for which nothing else may wait
        if self._sets() != before:
            raise RuntimeError("a step leaves other blocks on the device than it found")

    def _forget_events(self) -> None:
        self._begun = None
        for block in (self.staying, *self.blocks):
            block.copied = block.ended = block.used = None

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Order what the block asks of the compute stream after all copies of before, and before all that follow."""
        self._copier.join()
        yield
        self._begun = self._copier.mark()

    def evict(self) -> None:
        """Free all device memory as soon as its copies are done."""
        self._take_back_all()
        self._copier.drain()
        self.layout.give_room_back()
        for block in (self.staying, *self.blocks):
            block.reset()
        self._clear()

    def _take_back_all(self) -> None:
        for block in (self.staying, *self.blocks):
            self.take_back(block)

    # A call of a layer

    def enter(self, block: BlockState) -> None:
        """Note that a layer of a block runs, lend the block, and fetch ahead."""
        block.busy += 1
        self._busy |= block.bit
        if lending.release_after_repeats(self, block.number, self._release):
            block.held += 1
            self._held |= block.bit
        joined = block.bit & self._joined
        if (joined and not self.layout.streamed) or (self._last is block and (joined or block.versions is not None)):
            return
        self._last = block
        self._make(self._move(block), None if joined else block)

    def leave(self, block: BlockState) -> None:
        """Note that a layer of a block has run."""
        block.busy -= 1
        if not block.busy:
            self._busy &= ~block.bit

    def take_back(self, block: BlockState) -> None:
        """Point the weights of a block at host memory again if they are lent."""
        if block.versions is None:
            return
        if block.take_back():
            self._written()
        if block.streamed:
            block.used = self._copier.mark(block.used)

    def _release(self, number: int) -> None:
        block = self.blocks[number]
        block.held = max(0, block.held - 1)
        if not block.held:
            self._held &= ~block.bit

    def _move(self, block: BlockState | None) -> Move:
        """Return the move on entering ``block``, or with None that at the end of a run."""
        number = len(self.blocks) if block is None else block.number
        key = self._there, self._passing, self._busy, self._held, number
        move = self._moves.get(key)
        if move is None:
            if len(self._moves) > _MOST_MOVES * len(self.blocks):
                self._moves.clear()
            move = self._moves[key] = _Search(self.layout, self.blocks, self._there, self._passing).move(
                number, self._residents, self._repeats
            )
        return move

    def _make(self, move: Move, block: BlockState | None) -> None:
        for other in move.left:
            self._leave(other)
        for fetch in move.own:
            self._fetch(*fetch)
        if block is not None and block.versions is None:
            self._lend(block)
        for fetch in move.ahead:
            self._fetch(*fetch)
        self._there, self._passing = move.there, move.passing

    def _leave(self, block: BlockState) -> None:
        """Take back a block that was used, and free its memory if the ring follows the activations."""
        self.take_back(block)
        if self.layout.rooms and self._there & block.bit:
            self._copier.wait(block.copied)  # the block may be fetched but never used
            block.copied = None
            block.place((), (), ())
            self.layout.drop(block.number)

    def _fetch(self, block: BlockState, evicted: Sequence[BlockState]) -> None:
        """Copy a block to the device. Copies run in order, so its memory is free once the last ones there were used."""
        if self.layout.rooms and block.streamed:
            with ordinary_mode():
                self.layout.take(block.number, self._device)
            block.place(*self.layout.placed(block.number))
            after = [self._copier.mark()]  # kernels launched earlier may still read this memory
        else:
            for other in evicted:
                self.take_back(other)
            after = [self._begun, *(other.used for other in evicted)]
            self._begun = None
        block.copied = self._copier.copy(block.copies, after, block.ended)
        if isinstance(block.copied, torch.cuda.Event):
            block.ended = block.copied

    def _lend(self, block: BlockState) -> None:
        self._wait(block)
        block.lend()

    def _wait(self, block: BlockState) -> None:
        if block.copied is not None and self._copier.wait(block.copied):
            block.copied = None


class _Search:
    """The search for the move of a call."""

    def __init__(self, layout: DeviceLayout, blocks: Sequence[BlockState], there: int, passing: int) -> None:
        self._layout, self._blocks = layout, blocks
        self._there, self._passing = there, passing

    def move(self, position: int, residents: int, repeats: bool) -> Move:
        """Return the move of a call.

        Args:
            position: number of the block that is called; after a step, the count of blocks.
            residents: the set of blocks that stay.
            repeats: True if the first block is next after the last one.

        Raises:
            LowVRAMError: the bytes of the block belong to one whose layer runs.
        """
        block = self._blocks[position] if position < len(self._blocks) else None
        left = [other for other in self._members(self._passing) if not self._in_use(other, block)]
        for other in left:
            self._drop(other)
        own: list[Fetch] = []
        if block is not None and not block.bit & self._there:
            left += self._leaving_for(block)
            own.append(self._fetch(block))
        if block is not None and block.streamed:
            self._passing |= block.bit
        candidates = self._layout.streamed
        if self._there & residents != residents:
            candidates = list(range(len(self._blocks)))
        first = bisect.bisect_right(candidates, position)
        wanted = (*candidates[first:], *(candidates[:first] if repeats else ()))
        ahead = self._ahead(position, [self._blocks[number] for number in wanted])
        return Move(tuple(left), tuple(own), tuple(ahead), self._there, self._passing)

    def _members(self, bits: int) -> Iterator[BlockState]:
        """Yield the blocks of a set in their order, without those that stay whatever the schedule says."""
        bits &= -2  # STAYING has the lowest bit
        while bits:
            lowest = bits & -bits
            yield self._blocks[lowest.bit_length() - 2]
            bits ^= lowest

    def _in_use(self, other: BlockState, called: BlockState | None) -> bool:
        """True if a layer of the block runs, or will be called again immediately; after a step no block is in use."""
        return called is not None and (other is called or other.busy > 0 or other.held > 0)

    def _drop(self, block: BlockState) -> None:
        """Note that a block leaves, and its memory if the ring follows the activations."""
        self._passing &= ~block.bit
        if self._layout.rooms:
            self._there &= ~block.bit

    def _leaving_for(self, block: BlockState) -> Iterator[BlockState]:
        """Yield streamed blocks that an unexpected order left on the device, if the ring follows the activations."""
        if not self._layout.rooms:
            return
        for other in self._members(self._there):
            idle = other.streamed and not other.busy
            if idle and not self._fits(block, self._layout.rooms[block.number]):
                self._drop(other)
                yield other

    def _fits(self, block: BlockState, capacity: float) -> bool:
        """True if the ring, which follows the activations, holds the block in addition."""
        ring = sum(self._layout.blocks[b.number].bytes for b in self._members(self._there) if b.streamed)
        return ring + self._layout.blocks[block.number].bytes <= capacity

    def _fetch(self, block: BlockState) -> Fetch:
        """Note the fetch of a block."""
        evicted = tuple(self._members(block.overlapping_bits & self._there))
        for other in evicted:
            if other.busy:
                names = [self._layout.blocks[each.number].name for each in (block, other)]
                raise LowVRAMError(
                    f"{names[0]} runs inside {names[1]}, and the budget cannot hold both: give more weights_mib"
                )
            self._there &= ~other.bit
            self._passing &= ~other.bit
        self._there |= block.bit
        return Fetch(block, evicted)

    def _ahead(self, position: int, candidates: Sequence[BlockState]) -> Iterator[Fetch]:
        """Yield fetches of ``candidates``, in order, while they fit."""
        rooms = self._layout.rooms
        capacity = rooms[position % len(rooms)] if rooms else math.inf
        for block in candidates:
            if block.bit & self._there or block.number == position:
                continue
            if rooms and not self._fits(block, capacity):
                return
            if any(self._bars(other, block, position) for other in self._members(block.overlapping_bits & self._there)):
                return
            yield self._fetch(block)

    def _bars(self, other: BlockState, block: BlockState, position: int) -> bool:
        """True if ``other``, which is there and whose bytes ``block`` needs, is used before it."""
        steps = len(self._blocks) + 1
        return other.busy > 0 or other.held > 0 or (other.number - position) % steps < (block.number - position) % steps
