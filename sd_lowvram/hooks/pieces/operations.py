"""Operations on a strip of a map.

A residual block of any model is two operations, its halves. Every other step of an autoencoder is one operation. The
map may be stored between any two operations; otherwise the strip carries the rows that are still needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...models.anatomy import Residual
from ...models.autoencoder import Conv, Downsample, Step, Upsample
from .maps import AnyMap, Overwritten, Strip, load
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
        data = strip.x if statistics is None else statistics.activate(strip.x)
        return strip.shrunk(strip.convolve(step.conv, data))

    return Operation(run, step.norm)


def first_half(block: Residual, shift: Tensor | None = None, *facts: Tensor) -> Operation:
    """Operation conv1(act(norm1(x))) + shift of a residual block, which also crops x.

    Args:
        block: the block.
        shift: (N, C, 1, 1) that time adds; None: nothing.
        facts: further arguments of the convolution.
    """

    def run(strip: Strip, statistics: Statistics | None) -> Strip:
        assert statistics is not None
        hidden = strip.convolve(block.conv1, statistics.activate(strip.x, block.act), *facts)
        hidden = hidden if shift is None else hidden + shift.to(hidden.dtype)
        return strip.shrunk(strip.inner(strip.x), hidden)

    return Operation(run, block.norm1)


def second_half(block: Residual, *facts: Tensor) -> Operation:
    """Operation (shortcut(x) + conv2(act(norm2(hidden)))) / scale of a residual block.

    Args:
        block: the block.
        facts: further arguments of the convolution.
    """

    def run(strip: Strip, statistics: Statistics | None) -> Strip:
        assert statistics is not None and strip.hidden is not None
        hidden, strip.hidden = strip.hidden, None
        result = strip.convolve(block.conv2, statistics.activate(hidden, block.act), *facts)
        del hidden
        return strip.shrunk(_join(block, strip.inner(strip.x), result))

    return Operation(run, block.norm2, of_hidden=True)


def _join(block: Residual, x: Tensor, result: Tensor) -> Tensor:
    shortcut = x if block.shortcut is None else block.shortcut(x)
    wide = torch.result_type(result, shortcut) != result.dtype
    result = result + shortcut if wide else result.add_(shortcut)
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


def run_strip(
    operations: Sequence[Operation],
    statistics: Sequence[Statistics | None],
    maps: tuple[AnyMap | Overwritten, AnyMap | Overwritten | None],
    rows: tuple[int, int],
    wraps: bool,
    of_hidden: bool = False,
    wide: bool = False,
) -> Tensor:
    """Return ``rows`` (start, stop) of the result of ``operations``.

    Args:
        operations: in order.
        statistics: of each operation's normalisation.
        maps: the input, and the map inside a residual block whose first half has run; None if it has not.
        rows: start and stop.
        wraps: as in :func:`.maps.load`.
        of_hidden: True if the last operation is the first half of a residual block: return the rows inside the block.
        wide: convert the rows to float32 first.
    """
    start, stop = rows
    first, last = needed_rows(start, stop, operations)
    x, hidden = maps
    height = x.shape[2]
    if not wraps:
        first, last = max(0, first), min(height, last)
    inside = load(hidden, first, last, wraps) if hidden is not None else None
    strip = Strip(load(x, first, last, wraps), first, height, wraps, inside)
    del inside
    if wide:
        strip.widen()
    for operation, statistic in zip(operations, statistics, strict=True):
        strip = operation.run(strip, statistic)
    result = strip.hidden if of_hidden and strip.hidden is not None else strip.x
    return result[:, :, start - strip.start : stop - strip.start]
