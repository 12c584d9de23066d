"""Convolutions on a CPU, where torch has two kernels: its own, and oneDNN's.

torch's own kernel unfolds its input, 27 times as large for a kernel of 3x3x3; oneDNN's mostly does not, and sums in
another order. float32 goes by the map's size; 16-bit types go to oneDNN where its instructions know them. A strip of a
map is given to the kernel that the whole map would go to: the strip is as fast, and has the same bits where the
processor has AVX-512. Without, oneDNN sums a strip in an order of its own, and the result is equal up to rounding.

Which kernel oneDNN picks depends on the processor and on ONEDNN_MAX_CPU_ISA. Where several are possible, bytes are
those of the one that holds most.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat import autocast_dtype
from ..compat.private import FakeTensor, may_use
from ..memory.accounts import traces_cpu

_LEAST = 20480
"""Elements of a map's first four dimensions, up to which torch unfolds one picture of float32."""


def is_on_cpu(x: Tensor) -> bool:
    """True if a CPU computes with ``x``; in a trace, in the traced run."""
    return traces_cpu() if isinstance(x, FakeTensor) else x.device.type == "cpu"


def is_float32_on_cpu(x: Tensor) -> bool:
    """True if the kernel that convolves ``x`` depends on its size; in a trace, in the traced run."""
    if x.dtype != torch.float32 or autocast_dtype("cpu") is not None or not torch.backends.mkldnn.is_available():
        return False
    return is_on_cpu(x)


def unfolds(shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int] = (1,), groups: int = 1) -> bool:
    """Return True if torch unfolds a map of float32 to convolve it.

    Args:
        shape: shape of the map, with padding that is added outside of the kernel's own call.
        kernel: height and width of the kernel.
        stride, groups: of the convolution.
    """
    if max(kernel[-2:]) == 1 and max(stride) == 1 and shape[0] < 16 and torch.get_num_threads() == 1:
        return True
    return groups == 1 and min(kernel[-2:]) <= 3 and shape[0] == 1 and math.prod(shape[:4]) <= _LEAST


def is_unfolded(image: Tensor, kernel: Sequence[int], stride: Sequence[int], groups: int) -> bool:
    """True if torch's own kernel convolves ``image``, not oneDNN's."""
    if image.dtype in _HALF:
        return not runs_onednn(image.dtype)
    return not is_float32_on_cpu(image) or unfolds(image.shape, kernel, stride, groups)


def unfolded_bytes(image: Tensor, kernel: Sequence[int], stride: Sequence[int], result: Tensor, groups: int = 1) -> int:
    """Bytes that unfolding holds in addition to map and result; none for single pixels, which need no unfolding.

    Groups are convolved one after the other; a group's part of the map is copied where there are several pictures.
    """
    copied = 0 if groups == 1 or len(image) == 1 else image.nbytes // groups
    parts = 0 if groups == 1 else result.nbytes
    if math.prod(kernel) == 1 and max(stride) == 1:
        return max(copied, parts)
    columns = image.shape[0] * image.shape[1] * math.prod(kernel) * result.shape[2:].numel() * image.element_size()
    return max(columns // groups + copied, parts)


_HALF = (torch.bfloat16, torch.float16)
_CHECKS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


@functools.cache
def runs_onednn(dtype: torch.dtype) -> bool:
    """True if torch passes convolutions of this 16-bit type to oneDNN."""
    check = getattr(torch.ops.mkldnn, _CHECKS[dtype], None)
    return check is not None and torch.backends.mkldnn.is_available() and bool(check())


@functools.cache
def _limit() -> str:
    """The largest instruction set that oneDNN may use; like oneDNN, read its variables once."""
    names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    return next((os.environ[name].upper() for name in names if os.environ.get(name)), "ALL")


def beyond_sse() -> bool:
    """True if oneDNN may use AVX. With SSE alone it unfolds each frame of float32, and maps of a few channels."""
    return _limit() != "SSE41" and may_use("avx2")


def has_tiles() -> bool:
    """True if oneDNN may multiply 16-bit types by AMX."""
    return (_limit() in ("ALL", "DEFAULT") or "AMX" in _limit()) and may_use("amx_tile")


def facts() -> tuple[Any, ...]:
    """Facts on this processor that the bytes of convolutions depend on."""
    return torch.get_num_threads(), *map(runs_onednn, _HALF), beyond_sse(), has_tiles()


def onednn_bytes(image: Tensor, weight: Tensor, result: Tensor, groups: int, last: bool) -> int:
    """Bytes of oneDNN's reordered copies and of its scratch memory at one moment.

    Args:
        last: the channels come last, and only weights are brought into another order.
    """
    kernel, half, channels = weight.shape[2:], image.dtype in _HALF, result.shape[1]
    padded, threads = _padded_size(result.nbytes, channels, _LANES), torch.get_num_threads()
    if not half and not beyond_sse():
        if image.dim() == 5:
            columns = image.shape[1] // groups * math.prod(kernel) * result.shape[3:].numel()
            return columns * image.element_size() + _PAGE
        if groups == 1 and channels % _LANES:
            return weight.nbytes + threads * (image.nbytes + padded)
    scratch = _tile_bytes(image, kernel) if half and has_tiles() else 0
    if last:
        return _padded_size(weight.nbytes, channels, _COLUMNS) + scratch + (threads + 1) * _PAGE
    if half and math.prod(kernel) == 1:
        return image.nbytes + weight.nbytes + 2 * result.nbytes + scratch
    blocks = threads * _FEW if channels % _LANES else 0
    if half:
        return max(image.nbytes + weight.nbytes + max(scratch, blocks), 2 * result.nbytes)
    return max(
        image.nbytes + _padded_size(weight.nbytes, channels, 2 * _LANES) + padded - result.nbytes + blocks, padded
    )


_LANES, _COLUMNS = 8, 24
"""Channels that oneDNN fills up to: of a map, and of weights where channels come last."""
_PAGE = 4 << 10
"""Bytes in which each thread has the places of its blocks, and to which scratch is filled up."""


def _padded_size(size: int, channels: int, lanes: int) -> int:
    return size // channels * -(-channels // lanes) * lanes


_FEW = 292 << 10
"""Bytes a thread of sums and blocks of few channels; of 256 KiB on most processors, 33 KB more with AVX10."""
_TILES, _BLOCK = 256 << 10, 8 << 20
"""Bytes a thread: sums, and the block of a map from which on oneDNN takes fewer rows."""
_ROWS = 10
"""Rows of such a block at most, for a kernel of three."""


def _tile_bytes(image: Tensor, kernel: Sequence[int]) -> int:
    """Bytes of the blocks of ``image`` that AMX's kernels copy, padded, each thread one.

    A bound: oneDNN fits blocks to the processor's caches. With its 3.12 on 176 shapes, as on a Sapphire Rapids of 48 KB
    and 2 MB, none held more; kernels that step by their own size unfold what a patch has in each row.
    """
    sides = [side + 2 * (size // 2) for side, size in zip(image.shape[2:], kernel, strict=True)]
    pixel = image.shape[1] * image.element_size()
    patch = kernel[-2] * -(-kernel[-1] * pixel // 64) * 64
    if max(kernel) > 3:
        return torch.get_num_threads() * (_TILES + math.prod(sides) * patch)
    row = sides[-1] * pixel * math.prod(min(side, 2 * size) for side, size in zip(sides[:-2], kernel, strict=False))
    return torch.get_num_threads() * (_TILES + min(2 * math.prod(sides) * pixel, max(_BLOCK, _ROWS * row)))


def convolve_like_whole(
    whole: Sequence[int],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve a strip by the kernel that torch chooses for the whole map, with the same bits.

    Args:
        whole: shape of the whole map.
        x: (N, C, rows, W), or (N, C, frames, rows, W).
        weight, bias, stride, padding, dilation, groups: as torch's ``conv2d`` or ``conv3d``.
    """
    sides = x.dim() - 2
    stride, padding, dilation = (
        (each,) * sides if isinstance(each, int) else each for each in (stride, padding, dilation)
    )
    if not is_float32_on_cpu(x) or unfolds(whole, weight.shape[2:], stride, groups):
        return (F.conv2d if sides == 2 else F.conv3d)(x, weight, bias, stride, padding, dilation, groups)
    return torch.mkldnn_convolution(x, weight, bias, padding, stride, dilation, groups)
