"""What the benchmark tells of Winograd's convolutions."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from benchmarks.winograd import PUBLISHED, lines, run
from sd_lowvram.kernels.winograd import SIDES, gain


@pytest.mark.parametrize("side", SIDES)
def test_gains_are_those_that_were_published(side: int) -> None:
    """But for the source's rounding, which has 1.80 for 16/9 and 7.12 for 64/9."""
    ours = gain(side)
    for exact, published in zip((ours.operations, ours.intermediates, ours.weights), PUBLISHED[side], strict=True):
        assert abs(float(exact) / published - 1) < 0.015
    assert gain(6).intermediates == Fraction(16, 9)


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
