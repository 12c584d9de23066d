"""Winograd's transforms are exact, and its convolutions give what torch's own do."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from random import Random

import pytest
import tiny
import torch
from torch.nn import functional

from sd_lowvram.kernels.winograd import _DATA, _KERNEL, _OUTPUT, SIDE, convolve, transform_weight


def times(matrix: Sequence[Sequence[float]], vector: list[Fraction]) -> list[Fraction]:
    exact = ([Fraction(number).limit_denominator(24) for number in row] for row in matrix)
    return [sum((one * other for one, other in zip(row, vector, strict=True)), Fraction(0)) for row in exact]


def test_exact_in_rational_numbers() -> None:
    draw = Random(SIDE)
    taps, samples = ([Fraction(draw.randint(-99, 99), draw.randint(1, 9)) for _ in range(n)] for n in (3, SIDE + 2))
    both = zip(times(_KERNEL, taps), times(_DATA, samples), strict=True)
    expected = [sum(taps[tap] * samples[place + tap] for tap in range(3)) for place in range(SIDE)]
    assert times(_OUTPUT, [one * other for one, other in both]) == expected


@pytest.mark.parametrize("size", [(8, 8), (7, 13), (1, 1), (3, 40)])
def test_convolution(size: tuple[int, int]) -> None:
    noise = torch.Generator().manual_seed(4)
    x, weight = (torch.randn(*shape, generator=noise) for shape in ((2, 12, *size), (5, 12, 3, 3)))
    bias = torch.randn(5, generator=noise)
    expected = functional.conv2d(x.double(), weight.double(), bias.double(), padding=1)
    assert tiny.relative_error(convolve(x, transform_weight(weight), bias).double(), expected) < 3e-4
    exact = convolve(x.double(), transform_weight(weight.double()), bias.double())
    assert exact.shape == expected.shape and tiny.relative_error(exact, expected) < 1e-11
