"""Python's cycle collector at rest. torch is not imported here: that goes faster inside, too."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Inside, Python's cycle collector rests: what cycles hold would die at a moment that chance chooses, and among
    many small objects the collector takes its time."""
    active = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if active:
            gc.enable()
