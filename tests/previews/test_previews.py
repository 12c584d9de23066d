"""Previews: what the run heads for, in colours, while the run itself keeps its bits."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import families
import pytest
import torch
from torch.nn.functional import adaptive_avg_pool2d
from typer.testing import CliRunner

from sd_lowvram import files
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.checkpoints.schedulers import SCHEDULERS, set_scheduler
from sd_lowvram.cli import app
from sd_lowvram.demo import COLOURS_PATH
from sd_lowvram.previews import colours
from sd_lowvram.previews.prediction import show_predictions


@pytest.fixture(scope="module")
def demo():
    pipe = load_pipeline(None, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_demos_map_is_what_fitting_it_gives(demo):
    shipped, fitted = colours.demo_colours(), colours.fit(demo.vae)
    assert torch.allclose(torch.tensor(shipped.rows), torch.tensor(fitted.rows), atol=2e-3)
    assert fitted.explained == pytest.approx(json.loads(COLOURS_PATH.read_text())["explained"], abs=2e-3)
    assert fitted.explained > 0.8


def test_previews_come_near_the_picture(demo):
    """The last is nearer to it than a plain picture of its mean colour, and nearer than the first."""
    shown = []
    with show_predictions(demo, 5, lambda step, latents: shown.append((step, latents))):
        image = demo(
            "a red apple", num_inference_steps=20, guidance_scale=4.0, output_type="pt",
            generator=torch.Generator().manual_seed(1),
        ).images  # fmt: skip
    assert [step for step, _ in shown] == [5, 10, 15, 20]
    squares = adaptive_avg_pool2d(image, shown[0][1].shape[2:])[0].permute(1, 2, 0)
    away = [(colours.demo_colours().convert(latents)[0] / 255 - squares).abs().mean() for _, latents in shown]
    assert away[-1] < 0.6 * (squares - squares.mean((0, 1))).abs().mean() and away[-1] < away[0]
    assert "step" not in vars(demo.scheduler)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_every_schedulers_last_prediction_is_its_picture(scheduler, prediction):
    pipe = families.plain("sd15")
    pipe.scheduler.register_to_config(prediction_type=prediction)
    set_scheduler(pipe, scheduler)
    asked = {"num_inference_steps": 6, "output_type": "latent", "width": 64, "height": 64}

    def run() -> torch.Tensor:
        return pipe("a cat", generator=torch.Generator().manual_seed(1), **asked).images

    whole_run, shown = run(), []
    with show_predictions(pipe, 1, lambda step, latents: shown.append(latents)):
        assert torch.equal(run(), whole_run)
    unscaled = whole_run / pipe.vae.config.scaling_factor
    away = [float((latents - unscaled).abs().mean() / unscaled.abs().mean()) for latents in shown]
    assert len(away) >= 6 and away[-1] < 0.25


def test_another_models_map_is_fitted_once(monkeypatch, tmp_path):
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))
    vae = families.plain("sd15").vae
    before = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    first = colours.colours_of(vae, lambda: "this one")
    assert all(torch.equal(tensor, before[name]) for name, tensor in vae.state_dict().items())
    monkeypatch.setattr(colours, "fit", lambda vae: pytest.fail("fitted once more"))
    assert colours.colours_of(vae, lambda: "this one") == first
    assert first.convert(torch.zeros(2, 4, 8, 9)).shape == (2, 8, 9, 3)
    (file,) = tmp_path.rglob("*.json")
    file.write_text('{"rows": [[1, 2]], "explained": 1}')
    with pytest.raises(pytest.fail.Exception):
        colours.colours_of(vae, lambda: "this one")


def test_generate(tmp_path, monkeypatch):
    """Next to each picture a preview of its size, gone at the end; the picture and its saved latents are as without."""
    seen, write = [], files.write_whole

    def watched(data: bytes, path: Path) -> None:
        write(data, path)
        seen.append(path.name)

    def pictures(*options: str) -> list[str]:
        arguments = "a red apple", "--seed", "1", "--steps", "6", "--batch", "2", "--width", "64", "--height", "64"
        result = CliRunner().invoke(app, ["generate", *arguments, "--output", str(tmp_path / "out.png"), *options])
        assert result.exit_code == 0, result.output
        assert "cannot be saved" not in result.output
        files = sorted(tmp_path.iterdir())
        assert [file.name for file in files] == ["out-1.png", "out-2.png"]
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]

    monkeypatch.setattr("sd_lowvram.commands.previews.write_whole", watched)
    assert pictures() == pictures("--preview", "2")
    assert seen == ["out-1.preview.png", "out-2.preview.png"] * 3


@pytest.mark.parametrize("typed", ["0", "-1", "100000"])
def test_bad_steps(typed):
    result = CliRunner().invoke(app, ["generate", "an apple", "--preview", typed])
    assert result.exit_code == 2 and f"--preview {typed} " in " ".join(result.output.split())
