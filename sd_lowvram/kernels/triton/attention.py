"""Partially fused softmax attention: of the scores of a row only their maximum m and sum s are kept.

A program has some rows of queries of one head, goes through the keys in their order and weighs its sum of values anew
where m rises. It writes what it alone computes, so the same bits come at every run. Scores, m, s and the sum are in
float32. Fidelity: ``rounding``. Source: Chen et al. 2023, "Speed Is All You Need"; the rising maximum is Milakov and
Gimelshein's, 2018.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.problem import empty_output
from .launch import launching

WIDEST = 256
"""Channels of a head that a program holds at once."""


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """`fused_softmax` in plain PyTorch."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def fused_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Attention of q (batch, heads, queries, width), k and v, none wider than `WIDEST`.

    Args:
        mask: bool (True attends) or additive, broadcastable to (batch, heads, queries, keys). A row that sees nothing
            gives zeros.
        scale: of the scores; width**-0.5 when not given.
    """
    widths = [max(16, triton.next_power_of_2(one.shape[-1])) for one in (q, v)]
    rows, keys = _blocks(max(widths), q.dtype)
    return launched(_attention_kernel, q, k, v, mask, scale, rows, keys, (*widths,))


def _blocks(width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows and keys of a block: what 64 KiB of shared memory hold beside each other."""
    small = width > 128 or dtype == torch.float32
    return (32, 16 if width > 128 and dtype == torch.float32 else 32) if small else (64, 64 if width <= 64 else 32)


def launched(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    rows: int,
    keys: int,
    widths: tuple[int, ...],
) -> Tensor:
    """The result of ``kernel`` for blocks of ``rows`` and ``keys``."""
    out = empty_output(q, v)
    batch, heads, queries, width = q.shape
    seen, kind = q, 0
    if mask is not None:
        whole = mask[(None,) * (4 - mask.ndim)].expand(batch, heads, queries, k.shape[2])
        seen, kind = (whole.view(torch.uint8), 1) if mask.dtype == torch.bool else (whole, 2)
    scale = width**-0.5 if scale is None else scale
    strides = [number for one in (q, k, v, out, seen) for number in one.stride()]
    shape = heads, queries, k.shape[2], width, v.shape[3]
    with launching(q):
        kernel[(triton.cdiv(queries, rows), batch * heads)](
            *(q, k, v, out, seen, scale, *shape, *strides, kind, rows, keys, *widths), num_warps=4, num_stages=1
        )
    return out


@triton.jit
def masked(scores, mask, place, inside, seen, KIND: tl.constexpr):
    """Scores with the mask on them, and minus infinity where there is no key."""
    if KIND == 1:
        scores = tl.where(tl.load(mask + place, mask=inside, other=0) != 0, scores, float("-inf"))
    if KIND == 2:
        scores += tl.load(mask + place, mask=inside, other=0.0).to(tl.float32)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def exponentials(scores, m, s):
    """exp(score - m) with the maximum as it is now, by what the sums before are to be multiplied, and m and s."""
    highest = tl.maximum(m, tl.max(scores, 1))
    level = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(scores - level[:, None])
    less = tl.exp(m - level)
    return weights, less, highest, s * less + tl.sum(weights, 1)


@triton.jit
def _attention_kernel(
    q, k, v, out, mask, scale, heads, queries, keys, width, value_width,
    q_n, q_h, q_t, q_c, k_n, k_h, k_t, k_c, v_n, v_h, v_t, v_c, o_n, o_h, o_t, o_c, m_n, m_h, m_t, m_k,
    KIND: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    channel, value = tl.arange(0, WIDTH), tl.arange(0, VALUES)
    query = tl.load(
        q + batch * q_n + head * q_h + row * q_t + channel[None, :] * q_c,
        mask=(row < queries) & (channel[None, :] < width), other=0.0,
    )  # fmt: skip
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, VALUES), tl.float32)
    for first in range(0, keys, KEYS):
        key = (first + tl.arange(0, KEYS)).to(tl.int64)
        there = tl.load(
            k + batch * k_n + head * k_h + key[None, :] * k_t + channel[:, None] * k_c,
            mask=(key[None, :] < keys) & (channel[:, None] < width), other=0.0,
        )  # fmt: skip
        scores = tl.dot(query, there, input_precision="ieee") * scale
        seen = key[None, :] < keys
        place = batch * m_n + head * m_h + row * m_t + key[None, :] * m_k
        scores = masked(scores, mask, place, seen & (row < queries), seen, KIND)
        weights, less, m, s = exponentials(scores, m, s)
        values = tl.load(
            v + batch * v_n + head * v_h + key[:, None] * v_t + value[None, :] * v_c,
            mask=(key[:, None] < keys) & (value[None, :] < value_width), other=0.0,
        )  # fmt: skip
        total = total * less[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    result = total / tl.where(s == 0.0, 1.0, s)[:, None]
    tl.store(
        out + batch * o_n + head * o_h + row * o_t + value[None, :] * o_c, result.to(out.dtype.element_ty),
        mask=(row < queries) & (value[None, :] < value_width),
    )  # fmt: skip
