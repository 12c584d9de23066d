"""Python's cycle collector at rest."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from ..memory.threads import Shared


@contextlib.contextmanager
def _at_rest() -> Iterator[None]:
    active = gc.isenabled()
    gc.disable()
    yield
    if active:
        gc.enable()


no_collection = Shared(_at_rest)
"""Inside, in whichever thread, Python's cycle collector rests: what cycles hold would die at a moment that chance
chooses, and among many small objects the collector takes its time."""
