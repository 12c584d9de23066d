"""The teacher and the students of `tools/demo/students.md`, end to end with tiny numbers."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools" / "demo"
pytest.importorskip("transformers")
if not TOOLS.is_dir():
    pytest.skip("the scripts of training are not here", allow_module_level=True)

SHAPES = {"apple": "ellipse", "house": "rectangle"}
FEW = f"import combinations; combinations.THINGS = {{name: name for name in {[*SHAPES]}}}"


def run(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TOOLS, ROOT))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"{FEW}\n{code}", *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shapes, packed as the real pictures and their names are."""
    work = tmp_path_factory.mktemp("work")
    (work / "npm").mkdir()
    table = [{"short_names": [name], "unified": f"A{at}", "non_qualified": None} for at, name in enumerate(SHAPES)]
    members = {"lobehub-fluent-emoji-3d-1.1.0": {}, "emoji-datasource-16.0.0": {"emoji.json": json.dumps(table)}}
    for at, shape in enumerate(SHAPES.values()):
        picture, told = Image.new("RGBA", (64, 64)), io.BytesIO()
        getattr(ImageDraw.Draw(picture), shape)((8, 8, 56, 56), fill=(90, 60, 30), outline="white")
        picture.save(told, "webp", lossless=True)
        members["lobehub-fluent-emoji-3d-1.1.0"][f"a{at}.webp"] = told.getvalue()
    for archive, files in members.items():
        with tarfile.open(work / "npm" / f"{archive}.tgz", "w:gz") as tar:
            for name, held in files.items():
                data = held if isinstance(held, bytes) else held.encode()
                entry = tarfile.TarInfo(f"package/{name}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return work


@pytest.mark.rare
@pytest.mark.slow(60)
def test_teacher_and_students_are_trained_by_one_command_that_goes_on(archives: Path) -> None:
    small = ["--alone=1", "--together=6", "--held=3", "--batch=2", "--decoder-steps=1", "--judge-steps=2"]
    asked = ["--work", archives, *small, "--teacher-steps=2", "--steps=1", "--seeds=1"]
    code = "import smaller_unets; smaller_unets.main()"
    first = run(code, *asked, "--only", "teacher")
    assert first.returncode == 0, first.stderr
    assert (archives / "teacher" / "model_index.json").is_file() and not (archives / "runs").exists()
    scores = json.loads((archives / "judge.json").read_text(encoding="utf-8"))["scores"]
    assert {*scores} == {"real", "autoencoder"} and all(0 <= score["all"] <= 1 for score in scores.values())
    unet = json.loads((archives / "teacher" / "unet" / "config.json").read_text(encoding="utf-8"))
    assert (unet["layers_per_block"], unet["sample_size"]) == (2, 8)
    stop = """
import argparse, pathlib, sys, train_unet
told = dict(work=pathlib.Path(sys.argv[1]), layers=2, steps=9, until=9, batch=2, processes=1, rate=1e-3, seed=0)
told |= dict(channels=(64, 96, 128, 160))
for ends in ([False, True, True, True], [False, False, True, True]):
    print("stands at", train_unet.train(0, argparse.Namespace(**told), lambda: ends.pop(0)))
"""
    stopped = run(stop, archives)
    assert stopped.returncode == 0, stopped.stderr
    assert [line for line in stopped.stdout.splitlines() if "at" in line] == [
        "resumed at step 2", "stands at 3", "resumed at step 3", "stands at 4"
    ]  # fmt: skip
    again = run(code, *asked, "--only", "base", "m2")
    assert again.returncode == 0, again.stderr
    assert "judge, step" in first.stdout and "judge, step" not in again.stdout  # what is done stays done
    for name in ("base", "m2"):
        assert (archives / "runs" / name / "trained-0" / "model_index.json").is_file()
    table = archives / "table.md"
    code = "import measure; measure.main()"
    told = run(code, "--work", archives, "--seeds=1", "--steps=5", "--out", table, "--sheet", archives / "sheet.png")
    assert told.returncode == 0, told.stderr
    rows = json.loads(table.with_suffix(".json").read_text(encoding="utf-8"))["rows"]
    assert {*rows} == {"teacher", "base", "m2", "s1", "s2", "s3"} and rows["teacher"]["0"]["psnr"] == 200
    assert rows["s1"]["0"]["psnr"] != rows["s2"]["0"]["psnr"] < 200
    assert table.read_text(encoding="utf-8").endswith("\nOne seed shows no difference between rows.\n")
    assert float((archives / "hours.txt").read_text(encoding="utf-8")) > 0


def test_no_picture_of_training_shows_what_is_held_out(archives: Path) -> None:
    code = """
from pathlib import Path; import sys
from combinations import *
make(Path(sys.argv[1]), 2, 8, 4)
work = Path(sys.argv[1])
trained, held = ({one for parts in read(work, part)[1] for one in parts} for part in (False, True))
assert trained | held == {*every()} and not trained & held and held and all(map(held_out, held))
never = {one for one in held if unseen_pair(one)}
assert never and not {one[:2] for one in trained} & {one[:2] for one in never}
assert {len(parts) for part in (False, True) for parts in read(work, part)[1]} == {1, 2}
"""
    out = archives / "again"
    out.mkdir()
    (out / "npm").symlink_to(archives / "npm")
    done = run(code, out)
    assert done.returncode == 0, done.stderr


def test_what_lies_within_the_spread_is_no_difference() -> None:
    code = """
from measure import apart
row = lambda *values: {str(at): {"all": value} for at, value in enumerate(values)}
assert apart(row(0.9, 0.8, 0.95), row(0.7, 0.75, 0.6), "all") == 1 == -apart(row(0.1), row(0.2), "all")
assert apart(row(0.9, 0.7, 0.8), row(0.6, 0.75, 0.5), "all") == 0 == apart(row(0.5), row(0.5), "all")
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
