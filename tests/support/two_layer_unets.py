"""UNets of two layers a block, which can be cut: SD1.5's own without weights, and a narrow one with weights."""

from __future__ import annotations

import functools
from typing import Any

import torch

from sd_lowvram.checkpoints.architectures import architecture, build_components


@functools.cache
def full_size() -> Any:
    return build_components("sd15", torch.float16, "meta", only=("unet",))["unet"]


@functools.cache
def tiny() -> Any:
    """A UNet of SD1.5's structure, two layers a block, with weights."""
    config = architecture("sd15")["unet"] | {"block_out_channels": [32, 64, 64, 64], "norm_num_groups": 8}
    config |= {"cross_attention_dim": 32, "attention_head_dim": 4, "sample_size": 16}
    return build_components({"unet": config}, seed=3)["unet"]
