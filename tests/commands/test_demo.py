"""The demo model as it ships: its files, its shape, and that it really draws what it is asked for."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from sd_lowvram.demo import MODEL_PATH

diffusers = pytest.importorskip("diffusers")

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def pipe():
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(MODEL_PATH, safety_checker=None, local_files_only=True)
    pipe.to(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, prompt: str, seed: int = 0, steps: int = 15) -> torch.Tensor:
    picture = pipe(
        prompt,
        num_inference_steps=steps,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
    ).images
    return picture[0]


def collage() -> torch.Tensor:
    picture = np.asarray(Image.open(DATA / "collage.png").convert("RGB"))
    return torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1


def test_files_are_small_float16_safetensors():
    size = sum(file.stat().st_size for file in MODEL_PATH.rglob("*") if file.is_file())
    assert 20e6 <= size <= 30e6
    for part in ("unet", "vae", "text_encoder"):
        (file,) = (MODEL_PATH / part).glob("*.safetensors")
        with safe_open(file, "pt") as tensors:
            kinds = {tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118
        assert kinds <= {"F16", "I64"}, (part, kinds)
    assert (MODEL_PATH.parent / "LICENSE").read_text(encoding="utf-8").count("Microsoft") >= 1


def test_configs_say_what_the_card_says():
    unet = json.loads((MODEL_PATH / "unet" / "config.json").read_text())
    assert unet["down_block_types"] == ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"]
    assert unet["up_block_types"] == ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3
    assert (unet["sample_size"], unet["in_channels"]) == (16, 4)
    vae = json.loads((MODEL_PATH / "vae" / "config.json").read_text())
    assert len(vae["down_block_types"]) == 4
    assert vae["latent_channels"] == 4
    assert vae["mid_block_add_attention"]
    assert vae["scaling_factor"] == 0.18215
    for file in MODEL_PATH.rglob("*.json"):
        assert "_name_or_path" not in json.loads(file.read_text()), file


def test_tokenizer_round_trip(pipe):
    ids = pipe.tokenizer("a red apple").input_ids
    assert pipe.tokenizer.convert_ids_to_tokens(ids)[1:-1] == ["a</w>", "red</w>", "apple</w>"]
    assert pipe.tokenizer.decode(ids, skip_special_tokens=True).strip() == "a red apple"
    assert pipe.tokenizer("A RED  apple").input_ids == ids
    long = pipe.tokenizer("a red apple " * 40, truncation=True, padding="max_length").input_ids
    assert len(long) == pipe.tokenizer.model_max_length == pipe.text_encoder.config.max_position_embeddings
    assert max(long) < pipe.text_encoder.config.vocab_size
    assert pipe.tokenizer("日本 ü !").input_ids[-1] == pipe.tokenizer.eos_token_id


@torch.no_grad()
def test_reconstructs_real_pictures(pipe):
    crop = collage()[..., 400:800, 200:600]
    latents = pipe.vae.encode(crop).latent_dist.mean
    assert latents.shape == (1, 4, 50, 50)
    scaled = latents * pipe.vae.config.scaling_factor
    assert 0.3 < scaled.std().item() < 3
    error = (pipe.vae.decode(latents).sample.clamp(-1, 1) - crop).square().mean()
    assert 10 * torch.log10(4 / error).item() > 15


def test_draws_what_it_is_asked_for(pipe):
    apple, gem = (draw(pipe, text) for text in ("a red apple", "a blue gem"))
    middle, other = (picture[:, 40:96, 40:96].mean(dim=(1, 2)) for picture in (apple, gem))
    assert middle[0] > middle[1:].max() + 0.3  # red
    assert other[2] > other[0] + 0.3  # blue
    assert apple[:, :6, :6].mean() > 0.9  # on white


def test_same_seed_same_picture(pipe):
    one, same, other = (draw(pipe, "a cat", seed, steps=3) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
