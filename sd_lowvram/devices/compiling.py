"""Gain and duration of torch.compile on a device, as measured on it or on a GPU of its generation."""

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


_HOPPER = Compiling(gain=0.846, first_seconds=2.76, again_seconds=0.186)
_MEASURED = {"h100": _HOPPER, "h200": _HOPPER}
"""Figures of the H100 that was measured, for the named GPUs of its generation."""


def compiling_of(rates: Rates, device: torch.device) -> Compiling | None:
    """Gain of compiling on the device of ``rates``; None if it was not measured: plans compile only on request then.

    ``doctor --calibrate`` measures it for this machine.
    """
    if rates.name != THIS:
        return _MEASURED.get(rates.name)
    measurement = stored_measurement("compile", device) or {}
    return (
        Compiling(**measurement)
        if measurement.keys() == {field.name for field in dataclasses.fields(Compiling)}
        else None
    )


def remember_compiling(device: torch.device, measured: Compiling) -> None:
    remember(place_of_measurement("compile", device), measured)
