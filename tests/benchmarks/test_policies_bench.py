"""Tables that compare policies: each command, small, with its JSON and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import cards, peers
from benchmarks.cli import app
from benchmarks.tables import whole


def told(out: Path, *words: str) -> Any:
    result = CliRunner().invoke(app, [*words, "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert json.loads(out.with_suffix(".json").read_text()) == report
    return report


def written(out: Path, lines: Any, report: Any) -> bool:
    return out.read_text() == "\n".join(whole(report, lines)) + "\n"


@pytest.mark.slow(20)
def test_a_peer_is_measured_by_the_counters_that_measure_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "measure", lambda trial, **given: trial(**given))
    monkeypatch.setattr(peers, "THEIRS", {"diffusers, both": peers.THEIRS["diffusers, both"]})
    monkeypatch.setattr(peers, "OURS", {peers.LEAST: True})
    out = tmp_path / "peers.md"
    report = told(out, "peers", "--size", "128", "--steps", "1")
    theirs, ours = report["rows"]
    assert theirs["allocator_bytes"] > 50e6 < ours["allocator_bytes"] and ours["most"] <= 1
    assert all((row["most"] > 0) == (row["differing"] > 0) and row["seconds"] > 0 for row in report["rows"])
    assert written(out, peers.lines, report) and "mmgp" in report["left_out"]


@pytest.mark.slow(20)
def test_a_card_that_is_too_small_is_told_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "SIDES", {"sd15": (1024,)})
    monkeypatch.setattr(cards, "POLICIES", ("compvis", "ours"))
    out = tmp_path / "cards.md"
    (row,) = told(out, "cards", "--gpu", "gtx1650")["rows"]
    theirs, ours = row["cells"]
    assert theirs["needed_bytes"] > row["vram_bytes"] >= ours["peak_bytes"]
    assert "needs" in out.read_text() and ours["seconds"] > 0
