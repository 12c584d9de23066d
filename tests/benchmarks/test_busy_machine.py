"""What a busy machine gives is not told as a figure: processor time against wall time, and spread, decide."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import finite, ladder, matrix, pictures, steps, tables, variance
from sd_lowvram.devices import pairs

CPU = torch.device("cpu")
QUIET = {"policy": "ours", "slope": 0.1, "intercept": 0.2, "r_squared": 0.99, "seconds": [1.2, 2.2, 3.2], "own": 0.99}
PAIR = {"plain_seconds": 2.0, "seconds": 1.0, "ratio": 2.0, "plain_spread": 0.01, "spread": 0.02, "ratio_spread": 0.03}


def row_of(lines: Any, name: str) -> list[str]:
    return next(line for line in lines if line.startswith(f"| {name} |")).strip("| ").split(" | ")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ["100.0", "200.0"]),
        ({"own": 0.4}, [tables.BUSY] * 2),
        ({"r_squared": 0.13, "slope": -0.106}, ["not told: no line"] * 2),
    ],
)
def test_a_line_through_times_that_are_none_is_not_told(change: dict[str, Any], told: list[str]) -> None:
    report = {"model": "demo", "size": 64, "counts": [10, 20, 30], "device": "cpu", "left_out": []}
    assert row_of(steps.lines({**report, "rows": [{**QUIET, **change}]}), "ours")[1:3] == told


@pytest.mark.parametrize(("own", "told"), [(0.95, "0.1000"), (0.5, tables.BUSY)])
def test_how_much_times_scatter_is_not_told_of_a_busy_machine(own: float, told: str) -> None:
    row = {"policy": "ours", "mean": 1.0, "deviation": 0.1, "variation": 0.1, "own": own}
    report = {"model": "demo", "size": 64, "steps": 1, "runs": 3, "device": "cpu", "left_out": [], "rows": [row]}
    assert row_of(variance.lines(report), "ours")[2] == told


@pytest.mark.parametrize(
    ("change", "told"), [({}, "2.00 ± 3%"), ({"own": 0.3}, tables.BUSY), ({"ratio_spread": 0.4}, tables.BUSY)]
)
def test_a_ratio_stands_beside_both_its_sides(change: dict[str, Any], told: str) -> None:
    row = {"name": "this", "error": 0.0, "warm_up_seconds": 0.0, "fidelity": "bitwise", "published": None, "own": 1.0}
    report = {"source": "B", "model": "demo", "size": 64, "device": "cpu", "threads": 1, "torch": "2", "pairs": 3}
    lines = ladder.lines({**report, "left_out": {}, "rows": [{**row, **PAIR, **change}]})
    assert row_of(lines, "this")[1:4] == ["2.000 ± 1%", "1.000 ± 2%", told]


def test_a_cell_of_a_busy_machine_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.3, 0.9, 0.9, 0.9, 0.9])
    monkeypatch.setattr(pictures, "timed_pictures", lambda *_: pairs.PairedTimes([[1.0, 1.0, 1.0]], next(shares)))
    first, second = (matrix.run(None, (64, 128), steps=1, out=tmp_path) for _ in range(2))
    assert tables.BUSY in "\n".join(matrix.lines(first)) and None in matrix.seconds_by_size(first).values()
    assert tables.BUSY not in "\n".join(matrix.lines(second)) and len(second["cells"]) == 4
    assert next(shares, None) is None


def test_a_processor_that_others_have_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    used = time.thread_time
    monkeypatch.setattr(time, "thread_time", lambda: used() / 4)
    assert tables.own_share() < 0.3
    turns = pairs.in_turn([lambda: sum(range(100_000))] * 2, 3, CPU)
    assert [len(one) for one in turns.seconds] == [3, 3] and turns.own < 0.3
    assert not tables.trusted(pairs.figures(*turns.seconds, turns.own))
    assert "The machine was busy" in tables.origin_line({"made": tables.origin()})


def test_who_is_first_of_a_pair_changes() -> None:
    order: list[str] = []
    pairs.in_turn([lambda: order.append("a"), lambda: order.append("b")], 2, CPU)
    assert "".join(order) == "baabba"


def test_the_spread_is_half_of_what_lies_between_the_quartiles() -> None:
    assert pairs.spread([1.0, 2.0]) is None and pairs.spread([2.0] * 5) == 0
    assert pairs.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1 / 3)


def test_what_is_measured_says_where_and_by_which_command(tmp_path: Path) -> None:
    with tables.told_as("python -m benchmarks finite"):
        report = finite.written({"rows": []}, lambda report: ["# Nothing"], tmp_path / "a.md")
    made = report["made"]
    assert made["torch"] == torch.__version__ and made["commit"] and made["date"] and made["processor"]
    assert "by `python -m benchmarks finite`" in (tmp_path / "a.md").read_text(encoding="utf-8")
