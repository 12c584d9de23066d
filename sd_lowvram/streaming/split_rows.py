"""A layer whose weights are larger than their share of the device, computed by rows of its weight.

The layer's own forward runs once for every part, while its weight and bias hold just these rows: each output is made
from one row, so the parts are the whole. Fidelity: ``rounding``, as kernels may be chosen by the number of outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Part = tuple[tuple[int, int], contextlib.AbstractContextManager[Any]]
"""First and last output, and a context in which the layer holds the rows that make them."""


def in_parts(module: nn.Module, parts: Iterable[Part], original: Callable[..., Tensor], x: Tensor) -> Tensor:
    """``original(x)`` of a Linear (..., outputs) or Conv2d (N, outputs, H, W), a part of the outputs at a time."""
    dim = 1 if isinstance(module, nn.Conv2d) else -1
    outputs = getattr(module, "out_channels" if dim == 1 else "out_features")
    out: Tensor | None = None
    for (start, stop), held in parts:
        with held:
            part = original(x)
        if out is None:
            out = _room(part, dim if x.dim() == 4 or dim == -1 else 0, outputs)
        out.narrow(dim if out.dim() == 4 or dim == -1 else 0, start, stop - start).copy_(part)
        del part
    assert out is not None
    return out


def _room(part: Tensor, dim: int, outputs: int) -> Tensor:
    shape = list(part.shape)
    shape[dim] = outputs
    last = part.dim() == 4 and part.is_contiguous(memory_format=torch.channels_last) and not part.is_contiguous()
    wanted = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=wanted)
