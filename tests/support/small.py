"""Small models with the topology of the real ones, and single files as CompVis and Stability write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sd_lowvram.checkpoints.architectures import architecture


def narrow(name: str, vocabulary: int = 49408) -> dict[str, Any]:
    """A built-in architecture with few channels and layers of text; the widths by which it is told apart are kept."""
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


def _renamed(state: dict[str, torch.Tensor], pairs: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    renamed = {}
    for key, value in state.items():
        new = key
        for ours, theirs in pairs:
            new = new.replace(ours, theirs)
        renamed[new] = value
    return renamed


def unet_state(unet: nn.Module) -> dict[str, torch.Tensor]:
    levels = len(unet.config.block_out_channels)
    places = [("mid_block.resnets.0.", "middle_block.0."), ("mid_block.attentions.0.", "middle_block.1.")]
    places += [("mid_block.resnets.1.", "middle_block.2."), ("conv_in.", "input_blocks.0.0.")]
    places += [("conv_norm_out.", "out.0."), ("conv_out.", "out.2.")]
    places += [("time_embedding.linear_1.", "time_embed.0."), ("time_embedding.linear_2.", "time_embed.2.")]
    places += [("add_embedding.linear_1.", "label_emb.0.0."), ("add_embedding.linear_2.", "label_emb.0.2.")]
    for level in range(levels):
        for layer in range(2):
            place = 3 * level + layer + 1
            places.append((f"down_blocks.{level}.resnets.{layer}.", f"input_blocks.{place}.0."))
            places.append((f"down_blocks.{level}.attentions.{layer}.", f"input_blocks.{place}.1."))
        places.append((f"down_blocks.{level}.downsamplers.0.conv.", f"input_blocks.{3 * level + 3}.0.op."))
        for layer in range(3):
            place = 3 * level + layer
            places.append((f"up_blocks.{level}.resnets.{layer}.", f"output_blocks.{place}.0."))
            places.append((f"up_blocks.{level}.attentions.{layer}.", f"output_blocks.{place}.1."))
        after = 2 if "CrossAttn" in unet.config.up_block_types[level] else 1
        places.append((f"up_blocks.{level}.upsamplers.0.conv.", f"output_blocks.{3 * level + 2}.{after}.conv."))
    inside = [(".norm1.", ".in_layers.0."), (".conv1.", ".in_layers.2."), (".norm2.", ".out_layers.0.")]
    inside += [(".conv2.", ".out_layers.3."), (".time_emb_proj.", ".emb_layers.1.")]
    inside += [(".conv_shortcut.", ".skip_connection.")]
    state = unet.state_dict()
    resnets = {key: value for key, value in state.items() if ".resnets." in key}
    others = {key: value for key, value in state.items() if ".resnets." not in key}
    renamed = _renamed(_renamed(resnets, inside), places) | _renamed(others, places)
    return {"model.diffusion_model." + key: value for key, value in renamed.items()}


def vae_state(vae: nn.Module) -> dict[str, torch.Tensor]:
    pairs = [("mid_block.resnets.0.", "mid.block_1."), ("mid_block.resnets.1.", "mid.block_2.")]
    pairs += [("mid_block.attentions.0.", "mid.attn_1."), ("group_norm.", "norm."), ("conv_norm_out.", "norm_out.")]
    pairs += [("to_q.", "q."), ("to_k.", "k."), ("to_v.", "v."), ("to_out.0.", "proj_out.")]
    pairs += [("conv_shortcut.", "nin_shortcut.")]
    for level in range(4):
        pairs += [(f"down_blocks.{level}.resnets.", f"down.{level}.block.")]
        pairs += [(f"down_blocks.{level}.downsamplers.0.", f"down.{level}.downsample.")]
        pairs += [(f"up_blocks.{level}.resnets.", f"up.{3 - level}.block.")]
        pairs += [(f"up_blocks.{level}.upsamplers.0.", f"up.{3 - level}.upsample.")]
    renamed = _renamed(vae.state_dict(), pairs)
    for key, value in renamed.items():
        if ".attn_1." in key and value.ndim == 2:
            renamed[key] = value[:, :, None, None]
    return {"first_stage_model." + key: value for key, value in renamed.items()}


def clip_state(text: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    state = {key.removeprefix("text_model."): value for key, value in text.state_dict().items()}
    return {f"{prefix}text_model.{key}": value for key, value in state.items()}


def open_clip_state(text: nn.Module, prefix: str, unused_layers: int = 0) -> dict[str, torch.Tensor]:
    """OpenCLIP's names: q, k and v in one matrix. SD2.x files hold a last layer that is not used."""
    state = {key.removeprefix("text_model."): value for key, value in text.state_dict().items()}
    out = {
        "token_embedding.weight": state["embeddings.token_embedding.weight"],
        "positional_embedding": state["embeddings.position_embedding.weight"],
        "ln_final.weight": state["final_layer_norm.weight"],
        "ln_final.bias": state["final_layer_norm.bias"],
        "text_projection": state.get("text_projection.weight", torch.eye(text.config.hidden_size)).t().half(),
    }
    names = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    names["self_attn.out_proj"] = "attn.out_proj"
    layers = text.config.num_hidden_layers
    for layer in range(layers + unused_layers):
        ours, theirs = f"encoder.layers.{min(layer, layers - 1)}.", f"transformer.resblocks.{layer}."
        for kind in ("weight", "bias"):
            parts = [state[f"{ours}self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
            out[f"{theirs}attn.in_proj_{kind}"] = torch.cat(parts)
            for a, b in names.items():
                out[f"{theirs}{b}.{kind}"] = state[f"{ours}{a}.{kind}"]
    return {prefix + key: value for key, value in out.items()}


def single_file_state(models: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    """The models of ``build_components`` as one state dict in the original naming."""
    state = unet_state(models["unet"]) | vae_state(models["vae"])
    text = models["text_encoder"]
    if "text_encoder_2" in models:
        state |= clip_state(text, "conditioner.embedders.0.transformer.")
        state |= open_clip_state(models["text_encoder_2"], "conditioner.embedders.1.model.")
    elif text.config.hidden_size == 1024:
        state |= open_clip_state(text, "cond_stage_model.model.", unused_layers=1)
    else:
        state |= clip_state(text, "cond_stage_model.transformer.")
    return {key: value.contiguous() for key, value in state.items()}


def save_single_file(models: dict[str, nn.Module], path: Path, **more: torch.Tensor) -> Path:
    from safetensors.torch import save_file

    state = {key: value.clone() for key, value in single_file_state(models).items()}
    save_file(state | more, path)
    return path
