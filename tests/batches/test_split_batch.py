"""A batch with a model of split files."""

from __future__ import annotations

import json
from pathlib import Path

import command_line
import numpy
import pytest
import split_models
from PIL import Image
from typer.testing import CliRunner

from sd_lowvram.cli import app

SIZE = ("--width", "64", "--height", "64", "--steps", "2", "--seed", "5", "--device", "cpu", "--vram", "2GB")


@pytest.mark.slow(30)
def test_a_process_of_its_own_makes_the_folders_picture(tmp_path: Path) -> None:
    pipe = split_models.flux1()
    split_models.save(pipe, tmp_path / "folder")
    options = split_models.write(pipe, "flux1", tmp_path / "files")
    of_folder = ["generate", "a cat", "--model", str(tmp_path / "folder"), "-o", str(tmp_path / "a.png"), *SIZE]
    assert CliRunner().invoke(app, of_folder).exit_code == 0
    (tmp_path / "jobs.jsonl").write_text(json.dumps({"prompt": "a cat", "output": "b.png"}), encoding="utf-8")
    batch = command_line.call("batch", "jobs.jsonl", "--out", ".", *options, *SIZE, folder=tmp_path)
    assert batch.returncode == 0, batch.stderr
    a, b = (numpy.asarray(Image.open(tmp_path / name)).astype(int) for name in ("a.png", "b.png"))
    # How files are mapped decides in which order a processor's matrix kernels sum: the last bit of a few values.
    assert abs(a - b).max() <= 1 and abs(a - b).mean() < 0.01


def test_a_part_of_a_model_is_no_column(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text("prompt,vae\na cat,b.safetensors\n", encoding="utf-8")
    done = CliRunner().invoke(app, ["batch", str(tmp_path / "jobs.csv"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2 and "vae " in done.output
