"""Scaled dot-product attention under a trace: the memory of the kernel that will run, not of the one that fakes pick.

On fake tensors torch falls to its math kernel, which holds the whole score matrix: 2,640 MiB instead of 10 for (2, 10,
4096, 64) in fp16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .accounts import on_cpu
from .operators import nbytes

Booking = Callable[[str, int, tuple[Tensor, Tensor, Tensor], Tensor], None]


class AttentionMode(TorchFunctionMode):
    """Replaces ``scaled_dot_product_attention`` by an allocation of its output, and books what its kernel holds.

    Args:
        book: called with the kernel's name, the bytes that it holds unseen, query, key and value, and the output.
    """

    def __init__(self, book: Booking) -> None:
        super().__init__()
        self._book = book
        self._original = torch.nn.functional.scaled_dot_product_attention

    def __enter__(self) -> AttentionMode:
        # A mode is off while it handles a function, such as multi_head_attention_forward, that calls attention itself.
        torch.nn.functional.scaled_dot_product_attention = self._attention  # type: ignore[assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.nn.functional.scaled_dot_product_attention = self._original

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = self._attention if func is self._original else func
        return run(*args, **(kwargs or {}))

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mask = kwargs.get("attn_mask", args[0] if args else None)
        kernel = chosen_kernel(query, mask)
        if kernel == "math":
            return self._original(query, key, value, *args, **kwargs)
        # Fused kernels lay their output out as (batch, queries, heads, width).
        *batch, heads, queries, _ = query.shape
        out = query.new_empty((*batch, queries, heads, value.shape[-1])).transpose(-2, -3)
        hidden = cpu_workspace(query, key, value) if on_cpu() else gpu_workspace(kernel, query, key)
        self._book(kernel, hidden, (query, key, value), out)
        return out


def chosen_kernel(query: Tensor, mask: Tensor | None) -> str:
    """The kernel that torch takes on a GPU that has them all: "flash", "efficient" or "math"."""
    if query.dim() != 4:
        return "math"
    half = query.dtype in (torch.float16, torch.bfloat16)
    if torch.backends.cuda.flash_sdp_enabled() and mask is None and half and query.shape[-1] <= 256:
        return "flash"
    if torch.backends.cuda.mem_efficient_sdp_enabled():
        return "efficient"
    return "flash" if torch.backends.cuda.flash_sdp_enabled() and not half else "math"


def gpu_workspace(kernel: str, query: Tensor, key: Tensor) -> int:
    """Bytes that a fused kernel holds besides its arguments and its output."""
    try:
        from ..kernels.attention import workspace_bytes
    except ImportError:
        return _row_sums(query)
    return int(workspace_bytes(kernel, query.shape, key.shape, query.dtype, query.device))


def cpu_workspace(query: Tensor, key: Tensor, value: Tensor) -> int:
    """The same for torch's kernel on the CPU: a block of scores; keys and values repacked in half types."""
    queries, keys = query.shape[-2], min(key.shape[-2], 512)
    block = min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)
    total = _row_sums(query) + 4 * torch.get_num_threads() * block * (keys + 2 + query.shape[-1])
    if query.element_size() == 2:
        total += 2 * torch.get_num_threads() * block * keys + nbytes(key) + nbytes(value)
    return total


def _row_sums(query: Tensor) -> int:
    """The logarithm of the sum of each row of scores, float32."""
    return 4 * math.prod(query.shape[:-1])
