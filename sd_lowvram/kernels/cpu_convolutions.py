"""Convolutions on a CPU, where torch has two kernels for float32 and goes by the map's size.

The one unfolds its input, 27 times as large for a kernel of 3x3x3; oneDNN's does not, and sums in another order. A
strip of a map is given to the kernel that the whole map would go to: it is as fast, and has the same bits where the
processor has AVX-512. Without, oneDNN sums a strip in an order of its own, and the result is the same to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat import autocast_dtype
from ..compat.private import FakeTensor
from ..memory.accounts import on_cpu

_LEAST = 20480
"""Elements of a map's first four dimensions, up to which torch unfolds one picture of float32."""


def is_on_cpu(x: Tensor) -> bool:
    """True if a CPU computes with ``x``; in a trace, in the traced run."""
    return on_cpu() if isinstance(x, FakeTensor) else x.device.type == "cpu"


def is_float32_on_cpu(x: Tensor) -> bool:
    """True if the kernel that convolves ``x`` depends on its size; in a trace, in the traced run."""
    if x.dtype != torch.float32 or autocast_dtype("cpu") is not None or not torch.backends.mkldnn.is_available():
        return False
    return is_on_cpu(x)


def unfolds(shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int] = (1,), groups: int = 1) -> bool:
    """Return True if torch unfolds a map of float32 to convolve it.

    Args:
        shape: shape of the map, with padding that is added outside of the kernel's own call.
    """
    if max(kernel[-2:]) == 1 and max(stride) == 1 and shape[0] < 16 and torch.get_num_threads() == 1:
        return True
    return groups == 1 and min(kernel[-2:]) <= 3 and shape[0] == 1 and math.prod(shape[:4]) <= _LEAST


def unfolded_bytes(image: Tensor, kernel: Sequence[int], stride: Sequence[int], result: Tensor) -> int:
    """Bytes that unfolding holds in addition to map and result; none for single pixels."""
    if math.prod(kernel) == 1 and max(stride) == 1:
        return 0
    return image.shape[0] * image.shape[1] * math.prod(kernel) * result.shape[2:].numel() * image.element_size()


def as_the_whole(
    whole: Sequence[int],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """torch's ``conv2d`` or ``conv3d`` of ``x``, a strip of a map of the shape ``whole``, by the kernel of that map."""
    sides = x.dim() - 2
    stride, padding, dilation = (
        (each,) * sides if isinstance(each, int) else each for each in (stride, padding, dilation)
    )
    if not is_float32_on_cpu(x) or unfolds(whole, weight.shape[2:], stride, groups):
        return (F.conv2d if sides == 2 else F.conv3d)(x, weight, bias, stride, padding, dilation, groups)
    return torch.mkldnn_convolution(x, weight, bias, padding, stride, dilation, groups)
