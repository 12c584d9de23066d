"""Runs that are ended at any point, in processes of their own: ``resume`` makes the picture of an unbroken run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy
import pytest
from command_line import MAIN
from PIL import Image

from sd_lowvram.checkpoints.inspection import model_path
from sd_lowvram.saved_latents.file import Saved, read_saved, write_saved

ENDED = """
import os, sys
how, step = sys.argv.pop(1), int(sys.argv.pop(1))
def end():
    if how == "exception":
        raise ValueError("injected")
    if how == "MemoryError":
        raise MemoryError("injected")
    os.kill(os.getpid(), {"SIGKILL": 9, "SIGTERM": 15, "SIGINT": 2}[how])
from diffusers import AutoencoderKL
from torch._subclasses import FakeTensor
from sd_lowvram.saved_latents.keeping import Keeper
after, decode = Keeper.record_step, AutoencoderKL.decode
def ending(self, done, values):
    if done == step and how == "NaN":
        values = {**values, "latents": values["latents"] * float("inf")}
    values = after(self, done, values)
    if done == step:
        end()
    return values
Keeper.record_step = ending
def ending_decode(self, *args, **kwargs):
    if step == 0 and not any(isinstance(weight, FakeTensor) for weight in self.parameters()):  # planned before
        end()
    return decode(self, *args, **kwargs)
AutoencoderKL.decode = ending_decode
from sd_lowvram.__main__ import main
main()
"""
CODES = {"NaN": 1, "exception": 1, "MemoryError": 3, "SIGKILL": -9, "SIGTERM": 130, "SIGINT": 130}
SOME = [("euler-a", "SIGKILL"), ("dpm++-2m-sde", "SIGTERM"), ("plms", "exception")]
"""All schedulers go through this in test_saved_latents.py, within one process."""

GENERATE = ("generate", "a red apple, on a table", "--width", 64, "--height", 64, "--seed", 5, "--vram", "2GB")


def unbroken(run, folder: Path, *options: object) -> bytes:
    done = run(MAIN, *GENERATE, *options, "-o", "unbroken.png", folder=folder)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir() if "latents" in path.name] == []
    return (folder / "unbroken.png").read_bytes()


def ended(run, folder: Path, how: str, step: int, *options: object) -> Path:
    """The latents of a run that ends after ``step``, or in its decode where that is 0."""
    often = ("--latents-every", "1step") if how == "SIGKILL" else ()
    done = run(ENDED, how, step, *GENERATE, *options, *often, "-o", "out.png", folder=folder)
    assert done.returncode == CODES[how], done.stderr
    assert how == "SIGKILL" or "sd-lowvram resume out" in done.stderr
    assert not (folder / "out.png").exists()
    return folder / "out.latents.safetensors"


def resumed(run, folder: Path, *options: object) -> bytes:
    done = run(MAIN, "resume", "out.latents.safetensors", *options, folder=folder)
    assert done.returncode == 0, done.stderr
    return (folder / "out.png").read_bytes()


@pytest.mark.slow(8)
@pytest.mark.parametrize(("scheduler", "how"), SOME)
def test_ended_after_a_step(forked, tmp_path, scheduler, how):
    options = ("--steps", 5, "--scheduler", scheduler)
    whole = unbroken(forked, tmp_path, *options)
    assert ended(forked, tmp_path, how, 3, *options).exists()
    assert resumed(forked, tmp_path) == whole
    assert not (tmp_path / "out.latents.safetensors").exists()


@pytest.mark.slow(8)
@pytest.mark.parametrize("how", ["MemoryError", "SIGKILL", "SIGINT"])
def test_ended_in_the_decode(forked, tmp_path, how):
    options = ("--steps", 3, "--batch", 2, "--negative", "a car")
    done = forked(MAIN, *GENERATE, *options, "-o", "unbroken.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = forked(ENDED, how, 0, *GENERATE, *options, "--latents-every", "never", "-o", "out.png", folder=tmp_path)
    assert done.returncode == CODES[how], done.stderr
    done = forked(MAIN, "resume", ".", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == ["out-1.png", "out-2.png"]
    for number in (1, 2):
        assert (tmp_path / f"out-{number}.png").read_bytes() == (tmp_path / f"unbroken-{number}.png").read_bytes()


@pytest.mark.slow(5)
def test_a_step_of_no_numbers_is_gone_on_from_in_a_wider_type(forked, tmp_path):
    """By the command in the error; with a scheduler that remembers a step's latents."""
    options = ("--steps", 3, "--scheduler", "dpm++-2m", "--precision", "bf16")
    unbroken(forked, tmp_path, *options)
    done = forked(ENDED, "NaN", 2, *GENERATE, *options, "-o", "out.png", folder=tmp_path)
    assert done.returncode == CODES["NaN"]
    assert "out.latents.safetensors --precision fp32" in done.stderr
    assert read_saved(tmp_path / "out.latents.safetensors").tensors["latents"].dtype.itemsize == 2
    done = forked(MAIN, "resume", "out.latents.safetensors", "--precision", "fp9", folder=tmp_path)
    assert done.returncode == 2 and "--precision" in done.stderr
    resumed(forked, tmp_path, "--precision", "fp32")
    with Image.open(tmp_path / "out.png") as picture, Image.open(tmp_path / "unbroken.png") as narrow:
        assert "precision=fp32" in picture.text["parameters"] and "precision=bf16" in narrow.text["parameters"]
        away = numpy.asarray(picture, dtype=int) - numpy.asarray(narrow, dtype=int)
    assert abs(away).max() > 0 and abs(away).mean() < 4


def test_from_a_picture_that_has_gone_since(forked, tmp_path):
    Image.effect_noise((72, 64), 90).convert("RGB").save(tmp_path / "start.png")
    Image.linear_gradient("L").save(tmp_path / "mask.png")
    options = ("--steps", 4, "--init-image", "start.png", "--mask", "mask.png", "--memory-plot", "plot.png")
    whole = unbroken(forked, tmp_path, *options)
    ended(forked, tmp_path, "exception", 2, *options)
    (tmp_path / "start.png").unlink()
    (tmp_path / "mask.png").unlink()
    assert resumed(forked, tmp_path, "--keep-latents") == whole
    assert (tmp_path / "out.latents.safetensors").exists()


def test_what_does_not_go_on_is_told_by_name(forked, tmp_path):
    latents = ended(forked, tmp_path, "exception", 1, "--steps", 2)
    kept = latents.read_bytes()
    shutil.copytree(model_path(None), tmp_path / "other")
    index = tmp_path / "other" / "model_index.json"
    index.write_text(index.read_text() + "\n")
    saved = read_saved(latents)
    newer = Saved({**saved.about, "version": "9.9"}, saved.tensors)
    write_saved(newer, tmp_path / "newer.latents.safetensors")
    (tmp_path / "cut.latents.safetensors").write_bytes(kept[:-9])
    (tmp_path / "empty").mkdir()
    for arguments, told in (
        (("out.latents.safetensors", "--model", "other"), "is of a run of another model than other"),
        (("newer.latents.safetensors",), "was written by sd-lowvram 9.9, and this is"),
        (("cut.latents.safetensors",), "truncated"),
        (("empty",), "holds no saved latents"),
        (("absent",), "cannot be read"),
        (("out.latents.safetensors", "--vram", "2 bananas"), "2 bananas"),
    ):
        done = forked(MAIN, "resume", *arguments, folder=tmp_path)
        assert done.returncode == 2 and told in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    assert latents.read_bytes() == kept
    ended(forked, tmp_path, "exception", 1, "--steps", 2)
    assert latents.read_bytes() == kept and (tmp_path / "out-2.latents.safetensors").exists()
