"""Writes a pipeline to disk as a diffusers folder or a single file, all of it or nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoints.inspection import PICKLES
from ...checkpoints.load import silent
from ...errors import OutputError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def is_single_file(target: Path) -> bool:
    """True if ``target`` names a single file, not a folder."""
    return target.suffix.lower() == ".safetensors"


def check_new(target: Path, option: str) -> None:
    """Raise OutputError unless nothing, or an empty folder, is at ``target``, or where it names a pickle."""
    if target.suffix.lower() in PICKLES:
        raise OutputError(f"{option} {target} would be a pickle: single files are written as .safetensors")
    kind = "file" if is_single_file(target) else "folder"
    if target.exists() and (kind == "file" or not target.is_dir() or any(target.iterdir())):
        raise OutputError(f"{option} {target} is there already: name a new {kind}")


def save_pipeline(pipe: DiffusionPipeline, target: Path) -> None:
    """Write ``pipe`` to a new place, which appears when all is written.

    Args:
        pipe: a pipeline.
        target: a new folder, or a new ``.safetensors`` file.

    Raises:
        BadInputError: a single file cannot hold this model.
        OSError: it cannot be written; nothing is left then.
    """
    target = target.absolute()
    if is_single_file(target):
        from .save_single_file import save_single_file

        save_single_file(pipe, target)
    else:
        _save_folder(pipe, target)


def _save_folder(pipe: DiffusionPipeline, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".sd-lowvram-", dir=target.parent) as workspace:
        folder = Path(workspace, target.name)
        with silent("diffusers.utils.logging"), silent("transformers.utils.logging"):
            pipe.save_pretrained(folder, safe_serialization=True)
        os.replace(folder, target)
