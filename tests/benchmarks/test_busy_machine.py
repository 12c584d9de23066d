"""Figures of a busy machine are left out: processor time against wall time, and spread, decide."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import ladder, tables
from sd_lowvram.devices import pairs

CPU = torch.device("cpu")
PAIR = {"plain_seconds": 2.0, "seconds": 1.0, "ratio": 2.0, "plain_spread": 0.01, "spread": 0.02, "ratio_spread": 0.03}


def row_of(lines: Any, name: str) -> list[str]:
    return next(line for line in lines if line.startswith(f"| {name} |")).strip("| ").split(" | ")


@pytest.mark.parametrize(
    ("change", "cells"),
    [
        ({}, ["2.000 ± 1%", "1.000 ± 2%", "2.00 ± 3%"]),
        ({"own": 0.3}, ["", "", tables.BUSY]),
        ({"ratio_spread": 0.4}, ["", "", tables.BUSY]),
    ],
)
def test_a_ratio_and_both_its_sides_are_printed_or_omitted(change: dict[str, Any], cells: list[str]) -> None:
    row = {"name": "this", "error": 0.0, "warm_up_seconds": 0.0, "fidelity": "bitwise", "published": None, "own": 1.0}
    report = {"source": "B", "model": "demo", "size": 64, "device": "cpu", "threads": 1, "torch": "2", "pairs": 3}
    lines = ladder.lines({**report, "left_out": {}, "rows": [{**row, **PAIR, **change}]})
    assert row_of(lines, "this")[1:4] == cells


def test_a_processor_that_others_have_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    used = time.thread_time
    monkeypatch.setattr(time, "thread_time", lambda: used() / 4)
    assert tables.own_share() < 0.3
    turns = pairs.time_alternately([lambda: sum(range(100_000))] * 2, 3, CPU)
    assert [len(one) for one in turns.seconds] == [3, 3] and turns.own < 0.3
    assert not tables.trusted(pairs.figures(*turns.seconds, turns.own))
    assert "The machine was busy" in tables.origin_line({"made": tables.origin()})


def test_who_is_first_of_a_pair_changes() -> None:
    order: list[str] = []
    pairs.time_alternately([lambda: order.append("a"), lambda: order.append("b")], 2, CPU)
    assert "".join(order) == "baabba"


def test_the_spread_is_half_of_what_lies_between_the_quartiles() -> None:
    assert pairs.spread([1.0, 2.0]) is None and pairs.spread([2.0] * 5) == 0
    assert pairs.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1 / 3)


def test_what_is_measured_says_where_and_by_which_command(tmp_path: Path) -> None:
    with tables.told_as("python -m benchmarks vae"):
        report = tables.written({"rows": []}, lambda report: ["# Nothing"], tmp_path / "a.md")
    made = report["made"]
    assert made["torch"] == torch.__version__ and made["commit"] and made["date"] and made["processor"]
    assert "by `python -m benchmarks vae`" in (tmp_path / "a.md").read_text(encoding="utf-8")
