"""A WebUI's data folder for tests: random checkpoints that it can read, and this repository as users get it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import diffusers
import random_checkpoint
import split_models
import todays
import torch
from webui_models import LEVELS, WIDTH
from webui_server import NAME, kind_of

from sd_lowvram.checkpoints.architectures import architecture, autoencoder, build_components
from sd_lowvram.checkpoints.single_file_names import clip_state

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
WEBUI = os.environ.get("WEBUI_DIR") or ""
PYTHON = os.environ.get("WEBUI_PYTHON") or f"{WEBUI}/venv/bin/python"
KIND = kind_of(WEBUI)
MODELS = Path("models") / "Stable-diffusion"
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 32128}
"""forge_narrow.py has the same."""


def empty(place: Path) -> Path:
    """A data folder without an extension; Forge's is ready for narrow checkpoints."""
    for name in ("Stable-diffusion", "Lora", "VAE-approx"):
        (place / "models" / name).mkdir(parents=True)
    for file in (Path(WEBUI) / "models" / "VAE-approx").glob("*.pt"):
        shutil.copy(file, place / "models" / "VAE-approx")
    (place / "extensions").mkdir()  # without one the installers of what Forge brings along do not run
    if KIND in ("forge", "neo"):
        add_script(place, "forge_narrow.py")
    return place


def has_approximation() -> bool:
    """True if the host's folder has its small decoder for previews, which it would download."""
    return any((Path(WEBUI) / "models" / "VAE-approx").glob("*.pt"))


def add_script(place: Path, file: str, name: str = "") -> None:
    """A script of this folder as an extension of its own, by default loaded after ours."""
    scripts = place / "extensions" / (name or f"tests-{Path(file).stem}") / "scripts"
    scripts.mkdir(parents=True)
    shutil.copy(HERE / file, scripts)


def add_extension(place: Path) -> None:
    """The extension as users get it, with what is changed here and not committed yet."""
    clone = place / "extensions" / NAME
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    subprocess.run(["git", "-C", str(clone), "checkout", "--quiet", "-B", "main"], check=True)  # hosts ask for a branch
    changed = ["git", "ls-files", "--modified", "--others", "--exclude-standard"]
    listed = subprocess.run(changed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(lambda one: (ROOT / one).is_file(), listed.splitlines()):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)


def add_checkpoint(place: Path, name: str, seed: int = 0, kind: str = "sd15", width: int = WIDTH) -> Path:
    """A checkpoint of SD1.5 or another ``kind`` of webui_models, narrow where the host can be set so; in AUTOMATIC1111
    with a LoRA of the same name for SD1.5. Forge has "inpaint" besides, and Forge Neo "flux"."""
    file = place / MODELS / f"{name}.safetensors"
    if KIND == "a1111":
        program = [PYTHON, str(HERE / "webui_models.py"), WEBUI, str(file), str(seed), kind, str(width)]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
        if kind == "sd15":
            file.with_suffix(".lora").rename(place / "models" / "Lora" / file.name)
        return file
    if kind == "flux":
        random_checkpoint.write_state(_flux_state(), file, seed)
        return file
    config = architecture("sd15")
    config["unet"]["in_channels"] = 9 if kind == "inpaint" else 4
    if KIND in ("forge", "neo"):
        for part in ("unet", "vae"):
            config[part]["block_out_channels"] = [width * level for level in LEVELS]
    random_checkpoint.write(config, file, seed)
    return file


def _flux_state() -> dict[str, torch.Tensor]:
    """FLUX.1 with a block of each kind, two heads wide, and forge_narrow's T5: names and shapes of a whole file."""
    heads = {"attention_head_dim": 128, "num_attention_heads": 2, "num_layers": 1, "num_single_layers": 1}
    takes = {"joint_attention_dim": T5["d_model"], "pooled_projection_dim": 768, "guidance_embeds": True}
    config = autoencoder("flux") | {"block_out_channels": [WIDTH * level for level in LEVELS]}
    with torch.device("meta"):
        transformer = diffusers.FluxTransformer2DModel(in_channels=64, **heads, **takes)
        t5, vae = todays.t5(**T5), diffusers.AutoencoderKL.from_config(config)
    clip = build_components("sd15", torch.float16, "meta", only=("text_encoder",))["text_encoder"]
    named = split_models.TRANSFORMERS["flux1"](dict(transformer.state_dict()))
    parts = {
        "model.diffusion_model.": named,
        "vae.": split_models.vae_file(vae),
        "text_encoders.t5xxl.transformer.": split_models.text_file(t5),
    }
    state = {prefix + name: tensor for prefix, part in parts.items() for name, tensor in part.items()}
    return state | clip_state(clip, "text_encoders.clip_l.transformer.")
