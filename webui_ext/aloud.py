"""What goes wrong in a callback of ours ends the generation.

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
    """Let the generation end with ``error`` where the host calls one of the ``ways`` of ``owner`` next."""

    def raising(*args: Any, **kwargs: Any) -> None:
        raise error

    for way in ways:
        setattr(owner, way, raising)


@contextlib.contextmanager
def aloud(owner: Any, *ways: str) -> Iterator[None]:
    """Within the block of a callback an exception ends the run that it is called for, see :mod:`.run`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, LowVRAMError) and error.plainly:  # the log has what the page leaves out
            print(f"[{NAME}] {error.args[0]}")
        fail(owner, Refused(str(error)) if isinstance(error, LowVRAMError) else error, *ways)
