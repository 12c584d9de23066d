"""What happens in a run, as tests hear it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sd_lowvram.progress import capture_events


@contextmanager
def logged(match: str) -> Iterator[list[str]]:
    """The sentences that are logged within the block, of which one must match."""
    found: list[str] = []
    with capture_events(found.append):
        yield found
    assert any(re.search(match, sentence) for sentence in found), found


@contextmanager
def nothing_logged(match: str = "") -> Iterator[None]:
    """Within the block nothing that matches may be logged."""
    found: list[str] = []
    with capture_events(found.append):
        yield
    assert not [sentence for sentence in found if re.search(match, sentence)], found
