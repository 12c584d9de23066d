"""Equal passes of a loop, of which a trace needs to run only one.

On fake tensors all inner strips of a map cost the same, so one of them stands for the others: peaks are seen just the
same, and whoever counts work multiplies by :func:`times`. Where tensors come to lie hangs on all passes in their order:
whoever follows the loops is told it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from ..compat.private import FakeTensor

Piece = TypeVar("Piece")


class Follower(Protocol):
    """Who writes down what happens, and hears of loops that were not run whole."""

    def place(self) -> int:
        """How much has been written down."""

    def fill_in(self, places: Sequence[int], order: Sequence[int]) -> None:
        """A loop has ended, whose passes that ran began and ended at ``places``; its passes in their ``order``, each by
        the number of the one that it is like."""


class _ThreadRepeats(threading.local):
    times: int = 1
    follower: Follower | None = None


_state = _ThreadRepeats()


def times() -> int:
    """How many equal passes what runs now stands for, loops within loops multiplied."""
    return _state.times


@contextlib.contextmanager
def followed(follower: Follower) -> Iterator[None]:
    """Inside, ``follower`` hears of loops; what runs stands for itself, whatever a loop left behind that an error
    ended."""
    before = _state.times, _state.follower
    _state.times, _state.follower = 1, follower
    try:
        yield
    finally:
        _state.times, _state.follower = before


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Inside runs what may come to pass and seldom does: it counts as no work, and its memory does count."""
    before, _state.times = _state.times, 0
    try:
        yield
    finally:
        _state.times = before


def standing_for(pieces: Sequence[Piece], order: Sequence[int]) -> Iterator[Piece]:
    """The pieces of a loop that run, each for all equal passes; the others are left out.

    Args:
        order: of all passes the number of the piece that each is like; the first of a kind is the piece itself.
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


def each(pieces: Sequence[Piece], like: Tensor) -> Iterator[Piece]:
    """The pieces of a loop. Where ``like`` has no numbers, the second stands for all between the first, in which room
    is made, and the last, which may be smaller."""
    if len(pieces) < 4 or not (isinstance(like, FakeTensor) or like.is_meta):
        return iter(pieces)
    return standing_for([*pieces[:2], pieces[-1]], [0] + [1] * (len(pieces) - 2) + [2])


def representatives(kinds: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Which passes of a loop to run, in their order; and of all passes which of those each is like.

    Args:
        kinds: for each pass what its cost hangs on. The first and the last stand for themselves alone, because room is
            made in the one, and the other is cut off.
    """
    ends = {0, len(kinds) - 1}
    known = [(number,) if number in ends else ("inner", kind) for number, kind in enumerate(kinds)]
    first = {one: number for number, one in reversed([*enumerate(known)])}
    run = sorted(first.values())
    return run, [run.index(first[one]) for one in known]
