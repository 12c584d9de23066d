"""Loads a UNet by itself: of a diffusers folder, or the ``unet`` folder in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoints.load import explain_errors, load_folder_part
from ...checkpoints.safetensors_header import read_header
from ...errors import CheckpointError

if TYPE_CHECKING:
    import torch


_CLASSES = ("UNet2DConditionModel", "ASDMUNet2DConditionModel")


def unet_folder(path: Path) -> Path:
    """The folder with a UNet's configuration and weights: ``path``, or ``unet`` in it.

    Raises:
        CheckpointError: there is none, or its weights are missing or truncated.
    """
    path = path.expanduser()
    folder = next((candidate for candidate in (path / "unet", path) if (candidate / "config.json").is_file()), None)
    if folder is None or configuration_of_unet(folder).get("_class_name") not in _CLASSES:
        raise CheckpointError(
            f"there is no UNet at {path}: give a folder that `unet prune`, `combine` or `distil` wrote, or the unet "
            "folder of a diffusers model"
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no weights: it must hold diffusion_pytorch_model.safetensors")
    for file in files:
        read_header(file)
    return folder


def configuration_of_unet(folder: Path) -> dict[str, Any]:
    """The configuration of the UNet in ``folder``, with its prediction type if the folder has a scheduler.

    Raises:
        CheckpointError: the configuration cannot be read.
    """
    config = _table(folder / "config.json")
    scheduler = folder.parent / "scheduler" / "scheduler_config.json"
    prediction = _table(scheduler).get("prediction_type") if scheduler.is_file() else None
    return {**config, "prediction_type": prediction} if prediction else config


def _table(file: Path) -> dict[str, Any]:
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{file} cannot be read: it is not a table")
    return table


def load_unet(folder: Path, dtype: torch.dtype | None) -> Any:
    """The UNet in ``folder``, as :func:`unet_folder` finds it, on the CPU.

    Raises:
        CheckpointError: its files do not make a UNet, or weights are missing.
    """
    name = str(_table(folder / "config.json").get("_class_name"))
    with explain_errors(folder):
        return load_folder_part(folder, "diffusers", name, dtype).eval().requires_grad_(False)
