"""A strip of the exact tiles as one kernel: normalised with the whole map's statistics, SiLU, and a border of zeros.

Written out in operators these are three maps of the strip. A convolution that pads by itself asks for no border; the
tiles' own have that from their layers, which are called and never unpacked. Arithmetic in float32, rounded once.
Fidelity: ``rounding``. Source: ours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ..attention.problem import is_fake
from .group_norm import tile_of
from .launch import launching

Border = tuple[int, int, int, int]
"""Columns at the left and right, rows at the top and bottom, as torch's ``pad`` takes them."""


def reference(x: Tensor, scale: Tensor, shift: Tensor, border: Border = (0, 0, 0, 0)) -> Tensor:
    """`activated_strip` in plain PyTorch."""
    normed = torch.mul(x, scale).add_(shift).to(x.dtype)
    return functional.pad(functional.silu(normed, inplace=True), border)


def activated_strip(x: Tensor, scale: Tensor, shift: Tensor, border: Border = (0, 0, 0, 0)) -> Tensor:
    """SiLU of ``x * scale + shift`` for a strip (N, C, rows, W) within a ``border`` of zeros. A new tensor.

    Args:
        scale, shift: (N or 1, C, 1, 1) in float32, of the normalisation.
    """
    left, right, top, bottom = border
    count, channels, rows, columns = x.shape
    shape = count, channels, rows + top + bottom, columns + left + right
    lies_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    layout = torch.channels_last if lies_last else torch.contiguous_format
    if is_fake(x):
        return functional.pad(x.neg(), border) if any(border) else x.neg()
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
    scale, shift = (tensor.expand(count, channels, 1, 1).contiguous() for tensor in (scale, shift))
    pixels = shape[2] * shape[3]
    tile = tile_of(channels, pixels, (out.stride(0), out.stride(1), out.stride(3)))
    grid = count * triton.cdiv(channels, tile[0]), triton.cdiv(pixels, tile[1])
    with launching(x):
        _strip_kernel[grid](
            *(x, out, scale, shift, channels, rows, columns, shape[2], shape[3], top, left, *x.stride(), *out.stride()),
            *tile,
        )
    return out


@triton.jit
def _strip_kernel(
    x, out, scale, shift, channels, rows, columns, out_rows, out_columns, top, left,
    stride_n, stride_c, stride_h, stride_w, out_n, out_c, out_h, out_w,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, CHANNELS)
    picture = tl.program_id(0) // blocks
    channel = (tl.program_id(0) % blocks) * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)[None, :]
    is_channel = channel < channels
    row, column = pixel // out_columns, pixel % out_columns
    above, before = row - top, column - left
    inside = is_channel & (above >= 0) & (above < rows) & (before >= 0) & (before < columns)
    far = picture.to(tl.int64) * stride_n + channel.to(tl.int64) * stride_c
    value = tl.load(x + far + above.to(tl.int64) * stride_h + before * stride_w, mask=inside, other=0.0)
    gain = tl.load(scale + picture * channels + channel, mask=is_channel, other=0.0)
    value = value.to(tl.float32) * gain + tl.load(shift + picture * channels + channel, mask=is_channel, other=0.0)
    value = tl.where(inside, value * tl.sigmoid(value), 0.0)
    far = picture.to(tl.int64) * out_n + channel.to(tl.int64) * out_c
    where = far + row.to(tl.int64) * out_h + column * out_w
    tl.store(out + where, value.to(out.dtype.element_ty), mask=is_channel & (pixel < out_rows * out_columns))
