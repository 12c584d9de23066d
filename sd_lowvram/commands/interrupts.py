"""Ctrl-C, which some libraries swallow while they are imported: it is remembered, and heeded afterwards."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_came: list[int] = []


def remember_interrupts() -> None:
    """Record each interrupt in addition to raising KeyboardInterrupt; ignored interrupts stay ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, _: Any) -> NoReturn:
    _came.append(number)
    raise KeyboardInterrupt


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM as an interrupt within the block, so that finished work can be saved first."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def stop_between_steps() -> Iterator[Callable[[], bool]]:
    """Delay the first interrupt or SIGTERM within the block; a second one acts immediately.

    The yielded function returns True once one came, so that a long loop can save after the current step."""
    came: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, _: Any) -> None:
        came.append(number)
        signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():
        numbers = (int(signal.SIGINT), int(signal.SIGTERM))
        before |= {number: signal.getsignal(number) for number in numbers}
        for number in [number for number in numbers if before[number] not in (signal.SIG_IGN, None)]:
            signal.signal(number, note)
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)


def is_interrupted() -> bool:
    """True if an interrupt came, even if no code has noticed it."""
    return bool(_came)


def heed_interrupts() -> None:
    """Raise KeyboardInterrupt if one came that was swallowed."""
    if _came:
        raise KeyboardInterrupt
