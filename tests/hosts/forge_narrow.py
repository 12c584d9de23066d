"""A script for Forge's tests: a narrow SD1.5, which it knows by its widths and makes with known ones, is taken, and in
Forge Neo a narrow T5."""

from __future__ import annotations

from typing import Any

from backend import loader
from backend.nn.vae import IntegratedAutoencoderKL
from huggingface_guess.model_list import SD15  # Forge Neo has its own under this name

WIDTHS = [32, 64, 128, 128]
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
_known, _read = IntegratedAutoencoderKL.load_config, loader.read_arbitrary_config


def _narrow(*args: Any, **kwargs: Any) -> Any:
    return {**_known(*args, **kwargs), "block_out_channels": WIDTHS}


def _narrow_text(*args: Any) -> Any:
    config = _read(*args)
    return config | T5 if config.get("model_type") == "t5" else config


loader.read_arbitrary_config = _narrow_text
SD15.unet_config["model_channels"] = WIDTHS[0]
IntegratedAutoencoderKL.load_config = _narrow
