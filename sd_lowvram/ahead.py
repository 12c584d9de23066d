"""A second process that traces what a search will ask for later; what it finds comes back through the cache on disk."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from .cache import cache_folder

_PATIENCE = 60.0
"""Seconds after which a second process that has not done its part is given up."""

_wanted: ContextVar[bool] = ContextVar("second process", default=False)


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
def meanwhile(work: Callable[[], Any]) -> Iterator[None]:
    """Inside, a second process does ``work``, which is done at the end.

    Nothing happens outside of :func:`two_processes`: what is asked for is traced when it is asked for.
    """
    if not _wanted.get():
        yield
        return
    read, write = os.pipe()
    child = _forked(write, work)
    os.close(write)
    try:
        yield
        select.select([read], [], [], _PATIENCE)
    finally:
        os.close(read)
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)


def _forked(told: int, work: Callable[[], Any]) -> int:
    """The number of a process that does ``work`` and tells when it is done; what goes wrong in it just ends it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the thread that shows progress, which holds no lock
        child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit())
            _wanted.set(False)
            work()
            os.write(told, b".")
        finally:
            os._exit(0)
    return child
