"""A batch with a transformer of today."""

from __future__ import annotations

from pathlib import Path

import pytest
import todays
from typer.testing import CliRunner

from sd_lowvram.cli import app


def test_a_batch_with_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    todays.save(todays.klein(), tmp_path / "model")
    (tmp_path / "jobs.txt").write_text("a cat\na dog\n")
    size = ("--width", todays.SIZE, "--height", todays.SIZE, "--steps", 2, "--seed", 5, "--device", "cpu")
    command = ("batch", "jobs.txt", "--model", "model", "--out", "made", *size)
    done = CliRunner().invoke(app, [*map(str, command)])
    assert done.exit_code == 0, done.output
    assert len(list((tmp_path / "made").glob("*.png"))) == 2
