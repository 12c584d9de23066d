"""How far a long loop has come, for whoever wants to show it.

Core loops call ``report``; it does nothing unless somebody listens. Listeners nest; each thread or task has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")
Callback = Callable[[str, int, int], None]

_listeners: ContextVar[tuple[Callback, ...]] = ContextVar("sd_lowvram_progress", default=())


def report(stage: str, done: int, total: int) -> None:
    """Tell the listeners that ``done`` of ``total`` equal parts of ``stage`` ("decode", "encode", ...) are finished.

    An exception of a listener is not caught: that is how a listener stops a run.
    """
    for callback in _listeners.get():
        callback(stage, done, total)


def counted(stage: str, items: Collection[Item]) -> Iterator[Item]:
    """``items`` one after the other, with a report before the first and after each."""
    report(stage, 0, len(items))
    for done, item in enumerate(items, 1):
        yield item
        report(stage, done, len(items))


@contextmanager
def listen(callback: Callback) -> Iterator[None]:
    """Call ``callback(stage, done, total)`` at every report made inside the ``with`` block by this thread."""
    token = _listeners.set((*_listeners.get(), callback))
    try:
        yield
    finally:
        _listeners.reset(token)
