"""Saved latents of strangers: damaged, or whole and with a right checksum around what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hostile import JSON, SIZES, WORDS, damaged, inputs, survives
from hypothesis import given
from hypothesis import strategies as st

import sd_lowvram
from sd_lowvram.checkpoints.fingerprint import fingerprint
from sd_lowvram.checkpoints.inspection import model_path
from sd_lowvram.checkpoints.load_autoencoder import load_autoencoder
from sd_lowvram.commands.decode_saved import locate_files
from sd_lowvram.commands.latents import job_of, pictures_from
from sd_lowvram.errors import CheckpointError
from sd_lowvram.saved_latents.file import Saved, read_saved, write_saved
from sd_lowvram.saved_latents.hosted import is_hosted


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def about() -> dict[str, Any]:
    """The facts that a run of the demo model saves."""
    return {
        "version": sd_lowvram.__version__,
        "job": {"prompt": "a red apple", "seed": 3, "steps": 4, "width": 64, "height": 64, "vram": "1073741824B"},
        "asked_settings": {},
        "settings": {"vae_tiles": "exact"},
        "files": ["a.png"],
        "model": fingerprint(model_path(None)),
        "step": 2,
        "steps": 4,
        "scheduler": {"class": "EulerDiscreteScheduler", "config": {}, "state": {}},
    }


def resumed(file: Path) -> None:
    """What ``resume`` does before it loads a model."""
    saved = read_saved(file)
    job, files = job_of(file, saved, {})
    pictures_from(saved.tensors)
    assert len(files) == job.batch and all(one.parent == file.parent for one in files)


@inputs(0.03)
@given(st.data())
def test_damaged_latents(folder, about, data):
    import torch

    file = folder / "a.latents.safetensors"
    write_saved(Saved(about, {"latents": torch.zeros(1, 4, 8, 8)}), file)
    content = data.draw(damaged(st.just(file.read_bytes())))
    file.write_bytes(content)
    with survives(len(content)):
        resumed(file)


NAMES = ["version", "job", "asked_settings", "settings", "files", "model", "step", "steps", "scheduler"]
FIELDS = ["prompt", "seed", "steps", "width", "batch", "vram", "mask", "init_image", "model", "output", "settings", "x"]


@inputs(0.03)
@given(
    st.dictionaries(st.sampled_from(NAMES), JSON, max_size=2),
    st.dictionaries(st.sampled_from(FIELDS), JSON | WORDS | SIZES, max_size=2),
    st.sampled_from([(1, 4, 8, 8), (0,), (3,), (64, 64, 3), (2, 2, 7)]),
    st.sampled_from(["uint8", "float32", "bool"]),
    st.none() | JSON,
)
def test_latents_that_tell_nonsense(folder, about, changed, fields, shape, dtype, instead):
    """The checksum is right: whoever wrote it wrote that, too."""
    import torch

    told: Any = {**about, "job": {**about["job"], **fields}, **changed} if instead is None else instead
    tensors = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name in ("latents", "image")}
    file = folder / "b.latents.safetensors"
    try:
        json.dumps(told).encode()
    except (UnicodeEncodeError, ValueError):
        return
    write_saved(Saved(told, tensors), file)
    with survives(file.stat().st_size):
        resumed(file)


def decoded(file: Path) -> None:
    """What ``resume`` does with a host's latents before it loads an autoencoder."""
    saved = read_saved(file)
    assert not is_hosted(saved) or locate_files(file, saved, {})


HOSTED: dict[str, Any] = {"version": sd_lowvram.__version__, "host": "ComfyUI", "autoencoder": None, "texts": []}
TEXTS = st.lists(st.dictionaries(st.sampled_from(["parameters", "prompt", "workflow", "x"]), WORDS | JSON), max_size=3)
PLACES = st.sampled_from([".", "/", "/dev/zero", "/proc/self/mem", "a\0b", "../b.latents.safetensors", "~", "x" * 5000])


@inputs(0.03)
@given(st.data())
def test_damaged_latents_of_a_host(folder, data):
    import torch

    file = folder / "c.latents.safetensors"
    write_saved(Saved(HOSTED, {"latents": torch.zeros(1, 4, 8, 8)}), file)
    content = data.draw(damaged(st.just(file.read_bytes())))
    file.write_bytes(content)
    with survives(len(content)):
        decoded(file)


@inputs(0.03)
@given(
    st.dictionaries(st.sampled_from(["version", "host", "autoencoder", "texts"]), JSON | WORDS, max_size=2),
    st.none() | TEXTS,
    st.none() | PLACES,
    st.sampled_from([(1, 4, 8, 8), (2, 4, 8, 8), (3,), (1, 4, 0, 8), (0, 4, 8, 8), (1, 4, 1, 9000), (1, 1, 4, 8, 8)]),
    st.sampled_from(["uint8", "float32", "float16", "bool", "float64"]),
)
def test_latents_of_a_host_that_tell_nonsense(folder, changed, texts, place, shape, dtype):
    import torch

    told = {**HOSTED, **changed, **({} if texts is None else {"texts": texts})}
    told |= {} if place is None else {"autoencoder": place}
    file = folder / "d.latents.safetensors"
    try:
        json.dumps(told).encode()
    except (UnicodeEncodeError, ValueError):
        return
    write_saved(Saved(told, {"latents": torch.zeros(shape, dtype=getattr(torch, dtype))}), file)
    with survives(file.stat().st_size):
        decoded(file)


@pytest.mark.parametrize("shape", [(), (2**20,), (2**18, 1, 1, 1), (4, 2, 3, 3)])
def test_an_autoencoder_of_strangers_is_no_wider_than_its_file(folder, shape):
    """Change the weights that show the widths, level by level: nothing is built of what they claim."""
    import diffusers.models  # not within the time of the file
    import safetensors.torch
    import torch

    assert diffusers.AutoencoderKL
    file = folder / "vae.safetensors"
    level = torch.zeros(shape, dtype=torch.float16)
    levels = {f"decoder.up.{number}.block.0.conv1.weight": level.clone() for number in range(4)}
    safetensors.torch.save_file({**levels, "decoder.conv_in.weight": torch.zeros(8, 4, 3, 3)}, file)
    with survives(file.stat().st_size), pytest.raises(CheckpointError, match="has no autoencoder"):
        load_autoencoder(file, torch.float32)
