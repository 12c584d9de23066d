"""Winograd's transforms are exact, and what the benchmark tells follows from them."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tiny
import torch
from torch.nn import functional

from sd_lowvram.bench.winograd import PUBLISHED, lines, run
from sd_lowvram.kernels.winograd import SIDES, Matrix, convolve, gain, transformed, transforms


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
def test_gains_are_those_that_were_published(side: int) -> None:
    """But for the source's rounding, which has 1.80 for 16/9 and 7.12 for 64/9."""
    ours = gain(side)
    for exact, published in zip((ours.operations, ours.intermediates, ours.weights), PUBLISHED[side], strict=True):
        assert abs(float(exact) / published - 1) < 0.015
    assert gain(6).intermediates == Fraction(16, 9)


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


def test_the_benchmark_says_what_it_found(tmp_path: Path) -> None:
    report = run(tmp_path / "winograd.md", pairs=1, shapes=((16, 8, 8),))
    assert json.loads((tmp_path / "winograd.json").read_text()) == report
    told = (tmp_path / "winograd.md").read_text()
    assert "| 6x6 | 5.06 / 5.06 | 1.78 / 1.8 | 7.11 / 7.12 |" in told
    assert [row["tile"] for row in report["times"]] == list(SIDES)
    plain, *tiles = report["errors"]
    assert all(row["fp32"] < 1e-3 for row in (plain, *tiles)) and tiles[-1]["fp16"] > 10 * plain["fp16"]


def test_a_benchmark_that_wins_nowhere_says_so() -> None:
    report: dict[str, Any] = run(pairs=1, shapes=((4, 4, 4),))
    for row in report["times"]:
        row["ratio"] = 0.9
    assert any("It is faster nowhere." in line for line in lines(report))
