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
from ..memory.host_offload import reinterpret


class Map:
    """A map (N, C, H, W) on the device, read and written by rows as a :class:`Parked` one is."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.shape = data.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def convert(self, dtype: torch.dtype) -> None:
        """Convert the values to another type of as many bytes, in the same memory."""
        self.data = reinterpret(self.data, dtype, 2)

    def load(self, rows: slice) -> Tensor:
        """Return rows of the map."""
        return self.data[:, :, rows]

    def store(self, rows: slice, strip: Tensor) -> None:
        """Write ``strip`` to these rows of the map."""
        self.data[:, :, rows].copy_(strip)


class Given(Map):
    """A map that is there already: the input."""


AnyMap = Map | Parked
"""``Parked``: its rows wait in host memory and come to the device a strip at a time."""


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

    def widen(self) -> None:
        """Convert the strip to float32."""
        self.x = self.x.float()
        self.hidden = None if self.hidden is None else self.hidden.float()

    def convolve(self, conv: nn.Module, data: Tensor) -> Tensor:
        """Apply ``conv`` and crop the rows that lack their neighbours.

        Args:
            conv: a 3x3 convolution.
            data: (N, C, rows, W), with this strip's rows.

        Returns:
            (N, C', rows, W), without one row at each cut edge.
        """
        return self.inner(conv(data))

    def shrunk(self, x: Tensor, hidden: Tensor | None = None) -> Strip:
        """Return this strip after a convolution; ``x`` has lost the rows at the cut edges."""
        return Strip(x, self.start + self._cut(self.x.shape[2])[0], self.height, self.wraps, hidden)

    def inner(self, data: Tensor) -> Tensor:
        """The rows of ``data`` that a convolution of this strip keeps."""
        top, bottom = self._cut(data.shape[2])
        return data[:, :, top : data.shape[2] - bottom] if top or bottom else data

    def _cut(self, rows: int) -> tuple[int, int]:
        return int(self.wraps or self.start > 0), int(self.wraps or self.start + rows < self.height)


def spans(height: int, rows: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of strips of about ``rows`` rows, all of nearly the same height.

    Args:
        height: rows of the map.
        rows: rows of a strip, about.

    Yields:
        (start, stop) of each strip, from the top.
    """
    count = -(-height // max(1, min(rows, height)))
    for number in range(count):
        yield height * number // count, height * (number + 1) // count


def load(source: AnyMap, start: int, stop: int, wraps: bool) -> Tensor:
    """Load rows of a map to the device.

    Args:
        source: the map, on the device or parked.
        start, stop: rows, which may lie beyond the edges.
        wraps: True if the map's last row borders on its first: rows beyond an edge are those at the other edge. False:
            they are left out.

    Returns:
        (N, C, rows, W).
    """
    height = source.shape[2]
    if not wraps or (start >= 0 and stop <= height):
        return source.load(slice(max(start, 0), min(stop, height)))
    pieces, row = [], start
    while row < stop:
        first = row % height
        taken = min(height - first, stop - row)
        pieces.append(source.load(slice(first, first + taken)))
        row += taken
    return torch.cat(pieces, dim=2)
