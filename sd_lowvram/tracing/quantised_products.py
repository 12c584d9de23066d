"""Products with quantised weights, by torch's operators: what the kernels of quantisers hold, and their work.

Kernels that widen a whole weight before the product hold it in the type of the input, and those of 8 bits hold sums of
32 bits. Some kernels widen a small weight as they go; a plan has room for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _of_4bit(
    x: Tensor, weight: Tensor, shape: Sequence[int], absmax: Tensor, size: int, kind: str, bias: Any = None, *rest: Any
) -> Tensor:
    return functional.linear(x, x.new_empty(list(shape)), bias)


def _of_packed_4bit(x: Tensor, weight: Tensor, shape: Sequence[int], *rest: Any) -> Tensor:
    return functional.linear(x, x.new_empty(1).expand(list(shape)))


def _in_rows(x: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, None]:
    rows = x.numel() // x.shape[-1]
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(rows, dtype=torch.float32), None


def _of_8bit(
    x: Tensor, weight: Tensor, row: Tensor, column: Tensor, bias: Any = None, dtype: torch.dtype | None = None
) -> Tensor:
    one = row.new_empty(1)
    sums = functional.linear(one.expand(x.shape), one.expand(weight.shape))  # as wide as integers of 32 bits
    return sums.to(dtype or torch.float16, copy=True)


def _of_8bit_mixed(
    x: Tensor, rows: Tensor, weight: Tensor, row: Tensor, column: Tensor, *rest: Any
) -> tuple[Tensor, None]:
    return _of_8bit(rows, weight, row, column, dtype=x.dtype), None


def _of_bytes(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    wide = scales * (weight.to(scales.dtype) if weight.is_floating_point() else weight)
    return torch.matmul(x.to(scales.dtype), wide.t())


MADE_OF: dict[str, Callable[..., Any]] = {
    "bitsandbytes::gemm_4bit": _of_4bit,
    "bitsandbytes::gemv_4bit": _of_packed_4bit,
    "bitsandbytes::int8_vectorwise_quant": _in_rows,
    "bitsandbytes::int8_scaled_mm": _of_8bit,
    "bitsandbytes::int8_mixed_scaled_mm": _of_8bit_mixed,
    "quanto::qbytes_mm": _of_bytes,
}
"""By the names of the operators."""
