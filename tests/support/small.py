"""Small models with the topology of the real ones, and single files as CompVis and Stability write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sd_lowvram.checkpoints import single_file_names
from sd_lowvram.checkpoints.architectures import architecture
from sd_lowvram.checkpoints.single_file_names import clip_state, open_clip_state, unet_state, vae_state


def narrow(name: str, vocabulary: int = 49408) -> dict[str, Any]:
    """A built-in architecture with few channels and layers of text; the widths by which it is recognised stay."""
    config = architecture(name)
    levels = len(config["unet"]["block_out_channels"])
    config["unet"] |= {"block_out_channels": [32, 64, 64, 64][:levels], "sample_size": 8}
    if name != "sd15":
        config["unet"]["attention_head_dim"] = [2, 4, 4, 4][:levels]
    if name == "sdxl":
        config["unet"]["transformer_layers_per_block"] = [1, 1, 2]
    config["vae"] |= {"block_out_channels": [32, 32, 64, 64], "sample_size": 64}
    for text in ("text_encoder", "text_encoder_2"):
        if text in config:
            config[text] |= {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": vocabulary}
    return config


def single_file_state(models: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    """The models of ``build_components`` as one state dict in the original naming."""
    if "text_encoder_2" not in models:
        return single_file_names.single_file_state(models)
    state = unet_state(models["unet"]) | vae_state(models["vae"])
    state |= clip_state(models["text_encoder"], "conditioner.embedders.0.transformer.")
    state |= open_clip_state(models["text_encoder_2"], "conditioner.embedders.1.model.")
    return {key: value.contiguous() for key, value in state.items()}


def save_single_file(models: dict[str, nn.Module], path: Path, **more: torch.Tensor) -> Path:
    from safetensors.torch import save_file

    state = {key: value.clone() for key, value in single_file_state(models).items()}
    save_file(state | more, path)
    return path
