"""Plans of a batch know how many pictures come: where the warm-up pays for them, they compile, at a second run too."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from sd_lowvram.batches.alike import pictures_by_line
from sd_lowvram.batches.jobs import read_jobs
from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.cli import app
from sd_lowvram.commands.inputs import Job
from sd_lowvram.devices.compiling import Compiling
from sd_lowvram.hooks.replay import compiled
from sd_lowvram.kernels import compiler
from sd_lowvram.planning import cost_model

CPU = torch.device("cpu")
SMALL = ["--width", "64", "--height", "64", "--steps", "1", "--seed", "3", "--json", "--vram", "1GB", "--ram", "1GB"]


def batch(*options: str) -> dict:
    done = CliRunner().invoke(app, ["batch", "jobs.csv", "--out", "out", *SMALL, *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def costly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that takes as long as one picture for compiling, and then a third of the time for the next ones; what
    is planned to be compiled runs as it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path / "cache"))  # other caches hold plans of other rates
    Path("jobs.csv").write_text("prompt\na tree\n")
    (shape,) = batch("--dry-run")["shapes"]
    kinds = sum(map(len, compiled.kinds_of(meta_anatomy(None, torch.float32)).values()))
    known = Compiling(3.0, shape["seconds"] / kinds, 0.0)
    for module in (cost_model, compiled):
        monkeypatch.setattr(module, "compiling_of", lambda *_: known)
    monkeypatch.setattr(cost_model, "were_compiled", lambda *_: False)

    def nothing(anatomy, settings, device):
        return ()

    nothing.__name__ = "compiled"
    monkeypatch.setattr(compiled, "compiled", nothing)


def was_compiled(file: str) -> bool:
    with Image.open(Path("out", file)) as picture:
        return "compile=regional" in picture.text["parameters"]


@pytest.mark.slow(8)
@pytest.mark.skipif(compiler.why_not(CPU) is not None, reason=f"{compiler.why_not(CPU)}")
def test_many_pictures_of_a_shape_are_compiled_for_and_a_batch_that_goes_on_does_so_too(costly):
    rows = ["prompt,width,output", *(f"a tree {n},,{n}.png" for n in range(6)), "a car,72,alone.png"]
    Path("jobs.csv").write_text("\n".join(rows))
    batch()
    first = {name: Path("out", name).read_bytes() for name in ("0.png", "5.png", "alone.png")}
    assert was_compiled("0.png") and was_compiled("5.png") and not was_compiled("alone.png")
    os.unlink("out/5.png")
    assert batch()["missing"] == ["5.png"]
    assert {name: Path("out", name).read_bytes() for name in first} == first


def test_a_dry_run_plans_for_as_many(costly):
    (one,) = batch("--dry-run")["shapes"]
    Path("jobs.csv").write_text("prompt\n" + "a tree\n" * 6)
    (six,) = batch("--dry-run")["shapes"]
    assert six["seconds"] < 0.9 * 6 * one["seconds"]


def test_they_are_counted_by_what_falls_to_a_worker(tmp_path):
    """Jobs whose size is that of their picture are alike by that size."""
    for name, side in (("small.png", 64), ("other.png", 64), ("large.png", 128)):
        Image.new("RGB", (side, side)).save(tmp_path / name)
    rows = ["prompt,batch,init_image", *["a,,"] * 7, "b,2,", "b,2,"]
    rows += [f"c,,{tmp_path / name}" for name in ("small.png", "other.png", "large.png")]
    (tmp_path / "jobs.csv").write_text("\n".join(rows))
    tasks = read_jobs(tmp_path / "jobs.csv", Job(""), {})
    assert [*pictures_by_line(tasks, workers=1).values()] == [7] * 7 + [4] * 2 + [2, 2, 1]
    assert [*pictures_by_line(tasks, workers=2).values()] == [3] * 7 + [2] * 2 + [1] * 3
    assert [*pictures_by_line(tasks, workers=9).values()] == [1] * 7 + [2] * 2 + [1] * 3
