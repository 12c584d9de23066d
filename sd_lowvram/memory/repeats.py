"""Equal passes of a loop, of which a trace runs only one.

All inner strips of a map cost the same on fake tensors, so a trace runs one of them: peaks are equal, and counts of
work are multiplied by :func:`times`. The addresses of tensors depend on all passes in order, so a :class:`Follower` is
notified of the loops.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from ..compat.private import FakeTensor

Piece = TypeVar("Piece")


class Follower(Protocol):
    """A recorder of allocations that is notified of loops that were not run whole."""

    def place(self) -> int:
        """Number of records so far."""

    def fill_in(self, places: Sequence[int], order: Sequence[int]) -> None:
        """Record the passes of a loop that were not run.

        Args:
            places: numbers of records at the start and end of each pass that ran.
            order: for each pass of the whole loop, the number of the pass that represents it.
        """

    def run_once(self, kind: Hashable, run: Callable[[], object]) -> None:
        """Call ``run``, or record the allocations of an equal call again.

        Args:
            kind: equal for calls that allocate the same.
            run: the call; its result is not used.
        """


class _ThreadRepeats(threading.local):
    times: int = 1
    follower: Follower | None = None


_state = _ThreadRepeats()


def times() -> int:
    """Number of equal passes that the current code represents, with nested loops multiplied."""
    return _state.times


@contextlib.contextmanager
def notify_follower(follower: Follower) -> Iterator[None]:
    """Notify ``follower`` of loops within the block, which represents one pass, even after a loop that ended in an
    error.
    """
    before = _state.times, _state.follower
    _state.times, _state.follower = 1, follower
    try:
        yield
    finally:
        _state.times, _state.follower = before


@contextlib.contextmanager
def represent(passes: int) -> Iterator[None]:
    """Count the work of the block as often as ``passes``, whatever the loops around it represent."""
    before, _state.times = _state.times, passes
    try:
        yield
    finally:
        _state.times = before


def exclude_from_counts() -> contextlib.AbstractContextManager[None]:
    """Exclude the block from counts of work, because it rarely runs; its memory still counts."""
    return represent(0)


def run_uncounted(kind: Hashable, run: Callable[[], object]) -> None:
    """Call ``run`` for its memory alone, because it rarely runs; its work does not count.

    Args:
        kind: equal for calls that allocate the same: of these, a trace runs one.
        run: the call; its result is not used.
    """
    with exclude_from_counts():
        if _state.follower is None:
            run()
        else:
            _state.follower.run_once(kind, run)


def standing_for(pieces: Sequence[Piece], order: Sequence[int]) -> Iterator[Piece]:
    """Yield the pieces of a loop that run, each as the representative of all equal passes.

    Args:
        pieces: the pieces to run.
        order: for each pass, the number of the piece that represents it; the first of a kind is the piece itself.
    """
    follower, passes = _state.follower, Counter(order)
    places = [follower.place()] if follower else []
    for number, piece in enumerate(pieces):
        before, _state.times = _state.times, _state.times * passes[number]
        yield piece
        _state.times = before  # not in `finally`: after an error a generator is closed later, while other code runs
        if follower:
            places.append(follower.place())
    if follower:
        follower.fill_in(places, order)


def representative_pieces(pieces: Sequence[Piece], like: Tensor) -> Iterator[Piece]:
    """Yield the first piece (allocates), the second (stands for the middle) and the last while tracing, otherwise all.

    Args:
        pieces: all pieces of a loop, in order.
        like: a tensor of the loop, fake while tracing.
    """
    if len(pieces) < 4 or not (isinstance(like, FakeTensor) or like.is_meta):
        return iter(pieces)
    return standing_for([*pieces[:2], pieces[-1]], [0] + [1] * (len(pieces) - 2) + [2])


def representatives(kinds: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Passes of a loop to run, in order, and for all passes the number of the one that represents it.

    Args:
        kinds: for each pass the values that its cost depends on. The first and the last represent only themselves: the
            first allocates, and the last may be smaller.

    Returns:
        Numbers of the passes to run, and for every pass the number of the pass that represents it.
    """
    ends = {0, len(kinds) - 1}
    keys = [(number,) if number in ends else ("inner", kind) for number, kind in enumerate(kinds)]
    first = {key: number for number, key in reversed([*enumerate(keys)])}
    run = sorted(first.values())
    return run, [run.index(first[key]) for key in keys]
