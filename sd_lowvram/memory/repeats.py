"""Equal passes of a loop, of which a trace needs to run only one.

On fake tensors all inner strips of a map cost the same, so one of them stands for the others: peaks are seen just the
same, and whoever counts work multiplies by :func:`times`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Piece = TypeVar("Piece")


class _State(threading.local):
    times: int = 1


_state = _State()


def times() -> int:
    """How many equal passes what runs now stands for, loops within loops multiplied."""
    return _state.times


@contextlib.contextmanager
def counted_from_one() -> Iterator[None]:
    """What runs inside stands for itself, whatever a loop left behind that an error ended."""
    before, _state.times = _state.times, 1
    try:
        yield
    finally:
        _state.times = before


def standing_for(pieces: Iterable[tuple[Piece, int]]) -> Iterator[Piece]:
    """The pieces of a loop, each of which runs as one of so many equal passes; the others are left out."""
    for piece, passes in pieces:
        before, _state.times = _state.times, _state.times * passes
        yield piece
        _state.times = before  # not where an error ends the loop: that would come later, in the midst of something else


def each(pieces: Sequence[Piece], like: Tensor) -> Iterator[Piece]:
    """The pieces of a loop. Where ``like`` has no numbers, the second stands for all after it, which are no larger; the
    first differs, because room is made in it."""
    if len(pieces) < 3 or not (isinstance(like, FakeTensor) or like.is_meta):
        return iter(pieces)
    return standing_for([(pieces[0], 1), (pieces[1], len(pieces) - 1)])


def representatives(kinds: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Which passes of a loop to run, in their order, each with how many passes it stands for.

    Args:
        kinds: for each pass what its cost hangs on. The first and the last stand for themselves alone, because room is
            made in the one, and the other is cut off.
    """
    ends = {0, len(kinds) - 1}
    groups: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        groups.setdefault((number,) if number in ends else ("inner", kind), []).append(number)
    return sorted((group[0], len(group)) for group in groups.values())
