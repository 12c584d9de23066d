"""Weights in 8 bits, with one scale for each output channel.

The scale has the weight's own type and is rounded up before the weight is divided by it, so that its rounding adds no
error. fp8 is e4m3: a mantissa of 3 bits at every magnitude, so its scales are powers of two, exact in every type. Eight
bits are stored as ``uint8`` or ``int8``, not as a floating type, so that a model's dtype is the one of its arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = {"fp8": 448.0, "int8": 127.0}


def quantise(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Store ``weight`` in 8 bits.

    Args:
        weight: in float16, bfloat16 or float32; every value finite.
        kind: "fp8" or "int8".

    Returns:
        The weight (out, ...) in 8 bits with its strides, and the scales (out, 1, ...) in its old type.
    """
    largest = weight.detach().abs().amax(dim=tuple(range(1, weight.dim())), keepdim=True).float() / _LARGEST[kind]
    numbers = torch.finfo(weight.dtype)
    smallest = numbers.tiny * numbers.eps if weight.dtype == torch.float16 else numbers.tiny
    if kind == "fp8":
        scale = torch.exp2(torch.ceil(torch.log2(largest.clamp_min(smallest)))).to(weight.dtype)
        return _scale(weight, scale, 448.0).to(torch.float8_e4m3fn).view(torch.uint8), scale
    scale = (largest * (1 + numbers.eps)).clamp_min(smallest).to(weight.dtype)
    return _scale(weight, scale, 127.0).round_().to(torch.int8), scale


def _scale(weight: Tensor, scale: Tensor, largest: float) -> Tensor:
    return (weight.detach().float() / scale.float()).clamp_(-largest, largest)


def widen(stored: Tensor, scale: Tensor) -> Tensor:
    """Return what :func:`quantise` stored, in the type of its scale."""
    eight = stored.view(torch.float8_e4m3fn) if stored.dtype == torch.uint8 else stored
    return eight.to(scale.dtype).mul_(scale)
