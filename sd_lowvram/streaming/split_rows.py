"""A layer whose weights are larger than their share of the device, computed by rows of its weight.

The layer's own forward runs once for every part, while its weight and bias hold just these rows: each output is made
from one row, so the parts are the whole. Fidelity: ``rounding``, as kernels may be chosen by the number of outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ..weights import place_part

Part = tuple[tuple[int, int], contextlib.AbstractContextManager[Any]]
"""First and last output, and a context in which the layer holds the rows that make them."""


def run_in_parts(module: nn.Module, parts: Iterable[Part], original: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Compute ``original(*inputs)`` a part of the outputs at a time.

    Args:
        module: a Linear (..., outputs), a Conv2d (N, outputs, H, W) or a Conv3d (N, outputs, frames, H, W).
        parts: rows of each part, with the context in which its weights are on the device.
        original: the module's forward.
        inputs: its arguments.

    Returns:
        The whole output.
    """
    dims = 3 if isinstance(module, nn.Conv3d) else 2 if isinstance(module, nn.Conv2d) else 0
    outputs = getattr(module, "out_channels" if dims else "out_features")
    out: Tensor | None = None
    for (start, _), held in parts:
        with held:
            out = place_part(out, original(*inputs), -1 - dims, start, outputs)  # torch convolves maps without N too
    assert out is not None
    return out
