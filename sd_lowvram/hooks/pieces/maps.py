"""Feature maps that are worked on by strips of rows, with the normalisation statistics of the whole map.

A *strip* is some rows of a map with their *halo*, the neighbouring rows that a 3x3 convolution also reads. The layer
itself is called on the strip. Rows of the result that lack a neighbour, at the strip's cut edges, are cropped.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...memory import Parked
from ...memory.host_offload import reinterpret


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


class Halo:
    """The last rows of a strip, stored until the next strip reads them: their map is overwritten, or not held.

    The layers of a video autoencoder store rows of each chunk of frames, and whole frames, in the same way.
    """

    def __init__(self, dim: int = 2) -> None:
        """
        Args:
            dim: the dimension along which pieces follow each other.
        """
        self._dim = dim
        self._stored: dict[Hashable, Tensor] = {}

    def keep(self, rows: Tensor, key: Hashable = None) -> None:
        """Store a copy of ``rows``, if there are any, in place of those that are stored under ``key``."""
        if rows.shape[self._dim]:
            self._stored[key] = rows.clone()

    def take(self, key: Hashable = None) -> Tensor | None:
        """Remove and return the rows that are stored under ``key``; None if there are none."""
        return self._stored.pop(key, None)

    def last(self, count: int) -> Tensor | None:
        """The last ``count`` of the stored rows; None if no rows are stored."""
        rows = self._stored.get(None)
        return None if rows is None else rows.narrow(self._dim, rows.shape[self._dim] - count, count)

    def join(self, new: Tensor | None, key: Hashable = None) -> Tensor | None:
        """Remove the rows that are stored under ``key``; return them with ``new`` below."""
        before = self.take(key)
        if before is None or new is None:
            return before if new is None else new
        return torch.cat([before, new], self._dim)


class Overwritten:
    """A map that is read with a halo while strips are written over it, from the top."""

    def __init__(self, over: AnyMap, rows: int, wraps: bool = False) -> None:
        """
        Args:
            over: the map.
            rows: rows of the halo.
            wraps: True if the last strip reads the first rows again.
        """
        self.map, self.shape, self._rows = over, over.shape, rows
        self._written = 0
        self._halo = Halo()
        self._first = over.load(slice(0, rows)).clone() if wraps else None

    @property
    def dtype(self) -> torch.dtype:
        return self.map.dtype

    def mark_written(self, row: int) -> None:
        """Note that all rows above ``row`` were written, including strips that a trace left out."""
        self._written = row

    def load(self, rows: slice) -> Tensor:
        """Return rows of the map as they were before anything was written."""
        if self._first is not None and rows.start < self._written - self._rows:
            return self._first[:, :, rows]
        old = self._halo.last(self._written - rows.start) if rows.start < self._written else None
        if old is None:
            return self.map.load(rows)
        later = slice(self._written, rows.stop)
        return torch.cat([old, self.map.load(later)], dim=2) if rows.stop > self._written else old

    def convert(self, dtype: torch.dtype) -> None:
        """Convert the map's values, and the stored rows, to another type of as many bytes."""
        self.map.convert(dtype)
        old = self._halo.take()
        if old is not None:
            self._halo.keep(old.to(dtype))

    def keep(self, rows: slice) -> None:
        """Store the last of ``rows`` for the next strip, before they are overwritten."""
        self._halo.keep(self.load(slice(max(0, rows.stop - self._rows), rows.stop)))
        self._written = rows.stop

    def store(self, rows: slice, strip: Tensor) -> None:
        """Write ``strip`` over these rows."""
        self.keep(rows)
        self.map.store(rows, strip)


@dataclass
class Strip:
    """Rows ``start`` to ``start + x.shape[2]`` of a map with ``height`` rows, at some point between two layers.

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

    def convolve(self, conv: nn.Module, data: Tensor, *facts: Tensor) -> Tensor:
        """Apply ``conv`` and crop the rows that lack their neighbours.

        Args:
            conv: a 3x3 convolution.
            data: (N, C, rows, W), with this strip's rows.
            facts: further arguments of the convolution.

        Returns:
            (N, C', rows, W), without one row at each cut edge.
        """
        return self.inner(conv(data, *facts))

    def shrunk(self, x: Tensor, hidden: Tensor | None = None) -> Strip:
        """Return this strip after a convolution; ``x`` has lost the rows at the cut edges."""
        return Strip(x, self.start + self._cut(self.x.shape[2])[0], self.height, self.wraps, hidden)

    def inner(self, data: Tensor) -> Tensor:
        """The rows of ``data`` that a convolution of this strip keeps."""
        top, bottom = self._cut(data.shape[2])
        return data[:, :, top : data.shape[2] - bottom] if top or bottom else data

    def _cut(self, rows: int) -> tuple[int, int]:
        return int(self.wraps or self.start > 0), int(self.wraps or self.start + rows < self.height)


def load(source: AnyMap | Overwritten, start: int, stop: int, wraps: bool) -> Tensor:
    """Load rows of a map to the device.

    Args:
        source: the map, on the device, parked, or being overwritten.
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
