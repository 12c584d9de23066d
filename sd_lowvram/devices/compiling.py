"""Gain and duration of torch.compile on a device, as measured here or as published."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from ..cache import remember
from .performance import THIS, Rates
from .this_machine import place_of_measurement, stored_measurement


@dataclass(frozen=True)
class Compiling:
    """Blocks compiled by kinds, maps channels last.

    Attributes:
        gain: how many times as fast as the model as it is.
        first_seconds: until a kind of block is compiled for the first time.
        again_seconds: until it is ready in a later process, which finds its files.
    """

    gain: float
    first_seconds: float
    again_seconds: float

    def warm_up(self, kinds: int, again: bool) -> float:
        """Seconds that a first run takes longer."""
        return kinds * (self.again_seconds if again else self.first_seconds)


_PUBLISHED = {"h100": Compiling(66.0 / 54.5, first_seconds=4.0, again_seconds=1.0)}
"""Figures from stable-fast's table: SD1.5 at 512x512 in fp16, 54.5 steps a second without torch.compile, 66.0 with it.
The table has no warm-up, so the seconds are assumptions."""


def compiling_of(rates: Rates, device: torch.device) -> Compiling | None:
    """Gain of compiling on the device of ``rates``; None if unknown, and plans then compile only on request.

    ``doctor --calibrate`` measures it for this machine.
    """
    if rates.name != THIS:
        return _PUBLISHED.get(rates.name)
    measurement = stored_measurement("compile", device) or {}
    return (
        Compiling(**measurement)
        if measurement.keys() == {field.name for field in dataclasses.fields(Compiling)}
        else None
    )


def remember_compiling(device: torch.device, measured: Compiling) -> None:
    remember(place_of_measurement("compile", device), measured)
