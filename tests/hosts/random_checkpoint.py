"""Writes a full-size SD1.5 checkpoint with random weights, under the names that hosts read, in fp16 (2 GB).

Run by the host's Python: random_checkpoint.py COMFYUI_DIR FILE
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from safetensors.torch import save_file


def main(comfyui: str, file: str) -> None:
    sys.path.insert(0, comfyui)
    from comfy import ops
    from comfy.ldm.models.autoencoder import AutoencoderKL
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
    from transformers import CLIPTextConfig, CLIPTextModel

    unet = UNetModel(
        image_size=32,
        in_channels=4,
        out_channels=4,
        model_channels=320,
        num_res_blocks=[2, 2, 2, 2],
        channel_mult=(1, 2, 4, 4),
        num_heads=8,
        use_spatial_transformer=True,
        transformer_depth=[1, 1, 1, 1, 1, 1, 0, 0],
        transformer_depth_middle=1,
        transformer_depth_output=[1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        context_dim=768,
        operations=ops.disable_weight_init,
        dtype=torch.float16,
    )
    levels = {"ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    sizes = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3}
    text = CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
    vae = AutoencoderKL(ddconfig={**sizes, **levels}, embed_dim=4)
    weights = _random(unet, "model.diffusion_model.") | _random(vae, "first_stage_model.")
    encoder = _random(CLIPTextModel(text), "")
    weights |= {
        f"cond_stage_model.transformer.text_model.{n.removeprefix('text_model.')}": t for n, t in encoder.items()
    }
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    weights["alphas_cumprod"] = torch.cumprod(1 - betas, 0).float()
    save_file(weights, file + ".part")
    os.replace(file + ".part", file)


def _random(model: Any, prefix: str) -> dict[str, torch.Tensor]:
    """Weights that keep the size of what passes through them."""
    noise = torch.Generator().manual_seed(len(prefix))
    made = {}
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        drawn = torch.randn(tensor.shape, generator=noise)
        if tensor.dim() > 1:
            drawn *= tensor[0].numel() ** -0.5
        else:
            drawn = 1 + 0.1 * drawn if name.endswith("weight") else 0.02 * drawn
        made[prefix + name] = drawn.half()
    return made


if __name__ == "__main__":
    main(*sys.argv[1:])
