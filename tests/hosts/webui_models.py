"""Writes a checkpoint with random weights for a WebUI, its configuration next to it, and a LoRA for SD1.5.

Run by the WebUI's Python: webui_models.py WEBUI_DIR FILE SEED [KIND] [WIDTH]. The model has all blocks of its KIND:
SD1.5 (sd15), its inpainting (9 channels) and InstructPix2Pix (8), SD2.x that predicts noise (sd2) or v (sd2v), SDXL's
base or refiner. WIDTH are the UNet's channels at the highest resolution: by default a tenth of the real one's, so that
a step takes a second on a CPU; the autoencoder is as narrow.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

WIDTH, LEVELS, RANK = 32, [1, 2, 4, 4], 4


_LDM, _SD2 = "repositories/stable-diffusion-stability-ai", "configs/stable-diffusion/v2-inference"
CONFIGS = {
    "sd15": "configs/v1-inference.yaml",
    "inpaint": "configs/v1-inpainting-inference.yaml",
    "instruct": "configs/instruct-pix2pix.yaml",
    "sd2": f"{_LDM}/{_SD2}.yaml",
    "sd2v": f"{_LDM}/{_SD2}-v.yaml",
}
"""The WebUI's own, by the kinds of models that are ldm's."""


def main(webui: str, file: str, seed: str, kind: str = "sd15", width: str = str(WIDTH)) -> None:
    write = ldm if kind in CONFIGS else sdxl
    write(webui, file, torch.Generator().manual_seed(int(seed)), kind=kind, width=int(width))


def ldm(webui: str, file: str, noise: torch.Generator, kind: str, width: int) -> None:
    """A model of SD1.x or SD2.x; for SD1.5 a LoRA too."""
    sys.path.insert(0, f"{webui}/{_LDM}")
    from ldm.util import instantiate_from_config
    from omegaconf import OmegaConf

    config = OmegaConf.load(f"{webui}/{CONFIGS[kind]}")
    parts = config.model.params
    parts.unet_config.params.model_channels = width
    parts.first_stage_config.params.ddconfig.ch = WIDTH
    with torch.device("meta"):
        text = {"cond_stage_model.transformer.": _clip()}
    if kind.startswith("sd2"):
        text = {"cond_stage_model.model.": _open_clip()}
        parts.unet_config.params.context_dim, parts.unet_config.params.num_head_channels = _TEXT_WIDTH, 16
        parts.cond_stage_config.params.arch = _TEXT_ARCH
    OmegaConf.save(config, Path(file).with_suffix(".yaml"))
    with torch.device("meta"):
        made = {
            "model.diffusion_model.": instantiate_from_config(parts.unet_config),
            "first_stage_model.": instantiate_from_config(parts.first_stage_config),
        }
    weights = {prefix + name: one for prefix, part in (made | text).items() for name, one in _random(part, noise)}
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    weights["alphas_cumprod"] = torch.cumprod(1 - betas, 0).float()
    save_file(weights, file)
    if kind == "sd15":
        lora = str(Path(file).with_suffix(".lora"))
        save_file(_lora(noise, width), lora, metadata={"ss_network_module": "networks.lora"})


def _clip() -> torch.nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    return CLIPTextModel(CLIPTextConfig(**sizes))


def _open_clip() -> torch.nn.Module:
    import open_clip

    model = open_clip.create_model(_TEXT_ARCH)
    del model.visual
    return model


_TEXT_WIDTH, _TEXT_ARCH = 512, "ViT-B-32"
"""Of open_clip's text encoders, in place of ViT-H-14's 1024 and ViT-bigG-14's 1280."""


def sdxl(webui: str, file: str, noise: torch.Generator, kind: str, width: int) -> None:
    """SDXL's base or refiner."""
    folder = f"{webui}/repositories/generative-models"
    sys.path.insert(0, folder)
    from omegaconf import OmegaConf
    from sgm.util import instantiate_from_config

    config = OmegaConf.load(f"{folder}/configs/inference/sd_xl_{kind}.yaml")
    parts = config.model.params
    unet, vae = parts.network_config.params, parts.first_stage_config.params.ddconfig
    unet.model_channels, vae.ch = width, WIDTH
    unet.num_head_channels, unet.transformer_depth = 16, 1
    unet.spatial_transformer_attn_type, vae.attn_type = "softmax", "vanilla"
    unet.context_dim = _TEXT_WIDTH + (768 if kind == "base" else 0)
    unet.adm_in_channels = _TEXT_WIDTH + 256 * (6 if kind == "base" else 5)
    text = next(one.params for one in parts.conditioner_config.params.emb_models if "arch" in one.get("params", {}))
    text.arch = _TEXT_ARCH
    OmegaConf.save(config, Path(file).with_suffix(".yaml"))
    with torch.device("meta"):
        made = {
            "model.diffusion_model.": instantiate_from_config(parts.network_config),
            "first_stage_model.": instantiate_from_config(parts.first_stage_config),
        }
        if kind == "base":
            made["conditioner.embedders.0.transformer."] = _clip()
    made[f"conditioner.embedders.{1 if kind == 'base' else 0}.model."] = _open_clip()
    save_file({prefix + name: one for prefix, part in made.items() for name, one in _random(part, noise)}, file)


def _random(model: Any, noise: torch.Generator) -> Any:
    """Weights that keep the size of what passes through them."""
    for name, tensor in model.state_dict().items():
        if name.endswith("position_ids"):
            yield name, torch.arange(77)[None]
        elif tensor.dim() > 1:
            bound = (3 / tensor[0].numel()) ** 0.5
            yield name, torch.empty(tensor.shape).uniform_(-bound, bound, generator=noise).half()
        else:
            # text without a mean would be NaN in the WebUIs, which divide by it where they weigh words
            yield name, torch.full(tensor.shape, 0.01 if name.endswith("bias") else 1.0).half()


def _lora(noise: torch.Generator, channels: int) -> dict[str, torch.Tensor]:
    """For the attentions of the way down, and of the text encoder."""
    shapes = {}
    for level, factor in enumerate(LEVELS[:3]):
        for layer in range(2):
            for kind in ("attn1", "attn2"):
                place = f"lora_unet_down_blocks_{level}_attentions_{layer}_transformer_blocks_0_{kind}"
                width = factor * channels
                for name in ("to_q", "to_k", "to_v", "to_out_0"):
                    reads = 768 if kind == "attn2" and name in ("to_k", "to_v") else width
                    shapes[f"{place}_{name}"] = (width, reads)
    for layer in range(12):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes[f"lora_te_text_model_encoder_layers_{layer}_self_attn_{name}"] = (768, 768)
    weights = {}
    for name, (rows, columns) in shapes.items():
        weights[f"{name}.lora_down.weight"] = torch.randn(RANK, columns, generator=noise).half() / columns**0.5
        weights[f"{name}.lora_up.weight"] = 0.3 * torch.randn(rows, RANK, generator=noise).half()
        weights[f"{name}.alpha"] = torch.tensor(float(RANK))
    return weights


if __name__ == "__main__":
    main(*sys.argv[1:])
