"""How torch's kernels lay out what they make, derived from shapes and strides; fakes are wrong here and there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def wanted_format(*tensors: Tensor) -> torch.memory_format:
    """Channels last as soon as one of them is: what convolutions bring their arguments and result to."""
    return torch.channels_last if any(map(_is_channels_last, tensors)) else torch.contiguous_format


def _is_channels_last(tensor: Tensor) -> bool:
    """As torch decides it, of several channels: the strides of dimensions of size 1 count, and a doubtful case is not
    channels last."""
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        stride, size = tensor.stride(dim), tensor.shape[dim]
        if stride == 0 or stride < least or (dim == 0 and least == tensor.stride(1)):
            return False
        least = stride * max(size, 1)
    return True


def strides_of(shape: Sequence[int], memory_format: torch.memory_format | None = None) -> tuple[int, ...]:
    """Of a dense tensor (None: contiguous)."""
    last = memory_format is torch.channels_last
    return _packed(shape, (1, 3, 2, 0) if last else range(len(shape) - 1, -1, -1))


def _packed(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides when the dimensions lie in ``order``, the innermost first."""
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def iterated_strides(shape: Sequence[int], operands: Sequence[Tensor], alone: bool) -> tuple[int, ...]:
    """Those that torch's iterator gives an elementwise result of ``shape``.

    Args:
        operands: the tensors that have dimensions.
        alone: whether there is nothing besides, no number either.
    """
    if alone and all(operand.shape == shape for operand in operands):
        for memory_format in (torch.contiguous_format, torch.channels_last)[: 2 if len(shape) == 4 else 1]:
            if all(operand.is_contiguous(memory_format=memory_format) for operand in operands):
                return strides_of(shape, memory_format)
    return _packed(shape, _iteration_order(shape, [_expanded(operand, shape) for operand in operands]))


def _expanded(operand: Tensor, shape: Sequence[int]) -> list[int]:
    """The strides of ``operand`` when it is broadcast to ``shape``."""
    new = len(shape) - operand.dim()
    inner = zip(operand.stride(), operand.shape, shape[new:], strict=True)
    return [0] * new + [stride if size == wanted else 0 for stride, size, wanted in inner]


def _iteration_order(shape: Sequence[int], operands: Sequence[Sequence[int]]) -> list[int]:
    """Dimensions from the innermost outwards, sorted by the strides of the operands, the first one first."""
    order = list(reversed(range(len(shape))))
    for start in range(1, len(order)):
        at = start
        for before in reversed(range(start)):
            verdict = _lies_outside(order[before], order[at], shape, operands)
            if verdict is False:
                break
            if verdict:
                order[before], order[at] = order[at], order[before]
                at = before
    return order


def _lies_outside(first: int, second: int, shape: Sequence[int], operands: Sequence[Sequence[int]]) -> bool | None:
    """Whether dimension ``first`` belongs outside of ``second``; None: the operands do not say."""
    for strides in operands:
        if strides[first] and strides[second]:
            if strides[first] != strides[second]:
                return strides[first] > strides[second]
            if shape[first] > shape[second]:
                return True
    return None
