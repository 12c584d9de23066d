"""Winograd's 3x3 convolution F(4, 3): 4x4 outputs from 6x6 products a channel, where a convolution takes 9 for each.

The transforms follow from Toom and Cook's interpolation at the points 0, 1, -1, 2, -2 and infinity. Tiles of 2x2, 6x6
and 8x8 outputs were slower or coarser.

Fidelity: ``rounding`` in float32. Source: Winograd 1980; Lavin and Gray 2015.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..devices.pairs import ratio
from ..memory.repeats import representative_pieces
from ..weights import place_part

_TILES = 256
"""Tiles that are multiplied at once: enough for the product of matrices, and few enough for the cache."""

_PAIRS = 3

SIDE = 4
"""Outputs of a tile, along a side."""

_OUTPUT = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))
_KERNEL = (
    (1 / 4, 0, 0), (-1 / 6, -1 / 6, -1 / 6), (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6), (1 / 24, -1 / 12, 1 / 6), (0, 0, 1),
)  # fmt: skip
_DATA = (
    (4, 0, -5, 0, 1, 0), (0, -4, -4, 1, 1, 0), (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0), (0, 2, -1, -2, 1, 0), (0, 4, 0, -5, 0, 1),
)  # fmt: skip
"""``y = _OUTPUT @ ((_KERNEL @ g) * (_DATA @ d))`` for the 3 taps g and the 6 samples d of one side of a tile."""


def transform_weight(weight: Tensor) -> Tensor:
    """Transform a convolution's kernels (out, in, 3, 3) to (36, out, in), in their own type."""
    outputs, inputs = weight.shape[:2]
    kernel = _tensor_of(_KERNEL, _transforming(weight.dtype), weight.device)
    down = kernel @ weight.to(kernel.dtype).permute(2, 3, 0, 1).reshape(3, -1)
    across = _across(kernel, down)
    return across.view(-1, outputs, inputs).to(weight.dtype)


def convolve(x: Tensor, kernels: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve a map with 3x3 kernels, padded by one zero all around.

    Rows of tiles are computed one after the other, so that intermediate results stay in a processor's cache.

    Args:
        x: (N, in, H, W).
        kernels: (36, out, in), from `transformed`.
        bias: (out); None: none.

    Returns:
        (N, out, H, W).
    """
    count, channels, height, width = x.shape
    down, across = -(-height // SIDE), -(-width // SIDE)
    data, output = (_tensor_of(matrix, x.dtype, x.device) for matrix in (_DATA, _OUTPUT))
    right = across * SIDE - width + 1
    out: Tensor | None = None
    rows = max(1, _TILES // (across * count)) * SIDE
    for start, stop in representative_pieces(
        [(first, min(first + rows, height)) for first in range(0, down * SIDE, rows)], x
    ):
        strip = x[:, :, max(0, start - 1) : stop + 1]
        below = -(-(stop - start) // SIDE) * SIDE + 2 - strip.shape[2] - (start == 0)
        tiles = _tiles(functional.pad(strip, (1, right, int(start == 0), below)))
        tiles = _across(data, data @ tiles.reshape(SIDE + 2, -1))
        products = torch.bmm(kernels, tiles.view((SIDE + 2) ** 2, channels, -1))
        result = _across(output, output @ products.view(SIDE + 2, -1))
        result = result.view(SIDE, SIDE, kernels.shape[1], count, -1, across)
        result = result.permute(3, 2, 4, 0, 5, 1).reshape(count, kernels.shape[1], -1, across * SIDE)
        out = place_part(out, result[:, :, : stop - start, :width], 2, start, height)
        del strip, tiles, products, result
    assert out is not None
    return out if bias is None else out.add_(bias.view(-1, 1, 1))


def _tiles(padded: Tensor) -> Tensor:
    """Tiles (m + 2, m + 2, C, N, down, across) of a padded map (N, C, H, W)."""
    return padded.unfold(2, SIDE + 2, SIDE).unfold(3, SIDE + 2, SIDE).permute(4, 5, 1, 0, 2, 3)


def _across(matrix: Tensor, down: Tensor) -> Tensor:
    """Transform along the second side by ``matrix`` (a, b) of a tensor transformed along the first, (a, b * rest)."""
    return torch.bmm(matrix.expand(len(matrix), -1, -1), down.view(*matrix.shape, -1))


def _transforming(dtype: torch.dtype) -> torch.dtype:
    """The type in which kernels are transformed: what they lose there counts for every pixel."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _tensor_of(matrix: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(matrix, dtype=torch.float64).to(device, dtype)


_MAPS = ((512, 64), (512, 128), (256, 128), (128, 256))
"""Channels and side of maps in the decoder of a 512x512 picture."""


def gains(device: torch.device) -> dict[str, float]:
    """Speed-up of F(4, 3) over torch's own convolution on ``device`` in float32, with kernels transformed at each call.

    The values are ratios of medians of alternating runs."""
    ratios = {}
    randn = functools.partial(torch.randn, device=device, generator=torch.Generator(device))
    with torch.inference_mode():
        for channels, side in _MAPS:
            x, weight = randn(1, channels, side, side), randn(channels, channels, 3, 3)
            plain = functools.partial(functional.conv2d, x, weight, padding=1)
            ours = functools.partial(_convolve_untransformed, x, weight)
            ratios[f"winograd, {channels} channels, {side}x{side}"] = ratio(plain, ours, device, _PAIRS)
    return ratios


def _convolve_untransformed(x: Tensor, weight: Tensor) -> Tensor:
    return convolve(x, transform_weight(weight), None)
