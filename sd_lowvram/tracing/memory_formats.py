"""Memory formats of the results of torch's kernels, from shapes and strides, where fake tensors are wrong."""

from __future__ import annotations

import torch
from torch import Tensor


def wanted_format(*tensors: Tensor) -> torch.memory_format:
    """Return channels last if any of ``tensors`` is: convolutions bring their arguments and result to it."""
    return torch.channels_last if any(map(_is_channels_last, tensors)) else torch.contiguous_format


def _is_channels_last(tensor: Tensor) -> bool:
    """Return True if torch treats the tensor as channels last.

    Strides of size-1 dimensions count: of 1x1 weights, which are contiguous in both orders, they are what decides.
    """
    if tensor.dim() != 4:
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        stride, size = tensor.stride(dim), tensor.shape[dim]
        if stride == 0 or stride < least or (dim == 0 and least == tensor.stride(1)):
            return False
        least = stride * max(size, 1)
    return True
