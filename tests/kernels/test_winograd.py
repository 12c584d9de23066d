"""Winograd's transforms are exact."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest
import tiny
import torch
from torch.nn import functional

from sd_lowvram.kernels.winograd import SIDES, Matrix, convolve, transformed, transforms

PUBLISHED = {2: (2.25, 4.00, 1.77), 4: (4.00, 2.25, 4.00), 6: (5.06, 1.80, 7.12), 8: (5.76, 1.56, 11.1)}
"""Multiplications saved, and transformed maps and kernels over plain ones, as Chen et al. 2023 print them."""


def times(matrix: Matrix, vector: list[Fraction]) -> list[Fraction]:
    return [sum((one * other for one, other in zip(row, vector, strict=True)), Fraction(0)) for row in matrix]


@pytest.mark.parametrize("side", SIDES)
def test_exact_in_rational_numbers(side: int) -> None:
    draw, each = Random(side), transforms(side)
    taps, samples = ([Fraction(draw.randint(-99, 99), draw.randint(1, 9)) for _ in range(n)] for n in (3, side + 2))
    both = zip(times(each.kernel, taps), times(each.data, samples), strict=True)
    expected = [sum(taps[tap] * samples[place + tap] for tap in range(3)) for place in range(side)]
    assert times(each.output, [one * other for one, other in both]) == expected


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("size", [(8, 8), (7, 13), (1, 1), (3, 40)])
def test_convolution(side: int, size: tuple[int, int]) -> None:
    noise = torch.Generator().manual_seed(side)
    x, weight = (torch.randn(*shape, generator=noise) for shape in ((2, 12, *size), (5, 12, 3, 3)))
    bias = torch.randn(5, generator=noise)
    expected = functional.conv2d(x.double(), weight.double(), bias.double(), padding=1)
    assert tiny.relative_error(convolve(x, transformed(weight, side), bias, side).double(), expected) < 3e-4
    exact = convolve(x.double(), transformed(weight.double(), side), bias.double(), side)
    assert exact.shape == expected.shape and tiny.relative_error(exact, expected) < 1e-11


@pytest.mark.parametrize("side", SIDES)
def test_gains_of_the_tiles_are_those_that_were_published(side: int) -> None:
    """Up to the source's rounding, which has 1.80 for 16/9 and 7.12 for 64/9."""
    each = transforms(side)
    products, taps, outputs = len(each.data) ** 2, len(each.kernel[0]) ** 2, len(each.output) ** 2
    ours = (taps * outputs / products, products / outputs, products / taps)
    assert ours == pytest.approx(PUBLISHED[side], rel=0.015)
