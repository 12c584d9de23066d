"""Convolutions on a CPU with weights stored in the memory order of oneDNN's kernels.

torch reorders the weights of a convolution at every call. For small maps that takes longer than the convolution itself:
at 4x4 pixels of 1280 channels three times as long.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..memory.fake_mode import active_fake_mode


def why_not(device: torch.device) -> str | None:
    """The reason why weights cannot be stored so on ``device``; None if they can."""
    if device.type != "cpu":
        return f"weights are stored in the order of a CPU's kernels, and the device is {device.type}"
    there = all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_convolution_weight", "_convolution_pointwise"))
    if not torch.backends.mkldnn.is_available() or not there:
        return f"torch {torch.__version__} has no oneDNN here, whose order of weights it is"
    return None


class ConvParams(NamedTuple):
    """Parameters of a convolution in addition to its weights."""

    padding: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    groups: int


def pack(weight: Tensor, how: ConvParams, shape: Sequence[int]) -> Tensor:
    """Copy ``weight`` in the order of the kernel that convolves maps of ``shape``.

    Args:
        weight: (out, in, kh, kw).
        how: the convolution's parameters.
        shape: (N, C, H, W) of the maps.
    """
    if active_fake_mode(weight) is not None:
        return torch.empty_like(weight)
    with torch.inference_mode(False), torch.no_grad():
        packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(weight.detach(), *how, list(shape))
    return packed


_kept: ContextVar[Mapping[int, Tensor]] = ContextVar("weights in order, by the place of what they are made of")


@contextlib.contextmanager
def provide_copies(copies: Mapping[int, Tensor]) -> Iterator[None]:
    """Make these copies available to compiled code within the block."""
    token = _kept.set(copies)
    try:
        yield
    finally:
        _kept.reset(token)


@functools.cache
def provide_operator() -> None:
    """Register the convolution as an operator for compilers, which cannot trace one made in Python.

    It uses the stored copy of its weight if there is one, and else runs like torch's own. Maps are channels last.
    """

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
        padding, stride, dilation, groups = how
        copy = _kept.get({}).get(weight.data_ptr()) if x.dtype == torch.float32 else None
        if copy is None:
            result = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
        else:
            result = convolve(x, copy, bias, ConvParams(*how))
        return result.contiguous(memory_format=torch.channels_last)

    def fake(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
        padding, stride, dilation, groups = how
        result = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
        return torch.empty_like(result, memory_format=torch.channels_last)

    arguments = "Tensor x, Tensor weight, Tensor? bias, int[] padding, int[] stride, int[] dilation, int groups"
    operator: Any = torch.library.custom_op(_NAME, run, mutates_args=(), schema=f"({arguments}) -> Tensor")
    operator.register_fake(fake)


_NAME = "sd_lowvram::convolve_kept"


def convolve(x: Tensor, packed: Tensor, bias: Tensor | None, how: ConvParams) -> Tensor:
    """Convolve a map with a weight from :func:`pack`.

    Args:
        x: (N, C, H, W).
        packed: the weight.
        bias: (out); None: none.
        how: the convolution's parameters.

    Returns:
        The result, channels last.
    """
    result: Tensor = torch.ops.mkldnn._convolution_pointwise(x, packed, bias, *how, "none", [], "")
    return result
