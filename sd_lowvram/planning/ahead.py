"""A second process that traces what a search will ask for later; what it finds comes back through the cache on disk."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from ..cache import cache_folder

_PATIENCE = 20.0
"""Seconds after which a second process that has not done its part is given up."""

_LIFE = 300
"""Seconds after which a second process ends, should nobody be left who ends it."""

_wanted: ContextVar[bool] = ContextVar("second process", default=False)
_at_work: ContextVar[int | None] = ContextVar("what the second process tells", default=None)


@contextlib.contextmanager
def two_processes() -> Iterator[None]:
    """Inside, :func:`meanwhile` has a process of its own, where the system can fork and traces are remembered.

    For programs of our own alone: a host with threads and a GPU in use is not to be forked.
    """
    token = _wanted.set(hasattr(os, "fork") and (os.cpu_count() or 1) > 1 and cache_folder() is not None)
    try:
        yield
    finally:
        _wanted.reset(token)


@contextlib.contextmanager
def meanwhile(work: Callable[[], Any], another: bool = False, awaited: bool = True) -> Iterator[None]:
    """Inside, a second process does ``work``, which is done at the end if it is ``awaited``.

    Where one is at work already, it is that one's work that is done at the end. Nothing happens outside of
    :func:`two_processes`: what is asked for is traced when it is asked for.

    Args:
        another: have one more process do ``work``, whatever the second one does.
    """
    telling = _at_work.get()
    if not _wanted.get():
        yield
    elif telling is not None and not another:
        yield
        _wait_for(telling)
    else:
        with _at_work_on(work, awaited):
            yield


@contextlib.contextmanager
def _at_work_on(work: Callable[[], Any], awaited: bool) -> Iterator[None]:
    read, write = os.pipe()
    child = _forked(write, work)
    os.close(write)
    token = _at_work.set(read)
    try:
        yield
        if awaited:
            _wait_for(read)
    finally:
        _at_work.reset(token)
        os.close(read)
        _end(child)


def _end(child: int) -> None:
    """End a process that may be stuck: what it holds of torch was copied in the middle of something."""
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGTERM)
        deadline = time.monotonic() + 2
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.005)


def _wait_for(told: int) -> None:
    """Wait until a process tells that it is done, or is gone."""
    select.select([told], [], [], _PATIENCE)


def _forked(told: int, work: Callable[[], Any]) -> int:
    """The number of a process that does ``work`` and tells when it is done; what goes wrong in it just ends it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the thread that shows progress, which holds no lock
        child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit())
            signal.alarm(_LIFE)
            _wanted.set(False)
            work()
            os.write(told, b".")
        finally:
            os._exit(0)
    return child
