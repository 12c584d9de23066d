"""``smaller-unets`` on a narrow UNet of SD1.5's structure: rows, what is counted, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from two_layer_unets import full_size, tiny
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.smaller_unets import STUDENTS, lines, made, run
from benchmarks.tables import whole

pytest.importorskip("sd_lowvram.unets.door", reason="measures what is not here")


def test_every_student_has_its_row(tmp_path: Path) -> None:
    report = run(tmp_path / "unets.md", side=64, pairs=1, unet=tiny)
    rows = {row["name"]: row for row in report["rows"]}
    assert [*rows] == ["whole", *STUDENTS]
    sizes = [rows[name]["operations"] for name in ("whole", "M1", "M2", "M3", "Base", "Small", "Tiny")]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 7
    assert all(row["seconds"] > 0 and row["plain_seconds"] > 0 for row in report["rows"][1:])
    assert (tmp_path / "unets.md").read_text(encoding="utf-8") == "\n".join(whole(report, lines)) + "\n"
    assert json.loads((tmp_path / "unets.json").read_text(encoding="utf-8")) == report


@pytest.mark.parametrize(("name", "millions"), [("Base", 579.4), ("M1", 848.8), ("M2", 809.5)])
def test_students_of_full_size(name: str, millions: float) -> None:
    unet = made(full_size(), name)
    assert sum(weight.numel() for weight in unet.parameters()) == pytest.approx(millions * 1e6, abs=5e4)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--student", "M9"], "'M9' is unknown: choose one of Base, Small"),
        (["--size", "100"], "100"),
        (["--pairs", "0"], "0"),
    ],
)
def test_refusals(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["smaller-unets", *arguments])
    assert result.exit_code == 2 and told in " ".join(result.output.split())
