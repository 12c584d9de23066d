"""What torch.compile gains on a device, and how long it takes: as measured here, or as published."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from ..cache import remember
from .performance import THIS, Rates
from .this_machine import measured_here, place_of_measurement


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

    def warm_up(self, kinds: int, known: bool) -> float:
        """Seconds that a first run takes longer."""
        return kinds * (self.again_seconds if known else self.first_seconds)


_PUBLISHED = {"h100": Compiling(66.0 / 54.5, first_seconds=4.0, again_seconds=1.0)}
"""stable-fast's table: SD1.5 at 512x512 in fp16, 54.5 steps a second without torch.compile, 66.0 with it. It tells no
warm-up: the seconds are assumptions."""


def compiling_of(rates: Rates, device: torch.device) -> Compiling | None:
    """What is known of the device that ``rates`` are of; None: nothing, and a plan compiles only where it is told to.

    That of the machine at hand is measured by ``doctor --calibrate``.
    """
    if rates.name != THIS:
        return _PUBLISHED.get(rates.name)
    known = measured_here("compile", device) or {}
    return Compiling(**known) if known.keys() == {field.name for field in dataclasses.fields(Compiling)} else None


def remember_compiling(device: torch.device, measured: Compiling) -> None:
    remember(place_of_measurement("compile", device), measured)
