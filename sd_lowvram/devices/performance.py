"""How fast devices are: named profiles for machines that one does not have.

A GPU works off what the program has launched. Small pictures take the time of the launches, large ones that of the
work, and between the two each waits for the other at times: the cube root of the sum of both cubes is what the
published times of an RTX 2070 follow (169 sizes of picture by each of three programs). A matrix product takes the time
of its operations or of its bytes, whichever is longer; all else takes that of its bytes.

Cards are told by their makers' figures: dense fp16 matrix work, fp32 arithmetic, memory, bus. What share of them a
denoiser reaches, and how long a launch takes, is fitted to the 14 speeds of diffusers' page on memory and speed,
seven cards with and without memory-efficient attention; each card's two are within 25 % by what the other six say
(`python -m benchmarks published`, from a clone). The processor beside a card is fitted to the published times of
pictures that were made on an RTX 2070. All that is fitted and nothing measured: calibration tells the time of the
machine at hand better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import BadInputError
from ..units import GIB

AMPERE = 8, 0
"""Compute capability of NVIDIA's first cards that multiply bf16."""

THIS = "this"
"""The name of the rates that were measured on the machine at hand."""


class Work(Protocol):
    """What a part of a stage does, as a trace counts it."""

    @property
    def flops(self) -> int: ...
    @property
    def wide_flops(self) -> int: ...
    @property
    def moved_bytes(self) -> int: ...
    @property
    def product_bytes(self) -> int: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def copied_bytes(self) -> int: ...
    @property
    def operators(self) -> int: ...


class Run(Work, Protocol):
    """What a stage does, and its parts where they are known."""

    @property
    def spans(self) -> Sequence[Work]: ...


@dataclass(frozen=True)
class Rates:
    """A device, as a plan's time needs it.

    Attributes:
        name: what ``--gpu`` takes.
        title: for people.
        half_flops, float_flops: effective operations a second in 16 and 32 bits.
        bandwidth: effective bytes a second of the device's own memory.
        copy_bandwidth: bytes a second between host and device memory.
        launch_seconds: that every operator costs the program that asks for it.
        vram_bytes: memory of the card.
        source: where the figures come from.
        packing: bytes of weights a second that a CPU's kernels reorder at every call; 0: nothing is reordered.
        queued: whether the device works off a queue while the program fills it, as GPUs do.
        reading: bytes a second from a mapped file that the page cache has into memory for copies. What it has not comes
            at the disk's rate: about 3e9 from NVMe, 0.5e9 from SATA, 0.15e9 from a disk that turns.
        reordering: bytes a second of the same, for kernels of convolutions that are to lie channels last.
        processor_flops: effective operations a second, in 32 bits, of the processor beside a GPU of another machine.
        wide_flops: effective operations a second, in 16 bits, of products with matrices of at least 2048x2048, and of
            attention with heads of 128; 0: as all others.
        bf16: whether it multiplies bf16; NVIDIA's cards before Ampere do not, and compute it in float32.
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
    processor_flops: float = 0.0
    wide_flops: float = 0.0
    bf16: bool = True

    def seconds(self, cost: Run, element_size: int, launched: int | None = None) -> float:
        """Time of one run of a stage whose arithmetic is in elements of ``element_size`` bytes.

        Args:
            launched: launches of the program; None: one for each operator.
        """
        working = sum(self._working(part, element_size) for part in cost.spans or (cost,))
        launching = (cost.operators if launched is None else launched) * self.launch_seconds
        return self._together(working, launching) + self._copying(cost)

    def shares(self, parts: Sequence[Work], element_size: int, launched: Sequence[float] | None = None) -> list[float]:
        """Time of each part of a run; together they take what the whole takes.

        Args:
            launched: launches of the program in each part; None: one for each operator.
        """
        working = [self._working(part, element_size) for part in parts]
        launching = [number * self.launch_seconds for number in launched or [part.operators for part in parts]]
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
        arithmetic = cost.flops / (self.half_flops if element_size <= 2 else self.float_flops)
        if element_size <= 2 and self.wide_flops:
            arithmetic += cost.wide_flops * (1 / self.wide_flops - 1 / self.half_flops)
        if self.queued:
            products = max(arithmetic, cost.product_bytes / self.bandwidth)
            return products + (cost.moved_bytes - cost.product_bytes) / self.bandwidth
        packing = cost.packed_bytes / self.packing if self.packing else 0.0
        return arithmetic + cost.moved_bytes / self.bandwidth + packing

    def _copying(self, cost: Work) -> float:
        return cost.copied_bytes / self.copy_bandwidth


MATRIX_SHARE, MEMORY_SHARE, LAUNCH_SECONDS = 0.376, 0.485, 44e-6
"""Of makers' figures what a denoiser reaches, and seconds of a launch: fitted to the page of diffusers."""

_FLOAT_SHARE, _BUS_SHARE = 0.6, 0.75
PROCESSOR_FLOPS = 4.06e11
"""Of an i7-9700K that decodes in fp32: fitted to the published times of pictures."""

_H100_LAUNCH = 24e-6
"""By stable-fast's table: 54.5 steps a second of SD1.5 launched one by one, 104.6 replayed from a graph."""


def _card(
    name: str,
    title: str,
    matrix: float,
    fp32: float,
    memory: float,
    bus: float,
    vram: float,
    more: str = "",
    launch_seconds: float = LAUNCH_SECONDS,
    bf16: bool = True,
) -> Rates:
    """A profile from makers' figures: TFLOP/s, GB/s of the memory and of the bus in one direction, GiB.

    Args:
        matrix: dense, in fp16; of makers that tell two, with sums in fp16 too. 0: the card has no matrix units.
        more: where its figures come from besides.
    """
    single = fp32 * _FLOAT_SHARE * 1e12
    return Rates(
        name=name,
        title=title,
        half_flops=matrix * MATRIX_SHARE * 1e12 if matrix else single,
        float_flops=single,
        bandwidth=memory * MEMORY_SHARE * 1e9,
        copy_bandwidth=bus * _BUS_SHARE * 1e9,
        launch_seconds=launch_seconds,
        vram_bytes=int(vram * GIB),
        source="; ".join(one for one in (_SPECIFICATION, more) if one),
        queued=True,
        processor_flops=PROCESSOR_FLOPS,
        bf16=bf16,
    )


_SPECIFICATION = "maker's figures times shares fitted to published speeds, not measured"
_T4 = "matrix work as the TITAN RTX has it for each watt, as 70 W do not carry the figure of its sheet, 65"
PROFILES = {
    card.name: card
    for card in (
        _card("gtx1650", "GTX 1650", 0, 2.98, 128, 15.75, 4, "no matrix units, fp16 computes in fp32", bf16=False),
        _card("rtx2060", "RTX 2060", 51.6, 6.5, 336, 15.75, 6, bf16=False),
        _card("rtx2070", "RTX 2070", 59.7, 7.5, 448, 15.75, 8, bf16=False),
        _card("rtx3050-laptop", "RTX 3050 laptop", 21.9, 5.5, 192, 15.75, 4),
        _card("rtx3060", "RTX 3060", 51.2, 12.7, 360, 31.5, 12),
        _card("rtx4060", "RTX 4060", 60.4, 15.1, 272, 15.75, 8),
        _card("rtx4090", "RTX 4090", 330.3, 82.6, 1008, 31.5, 24),
        _card("t4", "Tesla T4", 32.6, 4.1, 320, 15.75, 16, _T4, bf16=False),
        _card("a10g", "A10G", 125.0, 31.5, 600, 31.5, 24, "matrix work as of the A10, the same chip"),
        _card("a6000", "RTX A6000", 154.8, 38.7, 768, 31.5, 48),
        _card("titan-rtx", "TITAN RTX", 130.5, 16.3, 672, 15.75, 24, bf16=False),
        _card("a100-40gb", "A100 40GB", 312.0, 19.5, 1555, 31.5, 40),
        _card("a100-80gb", "A100 80GB", 312.0, 19.5, 2039, 31.5, 80),
        _card(
            "h100", "H100", 989.0, 67.0, 3350, 63.0, 80, "launches by 54.5 published steps a second of SD1.5",
            launch_seconds=_H100_LAUNCH,
        ),
        _card("h200", "H200", 989.0, 67.0, 4800, 63.0, 141, "launches as of the H100", launch_seconds=_H100_LAUNCH),
    )
}  # fmt: skip


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
