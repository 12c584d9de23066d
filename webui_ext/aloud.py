"""Errors in our callbacks end the generation.

The host itself only logs it, and makes the picture without us.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sd_lowvram.errors import LowVRAMError

from .arguments import NAME
from .refusal import Refused


def fail(owner: Any, error: BaseException, *ways: str) -> None:
    """End the generation with ``error`` when the host next calls one of the ``ways`` of ``owner``."""

    def raising(*args: Any, **kwargs: Any) -> None:
        raise error

    for way in ways:
        setattr(owner, way, raising)


@contextlib.contextmanager
def aloud(owner: Any, *ways: str) -> Iterator[None]:
    """End the run of a callback, the block, if it raises; see :mod:`.run`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, LowVRAMError) and error.plainly:  # the log has what the page leaves out
            print(f"[{NAME}] {error.args[0]}")
        fail(owner, Refused(str(error)) if isinstance(error, LowVRAMError) else error, *ways)
