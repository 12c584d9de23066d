"""Noise that a seed determines, whatever number type the model computes in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_NARROW = ("torch.float16", "torch.bfloat16")


@contextlib.contextmanager
def drawn_in_float32() -> Iterator[None]:
    """Make torch.randn draw 16-bit noise in float32 and round it, within the block.

    torch draws other numbers for a 16-bit tensor whose number of elements is not a multiple of 16 (a picture of
    520x520, for example), so the same seed would give another picture in fp16. The change is process-wide: for our
    programs only.
    """
    import torch

    randn = torch.randn

    def wide(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
        if str(dtype) not in _NARROW:
            return randn(*size, dtype=dtype, **options)
        return randn(*size, dtype=torch.float32, **options).to(dtype)

    torch.randn = wide
    try:
        yield
    finally:
        torch.randn = randn
