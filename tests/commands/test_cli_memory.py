"""``generate`` where the device runs out of memory although a plan fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

PROGRAM = """
import sys, torch
from torch._subclasses.fake_tensor import FakeTensor
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from sd_lowvram.__main__ import main

forward, left = UNet2DConditionModel.forward, [int(sys.argv.pop(1))]

def full(self, sample, *args, **kwargs):
    if not isinstance(sample, FakeTensor) and left[0]:
        left[0] -= 1
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")
    return forward(self, sample, *args, **kwargs)

UNet2DConditionModel.forward = full
main()
"""


def drawn(forked: Any, file: Path, times: int) -> tuple[str, np.ndarray]:
    """Lines about a picture whose UNet runs out of memory so many times, and the picture."""
    arguments = ("generate", "a red apple", "--steps", 2, "--seed", 1, "--vram", "2GB", "--width", 64, "--height", 64)
    done = forked(PROGRAM, times, *arguments, "--output", file, folder=file.parent)
    assert done.returncode == 0, done.stderr
    return done.stderr, np.asarray(Image.open(file).convert("RGB")).astype(int)


@pytest.mark.slow(6)
def test_a_leaner_plan_draws_the_same_picture_and_says_so(forked: Any, tmp_path: Path) -> None:
    plain, wanted = drawn(forked, tmp_path / "plain.png", 0)
    again, made = drawn(forked, tmp_path / "again.png", 2)
    assert "ran out of memory" not in plain
    assert again.count("unet ran out of memory on cpu") == 2
    assert "it runs again as before" in again and "it continues with one of" in again
    assert np.abs(made - wanted).max() <= 1
    told = [Image.open(tmp_path / f"{name}.png").text["parameters"] for name in ("plain", "again")]
    assert "Low VRAM ran out" not in told[0]
    assert "Low VRAM ran out: cache emptied + parked maps" in told[1]
