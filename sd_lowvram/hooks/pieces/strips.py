"""Common parts of passes over a map piece by piece: spans, GroupNorm of the whole map, and when not to act.

Source: exact tiles: group statistics are summed strip by strip and merged as in Chan, Golub and LeVeque 1983.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.cpu_convolutions import is_on_cpu
from ...memory.repeats import representative_pieces
from ...patches import Answered
from ...streaming.weight_scopes import hold_weights
from ...weights import place_part

Span = tuple[int, int]


def equal_spans(total: int, pieces: int, least: int) -> list[Span]:
    """Start and stop of at most ``pieces`` equal pieces of ``total``; only the last may be smaller than ``least``.

    Piece size grows with the total, so that peak memory is monotonic in image size.

    Args:
        total: length to divide.
        pieces: largest number of pieces.
        least: smallest length of a piece.

    Returns:
        (start, stop) of each piece, in order; a single one if ``total`` is small.
    """
    size = max(least, -(-total // pieces))
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def even_spans(total: int, size: int) -> Iterator[Span]:
    """Yield start and stop of pieces of nearly equal size, at most ``size``, for which there is memory.

    Args:
        total: length to divide.
        size: largest length of a piece.

    Yields:
        (start, stop) of each piece, in order.
    """
    count = -(-total // max(1, min(size, total)))
    for number in range(count):
        yield total * number // count, total * (number + 1) // count


def assemble(
    make: Callable[[int, int], Tensor], pieces: Sequence[Span], dim: int, like: Tensor, out: Tensor | None = None
) -> Tensor:
    """Concatenate ``make(start, stop)`` of the pieces along ``dim``; lent weights stay for all pieces.

    Args:
        make: function from (start, stop) to a tensor of that length along ``dim``.
        pieces: (start, stop) of each piece, without gaps.
        dim: the dimension of the pieces.
        like: a tensor that is fake if the parts will be.
        out: tensor to overwrite if it has the type and the width of the parts; otherwise a new tensor is made.

    Returns:
        The parts side by side along ``dim``.
    """
    with hold_weights():
        for start, stop in representative_pieces(pieces, like):
            out = place_part(out, make(start, stop), dim, start, pieces[-1][1])
    assert out is not None
    return out


class Statistics:
    """Statistics of a whole map for the normalisation of its strips.

    They are mean and variance of each group of channels over all added strips, in float32 or wider."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        self.norm = norm
        self._groups = norm.num_groups
        self._count = 0
        self._mean: Tensor | None = None
        self._variance: Tensor | None = None
        self._affine: tuple[Tensor, Tensor] | None = None

    def add(self, strip: Tensor) -> None:
        """Add a strip (N, C, rows, W) to the sums."""
        wide = strip if strip.dtype.itemsize >= 4 else strip.float()
        grouped = wide.unflatten(1, (self._groups, -1))
        count = grouped.shape[2:].numel()
        mean, variance = _moments(grouped, in_place=wide is not strip)
        self._affine = None
        self._count += count
        if self._mean is None or self._variance is None:
            self._mean, self._variance = mean, variance
            return
        change, share = mean - self._mean, count / self._count
        self._mean.add_(change, alpha=share)
        self._variance.lerp_(variance, share).addcmul_(change, change, value=share * (1 - share))

    def affine(self, channels: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """Scale and shift (N, C, 1, 1) that normalise a strip, with the layer's own weight and bias (C) in them.

        Computed once and cached until another strip is added.

        Args:
            channels: C.
            weight, bias: (C) of the layer; None: 1 and 0.
            eps: the layer's.

        Returns:
            Scale and shift, each (N, C, 1, 1), in float32 or wider.
        """
        if self._affine is None:
            assert self._mean is not None and self._variance is not None
            scale, mean = (self._variance + eps).rsqrt(), self._mean
            scale, mean = (each.repeat_interleave(channels // self._groups, 1) for each in (scale, mean))
            scale = scale if weight is None else scale * weight.to(scale.dtype)
            shift = -mean * scale if bias is None else bias.to(scale.dtype) - mean * scale
            self._affine = scale.view(-1, channels, 1, 1), shift.view(-1, channels, 1, 1)
        return self._affine

    def normalise(self, strip: Tensor) -> Tensor:
        """The normalised rows ``strip`` (N, C, rows, W), with the statistics of the whole map. A new tensor.

        The arithmetic is done in float32 or wider and rounded once, as torch's own kernels do.
        """
        with Answered({F.group_norm: self._group_norm}):
            result: Tensor = self.norm(strip)
        return result

    def activate(self, strip: Tensor, act: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
        """The activation, SiLU or another one, of the normalised rows; a new tensor."""
        if act is not F.silu:
            return act(self.normalise(strip))
        return F.silu(self.normalise(strip), inplace=True)

    def _group_norm(
        self,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """Replace torch's ``group_norm``: use the statistics of the whole map."""
        scale, shift = self.affine(input.shape[1], weight, bias, eps)
        return torch.mul(input, scale).add_(shift).to(input.dtype)


def _moments(grouped: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
    """Mean and variance (N, groups) of a strip (N, groups, channels, rows, W) in float32 or wider.

    In a constant map, normalising multiplies an error of the mean by 1/sqrt(eps), so the mean must be exact to the last
    bit. ``var_mean`` gives such a mean in one operator. On a CPU it is 15 times as slow as the operators below.

    Args:
        in_place: may overwrite the strip.
    """
    if not is_on_cpu(grouped):
        variance, mean = torch.var_mean(grouped, (2, 3, 4), correction=0)
        return mean, variance
    mean = grouped.mean((2, 3, 4), keepdim=True)
    centred = grouped.sub_(mean) if in_place else grouped - mean
    missed = centred.mean((2, 3, 4))
    variance = (centred.square_().mean((2, 3, 4)) - missed.square()).clamp_min_(0)
    return mean.squeeze((2, 3, 4)) + missed, variance
