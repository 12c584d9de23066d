"""Writes a pipeline to disk as a diffusers folder, all of it or nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import OutputError
from .load import silent

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def check_new_folder(folder: Path, option: str) -> None:
    """Raise OutputError unless nothing, or an empty folder, is at ``folder``."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{option} {folder} is there already: name a new folder")


def save_pipeline(pipe: DiffusionPipeline, folder: Path) -> None:
    """Write ``pipe`` to the new ``folder``, which appears when all is written.

    Raises:
        OSError: it cannot be written; nothing is left then.
    """
    target = folder.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".sd-lowvram-", dir=target.parent) as beside:
        made = Path(beside, target.name)
        with silent("diffusers.utils.logging"), silent("transformers.utils.logging"):
            pipe.save_pretrained(made, safe_serialization=True)
        os.replace(made, target)
