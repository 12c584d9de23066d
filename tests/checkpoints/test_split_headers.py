"""Split files: their headers say what they are, models that differ from served ones by some weights are refused, and
nothing is linked."""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import split_models
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sd_lowvram.checkpoints.fingerprint import fingerprint
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.checkpoints.meta_model import meta_components
from sd_lowvram.checkpoints.split_files import split_model
from sd_lowvram.checkpoints.split_kinds import split_file, split_files_in
from sd_lowvram.errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]


def write_header(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """A .safetensors file of such tensors, whose contents take no disk."""
    table, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(torch.Size(shape).numel())
        table[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path


class Made:
    """A tiny pipeline, its split files, and the shapes in them by role."""

    def __init__(self, family: str, place: Path) -> None:
        self.pipe = getattr(split_models, family)()
        split_models.save(self.pipe, place / "folder")
        options = split_models.write(self.pipe, family, place / "files")
        pairs = list(zip(options[::2], options[1::2], strict=True))
        self.given: dict[str, Any] = {name[2:]: Path(value) for name, value in pairs if name != "--text-encoder"}
        self.given["text_encoders"] = [Path(value) for name, value in pairs if name == "--text-encoder"]

    def shapes(self, role: str) -> Shapes:
        texts = self.given["text_encoders"]
        file = {"text encoder": texts[0], "clip": texts[-1]}.get(role) or self.given[role]
        return {name: tuple(tensor.shape) for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    known: dict[str, Made] = {}

    def make(family: str) -> Made:
        if family not in known:
            known[family] = Made(family, tmp_path_factory.mktemp(family))
        return known[family]

    return make


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


FOREIGN = {
    "UMT5": ("chroma", "text encoder", "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"),
    "Lumina 2": ("z_image", "transformer", "layers.0.adaLN_modulation.1.weight"),
    "Z-Image Omni": ("z_image", "transformer", "siglip_embedder.0.weight"),
    "Qwen-Image-Layered": ("qwen_image", "transformer", "time_text_embed.addition_t_embedding.weight"),
    "HunyuanVideo": ("flux1", "transformer", "txt_in.individual_token_refiner.blocks.0.norm1.weight"),
    "Chroma Radiance": ("chroma", "transformer", "nerf_blocks.0.norm.scale"),
    "a LoRA": ("flux1", "transformer", "double_blocks.0.img_attn.qkv.lora_A.weight"),
    "a LoRA, with its prefix": ("flux1", "transformer", "diffusion_model.double_blocks.0.img_attn.qkv.lora_up.weight"),
    "a LoRA, of Kohya's": ("sd3", "transformer", "lora_unet_joint_blocks_0_x_block_attn_qkv.alpha"),
    "Gemma": ("z_image", "text encoder", "model.layers.0.pre_feedforward_layernorm.weight"),
    "Wan 2.2": ("qwen_image", "vae", "encoder.downsamples.0.downsamples.0.residual.0.gamma"),
    "no place": ("flux1", "transformer", "double_blocks.1.img_attn.gate.weight"),
    "no place,": ("flux2", "vae", "decoder.up.0.attn.0.q.weight"),
    "no place, with blocks": ("sd3", "clip", "text_model.encoder.layers.0.self_attn.rotary.weight"),
}
"""By what is said of it, the family, the role and a weight that makes its file one of another model."""


@pytest.mark.parametrize("said", FOREIGN)
def test_a_weight_that_a_model_has_no_place_for_makes_it_another(
    said: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    family, role, name = FOREIGN[said]
    file = write_header(tmp_path / "a.safetensors", {**made(family).shapes(role), name: (8, 8)})
    with pytest.raises(CheckpointError, match=said.partition(",")[0]) as told:
        split_file(file, "text encoder" if role == "clip" else role)
    assert name in str(told.value)


STORED = {
    "double_blocks.0.img_attn.qkv.weight.quant_state.bitsandbytes__nf4": "nf4 of bitsandbytes",
    "double_blocks.0.img_attn.qkv.SCB": "int8 of bitsandbytes",
    "double_blocks.0.img_attn.qkv.wscales": "nunchaku's 4 bits",
    "double_blocks.0.img_attn.qkv.weight_scale_2": "nvfp4",
}


@pytest.mark.parametrize("name", STORED)
def test_a_format_that_nothing_computes_with_is_named(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    file = write_header(tmp_path / "a.safetensors", {**made("flux1").shapes("transformer"), name: (8,)})
    with pytest.raises(CheckpointError, match=f"in {STORED[name]}"):
        split_file(file, "transformer")


UNUSED = {
    "transformer": ["model_ema.decay", "first_stage_model.decoder.conv_in.weight", "__index_timestep_zero__"],
    "text encoder": ["logit_scale", "lm_head.weight", "decoder.block.0.layer.0.SelfAttention.q.weight", "spiece_model"],
    "vae": ["loss.logvar", "model_ema.num_updates", "model.diffusion_model.input_blocks.0.0.weight"],
}


@pytest.mark.parametrize("role", UNUSED)
@pytest.mark.parametrize("family", ["flux1", "chroma"])
def test_what_is_known_to_be_of_no_use_is_left_out_without_a_word(
    family: str, role: str, made: Callable[[str], Made], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = made(family).shapes(role)
    scales = {name.removesuffix(".weight") + ".scale_weight": (1,) for name in list(plain)[:3] if name.endswith("t")}
    unused = dict.fromkeys(UNUSED[role], (8,))
    file = write_header(tmp_path / "a.safetensors", plain | unused | scales | {"scaled_fp8": (0,)})
    assert split_file(file, role).config == split_file(write_header(tmp_path / "b.safetensors", plain), role).config
    assert not caplog.records


def test_a_clip_with_its_half_that_sees_is_read(made: Callable[[str], Made], tmp_path: Path) -> None:
    plain = made("flux1").shapes("clip")
    seen = {"vision_model.encoder.layers.0.mlp.fc1.weight": (8, 8), "visual_projection.weight": (8, 8)}
    found = split_file(write_header(tmp_path / "a.safetensors", plain | seen), "text encoder")
    bare = {name.removeprefix("text_model."): shape for name, shape in plain.items()}
    assert found.config == split_file(write_header(tmp_path / "b.safetensors", bare), "text encoder").config
    longer = plain | {"text_model.embeddings.position_embedding.weight": (248, 64)}
    with pytest.raises(CheckpointError, match="Long-CLIP"):
        split_file(write_header(tmp_path / "c.safetensors", longer), "text encoder")


def test_weights_that_nobody_knows_are_told_in_one_line(
    made: Callable[[str], Made], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strange = {"distiller.a.weight": (2,), "distiller.b.weight": (2,)}
    file = write_header(tmp_path / "a.safetensors", made("flux1").shapes("transformer") | strange)
    with caplog.at_level(logging.WARNING):
        split_file(file, "transformer")
    (told,) = (record.getMessage() for record in caplog.records)
    assert re.match(rf"sd-lowvram: {re.escape(str(file))} .*2 weights .*FLUX\.1 .*distiller\.a\.weight", told)


@pytest.mark.parametrize("family", ["flux1", "sd3", "z_image", "chroma", "flux2", "qwen_image"])
def test_an_autoencoder_of_other_latents_is_refused_before_anything_is_loaded(
    family: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    one = made(family)
    shapes = one.shapes("vae")
    entry = "decoder.conv_in.weight" if "decoder.conv_in.weight" in shapes else "conv2.weight"
    wrong = {**shapes, entry: (shapes[entry][0], 4, 3, 3) if "conv_in" in entry else (4, 4, 1, 1, 1)}
    file = write_header(tmp_path / "vae.safetensors", wrong)
    with pytest.raises(CheckpointError, match=r"4.*16"):
        split_model(**{**one.given, "vae": file})


@pytest.mark.parametrize(("family", "entry"), [("flux1", "img_in.weight"), ("sd3", "x_embedder.proj.weight")])
def test_a_model_that_is_given_more_than_latents_is_refused(
    family: str, entry: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    shapes = {
        name.removeprefix("model.diffusion_model."): one for name, one in made(family).shapes("transformer").items()
    }
    width, channels, *sides = shapes[entry]
    file = write_header(tmp_path / "fill.safetensors", {**shapes, entry: (width, 2 * channels, *sides)})
    with pytest.raises(CheckpointError, match=r"32.*16"):
        split_file(file, "transformer")


def test_a_text_encoder_of_another_width_is_refused(made: Callable[[str], Made], tmp_path: Path) -> None:
    one = made("flux1")
    shapes = one.shapes("transformer")
    file = write_header(tmp_path / "wide.safetensors", {**shapes, "txt_in.weight": (shapes["txt_in.weight"][0], 128)})
    with pytest.raises(CheckpointError, match=r"128.*64"):
        split_model(**{**one.given, "transformer": file})


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model.", "model.", "transformer."])
@pytest.mark.parametrize("names", ["own", "diffusers"])
def test_flux_is_loaded_under_every_name_that_it_has(
    prefix: str, names: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    one = made("flux1")
    wanted = one.pipe.transformer.state_dict()
    state = wanted if names == "diffusers" else load_file(one.given["transformer"])
    save_file({prefix + name: tensor.clone() for name, tensor in state.items()}, tmp_path / "a.safetensors")
    folder = split_model(**{**one.given, "transformer": tmp_path / "a.safetensors"})
    found = load_pipeline(folder).transformer.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], one) for name, one in wanted.items())


@pytest.mark.parametrize("family", ["sd3", "chroma", "flux2", "z_image", "qwen_image"])
def test_transformers_and_autoencoders_are_loaded_in_diffusers_names(
    family: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    one = made(family)
    parts = {"transformer": one.pipe.transformer} | (
        {"vae": one.pipe.vae} if family in ("sd3", "chroma", "z_image") else {}
    )
    for name, part in parts.items():
        save_file({key: one.clone() for key, one in part.state_dict().items()}, tmp_path / f"{name}.safetensors")
    folder = split_model(**one.given | {name: tmp_path / f"{name}.safetensors" for name in parts})
    found, planned = load_pipeline(folder), meta_components(str(folder), torch.float32)
    for name, part in parts.items():
        wanted, held = part.state_dict(), getattr(found, name).state_dict()
        assert held.keys() == wanted.keys() == planned[name].state_dict().keys()
        assert all(torch.equal(held[key], tensor) for key, tensor in wanted.items())


def test_an_all_in_one_file_is_every_part(
    made: Callable[[str], Made], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = made("flux1")
    begins = {"transformer": "model.diffusion_model.", "vae": "vae."}
    state = {begins[role] + name: tensor for role in begins for name, tensor in load_file(one.given[role]).items()}
    for file in one.given["text_encoders"]:
        before = f"text_encoders.{'t5xxl' if '_2' in file.name else 'clip_l'}.transformer."
        state |= {before + name: tensor for name, tensor in load_file(file).items()}
    whole = tmp_path / "whole.safetensors"
    save_file(state | {"text_encoders.clip_l.logit_scale": torch.ones(())}, whole)
    assert {found.kind for found in split_files_in(whole, "text encoder")} == {"clip", "t5"}
    tokenizer = one.given["tokenizer"]
    folder = split_model(transformer=whole, text_encoders=[whole], vae=whole, tokenizer=tokenizer)
    assert not [record for record in caplog.records if record.name.startswith("sd_lowvram")]
    found = load_pipeline(folder)
    for name, part in one.pipe.components.items():
        if isinstance(part, nn.Module):
            held = getattr(found, name).state_dict()
            assert all(torch.equal(held[key], tensor) for key, tensor in part.state_dict().items()), name


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(1314, "A required privilege is not held by the client")


def test_nothing_is_linked(
    made: Callable[[str], Made], cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for place, name in ((os, "symlink"), (os, "link"), (Path, "symlink_to"), (Path, "hardlink_to")):
        monkeypatch.setattr(place, name, refuse)
    one = made("z_image")
    files = {role: tmp_path / f"{role}.safetensors" for role in ("transformer", "vae")}
    for role, file in files.items():
        file.write_bytes(one.given[role].read_bytes())
    folder = split_model(**one.given | files)
    assert folder.parent == cache / "models" and not any(file.is_symlink() for file in folder.rglob("*"))
    made_folders = [cache, *(one for one in cache.rglob("*") if one.is_dir())]
    assert os.name == "nt" or not any(one.stat().st_mode & 0o077 for one in made_folders)
    assert load_pipeline(folder).transformer is not None
    before = fingerprint(folder)
    data = bytearray(files["vae"].read_bytes())
    data[-len(data) // 2 :] = bytes(255 - byte for byte in data[-len(data) // 2 :])
    files["vae"].write_bytes(data)
    assert fingerprint(folder) != before
    files["transformer"].rename(tmp_path / "moved.safetensors")
    for look in (load_pipeline, fingerprint, lambda folder: meta_components(str(folder), torch.float32)):
        with pytest.raises(CheckpointError, match=r"transformer\.safetensors"):
            look(folder)


def test_what_was_damaged_is_laid_out_anew(made: Callable[[str], Made]) -> None:
    one = made("flux1")
    folder = split_model(**one.given)
    for name in ("split.json", "transformer/config.json", "model_index.json"):
        whole = (folder / name).read_bytes()
        for content in (b"", b"[]", b"\0" * 100):
            (folder / name).write_bytes(content)
            assert split_model(**one.given) == folder
            assert (folder / name).read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_done_without(
    made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path / "file" / "cache"))
    one = made("flux1")
    folder = split_model(**one.given)
    assert folder == split_model(**one.given) and load_pipeline(folder).vae is not None


IN_A_PROCESS = """
import json, sys
from pathlib import Path
from sd_lowvram.checkpoints.split_files import split_model
given = {name: [Path(one) for one in value] if isinstance(value, list) else Path(value)
         for name, value in json.loads(sys.argv[1]).items()}
folder = split_model(**given)
print(folder, oct(folder.parent.stat().st_mode & 0o777))
"""


def test_without_a_cache_the_folder_is_private_and_removed(made: Callable[[str], Made]) -> None:
    given = {
        name: [str(one) for one in value] if isinstance(value, list) else str(value)
        for name, value in made("flux1").given.items()
    }
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS, json.dumps(given)],
            env=os.environ | {"SD_LOWVRAM_CACHE": ""}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        folder, mode = done.stdout.split()
        assert mode == "0o700" and not Path(folder).parent.exists()
        found.append(folder)
    assert found[0] != found[1]
