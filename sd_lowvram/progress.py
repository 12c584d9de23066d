"""Progress and events of a run.

Core loops call ``report``, which does nothing without a listener. Listeners nest; each thread or task has its own.

Events that are not errors (a plan with less memory, strips computed again) are logged, each once. What the caller can
change (gradients left on, a missing package) goes through ``warnings``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")
Callback = Callable[[str, int, int], None]

_listeners: ContextVar[tuple[Callback, ...]] = ContextVar("sd_lowvram_progress", default=())
_hears: ContextVar[Callable[[str], None] | None] = ContextVar("sd_lowvram_hears", default=None)
_NAME = "sd-lowvram: "


def report(stage: str, done: int, total: int) -> None:
    """Report to the listeners that ``done`` of ``total`` equal parts of ``stage`` are finished.

    An exception of a listener is raised in the run: this is how a listener stops it.

    Args:
        stage: "decode", "encode", "denoise", ...
        done: number of finished parts.
        total: number of parts.
    """
    for callback in _listeners.get():
        callback(stage, done, total)


def report_each(stage: str, items: Collection[Item]) -> Iterator[Item]:
    """Yield ``items`` one after the other, with a report before the first and after each.

    Args:
        stage: as for :func:`report`.
        items: the parts.
    """
    report(stage, 0, len(items))
    for done, item in enumerate(items, 1):
        yield item
        report(stage, done, len(items))


@contextmanager
def listen(callback: Callback) -> Iterator[None]:
    """Call ``callback(stage, done, total)`` at every report made inside the ``with`` block by this thread.

    Args:
        callback: function of stage, done and total.
    """
    token = _listeners.set((*_listeners.get(), callback))
    try:
        yield
    finally:
        _listeners.reset(token)


def log_event(module: str, sentence: str) -> None:
    """Log ``sentence`` as a warning of the logger ``module``, or pass it to the listener of :func:`capture_events`.

    The message begins with the module's name, because many programs show the bare message, and so does Python by
    default.

    Args:
        module: name of the logger, usually ``__name__``.
        sentence: what happened, for people.
    """
    if (hear := _hears.get()) is not None:
        hear(sentence)
    else:
        logging.getLogger(module).warning(_NAME + sentence)


@contextmanager
def capture_events(hear: Callable[[str], None]) -> Iterator[None]:
    """Call ``hear(sentence)`` for events of this thread within the block, in place of the log.

    An exception of ``hear`` is raised in the run.
    """
    token = _hears.set(hear)
    try:
        yield
    finally:
        _hears.reset(token)
