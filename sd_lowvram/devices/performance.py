"""Speeds of devices: named profiles for machines that one does not have.

A GPU executes a queue of launches. The time of small pictures is that of the launches, the time of large ones that of
the work. In between each waits for the other at times: the cube root of the sum of both cubes fits the published times
of an RTX 2070 (169 sizes of picture by each of three programs). A matrix product takes the time of its operations or of
its bytes, whichever is longer; every other operator takes the time of its bytes.

Profiles hold the makers' figures: dense fp16 matrix work, fp32 arithmetic, memory, bus. The share of them that a
denoiser reaches, and the time of a launch, are fitted to the 14 speeds of diffusers' page on memory and speed (seven
GPUs with and without memory-efficient attention). A fit to six of the GPUs predicts the seventh within 25 %
(`python -m benchmarks published`, from a clone). The CPU next to a GPU is fitted to published times of pictures made on
an RTX 2070. All of this is fitted, not measured: calibration predicts the times of this machine better.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..errors import BadInputError
from ..units import GIB, MIB, format_size, parse_size

AMPERE = 8, 0
"""Compute capability of NVIDIA's first cards that multiply bf16."""

THIS = "this"
"""The name of the rates that were measured on the machine at hand."""


class Work(Protocol):
    """Work of a part of a stage, as counted by a trace."""

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
    def group_elements(self) -> int: ...
    @property
    def copied_bytes(self) -> int: ...
    @property
    def operators(self) -> int: ...


class Run(Work, Protocol):
    """Work of a stage, and of its parts if they are known."""

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
        processor_flops: effective operations a second, in 32 bits, of the processor next to a named GPU.
        wide_flops: effective operations a second, in 16 bits, of products with matrices of at least 2048x2048, and of
            attention with heads of 128; 0: as for all other products.
        bf16: whether it multiplies bf16; NVIDIA's cards before Ampere do not, and compute it in float32.
        group_seconds: seconds in which torch's GroupNorm reads an element of one of its groups, beyond the time of its
            bytes: a group has one thread block, however fast the memory is. 0: not measured.
        layer_launches: host time of our engine at each call of a layer whose weights it lends, in launches.
        fetch_launches: its host time at each fetch of a block of weights in a step, in launches.
        strip_launches: host time of an operator in the strips of an exact decode, in launches. No module is called for
            it.
        replay_launches: host time while a recorded pass runs, in launches for each module of the model, which are
            looked through.
        loading_seconds: by which the first runs of a process took longer than later ones: libraries and kernels are
            loaded. 0: not measured, or measured in a process that had them.
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
    group_seconds: float = 0.0
    layer_launches: float = 0.6
    fetch_launches: float = 6.6
    strip_launches: float = 1.0
    replay_launches: float = 0.22
    loading_seconds: float = 0.0

    def seconds(self, cost: Run, element_size: int, launched: float | None = None) -> float:
        """Time of one run of a stage whose arithmetic is in elements of ``element_size`` bytes.

        Args:
            launched: launches of the program; None: one for each operator.
        """
        return self.combine(*self.clocks(cost, element_size, launched))

    def clocks(self, cost: Run, element_size: int, launched: float | None = None) -> tuple[float, float]:
        """Return the seconds of the device in one run of a stage, and those of the program, which launches operators.

        Args:
            launched: as for :meth:`seconds`.
        """
        working = sum(self._working(part, element_size) for part in cost.spans or (cost,)) + self._copying(cost)
        return working, (cost.operators if launched is None else launched) * self.launch_seconds

    def shares(self, parts: Sequence[Work], element_size: int, launched: Sequence[float] | None = None) -> list[float]:
        """Time of each part of a run; together they take what the whole takes.

        Args:
            launched: launches of the program in each part; None: one for each operator.
        """
        working = [self._working(part, element_size) + self._copying(part) for part in parts]
        launching = [number * self.launch_seconds for number in launched or [part.operators for part in parts]]
        works, launches = sum(working), sum(launching)
        whole = self.combine(works, launches)
        # With w and l the whole's two times, (w^3 + l^3)^(1/3) is w (w/whole)^2 + l (l/whole)^2.
        weighs = ((works / whole) ** 2, (launches / whole) ** 2) if self.queued and whole else (1.0, 1.0)
        both = zip(working, launching, strict=True)
        return [weighs[0] * work + weighs[1] * launch for work, launch in both]

    def filling(self, size: int, kernels: int) -> float:
        """Bytes a second into the streaming engine's ring of ``size`` bytes of weights that lie in mapped files,
        ``kernels`` bytes of which come channels last."""
        return size / ((size - kernels) / self.reading + kernels / self.reordering) if size else self.reading

    def combine(self, working: float, launching: float) -> float:
        """Return the time of a run from those of its work and of its launches."""
        return (working**3 + launching**3) ** (1 / 3) if self.queued else working + launching

    def _working(self, cost: Work, element_size: int) -> float:
        arithmetic = cost.flops / (self.half_flops if element_size <= 2 else self.float_flops)
        if element_size <= 2 and self.wide_flops:
            arithmetic += cost.wide_flops * (1 / self.wide_flops - 1 / self.half_flops)
        if self.queued:
            products = max(arithmetic, cost.product_bytes / self.bandwidth)
            groups = cost.group_elements * self.group_seconds
            return products + (cost.moved_bytes - cost.product_bytes) / self.bandwidth + groups
        packing = cost.packed_bytes / self.packing if self.packing else 0.0
        return arithmetic + cost.moved_bytes / self.bandwidth + packing

    def _copying(self, cost: Work) -> float:
        return cost.copied_bytes / self.copy_bandwidth


MATRIX_SHARE, MEMORY_SHARE, LAUNCH_SECONDS = 0.376, 0.485, 44e-6
"""Shares of makers' figures that a denoiser reaches, and seconds of a launch: fitted to diffusers' page."""

_FLOAT_SHARE, _BUS_SHARE = 0.6, 0.75
PROCESSOR_FLOPS = 4.06e11
"""Operations a second of an i7-9700K that decodes in fp32: fitted to the published times of pictures."""

_H100_LAUNCH, _H100_WIDE = 38.5e-6, 740e12
"""Seconds of a launch, and operations a second of wide products, on the H100 that was measured: fitted to its steps of
SD1.5 at 512x512, 28.6 ms, and of FLUX.1-dev at 1024x1024, 180 to 188 ms, with all weights on the GPU."""

_H100_GROUP = (1.02e-3 - 128 * MIB / 2728e9) / 2**20
"""Seconds an element of a group: torch's GroupNorm of 128 channels, 512x512, 32 groups in fp16 took 1.02 ms there."""
LAYER_ON_CPU, FETCH_ON_CPU = 0.44, 0.5
"""``layer_launches`` and ``fetch_launches`` of a CPU: of a narrow UNet. The defaults are fitted to four streamed steps
of SD1.5 on an H100, with the ratio of both from a simulated GPU (``benchmarks/host_time.md``), where a step without
fetches was run too. The default of ``replay_launches`` is fitted to 6.2 ms of a step at 512x512 there."""

_H100_STRIP = 0.74
"""Launches of an operator in strips, between those of two decodes: SDXL's at 1024x1024 in fp16 (23,655 operators in 826
ms: 0.89) and SD1.5's at 2048x2048 (130,347 in 3,197 ms: 0.62). Calibration there measured 0.71 for an operator."""

_HOPPER = {
    "group_norm, denoise, contiguous_format": 0.547,
    "group_norm, decode, contiguous_format": 6.72,
    "group_norm, denoise, channels_last": 0.661,
    "group_norm, decode, channels_last": 3.34,
    "geglu": 1.33,
    "recorded passes": 1.43,
}
MEASURED_GAINS = {"h100": _HOPPER, "h200": _HOPPER}
"""Speed-up of our kernels and of recorded passes on the H100 that was measured, for the named GPUs of its generation.

No other generation was measured: on a named GPU of another one nothing is known to be faster."""


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
        matrix: dense, in fp16; of two stated rates the one with sums in fp16. 0: the GPU has no matrix units.
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
        source="; ".join(part for part in (_SPECIFICATION, more) if part),
        queued=True,
        processor_flops=PROCESSOR_FLOPS,
        bf16=bf16,
    )


def _hopper(name: str, title: str, memory: float, vram: float, source: str) -> Rates:
    """A profile from what was measured on an H100, whose memory has 3350 GB/s."""
    return replace(
        _card(name, title, 989.0, 67.0, memory, 63.0, vram, launch_seconds=_H100_LAUNCH),
        half_flops=268.2e12,
        float_flops=73.16e12,
        bandwidth=2728e9 * memory / 3350,
        copy_bandwidth=55.19e9,
        wide_flops=_H100_WIDE,
        group_seconds=_H100_GROUP,
        strip_launches=_H100_STRIP,
        source=source,
    )


_SPECIFICATION = "maker's figures times shares fitted to published speeds, not measured"
_PLAIN = "no matrix units, fp16 computes in fp32"
_AMD = "shares are those of NVIDIA's cards, and copies as from page-locked memory, which ROCm does not use"
_RDNA2 = f"packed fp16 in place of matrix units; {_AMD}"
_T4 = "matrix work as the TITAN RTX has it for each watt, as 70 W do not carry the figure of its sheet, 65"
PROFILES = {
    card.name: card
    for card in (
        _card("gtx1060", "GTX 1060 6GB", 0, 4.4, 192, 15.75, 6, _PLAIN, bf16=False),
        _card("gtx1070", "GTX 1070", 0, 6.5, 256, 15.75, 8, _PLAIN, bf16=False),
        _card("gtx1080", "GTX 1080", 0, 8.9, 320, 15.75, 8, _PLAIN, bf16=False),
        _card("gtx1080-ti", "GTX 1080 Ti", 0, 11.3, 484, 15.75, 11, _PLAIN, bf16=False),
        _card("gtx1650", "GTX 1650", 0, 2.98, 128, 15.75, 4, _PLAIN, bf16=False),
        _card("rtx2060", "RTX 2060", 51.6, 6.5, 336, 15.75, 6, bf16=False),
        _card("rtx2070", "RTX 2070", 59.7, 7.5, 448, 15.75, 8, bf16=False),
        _card("rtx2080", "RTX 2080", 80.5, 10.1, 448, 15.75, 8, bf16=False),
        _card("rtx2080-ti", "RTX 2080 Ti", 107.6, 13.4, 616, 15.75, 11, bf16=False),
        _card("rtx3050-laptop", "RTX 3050 laptop", 21.9, 5.5, 192, 15.75, 4),
        _card("rtx3060", "RTX 3060", 51.2, 12.7, 360, 31.5, 12),
        _card("rtx3060-ti", "RTX 3060 Ti", 64.8, 16.2, 448, 31.5, 8),
        _card("rtx3070", "RTX 3070", 81.3, 20.3, 448, 31.5, 8),
        _card("rtx3070-ti", "RTX 3070 Ti", 87.0, 21.7, 608, 31.5, 8),
        _card("rtx3080", "RTX 3080 10GB", 119.0, 29.8, 760, 31.5, 10),
        _card("rtx3080-ti", "RTX 3080 Ti", 136.4, 34.1, 912, 31.5, 12),
        _card("rtx3090", "RTX 3090", 142.0, 35.6, 936, 31.5, 24),
        _card("rtx4060", "RTX 4060", 60.4, 15.1, 272, 15.75, 8),
        _card("rtx4060-ti", "RTX 4060 Ti", 88.3, 22.1, 288, 15.75, 8),
        _card("rtx4060-ti-16gb", "RTX 4060 Ti 16GB", 88.3, 22.1, 288, 15.75, 16),
        _card("rtx4070", "RTX 4070", 116.6, 29.1, 504, 31.5, 12),
        _card("rtx4070-super", "RTX 4070 Super", 141.9, 35.5, 504, 31.5, 12),
        _card("rtx4070-ti", "RTX 4070 Ti", 160.4, 40.1, 504, 31.5, 12),
        _card("rtx4070-ti-super", "RTX 4070 Ti Super", 176.4, 44.1, 672, 31.5, 16),
        _card("rtx4080", "RTX 4080", 194.9, 48.7, 717, 31.5, 16),
        _card("rtx4080-super", "RTX 4080 Super", 208.9, 52.2, 736, 31.5, 16),
        _card("rtx4090", "RTX 4090", 330.3, 82.6, 1008, 31.5, 24),
        _card("rtx5050", "RTX 5050", 52.6, 13.2, 320, 31.5, 8),
        _card("rtx5060", "RTX 5060", 76.8, 19.2, 448, 31.5, 8),
        _card("rtx5060-ti", "RTX 5060 Ti", 94.8, 23.7, 448, 31.5, 8),
        _card("rtx5060-ti-16gb", "RTX 5060 Ti 16GB", 94.8, 23.7, 448, 31.5, 16),
        _card("rtx5070", "RTX 5070", 123.5, 30.9, 672, 63.0, 12),
        _card("rtx5070-ti", "RTX 5070 Ti", 175.8, 43.9, 896, 63.0, 16),
        _card("rtx5080", "RTX 5080", 225.1, 56.3, 960, 63.0, 16),
        _card("rtx5090", "RTX 5090", 419.0, 104.8, 1792, 63.0, 32),
        _card("rx6600", "RX 6600", 17.9, 8.9, 224, 15.75, 8, _RDNA2, bf16=False),
        _card("rx6600-xt", "RX 6600 XT", 21.2, 10.6, 256, 15.75, 8, _RDNA2, bf16=False),
        _card("rx6700-xt", "RX 6700 XT", 26.4, 13.2, 384, 31.5, 12, _RDNA2, bf16=False),
        _card("rx6800", "RX 6800", 32.3, 16.2, 512, 31.5, 16, _RDNA2, bf16=False),
        _card("rx6800-xt", "RX 6800 XT", 41.5, 20.7, 512, 31.5, 16, _RDNA2, bf16=False),
        _card("rx6900-xt", "RX 6900 XT", 46.1, 23.0, 512, 31.5, 16, _RDNA2, bf16=False),
        _card("rx7600", "RX 7600", 43.5, 21.8, 288, 15.75, 8, _AMD),
        _card("rx7600-xt", "RX 7600 XT", 45.1, 22.6, 288, 15.75, 16, _AMD),
        _card("rx7700-xt", "RX 7700 XT", 70.3, 35.2, 432, 31.5, 12, _AMD),
        _card("rx7800-xt", "RX 7800 XT", 74.7, 37.3, 624, 31.5, 16, _AMD),
        _card("rx7900-gre", "RX 7900 GRE", 92.0, 46.0, 576, 31.5, 16, _AMD),
        _card("rx7900-xt", "RX 7900 XT", 103.2, 51.6, 800, 31.5, 20, _AMD),
        _card("rx7900-xtx", "RX 7900 XTX", 122.8, 61.4, 960, 31.5, 24, _AMD),
        _card("t4", "Tesla T4", 32.6, 4.1, 320, 15.75, 16, _T4, bf16=False),
        _card("a10g", "A10G", 125.0, 31.5, 600, 31.5, 24, "matrix work as of the A10, the same chip"),
        _card("a6000", "RTX A6000", 154.8, 38.7, 768, 31.5, 48),
        _card("titan-rtx", "TITAN RTX", 130.5, 16.3, 672, 15.75, 24, bf16=False),
        _card("a100-40gb", "A100 40GB", 312.0, 19.5, 1555, 31.5, 40),
        _card("a100-80gb", "A100 80GB", 312.0, 19.5, 2039, 31.5, 80),
        _hopper("h100", "H100", 3350, 80, "measured on an H100"),
        _hopper("h200", "H200", 4800, 141, "as measured on an H100, its memory's bandwidth by the makers' figures"),
    )
}  # fmt: skip


def profile(name: str) -> Rates:
    """Return the named profile, however its name is written ("RTX 2070", "rtx2070"), or one from a maker's figures.

    Raises:
        BadInputError: no such profile, with the names nearest to it; figures that cannot be read.
    """
    if "," in name:
        return _stated_card(name)
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    for maker in ("nvidia", "geforce", "amd", "radeon"):
        plain = plain.removeprefix(maker)
    names = {profile_name.replace("-", ""): profile_name for profile_name in PROFILES}
    if plain in names:
        return PROFILES[names[plain]]
    near = [names[match] for match in difflib.get_close_matches(plain, names, n=5)] or PROFILES
    raise BadInputError(
        f"--gpu {name[:60]!r} is unknown: give its maker's figures, --gpu {_EXAMPLE}, or choose one of "
        f"{', '.join(near)}"
    )


_EXAMPLE = "8GB,20TFLOPS,448GB/s"
_STATED_BUS = 15.75
_FIGURE = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(?:(tflops?|tflop/s)|(gb|tb)/s)\s*", re.IGNORECASE)


def _stated_card(text: str) -> Rates:
    """Return the profile for a maker's figures as they are typed: memory, fp32 arithmetic and bandwidth, in any order.

    A second, larger figure of arithmetic is that of dense fp16 matrix work; without one fp16 computes at fp32's rate.
    """
    sizes: list[int] = []
    rates: list[float] = []
    memory: list[float] = []
    for part in text.split(","):
        if match := _FIGURE.fullmatch(part):
            number, _, per_second = match.groups()
            scale = 1000 if per_second and per_second.lower() == "tb" else 1
            (memory if per_second else rates).append(float(number) * scale)
        else:
            sizes.append(parse_size(part, "--gpu"))
    rates.sort()
    if (len(sizes), len(memory)) != (1, 1) or len(rates) not in (1, 2) or not rates[0] > 0 < memory[0]:
        raise BadInputError(
            f"--gpu {text[:60]!r} must state memory, arithmetic and bandwidth of a GPU, each more than zero: write "
            f'"{_EXAMPLE}", or "8GB,20TFLOPS,81TFLOPS,448GB/s" with that of fp16 matrix work'
        )
    said = f"{format_size(sizes[0])}, {' and '.join(f'{rate:g}' for rate in rates)} TFLOPS, {memory[0]:g} GB/s"
    more = f"copies over a bus of {_STATED_BUS:g} GB/s" + ("" if rates[1:] else "; fp16 at the rate of fp32")
    matrix = rates[-1] if rates[1:] else 0
    return _card(text, f"a card of {said}", matrix, rates[0], memory[0], _STATED_BUS, sizes[0] / GIB, more)
