"""A WebUI's data folder for tests: random checkpoints that it can read, and this repository as users get it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import random_checkpoint
from webui_models import LEVELS, WIDTH
from webui_server import NAME, kind_of

from sd_lowvram.checkpoints.architectures import architecture

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
WEBUI = os.environ.get("WEBUI_DIR") or ""
PYTHON = os.environ.get("WEBUI_PYTHON") or f"{WEBUI}/venv/bin/python"
KIND = kind_of(WEBUI)
MODELS = Path("models") / "Stable-diffusion"


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
    changed = ["git", "ls-files", "--modified", "--others", "--exclude-standard"]
    listed = subprocess.run(changed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(lambda one: (ROOT / one).is_file(), listed.splitlines()):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)


def add_checkpoint(place: Path, name: str, seed: int = 0, kind: str = "sd15", width: int = WIDTH) -> Path:
    """A checkpoint of SD1.5 or another ``kind`` of webui_models, narrow where the host can be set so; in AUTOMATIC1111
    with a LoRA of the same name for SD1.5. Forge has "inpaint" besides."""
    file = place / MODELS / f"{name}.safetensors"
    if KIND == "a1111":
        program = [PYTHON, str(HERE / "webui_models.py"), WEBUI, str(file), str(seed), kind, str(width)]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
        if kind == "sd15":
            file.with_suffix(".lora").rename(place / "models" / "Lora" / file.name)
        return file
    config = architecture("sd15")
    config["unet"]["in_channels"] = 9 if kind == "inpaint" else 4
    if KIND in ("forge", "neo"):
        for part in ("unet", "vae"):
            config[part]["block_out_channels"] = [width * level for level in LEVELS]
    random_checkpoint.write(config, file, seed)
    return file
