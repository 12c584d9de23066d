"""Loads a pipeline whose components keep the number types in which they are stored, so that it is written as it was."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoints.inspection import Task, configuration, is_pickle, model_path, weight_files
from ...checkpoints.load import load_pipeline
from ...checkpoints.safetensors_header import read_header

_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


def load_as_stored(model: str | None) -> Any:
    """The pipeline of ``model``, as :func:`load_pipeline` finds it, for inpainting where that is what it is made for;
    float32 where the file is a pickle.

    A folder's components keep a type each. A single file is loaded in the type of its UNet.

    Raises:
        CheckpointError: missing, unreadable, truncated, or of an unknown kind.
    """
    path = model_path(model)
    unread = not path.is_dir() and is_pickle(path, True)
    inpaints = not unread and configuration(model)["unet"].get("in_channels") == 9
    task: Task = "inpaint" if inpaints else "txt2img"
    if not path.is_dir():
        return load_pipeline(model, task, None if unread else _type_of([path], "model.diffusion_model."))
    pipe: Any = load_pipeline(model, task)  # diffusers widens all to float32
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module):
            dtype = _type_of(weight_files(path / name)[1])
            nn.Module.to(part, dtype)  # diffusers' own `to` warns of parts that stay in float32
    return pipe


def _type_of(files: list[Path], prefix: str = "") -> torch.dtype:
    """The type of most tensors in ``files`` whose names begin with ``prefix``; float32 without any."""
    entries = (entry for file in files for entry in read_header(file).tensors.items())
    types = Counter(entry.dtype for name, entry in entries if name.startswith(prefix))
    return _TYPES.get(types.most_common(1)[0][0], torch.float32) if types else torch.float32
