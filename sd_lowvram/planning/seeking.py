"""Searches that go step by step, so that of several the one that promises most goes on first."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

T = TypeVar("T")

Steps = Generator[float, bool, T]
"""Yields what its result costs at the least before each step that takes long, and takes it when it is sent True."""


class Seeking(Generic[T]):
    """A search under way.

    Attributes:
        least: what is sought costs no less; infinite where there is none.
        found: what was sought, once the search is no longer open.
    """

    def __init__(self, steps: Steps[T | None], cost: Callable[[T], float]) -> None:
        """
        Args:
            cost: of the result.
        """
        self.least = 0.0
        self.found: T | None = None
        self.is_open = True
        self._steps, self._cost = steps, cost
        self._send(None)

    def go_on(self, far: bool = True) -> None:
        """Go on to the next step that takes long, and with ``far`` through the one that comes now."""
        if self.is_open:
            self._send(far)

    def _send(self, far: bool | None) -> None:
        try:
            self.least = self._steps.send(far)  # type: ignore[arg-type]
        except StopIteration as end:
            self.is_open, self.found = False, end.value
            self.least = math.inf if self.found is None else self._cost(self.found)
