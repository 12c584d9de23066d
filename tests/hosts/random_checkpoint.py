"""Writes a full-size checkpoint with random weights in fp16, under the names that hosts read: SD1.5 2 GB, SDXL 7 GB.

PYTHONPATH=.:tests python tests/hosts/random_checkpoint.py sd15|sdxl FILE
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from small import single_file_state

from sd_lowvram.checkpoints.architectures import build_components

UNET = "model.diffusion_model."


def write(
    name: str | dict[str, Any], file: str | Path, seed: int = 0, named: Callable[[str], str | None] | None = None
) -> None:
    """Weights that keep the size of what passes through them, of a built-in architecture or a configuration like one.

    One tensor at a time is in memory.

    Args:
        named: a tensor's name in the file, by its name in the whole model; None where it is left out.
    """
    state = single_file_state(build_components(name, torch.float16, "meta"))
    if named is not None:
        state = {new: tensor for key, tensor in state.items() if (new := named(key)) is not None}
    header, end = {}, 0
    for key, tensor in state.items():
        start, end = end, end + 2 * tensor.numel()
        header[key] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    noise = torch.Generator().manual_seed(seed)
    with open(f"{file}.part", "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for key, tensor in state.items():
            out.write(_drawn(key, tensor.shape, noise).half().numpy().tobytes())
    os.replace(f"{file}.part", file)


def of_base(key: str) -> str | None:
    """The name of an SD1.x UNet's tensor once the cut "base" has taken a layer of each block; of nothing else."""
    if not key.startswith(UNET):
        return None
    found = re.match(r"(input|output)_blocks\.(\d+)\.", key[len(UNET) :])
    if found is None or (found[2] == "0" and found[1] == "input"):
        return key
    side = found[1]
    level, place = divmod(int(found[2]) - (side == "input"), 3)
    if place == 1:
        return None
    return f"{UNET}{side}_blocks.{2 * level + (place == 2) + (side == 'input')}.{key[len(UNET) + found.end() :]}"


def _drawn(name: str, shape: torch.Size, noise: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:  # text without a mean would be NaN in the WebUIs, which divide by it where they weigh words
        return torch.full(shape, 0.01 if name.endswith("bias") else 1.0)
    bound = (3 / shape[1:].numel()) ** 0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=noise)


if __name__ == "__main__":
    write(*sys.argv[1:3])
