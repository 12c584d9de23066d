"""How fast devices are: named profiles for machines that one does not have.

A rate here is *effective*: what a whole UNet step reaches, memory traffic and launches included where a profile gives
no figures of their own. The RTX 2070 is pinned to a measurement, 0.171 s for a guided step of SD1.5 at 512x512; the
other profiles take the makers' figures for dense fp16 matrix work, fp32 arithmetic and bus, times the share of them
that the RTX 2070 reached. They tell a plan's time to a factor of about two; calibration tells it better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..errors import BadInputError
from ..units import GIB

THIS = "this"
"""The name of the rates that were measured on the machine at hand."""


class Work(Protocol):
    """What a stage or a part of it does, as a trace counts it."""

    @property
    def flops(self) -> int: ...
    @property
    def moved_bytes(self) -> int: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def copied_bytes(self) -> int: ...
    @property
    def operators(self) -> int: ...


@dataclass(frozen=True)
class Rates:
    """A device, as a plan's time needs it.

    Attributes:
        name: what ``--gpu`` takes.
        title: for people.
        half_flops, float_flops: effective operations a second in 16 and 32 bits.
        bandwidth: bytes a second of the device's own memory, for operators without matrix work; 0: contained in the
            effective rates.
        copy_bandwidth: bytes a second between host and device memory.
        launch_seconds: that every operator costs; 0: contained in the effective rates.
        packing: bytes of weights a second that a CPU's kernels reorder at every call; 0: nothing is reordered.
        vram_bytes: memory of the card.
        source: where the figures come from.
    """

    name: str
    title: str
    half_flops: float
    float_flops: float
    bandwidth: float
    copy_bandwidth: float
    launch_seconds: float
    vram_bytes: int
    source: str
    packing: float = 0.0

    def seconds(self, cost: Work, element_size: int) -> float:
        """Time of one run of a stage, or of a part of it, whose arithmetic is in elements of ``element_size`` bytes."""
        flops = self.half_flops if element_size <= 2 else self.float_flops
        traffic = cost.moved_bytes / self.bandwidth if self.bandwidth else 0.0
        traffic += cost.packed_bytes / self.packing if self.packing else 0.0
        return cost.flops / flops + traffic + cost.copied_bytes / self.copy_bandwidth + self.launch(cost)

    def launch(self, cost: Work) -> float:
        return cost.operators * self.launch_seconds


# A guided step of SD1.5 at 512x512 is 1.607e12 operations as a trace counts them, attention's own products included.
_RTX2070_FLOPS = 1.607e12 / 0.171
_MATRIX_SHARE, _FLOAT_SHARE, _BUS_SHARE = _RTX2070_FLOPS / 59.7e12, 0.6, 0.75


def _card(name: str, title: str, matrix: float, fp32: float, bus: float, vram: float, source: str) -> Rates:
    """A profile from makers' figures: TFLOP/s, GB/s of the bus in one direction, GiB. Without matrix units: 0."""
    single = fp32 * _FLOAT_SHARE * 1e12
    half = matrix * _MATRIX_SHARE * 1e12 if matrix else single
    return Rates(name, title, half, single, 0.0, bus * _BUS_SHARE * 1e9, 0.0, int(vram * GIB), source)


_SPECIFICATION = "maker's specification times the share measured on the RTX 2070"
PROFILES = {
    card.name: card
    for card in (
        _card("gtx1650", "GTX 1650", 0.0, 2.98, 15.75, 4, f"{_SPECIFICATION}; no matrix units, fp16 computes in fp32"),
        Rates(
            name="rtx2070",
            title="RTX 2070",
            half_flops=_RTX2070_FLOPS,
            float_flops=4.5e12,
            bandwidth=0.0,
            copy_bandwidth=12.0e9,
            launch_seconds=0.0,
            vram_bytes=8 * GIB,
            source="measured: 0.171 s a guided step of SD1.5 at 512x512 in fp16, copies at 12 GB/s",
        ),
        _card("rtx3050-laptop", "RTX 3050 laptop", 43.9, 5.5, 15.75, 4, _SPECIFICATION),
        _card("rtx3060", "RTX 3060", 51.2, 12.7, 31.5, 12, _SPECIFICATION),
        _card("rtx4060", "RTX 4060", 60.4, 15.1, 15.75, 8, _SPECIFICATION),
        _card("t4", "Tesla T4", 65.1, 8.1, 15.75, 16, _SPECIFICATION),
        _card("a10g", "A10G", 70.0, 31.5, 31.5, 24, _SPECIFICATION),
        _card("h200", "H200", 989.0, 67.0, 63.0, 141, _SPECIFICATION),
    )
}


def profile(name: str) -> Rates:
    """The named profile, however its name is written ("RTX 2070", "rtx2070").

    Raises:
        BadInputError: no such profile; names those there are.
    """
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    for known, rates in PROFILES.items():
        if plain.removeprefix("nvidia").removeprefix("geforce") == known.replace("-", ""):
            return rates
    raise BadInputError(f"no profile for the GPU {name!r}: choose one of {', '.join(PROFILES)}")
