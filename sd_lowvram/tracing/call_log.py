"""The log of a call: what its operators did to memory, and what the streaming engine and loops did between them.

On fake tensors the figures of operators depend on shapes alone, but the moves of the streaming engine depend on which
blocks are on the device. So a repeated call repeats the figures, and lets the engine make its moves for its own blocks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from ..memory.repeats import represent, times
from ..memory.threads import Redirected
from ..streaming import weight_scopes as lending
from ..streaming.buffer import BlockState, DeviceBuffer
from ..streaming.timing import ModuleSpan
from .flop_counter import ModuleWork
from .ledger import Ledger, Mark, Stretch

_MOVES = {name: Redirected(DeviceBuffer, name) for name in ("begin", "end", "evict", "enter", "leave", "take_back")}
_IN_CALLS = frozenset({"enter", "leave", "take_back"})
"""Moves that a call of a layer makes."""


class _Move:
    """A move of the engine.

    Attributes:
        name: method of the device buffer; ``block``: its argument.
        path: dotted name of the module that runs; ``passes``: number of passes that it represents.
        scope: the open :func:`repeated_calls`; None if there is none.
        repeatable: False if its effect on memory depends on more than the blocks that are there.
        ended: numbers of the allocations that the move ended.
        made: numbers of the allocations that it made.
    """

    def __init__(self, name: str, block: BlockState | None, path: str) -> None:
        self.name, self.block, self.path, self.passes = name, block, path, times()
        self.scope = lending.open_repeats()
        self.repeatable = name in _IN_CALLS and not lending.holds_converted()
        self.ended: set[int] = set()
        self.made: set[int] = set()


@dataclass
class _Place:
    """A boundary of a pass of a loop."""

    handle: int


@dataclass
class _Loop:
    """The end of a loop that was not run whole."""

    handles: Sequence[int]
    order: Sequence[int]
    made: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Work:
    """The work between two moves of the engine, module by module."""

    spans: tuple[ModuleSpan, ...]


Entry = _Move | _Place | _Loop | Stretch | _Work


@dataclass(frozen=True)
class Roles:
    """The blocks of the layers in a module.

    Attributes:
        buffer: of the blocks; None: no weight of the module is streamed.
        blocks: in the order of the layers.
        kind: equal for modules whose layers have such blocks in the same places.
    """

    buffer: DeviceBuffer | None
    blocks: tuple[BlockState, ...]
    kind: Hashable


class CallLog:
    """The log of the calls of one trace."""

    def __init__(self, ledger: Ledger, work: ModuleWork) -> None:
        """
        Args:
            ledger: books the bytes.
            work: counts the operations.
        """
        self._ledger, self._work = ledger, work
        self._entries: list[Entry] = []
        self._open = 0
        self._mark: Mark | None = None
        self._first = 0
        self._places: list[int] = []
        self._buffers: dict[int, tuple[DeviceBuffer, tuple[BlockState, ...] | None]] = {}
        self._roles: dict[nn.Module, Roles] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Log the moves of the streaming engine within the block."""
        with contextlib.ExitStack() as stack:
            for name, method in _MOVES.items():
                stack.enter_context(method.to(self._logged(name)))
            yield

    def _logged(self, name: str) -> Callable[..., None]:
        def move(buffer: DeviceBuffer, *args: object) -> None:
            method: Callable[..., None] = getattr(DeviceBuffer, name)
            if name == "begin":
                self._buffers |= {key: (buffer, blocks) for key, blocks in buffer.roles().items()}
                self._roles.clear()
                self._ledger.repeats_calls = False  # the engine may act in them
            if not self._open or self._mark is None:  # within another move
                return method(buffer, *args)
            block = args[0] if name in _IN_CALLS and isinstance(args[0], BlockState) else None
            self._cut()
            place, entry = len(self._ledger.allocations), _Move(name, block, self._ledger.path)
            self._entries.append(entry)
            try:
                method(buffer, *args)
            finally:
                for number, nbytes in self._ledger.allocations[place:]:
                    (entry.ended if nbytes < 0 else entry.made).add(number)
                self._begin()

        return move

    # A follower of loops

    def place(self) -> int:
        """Handle of the number of records so far."""
        self._places.append(self._ledger.place())
        handle = len(self._places) - 1
        self._between(_Place(handle))
        return handle

    def fill_in(self, places: Sequence[int], order: Sequence[int]) -> None:
        """Record the passes of a loop that were not run; ``places`` are handles."""
        loop = _Loop(places, order)
        numbers = [self._places[handle] for handle in places]
        self._between(loop, lambda: self._ledger.fill_in(numbers, order))
        loop.made.update(number for number, nbytes in self._ledger.allocations[numbers[0] :] if nbytes >= 0)

    def run_once(self, kind: Hashable, run: Callable[[], object]) -> None:
        """Call ``run``, or record its allocations again."""
        self._ledger.run_once(kind, run)

    def _between(self, entry: Entry, then: Callable[[], None] = lambda: None) -> None:
        if not self._open:
            return then()
        self._entries += self._ledger.since(self._taken()), entry
        try:
            then()
        finally:
            self._mark = self._ledger.mark()

    # Calls

    def roles(self, module: nn.Module) -> Roles:
        """The streamed blocks of ``module``."""
        if not self._buffers:
            return _NONE
        if module not in self._roles:
            self._roles[module] = self._look(module)
        return self._roles[module]

    def _look(self, module: nn.Module) -> Roles:
        found = [self._buffers.get(id(member)) for member in module.modules()]
        buffers = [each[0] for each in found if each is not None]
        if not buffers:
            return _NONE
        blocks = {block: None for each in found if each is not None for block in each[1] or ()}
        numbers = {block: number for number, block in enumerate(blocks)}
        kind: list[Hashable] = []
        for each in found:
            if each is None or each[1] is None:
                kind.append(each is None)
                continue
            kind.append(tuple((numbers[block], each[0].layout.blocks[block.number].rows) for block in each[1]))
        return Roles(buffers[0], tuple(blocks), (len({*map(id, buffers)}), *kind))

    def begin(self) -> int:
        """Begin the log of a call; return a handle."""
        if self._open:
            self._cut()
        self._open += 1
        self._begin()
        return len(self._entries)

    def finish(self, start: int) -> list[Entry]:
        """Return the log of the call that began with ``start``."""
        self._cut()
        entries = self._entries[start:]
        self._open -= 1
        if self._open:
            self._begin()
        else:
            self._entries.clear()
        return entries

    def _begin(self) -> None:
        self._first = len(self._work.spans)
        self._work.spans.append(ModuleSpan(self._ledger.path))  # so that what follows has spans of its own
        self._mark = self._ledger.mark()

    def _cut(self) -> None:
        self._entries.append(self._ledger.since(self._taken()))
        spans = self._work.spans[self._first :]
        self._entries.append(_Work(tuple(ModuleSpan(**vars(span)) for span in spans)))
        self._work.spans.append(ModuleSpan(self._ledger.path))

    def _taken(self) -> Mark:
        mark, self._mark = self._mark, None
        assert mark is not None
        return mark

    def repeat(self, entries: Sequence[Entry], roles: tuple[Roles, Roles], there: str, more: int) -> dict[int, int]:
        """Repeat what is logged, in a call of another module.

        Args:
            entries: the log.
            roles: blocks of the module that was logged, and of the other.
            there: path of the module that was logged.
            more: bytes on the device at the start, less those at the start of the logged call.

        Returns:
            New numbers of its allocations by the old ones.
        """
        before, after = roles
        blocks = dict(zip(before.blocks, after.blocks, strict=True))
        here, numbers, handles = self._ledger.path, dict[int, int](), dict[int, int]()
        with _Scopes() as scopes:
            for entry in entries:
                if isinstance(entry, Stretch):
                    self._ledger.repeat(entry, numbers)
                elif isinstance(entry, _Work):
                    for span in entry.spans:
                        path, held = _moved(span.path, there, here), span.held_bytes + more
                        self._work.add(ModuleSpan(**vars(span) | {"path": path, "held_bytes": held}))
                elif isinstance(entry, _Place):
                    handles[entry.handle] = self.place()
                elif isinstance(entry, _Loop):
                    self.fill_in([handles[handle] for handle in entry.handles], entry.order)
                elif entry.block is not None:
                    scopes.go_to(entry.scope)
                    self._ledger.path = _moved(entry.path, there, here)
                    with represent(entry.passes):
                        getattr(after.buffer, entry.name)(blocks[entry.block])
        self._ledger.path = here
        return numbers


class _Scopes(contextlib.ExitStack):
    """The :func:`repeated_calls` of a logged call, opened and closed again."""

    def __init__(self) -> None:
        super().__init__()
        self._outer = lending.open_repeats()
        self._here: object | None = None

    def go_to(self, scope: object | None) -> None:
        """Be inside ``scope`` of the logged call."""
        if self._outer is not None or scope is self._here:
            return
        self.close()
        self._here = scope
        if scope is not None:
            self.enter_context(lending.repeated_calls())


_NONE = Roles(None, (), ())


def _moved(path: str, there: str, here: str) -> str:
    """``path`` in the module ``here`` in place of ``there``."""
    inside = not there or path == there or path.startswith(f"{there}.")
    return here + path[len(there) :] if inside else path


def as_one(entries: Sequence[Entry], allocations: Sequence[tuple[int, int]]) -> list[Entry]:
    """``entries`` of a call without moves of the engine, as one stretch with the spans of all.

    Args:
        entries: the log.
        allocations: of the whole call, its loops included.
    """
    stretches = [entry for entry in entries if isinstance(entry, Stretch)]
    spans = tuple(span for entry in entries if isinstance(entry, _Work) for span in entry.spans)
    return [functools.reduce(Stretch.followed_by, stretches)._replace(allocations=allocations), _Work(spans)]


def ends_own(entries: Sequence[Entry], kept: set[int]) -> bool:
    """True if a call freed all that its operators allocated except ``kept``, and nothing else, and the engine's moves
    freed nothing of it.
    """
    made, ended, by_loops, by_moves = set[int](), set[int](), set[int](), set[int]()
    for entry in entries:
        if isinstance(entry, Stretch):
            for number, nbytes in entry.allocations:
                (ended if nbytes < 0 else made).add(number)
        elif isinstance(entry, _Loop):
            by_loops |= entry.made
        elif isinstance(entry, _Move):
            by_moves |= entry.ended
    return made - ended == kept and ended <= made | by_loops and not by_moves & (made | by_loops)


def moves_in(entries: Sequence[Entry]) -> list[_Move]:
    """The engine's moves in a log."""
    return [entry for entry in entries if isinstance(entry, _Move)]
