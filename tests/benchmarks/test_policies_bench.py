"""Measurements that compare policies: each command on the demo model, small, with its JSON and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import cards, fit, max_size, peers, same, steps, warmup
from benchmarks.cli import app
from benchmarks.fits import polynomial
from benchmarks.tables import whole
from sd_lowvram.policies.named import runs_on

LEFT_OUT = list(runs_on("cpu")[1])
TWO = ("--policy", "basujindal-turbo", "--policy", "diffusers-default")


def told(out: Path, *words: str) -> Any:
    result = CliRunner().invoke(app, [*words, "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert json.loads(out.with_suffix(".json").read_text()) == report
    return report


def written(out: Path, lines: Any, report: Any) -> bool:
    return out.read_text() == "\n".join(whole(report, lines)) + "\n"


@pytest.mark.slow(25)
def test_pictures_in_a_row_and_by_their_steps(tmp_path: Path) -> None:
    small = (*TWO, "--size", "64")
    out = tmp_path / "variance.md"
    row, plain = told(out, "variance", *small, "--steps", "1", "--runs", "3")["rows"]
    assert len(row["seconds"]) == 3 and row["variation"] == pytest.approx(row["deviation"] / row["mean"])
    assert plain["policy"] == "diffusers-default" and "| 0.152 | 0.023 |" in out.read_text()
    assert f"by `python -m benchmarks variance {' '.join(small)} --steps 1 --runs 3`" in out.read_text()
    out = tmp_path / "steps.md"
    report = told(out, "steps", *small, "--to", "30")
    assert report["counts"] == [10, 20, 30] and written(out, steps.lines, report)
    assert all(row["slope"] > 0 and row["r_squared"] <= 1 for row in report["rows"])


@pytest.mark.slow(15)
def test_a_first_picture_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "warmup.md"
    report = told(out, "warmup", "--policy", "compvis", "--size", "64", "--steps", "2", "--runs", "2")
    (row,) = report["rows"]
    assert row["first_beyond"] == pytest.approx(row["first_seconds"] - row["median_seconds"])
    assert {"step_beyond", "decode_beyond", "load_seconds"} <= row.keys() and written(out, warmup.lines, report)
    assert report["model"] == "demo"


@pytest.mark.slow(15)
def test_the_same_picture(tmp_path: Path) -> None:
    out = tmp_path / "same.md"
    report = told(out, "same", *TWO, "--size", "64", "--steps", "2")
    found = {tuple(pair["of"]): pair for pair in report["pairs"]}
    assert found[same.PLAIN, "diffusers-default"]["bits"] and not found[same.PLAIN, "basujindal-turbo"]["bits"]
    assert found[same.PLAIN, "basujindal-turbo"]["relative"] < 1e-4 and all(one["bits"] for one in report["again"])
    assert written(out, same.lines, report)


@pytest.mark.slow(60)
def test_the_largest_size_is_confirmed_by_runs_on_both_sides(tmp_path: Path) -> None:
    out, asked = tmp_path / "max.md", ("max-size", "--policy", "compvis", "--vram", "80MB")
    report = told(out, *asked)
    (row,) = report["rows"]
    beyond = [trial for trial in row["trials"] if trial["side"] == row["side"] + 64]
    assert row["one_more_fails"] and beyond[0]["device_bytes"] > report["cap"] and written(out, max_size.lines, report)
    (passed,) = (trial for trial in row["trials"] if trial["side"] == row["side"])
    assert passed["fits"] and passed["device_bytes"] <= report["cap"]
    out.with_suffix(".json").write_text(json.dumps({**report, "rows": [{**row, "side": 7}]}))
    assert told(out, *asked)["rows"][0]["side"] == 7  # what is there is kept
    other = CliRunner().invoke(app, [*asked[:-1], "81MB", "--out", str(out)])
    assert other.exit_code == 2 and "was made with cap" in " ".join(other.output.split())


def test_polynomials_through_points() -> None:
    found = polynomial([1e6, 2e6, 3e6, 4e6], [3.0, 7.0, 13.0, 21.0], 2)
    assert found is not None and found.coefficients == pytest.approx((1.0, 1e-6, 1e-12)) and found.r_squared == 1
    assert found.at(5e6) == pytest.approx(31.0) and polynomial([1, 1, 2], [1, 2, 3], 2) is None


def test_matrices_are_fitted_beside_the_published_ones(tmp_path: Path) -> None:
    cells = [{"height": side, "width": side, "seconds": side / 100} for side in (256, 512, 768, 1024)]
    about = {"model": "demo", "policy": "ours", "card": None, "vram": None, "steps": 1, "how": "measured"}
    matrix = tmp_path / "matrix.json"
    matrix.write_text(json.dumps({**about, "cells": [*cells, {"height": 8, "width": 8, "needed_bytes": 5}]}))
    out = tmp_path / "fit.md"
    report = told(out, "fit", str(matrix))
    rows = {row["matrix"]: row for row in report["rows"]}
    assert rows["consciencia-modified, published"]["all"]["r_squared"] > 0.99
    assert rows["demo, ours, 1 steps, measured for this machine"]["all"]["sizes"] == 4
    assert written(out, fit.lines, report)
    matrix.write_text("{}")
    refused = CliRunner().invoke(app, ["fit", str(matrix)])
    assert refused.exit_code == 2 and "is no JSON file of python -m benchmarks matrix" in refused.output


@pytest.mark.parametrize("words", [["variance", "--runs", "1"], ["same", "--policy", "fast"], ["steps", "--to", "5"]])
def test_bad_input_is_told(words: list[str]) -> None:
    assert CliRunner().invoke(app, [*words]).exit_code == 2


def test_what_needs_an_accelerator_is_refused_by_name_and_left_out_unasked() -> None:
    refused = CliRunner().invoke(app, ["same", "--policy", LEFT_OUT[0]])
    assert refused.exit_code == 2 and "needs an accelerator" in refused.output
    report = {"policies": [same.PLAIN], "pairs": [], "left_out": LEFT_OUT, "prompts": [], "model": "demo"}
    again = [{"of": [same.PLAIN, same.PLAIN], "bits": True}]
    report |= {"again": again, "size": 8, "steps": 1, "device": "cpu"}
    assert f"Left out, as they need an accelerator: {', '.join(LEFT_OUT)}." in "\n".join(same.lines(report))


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
