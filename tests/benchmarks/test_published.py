"""The time model beside published times: the committed comparison is of today's plans, and holds its bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import Planned, compared, planned_times, published_times

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "published.json"


BOUNDS = {
    "basujindal-turbo": (0.10, 0.20, 0.95),
    "consciencia-turbo": (0.06, 0.15, 0.97),
    "consciencia-modified": (0.06, 0.15, 0.97),
}
"""Of the median error, of the error beyond which a tenth is, and of R^2, by policy."""


@pytest.mark.parametrize(
    "row", json.loads(COMMITTED.read_text(encoding="utf-8"))["rows"], ids=lambda row: row["policy"]
)
def test_foretold_times_follow_the_published_ones(row: dict[str, Any]) -> None:
    times = {(one["height"], one["width"]): one for one in row["times"]}
    assert {size: one["published"] for size, one in times.items()} == published_times(row["policy"])
    assert len(times) == 169 and row["agreement"]["sizes"] == 156
    median_error, worst_tenth, r_squared = BOUNDS[row["policy"]]
    assert row["agreement"]["median_error"] <= median_error and row["agreement"]["r_squared"] >= r_squared
    assert row["agreement"]["worst_tenth_error"] <= worst_tenth
    share = row["decode_share"] or 0.0
    for size, planned in planned_times(row["policy"], [(256, 256), (512, 512), (1024, 768)]).items():
        seconds = row["fixed_seconds"] + planned.on_card + share * planned.on_processor
        assert times[size]["foretold"] == pytest.approx(seconds, rel=0.01)


def test_one_fixed_part_is_fitted_to_the_squares_alone() -> None:
    published = {(1, 1): 5.0, (2, 2): 7.0, (1, 2): 6.0, (2, 1): 9.0}
    on_card = {(1, 1): 3.0, (2, 2): 5.0, (1, 2): 4.0, (2, 1): 4.0}
    found = compared(published, {size: Planned(seconds, 0.0) for size, seconds in on_card.items()})
    assert found.fixed_seconds == pytest.approx(2.0) and found.decode_share is None
    assert found.foretold[2, 1] == pytest.approx(6.0) and found.agreement.sizes == 2


def test_a_decode_on_the_processor_has_a_share_of_its_own() -> None:
    published = {(1, 1): 5.0, (2, 2): 8.0, (1, 2): 6.0, (2, 1): 6.5}
    planned = {
        (1, 1): Planned(3.0, 2.0),
        (2, 2): Planned(4.0, 6.0),
        (1, 2): Planned(3.0, 4.0),
        (2, 1): Planned(3.0, 4.0),
    }
    found = compared(published, planned)
    assert found.fixed_seconds == pytest.approx(1.0) and found.decode_share == pytest.approx(0.5)
    assert found.foretold[1, 2] == pytest.approx(6.0)
