"""Hostile input, a thousand in every run and ten thousand by ``make fuzz``: nothing but errors of ours comes of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hostile
import pytest
from hostile import JSON, NUMBERS, SIZES, WORDS, damaged, inputs, survives
from hypothesis import example, given
from hypothesis import strategies as st

from sd_lowvram.checkpoints.inspection import check_model, configuration
from sd_lowvram.checkpoints.safetensors_header import read_header
from sd_lowvram.commands.early import check_floor
from sd_lowvram.commands.inputs import Job, check_job
from sd_lowvram.commands.values import checked_settings, open_picture
from sd_lowvram.errors import BadInputError
from sd_lowvram.settings import knobs
from sd_lowvram.units import parse_size

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@inputs(0.18)
@given(SIZES | WORDS)
@example("9" * 5000 + "GB")
def test_sizes(value):
    with survives(len(str(value)[:5000])):
        assert 1 <= parse_size(value, "--vram") < 1 << 60


WHOLE = st.none() | NUMBERS.filter(lambda number: isinstance(number, int))
FIELDS = {
    "prompt": WORDS, "negative": WORDS, "model": st.none() | WORDS, "scheduler": st.none() | WORDS,
    "width": WHOLE, "height": WHOLE, "seed": WHOLE, "steps": st.integers(-5, 2000), "batch": st.integers(),
    "guidance": st.none() | st.floats(), "strength": st.none() | st.floats(), "init_image": st.none() | WORDS.map(Path),
    "vram": st.none() | SIZES.map(str), "ram": st.none() | SIZES.map(str), "device": st.none() | WORDS,
    "prediction": st.none() | WORDS,
}  # fmt: skip


@inputs(0.1)
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_what_is_typed(chosen):
    with survives(200_000):
        job = check_job(Job(**{"prompt": "a", **chosen}))
        assert job.seed is not None and job.steps >= 1


@inputs(0.1)
@given(st.dictionaries(st.sampled_from(list(knobs())), WORDS | NUMBERS | st.booleans(), max_size=4))
def test_settings(chosen):
    with survives(200_000):
        settings = checked_settings(chosen)
        assert all(getattr(settings, name) == value for name, value in chosen.items())


@inputs(0.2)
@given(damaged(hostile.safetensors()))
def test_safetensors(folder, content):
    file = folder / "a.safetensors"
    file.write_bytes(content)
    with survives(len(content)):
        header = read_header(file)
        assert all(entry.end <= len(content) for entry in header.tensors.values())
    with survives(len(content)):
        check_model(file, "txt2img")


@inputs(0.1)
@given(damaged(hostile.pngs()))
@example(hostile.png_that_announces(1 << 30))
def test_pictures_and_their_texts(folder, content):
    from PIL import Image

    (folder / "a.png").write_bytes(content)
    before = Image.core.get_stats()["allocated_blocks"]
    with survives(len(content)):
        image = open_picture(folder / "a.png", "--init-image")
        assert image.width * image.height <= 8 * 1032 * len(content)
    taken = (Image.core.get_stats()["allocated_blocks"] - before) * Image.core.get_block_size()
    assert taken <= 3 * 8 * 1032 * 4 * len(content) + 4 * Image.core.get_block_size()


CONFIG = st.dictionaries(
    st.sampled_from(["in_channels", "sample_size", "block_out_channels", "_class_name", "attention_head_dim", "x"]),
    JSON,
)


@inputs(0.1)
@given(CONFIG, CONFIG, JSON | st.just({"_class_name": "StableDiffusionPipeline"}), st.integers(1, 64))
def test_folders_of_models(folder, unet, vae, index, budget):
    model = folder / "model"
    size = 0
    for name, table in (("unet/config.json", unet), ("vae/config.json", vae), ("model_index.json", index)):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        size += (model / name).write_text(json.dumps(table))
    with survives(size):
        check_model(model, "txt2img")
        check_floor(configuration(str(model)), None, None, 1, budget * MIB)


SIDES = st.lists(st.integers(0, 6), min_size=3, max_size=5)
TILES = st.fixed_dictionaries(
    {"vae_map": st.sampled_from(["held", "parked", "recomputed"])},
    optional={"vae_strip_mib": st.integers(1, 1024), "vae_slices": st.just(True)},
)


@pytest.fixture(scope="module")
def vae():
    import tiny
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny.pipeline("sd15").vae
    torch.set_num_threads(threads)


@inputs(0.02)
@given(SIDES, st.sampled_from(["float32", "float16", "int64", "bool"]))
def test_shapes_that_no_autoencoder_takes(vae, sides, dtype):
    import torch

    import sd_lowvram

    if len(sides) == 4 and sides[1] in (3, 4):
        sides[1] = 5
    given = torch.zeros(sides).to(getattr(torch, dtype))
    for run in (sd_lowvram.decode, sd_lowvram.encode):
        with pytest.raises(BadInputError, match="are not what this autoencoder takes"):
            run(vae, given)


@inputs(0.03)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 2), TILES)
def test_tiles(vae, height, width, count, chosen):
    """Latents of any size by strips of any height are those of the plain decode."""
    import torch

    from sd_lowvram import Settings, attached

    latents = torch.randn(count, 4, height, width, generator=torch.Generator().manual_seed(height * width))
    with torch.no_grad():
        plain = vae.decode(latents).sample
        with survives(1 << 24), attached(vae, Settings(vae_tiles="exact", **chosen)):
            made = vae.decode(latents).sample
    assert torch.dist(made, plain) <= 1e-4 * plain.norm()


@inputs(0.05)
@given(WORDS | JSON.map(str), st.sampled_from(["enabled", "vram", "preset", "attention", "vae_strip_mib"]))
def test_texts_of_pictures_that_are_pasted(text, name):
    from webui_ext import infotext

    with survives(200_000):
        infotext.paste({infotext.KEY: text}, name)
        infotext.paste({infotext.KEY: f"{name} {text} | {name}"}, name)


def test_every_target_is_within_the_thousand():
    """The shares of both files are of one thousand inputs."""
    import test_hostile_latents

    named = {**vars(sys.modules[__name__]), **vars(test_hostile_latents)}
    targets = [one for name, one in named.items() if name.startswith("test_") and hasattr(one, "hypothesis")]
    examples = [one._hypothesis_internal_use_settings.max_examples for one in targets]
    assert sum(examples) == pytest.approx(hostile.INPUTS, rel=0.01)
