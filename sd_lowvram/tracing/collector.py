"""Python's cycle collector at rest."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from ..memory.threads import Shared


@contextlib.contextmanager
def _pause_collector() -> Iterator[None]:
    active = gc.isenabled()
    gc.disable()
    yield
    if active:
        gc.enable()


no_collection = Shared(_pause_collector)
"""Disables Python's cycle collector within the block, in any thread: objects in cycles would be freed at arbitrary
moments, and the collector is slow among many small objects."""
