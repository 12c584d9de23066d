"""Winograd's 3x3 convolution F(m, 3): m x m outputs from (m + 2) x (m + 2) products a channel instead of 9 m x m.

The transforms follow from Toom and Cook's interpolation, in rational numbers and so without rounding: with the points
a_0 ... a_m and infinity, A' evaluates polynomials of degree m - 1, G those of the kernel over the Lagrange polynomials'
denominators, and B' has their numerators' coefficients.

Fidelity: ``rounding`` in float32, and the larger the tile the coarser. Source: Winograd 1980; Lavin and Gray 2015.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import functional

from ..devices.pairs import ratio
from ..memory.repeats import representative_pieces
from ..weights import placed

SIDES = (2, 4, 6, 8)
"""Outputs of a tile, along a side."""

_POINTS = [Fraction(*pair) for pair in ((0, 1), (1, 1), (-1, 1), (2, 1), (-2, 1), (1, 2), (-1, 2), (3, 4), (-3, 4))]

_TILES = 256
"""Tiles that are multiplied at once: enough for the product of matrices, and few enough for the cache."""

_PAIRS = 3

Matrix = list[list[Fraction]]


@dataclass(frozen=True)
class Transforms:
    """``y = output @ ((kernel @ g) * (data @ d))`` for the 3 taps g and the m + 2 samples d of one side of a tile.

    Attributes:
        output: A', (m, m + 2).
        kernel: G, (m + 2, 3).
        data: B', (m + 2, m + 2).
    """

    output: Matrix
    kernel: Matrix
    data: Matrix


def transforms(side: int) -> Transforms:
    """The exact transforms of F(``side``, 3)."""
    points = _POINTS[: side + 1]
    others = [[other for other in points if other != point] for point in points]
    denominators = [_product([point - other for other in rest]) for point, rest in zip(points, others, strict=True)]
    kernel = [[point**tap / below for tap in range(3)] for point, below in zip(points, denominators, strict=True)]
    output = [[point**row for point in points] + [Fraction(row == side - 1)] for row in range(side)]
    data = [[*_coefficients(rest), Fraction(0)] for rest in others] + [_coefficients(points)]
    return Transforms(output, [*kernel, [Fraction(0), Fraction(0), Fraction(1)]], data)


def _product(factors: list[Fraction]) -> Fraction:
    result = Fraction(1)
    for factor in factors:
        result *= factor
    return result


def _coefficients(roots: list[Fraction]) -> list[Fraction]:
    """Coefficients of the polynomial with these roots and a leading 1, the constant first."""
    found = [Fraction(1)]
    for root in roots:
        found = [
            before - root * here for before, here in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)
        ]
    return found


def transformed(weight: Tensor, side: int) -> Tensor:
    """A convolution's kernels (out, in, 3, 3) as `convolve` takes them, ((m + 2)^2, out, in), in their own type."""
    outputs, inputs = weight.shape[:2]
    kernel = _as_tensor(transforms(side).kernel, _transforming(weight.dtype), weight.device)
    down = kernel @ weight.to(kernel.dtype).permute(2, 3, 0, 1).reshape(3, -1)
    across = _across(kernel, down)
    return across.view(-1, outputs, inputs).to(weight.dtype)


def convolve(x: Tensor, kernels: Tensor, bias: Tensor | None, side: int) -> Tensor:
    """The 3x3 convolution of ``x`` (N, C, H, W), padded by one zero all around, with `transformed` kernels.

    It goes by rows of tiles, so that what it holds beside maps and kernels stays in a processor's cache.
    """
    count, channels, height, width = x.shape
    down, across = -(-height // side), -(-width // side)
    exact = transforms(side)
    data, output = (_as_tensor(matrix, x.dtype, x.device) for matrix in (exact.data, exact.output))
    right = across * side - width + 1
    out: Tensor | None = None
    rows = max(1, _TILES // (across * count)) * side
    for start, stop in representative_pieces(
        [(first, min(first + rows, height)) for first in range(0, down * side, rows)], x
    ):
        strip = x[:, :, max(0, start - 1) : stop + 1]
        below = -(-(stop - start) // side) * side + 2 - strip.shape[2] - (start == 0)
        tiles = _tiles(functional.pad(strip, (1, right, int(start == 0), below)), side)
        tiles = _across(data, data @ tiles.reshape(side + 2, -1))
        products = torch.bmm(kernels, tiles.view((side + 2) ** 2, channels, -1))
        made = _across(output, output @ products.view(side + 2, -1))
        made = made.view(side, side, kernels.shape[1], count, -1, across)
        made = made.permute(3, 2, 4, 0, 5, 1).reshape(count, kernels.shape[1], -1, across * side)
        out = placed(out, made[:, :, : stop - start, :width], 2, start, height)
        del strip, tiles, products, made
    assert out is not None
    return out if bias is None else out.add_(bias.view(-1, 1, 1))


def _tiles(padded: Tensor, side: int) -> Tensor:
    """Tiles (m + 2, m + 2, C, N, down, across) of a padded map (N, C, H, W)."""
    return padded.unfold(2, side + 2, side).unfold(3, side + 2, side).permute(4, 5, 1, 0, 2, 3)


def _across(matrix: Tensor, down: Tensor) -> Tensor:
    """The other side's transform by ``matrix`` (a, b) of what is transformed down already, (a, b * others)."""
    return torch.bmm(matrix.expand(len(matrix), -1, -1), down.view(*matrix.shape, -1))


def _transforming(dtype: torch.dtype) -> torch.dtype:
    """The type in which kernels are transformed: what they lose there counts for every pixel."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _as_tensor(matrix: Matrix, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([[float(number) for number in row] for row in matrix], dtype=torch.float64).to(device, dtype)


_MAPS = ((512, 64), (512, 128), (256, 128), (128, 256))
"""Channels and side of maps in the decoder of a 512x512 picture."""


def gains(device: torch.device) -> dict[str, float]:
    """Speed-up of F(4, 3) over torch's own convolution on ``device`` in float32, with kernels transformed at each call.

    The values are ratios of medians of alternating runs."""
    found = {}
    randn = functools.partial(torch.randn, device=device, generator=torch.Generator(device))
    with torch.inference_mode():
        for channels, side in _MAPS:
            x, weight = randn(1, channels, side, side), randn(channels, channels, 3, 3)
            plain = functools.partial(functional.conv2d, x, weight, padding=1)
            ours = functools.partial(_at_once, x, weight)
            found[f"winograd, {channels} channels, {side}x{side}"] = ratio(plain, ours, device, _PAIRS)
    return found


def _at_once(x: Tensor, weight: Tensor) -> Tensor:
    return convolve(x, transformed(weight, 4), None, 4)
