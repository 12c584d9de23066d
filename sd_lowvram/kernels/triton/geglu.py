"""GEGLU as one kernel: from a projection's product (..., 2 D) to value * gelu(gate) (..., D).

Neither the activated gate nor a copy of either half exists in between. Arithmetic in float32, rounded once.
Fidelity: ``rounding``. Source: Shazeer 2020; as one kernel, the fused kernels of serving libraries.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ..attention.problem import is_fake
from .launch import launching


def reference(product: Tensor) -> Tensor:
    """`geglu` in plain PyTorch."""
    value, gate = product.chunk(2, dim=-1)
    return value * functional.gelu(gate)


def geglu(product: Tensor) -> Tensor:
    """``value * gelu(gate)`` of the two halves of the last dimension, the value first. A new tensor."""
    width = product.shape[-1] // 2
    if is_fake(product):  # one operator that reads a half; the other half's bytes are not counted
        return product[..., :width].neg().contiguous()
    product = product if product.is_contiguous() else product.contiguous()
    out = product.new_empty(*product.shape[:-1], width)
    block = min(1024, max(64, width & -width))
    with launching(product):
        _geglu_kernel[(out.numel() // width, triton.cdiv(width, block))](product, out, width, BLOCK=block)
    return out


@triton.jit
def _geglu_kernel(product, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(product + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(product + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (value * gelu_by_erf(gate)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gelu_by_erf(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
