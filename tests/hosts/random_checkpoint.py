"""Writes a full-size checkpoint with random weights in fp16, under the names that hosts read: SD1.5 2 GB, SDXL 7 GB.

PYTHONPATH=.:tests python tests/hosts/random_checkpoint.py sd15|sdxl FILE
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from small import single_file_state

from sd_lowvram.checkpoints.architectures import build_components


def write(name: str | dict[str, Any], file: str | Path, seed: int = 0) -> None:
    """Weights that keep the size of what passes through them, of a built-in architecture or of a configuration."""
    write_state(single_file_state(build_components(name, torch.float16, "meta")), file, seed)


def write_state(state: dict[str, torch.Tensor], file: str | Path, seed: int) -> None:
    """Weights of these names and shapes; one tensor at a time is in memory."""
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


def _drawn(name: str, shape: torch.Size, noise: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:  # text without a mean would be NaN in the WebUIs, which divide by it where they weigh words
        return torch.full(shape, 0.01 if name.endswith("bias") else 1.0)
    bound = (3 / shape[1:].numel()) ** 0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=noise)


if __name__ == "__main__":
    write(*sys.argv[1:3])
