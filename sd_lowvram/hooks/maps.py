"""Feature maps that are worked on by strips of rows, with the normalisation statistics of the whole map.

A *strip* is some rows of a map, with those that a 3x3 convolution looks at beyond them (its halo). A convolution over a
strip is the layer itself, called on the strip; what it makes of the strip's cut edges is cropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..memory import Parked
from ..weights import room
from .strips import Moments, normalised


class Map:
    """A map (N, C, H, W) on the device."""

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        self.data = room(shape, like)
        self.shape = shape

    def load(self, start: int, stop: int) -> Tensor:
        return self.data[:, :, start:stop]

    def store(self, start: int, strip: Tensor) -> None:
        self.data[:, :, start : start + strip.shape[2]].copy_(strip)


class ParkedMap:
    """A map whose rows wait in host memory and come to the device a strip at a time."""

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        self._parked = Parked.empty(shape, like.dtype, like=like)
        self.shape = shape

    def load(self, start: int, stop: int) -> Tensor:
        return self._parked.load(slice(start, stop))

    def store(self, start: int, strip: Tensor) -> None:
        self._parked.store(slice(start, start + strip.shape[2]), strip)


class Given(Map):
    """A map that is there already: the input."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.shape = tuple(data.shape)


AnyMap = Map | ParkedMap


@dataclass
class Strip:
    """Rows ``start`` to ``start + x.shape[2]`` of a map that has ``height`` of them, before or after some layers.

    ``hidden`` are the same rows inside a residual block. With ``wraps`` the map's last row borders on its first.
    """

    x: Tensor
    start: int
    height: int
    wraps: bool
    hidden: Tensor | None = None

    def convolve(self, conv: nn.Module, data: Tensor) -> Tensor:
        """``conv`` of ``data``, which has this strip's rows, without the rows that lack their neighbours."""
        top, bottom = self._cut(data.shape[2])
        result: Tensor = conv(data)
        return result[:, :, top : result.shape[2] - bottom] if top or bottom else result

    def shrunk(self, x: Tensor, hidden: Tensor | None = None) -> Strip:
        """This strip after a convolution: ``x`` has lost the rows at the cut edges."""
        return Strip(x, self.start + self._cut(self.x.shape[2])[0], self.height, self.wraps, hidden)

    def inner(self, data: Tensor) -> Tensor:
        """The rows of ``data`` that a convolution of this strip keeps."""
        top, bottom = self._cut(data.shape[2])
        return data[:, :, top : data.shape[2] - bottom] if top or bottom else data

    def _cut(self, rows: int) -> tuple[int, int]:
        return int(self.wraps or self.start > 0), int(self.wraps or self.start + rows < self.height)


class Statistics:
    """What a normalisation has to know of the whole map before it can work on a strip of it."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        self.norm = norm
        self._moments = Moments(norm.num_groups)

    def add(self, strip: Tensor) -> None:
        self._moments.add(strip)

    def activated(self, x: Tensor) -> Tensor:
        """SiLU of the normalised rows ``x``; a new tensor."""
        return nn.functional.silu(self.normalised(x), inplace=True)

    def normalised(self, x: Tensor) -> Tensor:
        return normalised(self.norm, x, self._moments)


def spans(height: int, rows: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of strips of about ``rows`` rows, all of nearly the same height."""
    count = -(-height // max(1, min(rows, height)))
    for number in range(count):
        yield height * number // count, height * (number + 1) // count


def load(source: AnyMap, start: int, stop: int, wraps: bool) -> Tensor:
    """Rows of ``source``; with ``wraps`` those beyond an edge are those at the other."""
    height = source.shape[2]
    if not wraps or (start >= 0 and stop <= height):
        return source.load(max(start, 0), min(stop, height))
    pieces, row = [], start
    while row < stop:
        first = row % height
        taken = min(height - first, stop - row)
        pieces.append(source.load(first, first + taken))
        row += taken
    return torch.cat(pieces, dim=2)
