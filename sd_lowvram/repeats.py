"""Equal passes of a loop, of which a trace needs to run only one.

On fake tensors all inner strips of a map cost the same, so one of them stands for the others: peaks are seen just the
same, and whoever counts work multiplies by :func:`times`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _State(threading.local):
    times: int = 1


_state = _State()


def times() -> int:
    """How many equal passes what runs now stands for, loops within loops multiplied."""
    return _state.times


@contextlib.contextmanager
def standing_for(passes: int) -> Iterator[None]:
    """What runs inside is one of this many equal passes; the others are left out."""
    before, _state.times = _state.times, _state.times * passes
    try:
        yield
    finally:
        _state.times = before
