"""Decodes the latents that a host has saved before it could."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.load_autoencoder import load_autoencoder
from ..errors import BadInputError
from ..saved_latents.file import ENDING, Saved
from ..saved_latents.hosted import Hosted, read_hosted
from .pictures import check_writable, png_of, save_png
from .values import LARGEST_SIDE, checked_settings

if TYPE_CHECKING:
    import torch
    from rich.console import Console

_FACTOR = 8
"""Pixels to a side of a latent pixel, in all that hosts decode with our nodes and panel."""


def decode_file(path: Path, saved: Saved, asked: dict[str, Any], keep: bool, console: Console) -> dict[str, Any]:
    """Decode ``path`` to pictures next to it; return plain values for ``--json``.

    Args:
        asked: the options of ``resume`` that were given.

    Raises:
        LowVRAMError: it makes no sense, its autoencoder is not known or not there, or the budget cannot hold it.
    """
    from .show import loading

    hosted, model, files = locate_files(path, saved, asked)
    height, width = (side * _FACTOR for side in hosted.latents.shape[2:])
    check_writable(files[0], len(files) * (width * height * 4 + (64 << 10)))
    console.print(
        f"{path}: of {hosted.host}, whose run is not known; its latents are decoded alone",
        highlight=False,
    )
    begun = time.perf_counter()
    with loading(console, model):
        vae = _check(path, hosted, load_autoencoder(model, _float32()))
    loaded = time.perf_counter()
    with console.status("decoding"):
        pictures = _pictures(vae, hosted.latents, asked)
    for picture, file, texts in zip(pictures, files, hosted.texts, strict=True):
        save_png(png_of(picture, texts), file)
    if not keep:
        path.unlink(missing_ok=True)
    seconds = {"load": loaded - begun, "run": time.perf_counter() - loaded}
    return {
        "files": [str(file) for file in files],
        "latents": str(path) if keep else None,
        "width": width,
        "height": height,
        "decoded_only": True,
        "seconds": {stage: round(value, 3) for stage, value in seconds.items()},
    }


def locate_files(path: Path, saved: Saved, asked: dict[str, Any]) -> tuple[Hosted, Path, list[Path]]:
    """Contents of ``path``, the path of its autoencoder, and the files for its pictures.

    Arguments and errors as for :func:`decode_file`."""
    hosted = read_hosted(path, saved)
    model = _model_of(path, hosted, asked)
    height, width = (side * _FACTOR for side in hosted.latents.shape[2:])
    if max(height, width) > LARGEST_SIDE:
        raise BadInputError(f"{path} is of {width}x{height}, and no side above {LARGEST_SIDE} pixels is served")
    return hosted, model, _files_beside(path, len(hosted.latents))


def _model_of(path: Path, hosted: Hosted, asked: dict[str, Any]) -> Path:
    """Path of the autoencoder."""
    source = asked.get("model") or hosted.autoencoder
    if source is None:
        raise BadInputError(f"{path} does not name its VAE: give the checkpoint, or the VAE's own file, with --model")
    if "\0" in source or not os.path.exists(source):  # False, where pathlib raises for a name that is too long
        raise BadInputError(f"the autoencoder of {path} is not at {source!r} any more: name its path with --model")
    return Path(source)


def _files_beside(path: Path, count: int) -> list[Path]:
    """Names for the pictures, which nothing has yet: those that are there may be of somebody else."""
    stem = path.name.removesuffix(ENDING)
    files = [path.with_name(f"{stem}.png" if count == 1 else f"{stem}-{number + 1}.png") for number in range(count)]
    for file in files:
        if file.exists():
            raise BadInputError(f"{file}, the picture of {path}, is there already: move one of the two")
    return files


def _float32() -> torch.dtype:
    """The type of the decode: the host's own may be narrower, and its latents lose nothing."""
    import torch

    return torch.float32


def _check(path: Path, hosted: Hosted, vae: Any) -> Any:
    channels, wanted = hosted.latents.shape[1], vae.config.latent_channels
    if channels != wanted:
        raise BadInputError(f"{path} holds latents of {channels} channels, and this autoencoder has {wanted}")
    return vae.eval().requires_grad_(False)


def _pictures(vae: Any, latents: torch.Tensor, asked: dict[str, Any]) -> list[Any]:
    from PIL import Image

    from ..api import decode
    from ..devices.info import default_device

    device = default_device()
    budget = {name: asked[name] for name in ("vram", "ram") if name in asked}
    settings = checked_settings({"precision": asked.get("precision")}, None)
    pixels = decode(vae.to(device), latents.to(device, _float32()), settings=settings, **budget)
    values = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(pixels) for pixels in values]
