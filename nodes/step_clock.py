"""Times of the steps of a sampling, from the sampler's callback at the end of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class StepClock:
    """Seconds of the steps in which a model ran.

    The first of them waits for the first call of the model: weights are loaded before it. What nodes do at the end of
    a step (previews) is in none.

    Attributes:
        sizes: of the calls of the model in each step, added up.
    """

    def __init__(self, device: torch.device, step_ended: Callable[[], None]) -> None:
        self._device = device
        self._step_ended = step_ended
        self._begun = 0.0
        self._size = 0
        self.seconds: list[float] = []
        self.sizes: list[int] = []

    def record_call(self, size: int) -> None:
        """The model is about to run on so much."""
        if not self._size and not self.seconds:
            self._begun = self._now()
        self._size += size

    def around(self, callback: Callable[..., Any] | None) -> Callable[..., Any]:
        """Callback for the end of a step: the clock, then ``callback``."""

        def end_of_step(*args: Any, **kwargs: Any) -> Any:
            if self._size:
                self.seconds.append(self._now() - self._begun)
                self.sizes.append(self._size)
                self._size = 0
                self._step_ended()
            result = None if callback is None else callback(*args, **kwargs)
            self._begun = self._now()
            return result

        return end_of_step

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()
