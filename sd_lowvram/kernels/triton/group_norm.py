"""GroupNorm with SiLU of maps (N, C, H, W) in either memory format: statistics, then one read and one write.

The first kernel gives mean and sum of squared deviations, in float32, of each chunk of a group; the second merges them
in a fixed order (Chan, Golub and LeVeque 1983), so that the same bits come at every run, and writes the result. No map
exists in between. Fidelity: ``rounding``. Source: fused kernels of serving libraries; Chen et al. 2023 for GroupNorm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ..attention.problem import is_fake
from .launch import launching

_TILE = 1024
_CHUNK = 16384
"""Elements of a chunk: few enough to be in the cache when they are read for the second time."""
_MOST_CHUNKS = 256


def reference(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, silu: bool) -> Tensor:
    """`group_norm` in plain PyTorch."""
    normed = functional.group_norm(x, groups, weight, bias, eps)
    return functional.silu(normed) if silu else normed


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    silu: bool = True,
) -> Tensor:
    """GroupNorm of ``x`` (N, C, H, W), followed by SiLU if ``silu``. Return a new tensor of the same layout.

    Args:
        x: (N, C, H, W).
        groups: number of groups of channels.
        weight, bias: (C) each, of any floating type.
        eps: added to the variance.
        silu: True to apply SiLU.
    """
    count, channels, pixels = x.shape[0], x.shape[1], x.shape[2:].numel()
    width = channels // groups
    chunk = max(1, _CHUNK // width, -(-pixels // _MOST_CHUNKS))
    chunks = -(-pixels // chunk)
    partial = torch.empty(count * groups, chunks, 2, dtype=torch.float32, device=x.device)
    if is_fake(x):  # as many operators as there are kernels, which read and write what these do
        x.sum(dtype=torch.float32)
        return x.neg()
    x, strides = join_rows(x)
    out = torch.empty_like(x)
    tile = tile_of(width, min(chunk, pixels), strides)
    places = (groups, width, pixels, chunk, chunks)
    with launching(x):
        _moments_kernel[(count * groups, chunks)](x, partial, *places, *strides, *tile)
        _normalise_kernel[(count * groups, chunks)](
            *(x, out, partial, x if weight is None else weight, x if bias is None else bias),
            *(*places, *strides, *join_rows(out)[1], eps, triton.next_power_of_2(chunks)),
            *(weight is not None, bias is not None, silu, *tile),
        )
    return out


def join_rows(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """``x`` or a copy whose rows follow each other, and its strides by picture, channel and pixel."""
    height, width = x.shape[2:]
    if height > 1 and width > 1 and x.stride(2) != width * x.stride(3):
        x = x.contiguous()
    return x, (x.stride(0), x.stride(1), x.stride(2) if width == 1 else x.stride(3))


def tile_of(channels: int, pixels: int, strides: tuple[int, int, int]) -> tuple[int, int]:
    """Channels and pixels that a kernel takes at once, the longer side along the memory."""
    along, across = (pixels, channels) if strides[2] == 1 else (channels, pixels)
    long = min(_TILE, triton.next_power_of_2(along))
    short = min(_TILE // long, triton.next_power_of_2(across))
    return (short, long) if strides[2] == 1 else (long, short)


@triton.jit
def _moments_kernel(
    x, partial, groups, width, pixels, chunk, chunks, stride_n, stride_c, stride_p,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    start = part * chunk
    stop = tl.minimum(start + chunk, pixels)
    channels = tl.arange(0, CHANNELS)[:, None]
    places = tl.arange(0, PIXELS)[None, :]
    base = x + (row // groups).to(tl.int64) * stride_n + ((row % groups) * width).to(tl.int64) * stride_c
    total = tl.zeros((CHANNELS, PIXELS), tl.float32)
    for c in range(0, width, CHANNELS):
        for p in range(start, stop, PIXELS):
            inside = (c + channels < width) & (p + places < stop)
            where = (c + channels).to(tl.int64) * stride_c + (p + places).to(tl.int64) * stride_p
            total += tl.load(base + where, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(total, 1), 0) / (width * (stop - start)).to(tl.float32)
    squares = tl.zeros((CHANNELS, PIXELS), tl.float32)
    for c in range(0, width, CHANNELS):
        for p in range(start, stop, PIXELS):
            inside = (c + channels < width) & (p + places < stop)
            where = (c + channels).to(tl.int64) * stride_c + (p + places).to(tl.int64) * stride_p
            apart = tl.load(base + where, mask=inside, other=0.0).to(tl.float32) - mean
            squares += tl.where(inside, apart * apart, 0.0)
    place = partial + (row.to(tl.int64) * chunks + part) * 2
    tl.store(place, mean)
    tl.store(place + 1, tl.sum(tl.sum(squares, 1), 0))


@triton.jit
def _normalise_kernel(
    x, out, partial, weight, bias, groups, width, pixels, chunk, chunks, stride_n, stride_c, stride_p,
    out_n, out_c, out_p, eps, CHUNKS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    parts = tl.arange(0, CHUNKS)
    held = parts < chunks
    sizes = tl.where(held, tl.minimum(chunk, pixels - parts * chunk) * width, 0).to(tl.float32)
    means = tl.load(partial + (row.to(tl.int64) * chunks + parts) * 2, mask=held, other=0.0)
    squares = tl.load(partial + (row.to(tl.int64) * chunks + parts) * 2 + 1, mask=held, other=0.0)
    total = tl.sum(sizes, 0)
    mean = tl.sum(means * sizes, 0) / total
    apart = tl.where(held, means - mean, 0.0)
    variance = (tl.sum(squares, 0) + tl.sum(apart * apart * sizes, 0)) / total
    scale = 1.0 / tl.sqrt(variance + eps)
    start = part * chunk
    stop = tl.minimum(start + chunk, pixels)
    channels = tl.arange(0, CHANNELS)[:, None]
    places = tl.arange(0, PIXELS)[None, :]
    picture, first = (row // groups).to(tl.int64), (row % groups) * width
    for c in range(0, width, CHANNELS):
        channel = (first + c + channels).to(tl.int64)
        is_inside = c + channels < width
        gain, shift = scale, 0.0
        if WEIGHT:
            gain = scale * tl.load(weight + channel, mask=is_inside, other=0.0).to(tl.float32)
        if BIAS:
            shift = tl.load(bias + channel, mask=is_inside, other=0.0).to(tl.float32)
        for p in range(start, stop, PIXELS):
            pixel = (p + places).to(tl.int64)
            inside = is_inside & (p + places < stop)
            value = tl.load(x + picture * stride_n + channel * stride_c + pixel * stride_p, mask=inside, other=0.0)
            value = (value.to(tl.float32) - mean) * gain + shift
            if SILU:
                value = value * tl.sigmoid(value)
            where = picture * out_n + channel * out_c + pixel * out_p
            tl.store(out + where, value.to(out.dtype.element_ty), mask=inside)
