"""Attention with heads up to 512 channels wide, which the middle of the autoencoder has, as one kernel.

The sum of values of a block of rows is held whole; queries and keys are multiplied 64 channels at a time, so that
nothing else of the head's width is held. All else as in `attention`. Fidelity: ``rounding``. Source: ours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import exponentials, launched, masked

WIDEST = 512


def wide_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """`fused_softmax` for values up to `WIDEST` channels, and queries with any number of channels."""
    values = max(16, triton.next_power_of_2(v.shape[-1]))
    wide = q.dtype == torch.float32
    return launched(_wide_kernel, q, k, v, mask, scale, 16 if wide else 32, 16 if wide else 32, (64, values))


@triton.jit
def _wide_kernel(
    q, k, v, out, mask, scale, heads, queries, keys, width, value_width,
    q_n, q_h, q_t, q_c, k_n, k_h, k_t, k_c, v_n, v_h, v_t, v_c, o_n, o_h, o_t, o_c, m_n, m_h, m_t, m_k,
    KIND: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    value = tl.arange(0, VALUES)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, VALUES), tl.float32)
    for first in range(0, keys, KEYS):
        key = (first + tl.arange(0, KEYS)).to(tl.int64)
        seen = key[None, :] < keys
        scores = tl.zeros((ROWS, KEYS), tl.float32)
        for start in range(0, width, PART):
            channel = start + tl.arange(0, PART)
            query = tl.load(
                q + batch * q_n + head * q_h + row * q_t + channel[None, :] * q_c,
                mask=(row < queries) & (channel[None, :] < width), other=0.0,
            )  # fmt: skip
            there = tl.load(
                k + batch * k_n + head * k_h + key[None, :] * k_t + channel[:, None] * k_c,
                mask=seen & (channel[:, None] < width), other=0.0,
            )  # fmt: skip
            scores += tl.dot(query, there, input_precision="ieee")
        place = batch * m_n + head * m_h + row * m_t + key[None, :] * m_k
        scores = masked(scores * scale, mask, place, seen & (row < queries), seen, KIND)
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
