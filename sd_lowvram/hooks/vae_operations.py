"""Operations on a strip of a map in an autoencoder: each step is one operation, a residual block two halves.

The map may be stored between any two operations; otherwise the strip carries the rows that are still needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..models.anatomy import Residual
from ..models.autoencoder import Conv, Downsample, Step, Upsample
from .maps import Strip
from .strips import Statistics


def _neighbours(start: int, stop: int) -> tuple[int, int]:
    return start - 1, stop + 1


def _halve_rows(start: int, stop: int) -> tuple[int, int]:
    return (start - 1) // 2, -(-(stop + 1) // 2)


def _double_rows(start: int, stop: int) -> tuple[int, int]:
    return 2 * start, 2 * stop + 1


@dataclass(frozen=True)
class Operation:
    """The work on a strip between two stored maps.

    Attributes:
        run: function that computes it, with the statistics of ``norm``.
        norm: the normalisation with which it starts; with ``of_hidden``, of the strip's hidden rows.
        needs: function from rows (start, stop) of its output to the rows of its input.
        resize: output rows for an input row.
    """

    run: Callable[[Strip, Statistics | None], Strip]
    norm: nn.GroupNorm | None = None
    of_hidden: bool = False
    needs: Callable[[int, int], tuple[int, int]] = _neighbours
    resize: float = 1.0


def _convolution(step: Conv) -> Operation:
    def run(strip: Strip, statistics: Statistics | None) -> Strip:
        data = strip.x if statistics is None else statistics.activated(strip.x)
        return strip.shrunk(strip.convolve(step.conv, data))

    return Operation(run, step.norm)


def first_half(block: Residual) -> Operation:
    """Operation conv1(silu(norm1(x))) of a residual block, which also crops x."""

    def run(strip: Strip, statistics: Statistics | None) -> Strip:
        assert statistics is not None
        hidden = strip.convolve(block.conv1, statistics.activated(strip.x))
        return strip.shrunk(strip.inner(strip.x), hidden)

    return Operation(run, block.norm1)


def second_half(block: Residual) -> Operation:
    """Operation (shortcut(x) + conv2(silu(norm2(hidden)))) / scale of a residual block."""

    def run(strip: Strip, statistics: Statistics | None) -> Strip:
        assert statistics is not None and strip.hidden is not None
        hidden, strip.hidden = strip.hidden, None
        result = strip.convolve(block.conv2, statistics.activated(hidden))
        del hidden
        return strip.shrunk(_join(block, strip.inner(strip.x), result))

    return Operation(run, block.norm2, of_hidden=True)


def _join(block: Residual, x: Tensor, result: Tensor) -> Tensor:
    shortcut = x if block.shortcut is None else block.shortcut(x)
    result = result.add_(shortcut)
    return result if block.scale == 1.0 else result.div_(block.scale)


def _upsampling(step: Upsample) -> Operation:
    def run(strip: Strip, statistics: Statistics | None) -> Strip:
        large = nn.functional.interpolate(strip.x, scale_factor=2.0, mode="nearest")
        doubled = Strip(large, 2 * strip.start, 2 * strip.height, strip.wraps)
        return doubled.shrunk(doubled.convolve(step.conv, large))

    return Operation(run, needs=_halve_rows, resize=2.0)


def _downsampling(step: Downsample) -> Operation:
    def run(strip: Strip, statistics: Statistics | None) -> Strip:
        odd = strip.start % 2
        start = strip.start + odd
        data = strip.x[:, :, odd : odd + strip.height - start]  # beyond the last row there is padding, not the first
        last = start + data.shape[2] >= strip.height
        result = step.conv(nn.functional.pad(data, (0, 1, 0, int(last))))
        return Strip(result, start // 2, strip.height // 2, strip.wraps)

    return Operation(run, needs=_double_rows, resize=0.5)


def operations_of(step: Step) -> list[Operation]:
    """Operations of one step of an autoencoder, in order."""
    if isinstance(step, Residual):
        return [first_half(step), second_half(step)]
    if isinstance(step, Upsample):
        return [_upsampling(step)]
    if isinstance(step, Downsample):
        return [_downsampling(step)]
    assert isinstance(step, Conv)
    return [_convolution(step)]


def needed_rows(start: int, stop: int, operations: Sequence[Operation]) -> tuple[int, int]:
    """The rows of the first operation's input that rows (start, stop) of the last one's output depend on."""
    for operation in reversed(operations):
        start, stop = operation.needs(start, stop)
    return start, stop
