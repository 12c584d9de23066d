"""The benchmark of the autoencoder says what it measured; how fast anything is, is not asserted."""

from __future__ import annotations

import pytest

from benchmarks import vae
from benchmarks.vae import MAPS, lines, run
from sd_lowvram.errors import BadInputError


@pytest.mark.slow(12)
def test_report_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a band of its picture: as high as has several tiles of every kind."""
    whole = vae._discs
    monkeypatch.setattr(vae, "_discs", lambda side: whole(side)[..., :64])
    report = run(sizes=(64,), repeats=1, side=520, traced=(256,))
    (times,) = report["times"]
    assert times["size"] == 64
    assert times["plain_seconds"] > 0
    assert all(times[kind] > 0 for kind in MAPS)
    (peaks,) = report["peaks"]
    assert all(peaks[kind][0] <= peaks["plain"][0] for kind in MAPS)
    *exact, fast, theirs = report["differences"]
    assert len(exact) == len(MAPS)
    for row in exact:
        assert row["most"] <= 1
        assert row["differing_percent"] <= 0.1
    assert min(fast["mean"], theirs["mean"]) > 10 * max(row["mean"] for row in exact)


def test_table_of_the_benchmark() -> None:
    table = "\n".join(lines(run(sizes=(), side=64, traced=())))
    assert all(way in table for way in (*MAPS, "fast tiles", "diffusers tiling"))


@pytest.mark.slow(9)
def test_other_autoencoders() -> None:
    report = run(sizes=(), side=64, traced=(64,), model="flux2")
    table = "\n".join(lines(report))
    assert all(way in table for way in (*MAPS, "diffusers tiling", "random weights", "flux2"))
    theirs = report["errors"].pop("diffusers tiling")
    assert len(report["errors"]) == len(MAPS)
    assert max(report["errors"].values()) < 2e-5 < theirs / 100


@pytest.mark.slow(9)
def test_an_autoencoder_of_frames() -> None:
    report = run(sizes=(32,), repeats=1, side=64, traced=(256,), model="qwen-image")
    table = "\n".join(lines(report))
    assert all(way in table for way in ("exact tiles |", "diffusers tiling", "random weights", "qwen-image"))
    assert report["errors"]["exact tiles"] < 2e-5 < report["errors"]["diffusers tiling"] / 100
    (peaks,) = report["peaks"]
    assert peaks["exact"][0] < peaks["plain"][0] / 4


def test_an_autoencoder_that_nobody_knows() -> None:
    with pytest.raises(BadInputError, match="'sd3': choose one of sd15, sdxl, flux, flux2, qwen-image"):
        run(model="sd3")
