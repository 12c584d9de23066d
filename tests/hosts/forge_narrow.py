"""A script for Forge's tests: a narrow SD1.5, which it knows by its widths and makes with known ones, is taken."""

from __future__ import annotations

from typing import Any

from backend.nn.vae import IntegratedAutoencoderKL
from huggingface_guess.model_list import SD15  # Forge Neo has its own under this name

WIDTHS = [32, 64, 128, 128]
_known = IntegratedAutoencoderKL.load_config


def _narrow(*args: Any, **kwargs: Any) -> Any:
    return {**_known(*args, **kwargs), "block_out_channels": WIDTHS}


SD15.unet_config["model_channels"] = WIDTHS[0]
IntegratedAutoencoderKL.load_config = _narrow
