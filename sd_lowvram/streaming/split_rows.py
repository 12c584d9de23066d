"""A layer whose weights are larger than their share of the device, computed by rows of its weight.

The layer's own forward runs once for every part, while its weight and bias hold just these rows: each output is made
from one row, so the parts are the whole. Fidelity: ``rounding``, as kernels may be chosen by the number of outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ..weights import placed

Part = tuple[tuple[int, int], contextlib.AbstractContextManager[Any]]
"""First and last output, and a context in which the layer holds the rows that make them."""


def in_parts(module: nn.Module, parts: Iterable[Part], original: Callable[..., Tensor], x: Tensor) -> Tensor:
    """``original(x)`` of a Linear (..., outputs) or Conv2d (N, outputs, H, W), a part of the outputs at a time."""
    convolves = isinstance(module, nn.Conv2d)
    dim = -3 if convolves else -1  # torch convolves a map (C, H, W) too
    outputs = getattr(module, "out_channels" if convolves else "out_features")
    out: Tensor | None = None
    for (start, _), held in parts:
        with held:
            out = placed(out, original(x), dim, start, outputs)
    assert out is not None
    return out
