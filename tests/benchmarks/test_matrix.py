"""The matrix of sizes: foretold and measured, cell by cell, resumed, and never the two in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app


def told(out: Path, *arguments: str) -> Any:
    result = CliRunner().invoke(app, ["matrix", "--out", str(out), "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.slow(20)
def test_a_card_is_foretold_and_what_does_not_fit_is_grey(tmp_path: Path) -> None:
    small = ("--gpu", "rtx2070", "--from", "64", "--to", "1536", "--step", "1472", "--vram", "530MB")
    found = told(tmp_path, *small)
    cells = {(cell["height"], cell["width"]): cell for cell in found["cells"]}
    assert len(cells) == 4 and cells[64, 1536]["seconds"] == pytest.approx(cells[1536, 64]["seconds"], rel=0.05)
    assert cells[64, 64]["peak_bytes"] < 530 * 2**20 and "needed_bytes" in cells[1536, 1536]
    assert (tmp_path / "matrix-demo-rtx2070.png").read_bytes().startswith(b"\x89PNG")
    assert "needs " in (tmp_path / "matrix-demo-rtx2070.md").read_text()
    refused = CliRunner().invoke(app, ["matrix", "--out", str(tmp_path), *small[:-1], "8GB"])
    assert refused.exit_code == 2 and "was made with vram 530MB" in " ".join(refused.output.split())


def test_a_matrix_goes_on_with_the_sizes_that_it_lacks(tmp_path: Path) -> None:
    asked = ("--from", "64", "--to", "128", "--step", "64", "--steps", "1")
    found = told(tmp_path, *asked)
    file = tmp_path / "matrix-demo-here.json"
    assert json.loads(file.read_text()) == found and found["how"] == "measured" and len(found["cells"]) == 4
    marked = {**found, "cells": [{**cell, "seconds": 7.0} for cell in found["cells"][:3]]}
    file.write_text(json.dumps(marked))
    again = told(tmp_path, *asked)
    assert [cell["seconds"] == 7.0 for cell in again["cells"]] == [True] * 3 + [False]
    assert told(tmp_path, *asked, "--again")["cells"][0]["seconds"] != 7.0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--model", "sd15"], "no weights to measure with"),
        (["--from", "512", "--to", "256"], "--from 512 is beyond --to 256"),
        (["--from", "100"], "no multiple of 8"),
        (["--gpu", "voodoo"], "--gpu 'voodoo' is unknown"),
    ],
)
def test_bad_input_is_told(tmp_path: Path, arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["matrix", "--out", str(tmp_path), *arguments])
    assert result.exit_code == 2 and why in " ".join(result.output.split())
