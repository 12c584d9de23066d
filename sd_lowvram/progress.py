"""What a run tells: how far it has come, and what happens in it.

Core loops call ``report``; it does nothing unless somebody listens. Listeners nest; each thread or task has its own.

What happens and is no error (a leaner plan, strips computed anew) goes to the log, each event once. What
the caller can change (gradients left on, a package that is missing) goes through ``warnings``.
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
_PACKAGE = __name__.rpartition(".")[0]
_NAME = "sd-lowvram: "


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


def happened(module: str, sentence: str) -> None:
    """Log ``sentence`` as a warning of the logger ``module``.

    The name stands before it, as many programs show the bare message, and Python does where no logging is set up.
    """
    logging.getLogger(module).warning(_NAME + sentence)


@contextmanager
def heard(hear: Callable[[str], None]) -> Iterator[None]:
    """Within the block ``hear(sentence)`` is called for what happens, in place of the log.

    What ``hear`` raises is raised in the run.
    """
    logger = logging.getLogger(_PACKAGE)
    handlers, propagate = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [_Hearing(hear)], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate


class _Hearing(logging.Handler):
    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__()
        self._hear = hear

    def emit(self, record: logging.LogRecord) -> None:
        self._hear(record.getMessage().removeprefix(_NAME))
