"""Convolutions on a CPU whose weights are kept in the order of oneDNN's kernels.

torch brings the weights of a convolution into that order at every call. Where the maps are small that takes longer than
the convolution itself: at 4x4 pixels of 1280 channels three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..memory.fake_mode import active_fake_mode


def refusal(device: torch.device) -> str | None:
    """Why weights cannot be kept so on ``device``; None where they can."""
    if device.type != "cpu":
        return f"weights are kept in the order of a CPU's kernels, and the device is {device.type}"
    there = all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_convolution_weight", "_convolution_pointwise"))
    if not torch.backends.mkldnn.is_available() or not there:
        return f"torch {torch.__version__} has no oneDNN here, whose order of weights it is"
    return None


class How(NamedTuple):
    """What a convolution does besides its weights."""

    padding: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    groups: int


def pack(weight: Tensor, how: How, shape: Sequence[int]) -> Tensor:
    """A copy of ``weight`` in the order of the kernel that takes maps of ``shape``."""
    if active_fake_mode(weight) is not None:
        return torch.empty_like(weight)
    with torch.inference_mode(False), torch.no_grad():
        packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(weight.detach(), *how, list(shape))
    return packed


def convolve(x: Tensor, packed: Tensor, bias: Tensor | None, how: How) -> Tensor:
    """The convolution of a map (N, C, H, W) with a weight from :func:`pack`; it comes channels last."""
    result: Tensor = torch.ops.mkldnn._convolution_pointwise(x, packed, bias, *how, "none", [], "")
    return result
