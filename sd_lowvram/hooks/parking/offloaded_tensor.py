"""A map in host memory that takes the place of a tensor in the host's code.

Code that only passes tensors on does not notice. A function that computes with the map fetches it, through torch's own
``__torch_function__`` protocol, so that no forward of the host is rewritten.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.private import tree_map
from ...memory import Parked, fetch, send
from ...weights import room


class OffloadedMap:
    """A map (N, C, H, W) in host memory, in pieces along pictures and, within them, along channels.

    Attributes:
        shape, dtype, device: those of the tensor that it replaces.
    """

    def __init__(self, pieces: Sequence[Sequence[Parked]]) -> None:
        first = pieces[0][0]
        batch, channels = sum(row[0].shape[0] for row in pieces), sum(part.shape[1] for part in pieces[0])
        self._pieces = [tuple(row) for row in pieces]
        self.shape = torch.Size((batch, channels, *first.shape[2:]))
        self.dtype, self.device = first.dtype, first.device

    @classmethod
    def park(cls, tensor: Tensor) -> OffloadedMap:
        """Park ``tensor`` (N, C, H, W) in pieces; the caller drops it."""
        return cls([[send(tensor)]])

    @classmethod
    def join(cls, parts: Sequence[OffloadedMap]) -> OffloadedMap:
        """The pictures of all ``parts``, one after the other; nothing is copied."""
        return cls([row for part in parts for row in part._pieces])

    def _counts(self) -> list[int]:
        return [row[0].shape[0] for row in self._pieces]

    def pictures(self, start: int, stop: int) -> OffloadedMap | Tensor:
        """Return pictures ``start`` to ``stop``: still parked if they are whole pieces, else fetched."""
        ends = [0, *itertools.accumulate(self._counts())]
        if start in ends and stop in ends:
            return OffloadedMap(self._pieces[ends.index(start) : ends.index(stop)])
        return self.fetch_tensor()[start:stop]

    def fetch_tensor(self) -> Tensor:
        """The tensor, new on the device."""
        if len(self._pieces) == len(self._pieces[0]) == 1:
            return fetch(self._pieces[0][0])
        out: Tensor | None = None
        picture = 0
        for row in self._pieces:
            channel = 0
            for parked in row:
                part = parked.recall()
                out = room(self.shape, part) if out is None else out
                pictures, channels = part.shape[:2]
                out[picture : picture + pictures, channel : channel + channels] = part
                channel += channels
                del part
            picture += pictures
        assert out is not None
        return out

    def recall_tensor(self) -> Tensor:
        """Return the tensor for reading: the original one while it has not left the device."""
        return self._pieces[0][0].recall() if len(self._pieces) == len(self._pieces[0]) == 1 else self.fetch_tensor()

    def is_last_there(self) -> bool:
        """True if its last pictures have not left the device."""
        return self._pieces[-1][0].is_there

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __add__(self, other: Any) -> OffloadedMap:
        """A sum that waits too: a ControlNet's residual is added to every skip long before it is used."""
        sums = []
        for start, stop in itertools.pairwise([0, *itertools.accumulate(self._counts())]):
            mine, theirs = fetch_value(self.pictures(start, stop)), pictures(other, len(self), start, stop)
            sums.append(OffloadedMap.park(mine + fetch_value(theirs)))
            del mine, theirs
        return OffloadedMap.join(sums)

    __radd__ = __add__

    def __iadd__(self, other: Any) -> OffloadedMap:
        """Add in place: as with a tensor, every holder of this map sees the sum."""
        self._become(self + other)
        return self

    def __mul__(self, other: Any) -> Tensor:
        product: Tensor = self.fetch_tensor() * fetch_value(other)
        return product

    __rmul__ = __mul__

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        return self.fetch_tensor()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        tensor = self.fetch_tensor()
        tensor[index] = fetch_value(value)
        self._become(OffloadedMap.park(tensor))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name.endswith("_"):
            raise AttributeError(f"a map that waits in host memory cannot be changed in place by {name}()")
        return getattr(self.fetch_tensor(), name)

    def _become(self, other: OffloadedMap) -> None:
        self._pieces, self.dtype = other._pieces, other.dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lazy = _concatenate(*args, **kwargs) if func is torch.cat else None
        if lazy is not None:
            return lazy
        args, kwargs = tree_map(fetch_value, (args, kwargs))
        return func(*args, **kwargs)


def _concatenate(tensors: Any, dim: int = 0, *, out: Tensor | None = None) -> OffloadedMap | None:
    """Result of ``torch.cat`` of a map and its skip, without a copy, if both are parked in pieces of the same pictures.

    None if it must be computed."""
    waiting = [parked for parked in tensors if isinstance(parked, OffloadedMap)]
    if dim != 1 or out is not None or len(waiting) != len(tensors) or len({parked.dtype for parked in waiting}) > 1:
        return None
    if any(parked._counts() != waiting[0]._counts() for parked in waiting):
        return None
    return OffloadedMap(
        [tuple(itertools.chain(*rows)) for rows in zip(*(parked._pieces for parked in waiting), strict=True)]
    )


def fetch_value(value: Any) -> Any:
    """``value``, or the tensor that it replaces."""
    return value.fetch_tensor() if isinstance(value, OffloadedMap) else value


def recall_value(value: Any) -> Any:
    """Like :func:`fetch_value`, for reading only."""
    return value.recall_tensor() if isinstance(value, OffloadedMap) else value


def pictures(value: Any, batch: int, start: int, stop: int) -> Any:
    """Return some pictures of a tensor or parked map that has one entry for each of ``batch``; anything else as it is.

    Args:
        value: a leaf of a call's arguments.
        batch: rows of the whole batch.
        start, stop: the rows to return.
    """
    if isinstance(value, OffloadedMap):
        return value.pictures(start, stop) if len(value) == batch else value
    if isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == batch:
        return value[start:stop]
    return value
