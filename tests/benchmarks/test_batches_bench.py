"""The benchmark of batches counts what is made while all workers are at work; how fast that is, is not asserted."""

from __future__ import annotations

import pytest

from benchmarks.batches import _rate


def test_loading_and_the_tail_do_not_count() -> None:
    one = [("a", 0.0, 9.0), ("a", 9.0, 1.0), ("a", 10.0, 1.0)]
    assert _rate(one) == pytest.approx(60)
    late = [("b", 0.0, 10.0), ("b", 10.0, 1.0)]  # warm at 10, and at work until 11
    assert _rate(one + late) == pytest.approx(2 * 60)
