"""How fast devices are: named profiles for machines that one does not have.

A GPU works off what the program has launched. Small pictures take the time of the launches, large ones that of the
arithmetic, and between the two each waits for the other at times: the cube root of the sum of both cubes is what the
published times of an RTX 2070 follow (`benchmarks/published.md`: 169 sizes). Its rates are fitted to the 13 squares
among them, with a guided step of SD1.5 at 512x512 pinned to 0.171 s. The other profiles take the makers' figures for
dense fp16 matrix work, fp32 arithmetic and bus, times the share of them that the RTX 2070 reached, and launches as
fast as those of the published H100. They tell a plan's time to a factor of about two; calibration tells it better.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        launch_seconds: that every operator costs the program that asks for it.
        vram_bytes: memory of the card.
        source: where the figures come from.
        packing: bytes of weights a second that a CPU's kernels reorder at every call; 0: nothing is reordered.
        queued: whether the device works off a queue while the program fills it, as GPUs do.
        reading: bytes a second from a mapped file that the page cache has into memory for copies. What it has not comes
            at the disk's rate: about 3e9 from NVMe, 0.5e9 from SATA, 0.15e9 from a disk that turns.
        reordering: bytes a second of the same, for kernels of convolutions that are to lie channels last.
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
    queued: bool = False
    reading: float = 8.0e9
    reordering: float = 4.0e9

    def seconds(self, cost: Work, element_size: int) -> float:
        """Time of one run of a stage whose arithmetic is in elements of ``element_size`` bytes."""
        return self._together(self._working(cost, element_size), self._launching(cost)) + self._copying(cost)

    def shares(self, parts: Sequence[Work], element_size: int) -> list[float]:
        """Time of each part of a run; together they take what the whole takes."""
        working = [self._working(part, element_size) for part in parts]
        launching = [self._launching(part) for part in parts]
        works, launches = sum(working), sum(launching)
        whole = self._together(works, launches)
        # With w and l the whole's two times, (w^3 + l^3)^(1/3) is w (w/whole)^2 + l (l/whole)^2.
        weighs = ((works / whole) ** 2, (launches / whole) ** 2) if self.queued and whole else (1.0, 1.0)
        both = zip(parts, working, launching, strict=True)
        return [weighs[0] * work + weighs[1] * launch + self._copying(part) for part, work, launch in both]

    def filling(self, size: int, kernels: int) -> float:
        """Bytes a second into the streaming engine's ring of ``size`` bytes of weights that lie in mapped files,
        ``kernels`` bytes of which come channels last."""
        return size / ((size - kernels) / self.reading + kernels / self.reordering) if size else self.reading

    def _together(self, working: float, launching: float) -> float:
        return (working**3 + launching**3) ** (1 / 3) if self.queued else working + launching

    def _working(self, cost: Work, element_size: int) -> float:
        flops = self.half_flops if element_size <= 2 else self.float_flops
        traffic = cost.moved_bytes / self.bandwidth if self.bandwidth else 0.0
        traffic += cost.packed_bytes / self.packing if self.packing else 0.0
        return cost.flops / flops + traffic

    def _launching(self, cost: Work) -> float:
        return cost.operators * self.launch_seconds

    def _copying(self, cost: Work) -> float:
        return cost.copied_bytes / self.copy_bandwidth


# A guided step of SD1.5 at 512x512 is 1.607e12 operations and 734 launches as a trace counts them.
_STEP_FLOPS, _STEP_LAUNCHES = 1.607e12, 734
# The two that make it 0.171 s and, one fixed part for a picture besides, meet the published squares best.
_RTX2070_FLOPS, _RTX2070_LAUNCH = 13.0e12, 199.0e-6
# stable-fast's table for an H100: 104.6 steps a second replayed from a graph, 54.5 launched one by one.
_H100_FLOPS = _STEP_FLOPS * 104.6
_H100_LAUNCH = (54.5**-3 - 104.6**-3) ** (1 / 3) / _STEP_LAUNCHES
_MATRIX_SHARE, _FLOAT_SHARE, _BUS_SHARE = _RTX2070_FLOPS / 59.7e12, 0.6, 0.75


def _card(name: str, title: str, matrix: float, fp32: float, bus: float, vram: float, source: str) -> Rates:
    """A profile from makers' figures: TFLOP/s, GB/s of the bus in one direction, GiB. Without matrix units: 0."""
    single = fp32 * _FLOAT_SHARE * 1e12
    half = matrix * _MATRIX_SHARE * 1e12 if matrix else single
    copies, memory = bus * _BUS_SHARE * 1e9, int(vram * GIB)
    return Rates(name, title, half, single, 0.0, copies, _H100_LAUNCH, memory, source, queued=True)


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
            launch_seconds=_RTX2070_LAUNCH,
            vram_bytes=8 * GIB,
            source="measured: 0.171 s a guided step of SD1.5 at 512x512 in fp16, copies at 12 GB/s",
            queued=True,
        ),
        _card("rtx3050-laptop", "RTX 3050 laptop", 43.9, 5.5, 15.75, 4, _SPECIFICATION),
        _card("rtx3060", "RTX 3060", 51.2, 12.7, 31.5, 12, _SPECIFICATION),
        _card("rtx4060", "RTX 4060", 60.4, 15.1, 15.75, 8, _SPECIFICATION),
        _card("rtx4090", "RTX 4090", 330.3, 82.6, 31.5, 24, _SPECIFICATION),
        _card("t4", "Tesla T4", 65.1, 8.1, 15.75, 16, _SPECIFICATION),
        _card("a10g", "A10G", 70.0, 31.5, 31.5, 24, _SPECIFICATION),
        Rates(
            name="h100",
            title="H100",
            half_flops=_H100_FLOPS,
            float_flops=67.0e12 * _FLOAT_SHARE,
            bandwidth=0.0,
            copy_bandwidth=63.0e9 * _BUS_SHARE,
            launch_seconds=_H100_LAUNCH,
            vram_bytes=80 * GIB,
            source="published: SD1.5 at 512x512 in fp16, 104.6 guided steps a second from a graph, 54.5 without",
            queued=True,
        ),
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
