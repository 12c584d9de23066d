"""Layers of an autoencoder of frames over strips of rows: each layer stores the few rows that it will read again.

A strip runs through all layers, one chunk of frames after the other, before the next strip. A convolution stores the
last two rows of its input for the next strip, and the last two frames of the strip for the next chunk. A shortcut's
rows wait until the parallel layers have reached them. So every row of every layer is computed once, and no map is held
whole. Convolutions pad only at the map's own edges: their call of torch's ``pad`` is replaced accordingly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.cpu_convolutions import convolve_like_whole, is_float32_on_cpu, unfolds
from ...models.anatomy import layer
from ...models.causal_autoencoder import CausalConv, CausalResidual, CausalStep, Enlarge, Level, Reduce
from ...patches import Answered
from .maps import Halo

_ROWS = 3
"""The dimension of rows in maps (N, C, frames, H, W)."""


@dataclass(frozen=True)
class Turn:
    """Position of a strip of a chunk of frames.

    Attributes:
        chunk: number of the chunk.
        last_chunk: True if no other frames follow.
        last: True if no rows follow.
        piece: numbers of the parts into which the strip was divided on its way, from the outside.
    """

    chunk: int
    last_chunk: bool
    last: bool
    piece: tuple[int, ...] = ()


class Rows(Protocol):
    """A layer, or several: a function from rows (N, C, frames, rows, W) of a chunk to the rows of the result so far.

    ``None`` means no rows. At the last turn a layer returns all remaining rows.
    """

    def __call__(self, x: Tensor | None, turn: Turn) -> Tensor | None: ...


def layers_of(steps: Sequence[CausalStep], height: int, width: int, rows: int = 0) -> tuple[Rows, int, int]:
    """Build the layers that run ``steps`` over a map of this size; return them and the size of the result.

    Args:
        steps: the steps of an autoencoder of frames, in order.
        height, width: of the map that enters.
        rows: rows of a strip; if given, strips are divided so that none grows by much.

    Returns:
        The layers as one function, and height and width of the map that leaves.
    """
    layers: list[Rows] = []
    most, tall = [], height
    for step in steps:
        most.append(-(-rows * height // tall) + 2)
        layer, height, width = _layer_of(step, height, width)
        layers.append(layer)
    return _InTurn(layers, most if rows else ()), height, width


def _layer_of(step: CausalStep, height: int, width: int) -> tuple[Rows, int, int]:
    if isinstance(step, Level):
        inner, high, wide = layers_of(step.steps, height, width)
        return _Beside(inner, step.shortcut, high / height), high, wide
    if isinstance(step, CausalResidual):
        halves = _InTurn([_Convolution(half, height) for half in (step.first, step.second)])
        return _Beside(halves, functools.partial(_straight, step.shortcut), 1), height, width
    if isinstance(step, Enlarge):
        return _Enlarging(step, height, width), 2 * height, 2 * width
    if isinstance(step, Reduce):
        return _Reducing(step, height, width), height // 2, width // 2
    assert isinstance(step, CausalConv)
    return _Convolution(step, height), height, width


def _straight(shortcut: Callable[[Tensor], Tensor], x: Tensor, first: bool) -> Tensor:
    return shortcut(x)


class _InTurn:
    """A sequence of layers.

    At the map's lower edge each layer returns, in addition to the strip's rows, those that it was behind. A strip with
    more rows than the layer's ``most`` continues in parts, so that it holds no more than other strips.
    """

    def __init__(self, layers: Sequence[Rows], most: Sequence[int] = ()) -> None:
        self._layers = layers
        self._most = most

    def __call__(self, x: Tensor | None, turn: Turn, start: int = 0) -> Tensor | None:
        for number in range(start, len(self._layers)):
            if self._most and x is not None and x.shape[_ROWS] > self._most[number]:
                return self._run_parts(x, turn, number)
            x = self._layers[number](x, turn)
        return x

    def _run_parts(self, x: Tensor, turn: Turn, number: int) -> Tensor | None:
        parts = -(-x.shape[_ROWS] // self._most[number])
        results = []
        for part, rows in enumerate(x.tensor_split(parts, _ROWS)):
            its = dataclasses.replace(turn, last=turn.last and part == parts - 1, piece=(*turn.piece, part))
            done = self(rows, its, number)
            results += [] if done is None else [done]
        return torch.cat(results, _ROWS) if results else None


def _keep(halo: Halo, rows: Tensor, turn: Turn) -> None:
    """Store the rows of a chunk that are read again, if another strip comes."""
    if not turn.last:
        halo.keep(rows, turn.chunk)


class _Neighbours:
    """Rows of a map with their neighbours above and below, as they come."""

    def __init__(self) -> None:
        self._halo = Halo(_ROWS)
        self._begun: set[int] = set()

    def __call__(self, x: Tensor | None, turn: Turn) -> tuple[Tensor, bool] | None:
        """Rows of which the first and the last are neighbours, except at the map's edges, and whether they begin it."""
        rows = self._halo.join(x, turn.chunk)
        if rows is None or (x is None and not turn.last):
            if rows is not None:
                _keep(self._halo, rows, turn)
            return None
        top = turn.chunk not in self._begun
        if rows.shape[_ROWS] - 2 + top + turn.last < 1:
            _keep(self._halo, rows, turn)
            return None
        self._begun.add(turn.chunk)
        _keep(self._halo, rows[:, :, :, -2:], turn)
        return rows, top


class _Before(Halo):
    """The last frames of a strip, for its next chunk."""

    def __init__(self, most: int = 2) -> None:
        super().__init__(2)
        self._most = most

    def then(self, x: Tensor, turn: Turn, first: int = 0) -> Tensor | None:
        """Return the frames before ``x`` and store those of ``x``, from the chunk ``first`` on; None before that."""
        before = self.take(turn.piece)
        if not turn.last_chunk and turn.chunk >= first:
            frames = x if before is None else torch.cat([before, x], 2)
            self.keep(frames[:, :, -self._most :], turn.piece)
        return before


class _Convolution:
    def __init__(self, step: CausalConv, height: int) -> None:
        self._step = step
        self._height = height
        self._neighbours = _Neighbours()
        self._before = _Before()

    def __call__(self, x: Tensor | None, turn: Turn) -> Tensor | None:
        if x is not None and self._step.norm is not None:
            x = F.silu(self._step.norm(x), inplace=True)
        image = self._neighbours(x, turn)
        if image is None:
            return None
        del x
        rows, top = image
        return _convolve(self._step.conv, rows, self._before.then(rows, turn), (top, turn.last), self._height)


def _convolve(conv: nn.Module, rows: Tensor, before: Tensor | None, edges: tuple[bool, bool], height: int) -> Tensor:
    """``conv`` of rows, of which the first and the last are only looked at, but padded at the map's ``edges``."""
    inside = any(layer(conv).padding)  # in its own call it pads what is around a frame, of one alone nothing else
    if isinstance(layer(conv), nn.Conv2d):
        border = 0 if inside else 2
        image = call_like_whole(
            conv, (*rows.shape[:2], height + border, rows.shape[4] + border), rows.squeeze(2) if inside else rows
        )
        image = image.unsqueeze(2) if inside else image
        return image[:, :, :, 0 if edges[0] else 1 : image.shape[_ROWS] - (0 if edges[1] else 1)]
    whole = (*rows.shape[:2], rows.shape[2] + (0 if inside and before is None else 2), height + (0 if inside else 2))
    exact = is_float32_on_cpu(rows) and unfolds(whole, (3, 3, 3))
    alone = before is None and rows.shape[2] == 1 and not exact

    def padded(x: Tensor, pad: Sequence[int], *_: Any, **__: Any) -> Tensor:
        left, right, _above, _below, earlier, _later = pad
        return F.pad(x, (left, right, *map(int, edges), 0 if alone else earlier, 0))

    def around(x: Tensor) -> Tensor:
        return F.pad(x, (1, 1, *map(int, edges))) if inside else x

    def by_cudnn(x: Tensor, weight: Tensor, padding: Any, *more: Any, **named: Any) -> Tensor:
        if alone:
            return convolve(x, weight, None)
        return torch.cudnn_convolution(around(x), weight, (0, 0, 0), *more, **named)

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
        x = around(x)
        if alone:  # the other two thirds of the kernel would see frames of zeros
            return convolve_like_whole(whole, x[:, :, 0], weight[:, :, -1], bias).unsqueeze(2)
        return convolve_like_whole(whole, x, weight, bias)

    with Answered({F.pad: padded, F.conv3d: convolve, torch.cudnn_convolution: by_cudnn}):
        result: Tensor = conv(rows, before)
    return result


def call_like_whole(conv: nn.Module, whole: Sequence[int], x: Tensor, *more: Any) -> Tensor:
    """Call ``conv`` on a strip, with the kernel that a CPU would choose for the whole map, so that the bits are the
    same.

    Args:
        conv: a convolution.
        whole: shape of the whole map.
        x: strip of that map.
        more: further arguments of the layer.
    """
    answer = functools.partial(convolve_like_whole, whole)
    with Answered({F.conv2d: answer, F.conv3d: answer}):
        result: Tensor = conv(x, *more)
    return result


class _Enlarging:
    def __init__(self, step: Enlarge, height: int, width: int) -> None:
        self._step = step
        self._size = height, width
        self._neighbours = _Neighbours()
        self._before = _Before()

    def __call__(self, x: Tensor | None, turn: Turn) -> Tensor | None:
        if x is not None and self._step.time is not None and turn.chunk > 0:
            x = self._two_frames_of_each(x, self._step.time, turn)
        image = self._neighbours(x, turn)
        if image is None:
            return None
        del x
        rows, top = image
        height, width = self._size
        large = self._step.repeat(_split_frames(rows))
        enlarged = call_like_whole(self._step.conv, (*large.shape[:2], 2 * height, 2 * width), large)
        del large
        cropped = enlarged[:, :, 0 if top else 2 : enlarged.shape[2] - (0 if turn.last else 2)]
        return _join_frames(cropped, len(rows))

    def _two_frames_of_each(self, x: Tensor, time: nn.Module, turn: Turn) -> Tensor:
        whole = (*x.shape[:2], x.shape[2] + 2, self._size[0])
        frames = call_like_whole(time, whole, x, self._before.then(x, turn, first=1))
        pairs: Tensor = frames.unflatten(1, (2, -1)).permute(0, 2, 3, 1, 4, 5)
        return pairs.flatten(2, 3)


class _Reducing:
    def __init__(self, step: Reduce, height: int, width: int) -> None:
        self._step = step
        self._size = height, width
        self._halo = Halo(_ROWS)
        self._before = _Before(1)

    def __call__(self, x: Tensor | None, turn: Turn) -> Tensor | None:
        rows = self._halo.join(x, turn.chunk)
        if rows is None:
            return None
        below = int(turn.last)
        count = max(0, (rows.shape[_ROWS] + below - 1) // 2)
        _keep(self._halo, rows[:, :, :, 2 * count :], turn)
        if not count:
            return None
        height, width = self._size
        small = F.pad(_split_frames(rows), (0, 1, 0, below))
        small = call_like_whole(self._step.conv, (*small.shape[:2], height + 1, width + 1), small)
        x = _join_frames(small, len(rows))
        del rows, small
        if self._step.time is None:
            return x
        before = self._before.then(x, turn)
        if before is None:
            return x
        x = torch.cat([before, x], 2)
        return call_like_whole(self._step.time, (*x.shape[:3], height // 2), x)


def _split_frames(x: Tensor) -> Tensor:
    """(N, C, frames, rows, W) as (N frames, C, rows, W)."""
    return x.transpose(1, 2).flatten(0, 1)


def _join_frames(x: Tensor, count: int) -> Tensor:
    """(N frames, C, rows, W) as (N, C, frames, rows, W)."""
    frames: Tensor = x.unflatten(0, (count, -1))
    return frames.transpose(1, 2)


class _Beside:
    """Layers and a shortcut around them; rows of both are paired by pixel."""

    def __init__(self, layers: Rows, shortcut: Callable[[Tensor, bool], Tensor], scale: float) -> None:
        self._layers = layers
        self._shortcut = shortcut
        self._scale = scale
        self._halo = Halo(_ROWS)

    def __call__(self, x: Tensor | None, turn: Turn) -> Tensor | None:
        rows = self._halo.join(x, turn.chunk)
        result = self._layers(x, turn)
        if rows is None:
            return result
        passed = 0 if result is None else round(result.shape[_ROWS] / self._scale)
        _keep(self._halo, rows[:, :, :, passed:], turn)
        return None if result is None else result.add_(self._shortcut(rows[:, :, :, :passed], turn.chunk == 0))
