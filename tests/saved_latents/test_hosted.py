"""Latents that a host has saved: decoded by the command, with an autoencoder from wherever it is, or refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from PIL import Image
from typer.testing import CliRunner

from sd_lowvram.checkpoints.architectures import architecture, build_components
from sd_lowvram.checkpoints.single_file_names import vae_state
from sd_lowvram.cli import app
from sd_lowvram.saved_latents.file import Saved, write_saved
from sd_lowvram.saved_latents.hosted import Hosted, write_hosted

HOSTED = Hosted("ComfyUI", torch.randn(2, 4, 8, 9, generator=torch.Generator().manual_seed(1)))


def resumed(*words: object) -> Any:
    return CliRunner().invoke(app, ["resume", *map(str, words)])


@pytest.fixture(scope="module")
def vae() -> Any:
    config = architecture("sd15")
    config["vae"]["block_out_channels"] = [32, 32, 64, 64]
    return build_components(config, only=("vae",))["vae"]


@pytest.mark.parametrize("kind", ["checkpoint", "file", "folder"])
def test_decoded_by_the_autoencoder_of(vae, tmp_path, kind) -> None:
    model = tmp_path / "a.safetensors"
    if kind == "folder":
        model = tmp_path / "model"
        vae.save_pretrained(model / "vae")
    else:
        state = vae_state(vae)
        if kind == "file":
            state = {name.removeprefix("first_stage_model."): one for name, one in state.items()}
        safetensors.torch.save_file({name: one.contiguous() for name, one in state.items()}, model)
    file = tmp_path / "x.latents.safetensors"
    texts = [{"parameters": "first"}, {"parameters": "second"}]
    write_hosted(dataclasses.replace(HOSTED, autoencoder=str(model), texts=texts), file)
    done = resumed(file, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["decoded_only"] and told["latents"] is None and not file.exists()
    with torch.no_grad():
        plain = vae.decode(HOSTED.latents).sample
    wanted = ((plain / 2 + 0.5).clamp(0, 1) * 255).round().permute(0, 2, 3, 1).numpy()
    for name, one, text in zip(told["files"], wanted, texts, strict=True):
        with Image.open(name) as picture:
            assert picture.text == text and abs(numpy.asarray(picture).astype(int) - one).max() <= 1


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"autoencoder": None}, "with --model"),
        ({"autoencoder": "/nowhere/a.safetensors"}, "'/nowhere/a.safetensors'"),
        ({"autoencoder": 3}, "does not say which pictures"),
        ({"texts": [{"parameters": "one"}]}, "does not say which pictures"),
        ({"texts": [{"other": "x"}, {}]}, "does not say which pictures"),
        ({"latents": torch.zeros(3)}, "holds no latents"),
        ({"latents": torch.zeros(1, 4, 1, 4096)}, "no side above"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(tmp_path, about, why) -> None:
    told = {"host": "ComfyUI", "autoencoder": str(tmp_path), "texts": [], **about}
    latents = told.pop("latents", HOSTED.latents)
    file = tmp_path / "x.latents.safetensors"
    write_saved(Saved(told, {"latents": latents}), file)
    done = resumed(file)
    assert done.exit_code == 2 and why in " ".join(done.stderr.split()), done.output
    assert file.exists()
