"""Models for tests of smaller UNets: two layers a block, which can be cut, or with blocks that are changed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from sd_lowvram.checkpoints.architectures import architecture, build_components
from sd_lowvram.checkpoints.load import load_pipeline


@functools.cache
def full_size() -> Any:
    return build_components("sd15", torch.float16, "meta", only=("unet",))["unet"]


@functools.cache
def tiny() -> Any:
    """A UNet of SD1.5's structure, two layers a block, with weights."""
    config = architecture("sd15")["unet"] | {"block_out_channels": [32, 64, 64, 64], "norm_num_groups": 8}
    config |= {"cross_attention_dim": 32, "attention_head_dim": 4, "sample_size": 16}
    return build_components({"unet": config}, seed=3)["unet"]


def write_changed_demo(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    """The demo model with experts or regions, which the command makes of models with two layers a block alone."""
    from sd_lowvram.unets.changes import BlockChanges
    from sd_lowvram.unets.checkpoints.save import save_pipeline
    from sd_lowvram.unets.cuts import whole
    from sd_lowvram.unets.prune import cut_by_names, prune_unet

    pipe: Any = load_pipeline(None)
    config = pipe.unet.config
    cut = cut_by_names(config, drop=drop) if drop else whole(config)
    pipe.register_modules(unet=prune_unet(pipe.unet, cut, BlockChanges(**changes)))
    save_pipeline(pipe, folder)
