"""Scaled dot-product attention in a trace: the memory of the kernel that will run, not of the kernel that fake tensors
choose.

For fake tensors torch may choose its math kernel, which holds the whole score matrix: 2,640 MiB instead of 10 for (2,
10, 4096, 64) in fp16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..compat.private import FakeTensor
from ..memory.accounts import traces_cpu

Booking = Callable[[str, int, tuple[Tensor, Tensor, Tensor], Tensor], None]


@contextlib.contextmanager
def traced_attention(book: Booking) -> Iterator[None]:
    """Make torch's scaled_dot_product_attention only allocate its output for fake tensors, within the block.

    The attribute is replaced, because a function mode would slow down every access to a tensor's shape. Real tensors,
    and other threads, still use the original.

    Args:
        book: function that is called with the kernel's name, its hidden bytes, (query, key, value), and the output.
    """
    from ..kernels.attention.problem import problem_of
    from ..kernels.attention.registry import held_bytes
    from ..kernels.attention.torch_kernels import SWITCHES, TORCHS_ATTENTION, kernel_to_book

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mask = kwargs.get("attn_mask", args[0] if args else None)
        if not isinstance(query, FakeTensor):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        with SWITCHES.hold_unset():
            kernel = kernel_to_book() or chosen_kernel(query, value, mask)
        if kernel == "math, in float32":
            return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, *args, **kwargs)[0]  # type: ignore[no-any-return]
        if kernel == "math":
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        batch, heads, queries, _ = query.shape
        width = value.shape[-1]
        if kernel in ("flash", "cudnn") and query.shape[-1] == width:
            out = torch.empty_like(query)
        else:  # these kernels lay out their output as (batch, queries, heads, width)
            out = query.new_empty((batch, queries, heads, width)).transpose(1, 2)
        book(kernel, held_bytes(kernel, problem_of(query, key, value)), (query, key, value), out)
        return out

    with TORCHS_ATTENTION.to(attention):
        yield


def chosen_kernel(query: Tensor, value: Tensor, mask: Tensor | None) -> str:
    """Return the kernel that torch chooses on a GPU that has them all, or on the CPU.

    Args:
        query: (batch, heads, queries, width).
        value: (batch, heads, keys, value width).
        mask: as torch's ``attn_mask``.

    Returns:
        "flash", "efficient" or "math"; "cudnn" if the present GPU prefers that; "math, in float32" if it cannot compute
        in bf16.
    """
    if query.dim() != 4:
        return "math"
    flash = torch.backends.cuda.flash_sdp_enabled() and query.shape[-1] == value.shape[-1]
    if traces_cpu():
        return "flash" if flash else "math"
    from ..kernels.attention.problem import has_bf16, problem_of
    from ..kernels.attention.torch_kernels import own_kernel

    if query.dtype == torch.bfloat16 and not has_bf16(query.device):
        return "math, in float32"
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and own_kernel(problem_of(query, value, value, mask)) == "cudnn":
        return "cudnn"
    if flash and mask is None and half and query.shape[-1] <= 256:
        return "flash"
    return "efficient" if torch.backends.cuda.mem_efficient_sdp_enabled() else "math"
