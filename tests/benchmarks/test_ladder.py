"""``ladder`` in processes of its own, on the demo model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


def told(*arguments: str) -> Any:
    command = [sys.executable, "-m", "benchmarks", *arguments, "--model", "demo", "--json"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=None, stdin=subprocess.DEVNULL
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout)


@pytest.mark.slow(60)
@pytest.mark.parametrize("source", ["B", "E"])
def test_the_ladder_has_its_sources_rows_and_ours(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")  # what takes minutes is left out, and named
    report = told("ladder", "--of", source, "--pairs", "1", "--size", "64")
    rows = {row["name"]: row for row in report["rows"]}
    first, own = ("original", "channels last") if source == "B" else ("fp32", "inference mode")
    traced = {"traced", "traced, as kept"} if source == "B" else set()
    assert {first, own, "fused QKV products", *traced} <= rows.keys()
    assert all(row["seconds"] > 0 and row["ratio"] > 0 for row in rows.values())
    assert rows[first]["published"] == 1.0 and rows[first]["error"] == 0
    assert all(row["error"] < 1e-3 for row in rows.values() if row["fidelity"] != "approximate")
    assert "no-such-compiler is not found" in report["left_out"]["compiled"]


def test_a_source_without_a_ladder_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks", "ladder", "--of", "Z"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and "--of" in ended.stderr and "Traceback" not in ended.stderr
