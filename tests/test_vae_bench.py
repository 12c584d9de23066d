"""The benchmark of the autoencoder says what it measured; how fast anything is, is not asserted."""

from __future__ import annotations

import json
from typing import Any

from sd_lowvram.bench.vae import MAPS, run


def test_report_of_the_benchmark(capsys: Any) -> None:
    report = run(json=True, sizes=(64,), repeats=1, side=520)
    assert json.loads(capsys.readouterr().out) == report
    (times,) = report["times"]
    assert times["size"] == 64
    assert times["plain_seconds"] > 0
    assert all(times[kind] > 0 for kind in MAPS)
    *exact, fast, theirs = report["differences"]
    assert len(exact) == len(MAPS)
    for row in exact:
        assert row["most"] <= 1
        assert row["differing_percent"] <= 0.1
    assert min(fast["mean"], theirs["mean"]) > 10 * max(row["mean"] for row in exact)


def test_table_of_the_benchmark(capsys: Any) -> None:
    run(sizes=(), side=64)
    table = capsys.readouterr().out
    assert all(way in table for way in (*MAPS, "fast tiles", "diffusers tiling"))
