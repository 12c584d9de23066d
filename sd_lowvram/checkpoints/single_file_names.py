"""The names under which single files hold the weights of SD1.x, SD2.x and SDXL: CompVis' for UNet and autoencoder,
and those of transformers or OpenCLIP for text encoders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import BadInputError
from .architectures import layers_per_block

if TYPE_CHECKING:
    from torch import Tensor, nn

UNET = "model.diffusion_model."
VAE = "first_stage_model."
_FIRST = "input_blocks.0.0.weight"
_WRAPPERS = ("", "model.", "module.", "state_dict.")
"""Prefixes that some programs write before every name."""

_UNETS = (UNET, "diffusion_model.", "model.", "")
_OLD_CLIP = re.compile(
    r"((?:cond_stage_model|conditioner\.embedders\.\d)\.transformer\.)(?=embeddings\.|encoder\.|final_l)"
)
"""Names from before transformers put ``text_model.`` into them."""


def usual_names(names: Iterable[str]) -> dict[str, str]:
    """Name in a single file -> the name that most files have for it; equal where nothing is known of it."""
    all_names = [*names]
    there = set(all_names)
    pairs = ((wrapper, unet) for unet in _UNETS for wrapper in _WRAPPERS if f"{wrapper}{unet}{_FIRST}" in there)
    wrapper, unet = next(pairs, ("", UNET))
    plain = {name: name.removeprefix(wrapper) for name in all_names}
    blocks = ("input_blocks", "middle_block", "output_blocks", "time_embed", "label_emb", "out")
    inner = tuple(f"{unet}{block}." for block in blocks)
    whole = unet in (UNET, "diffusion_model.")  # with other prefixes, not every such name is of the UNet
    vae = "vae." if not any(name.startswith(VAE) for name in plain.values()) else VAE
    usual = {}
    for name, left in plain.items():
        if left.startswith(unet if whole else inner):
            usual[name] = UNET + left.removeprefix(unet)
        elif left.startswith(vae):
            usual[name] = VAE + left.removeprefix(vae)
        else:
            usual[name] = _OLD_CLIP.sub(r"\1text_model.", left)
    return usual


_OUTER = {
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}
_RESIDUAL = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def unet_names(unet: Any) -> dict[str, str]:
    """Name of a weight of diffusers' ``unet`` -> its name in a single file; blocks are numbered by its own layers.

    Raises:
        BadInputError: it has a weight that single files have no place for.
    """
    places = _OUTER | _places(unet.config)
    return {name: UNET + _move(name, places) for name in unet.state_dict()}


def _places(config: Mapping[str, Any]) -> dict[str, str]:
    """Path of every layer and sampler -> its path in a single file."""
    places: dict[str, str] = {}
    layers, place = layers_per_block(config), 1
    for level, number in enumerate(layers):
        for layer in range(number):
            places |= _layer(f"down_blocks.{level}", layer, f"input_blocks.{place + layer}")
        place += number
        if level + 1 < len(layers):
            places[f"down_blocks.{level}.downsamplers.0.conv"] = f"input_blocks.{place}.0.op"
            place += 1
    place = 0
    for level, (number, kind) in enumerate(zip(reversed(layers), config["up_block_types"], strict=True)):
        for layer in range(number + 1):
            places |= _layer(f"up_blocks.{level}", layer, f"output_blocks.{place + layer}")
        place += number + 1
        behind = 2 if "CrossAttn" in kind else 1
        places[f"up_blocks.{level}.upsamplers.0.conv"] = f"output_blocks.{place - 1}.{behind}.conv"
    return places


def _layer(block: str, layer: int, place: str) -> dict[str, str]:
    return {f"{block}.resnets.{layer}": f"{place}.0", f"{block}.attentions.{layer}": f"{place}.1"}


def _move(name: str, places: Mapping[str, str]) -> str:
    start = next((start for start in places if name.startswith(start + ".")), None)
    if start is None:
        raise BadInputError(f"a single file has no place for the UNet's {name}: name a folder")
    inside = name.removeprefix(start + ".")
    if ".resnets." in name:
        part, _, rest = inside.partition(".")
        inside = f"{_RESIDUAL[part]}.{rest}"
    return f"{places[start]}.{inside}"


def unet_state(unet: nn.Module) -> dict[str, Tensor]:
    """The weights of diffusers' ``unet`` by their names in a single file.

    Raises:
        BadInputError: it has a weight that single files have no place for.
    """
    weights = unet.state_dict()
    return {theirs: weights[ours] for ours, theirs in unet_names(unet).items()}


_AUTOENCODER = (
    ("mid_block.resnets.0.", "mid.block_1."),
    ("mid_block.resnets.1.", "mid.block_2."),
    ("mid_block.attentions.0.", "mid.attn_1."),
    *(("group_norm.", "norm."), ("conv_norm_out.", "norm_out.")),
    *(("to_q.", "q."), ("to_k.", "k."), ("to_v.", "v."), ("to_out.0.", "proj_out.")),
    ("conv_shortcut.", "nin_shortcut."),
)


def vae_names(vae: Any) -> dict[str, str]:
    """Name of a weight of diffusers' AutoencoderKL -> its name in a single file."""
    pairs, levels = [*_AUTOENCODER], len(vae.config["block_out_channels"])
    for level in range(levels):
        pairs += [(f"down_blocks.{level}.resnets.", f"down.{level}.block.")]
        pairs += [(f"down_blocks.{level}.downsamplers.0.", f"down.{level}.downsample.")]
        pairs += [(f"up_blocks.{level}.resnets.", f"up.{levels - 1 - level}.block.")]
        pairs += [(f"up_blocks.{level}.upsamplers.0.", f"up.{levels - 1 - level}.upsample.")]
    names = {}
    for name in vae.state_dict():
        new = name
        for ours, theirs in pairs:
            new = new.replace(ours, theirs)
        names[name] = VAE + new
    return names


def vae_state(vae: Any) -> dict[str, Tensor]:
    """The weights of diffusers' AutoencoderKL by their names in a single file, where its attention is of 1x1
    convolutions."""
    weights, renamed = vae.state_dict(), {}
    for ours, theirs in vae_names(vae).items():
        weight = weights[ours]
        pointwise = ".attn_1." in theirs and weight.ndim == 2
        renamed[theirs] = weight[:, :, None, None] if pointwise else weight
    return renamed


def clip_state(text: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The weights of a CLIPTextModel as transformers named them when single files began."""
    return {
        f"{prefix}text_model.{name.removeprefix('text_model.')}": weight for name, weight in text.state_dict().items()
    }


_OPEN_CLIP = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}


_OPEN_CLIP_OUTER = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
    "text_projection.weight": "text_projection",
}
_JOINED = re.compile(r"self_attn\.[qkv]_proj\.(weight|bias)")


def text_names(text: nn.Module, prefix: str, there: Iterable[str]) -> dict[str, str]:
    """Name of a weight of a CLIPTextModel -> its name in a single file that holds the names ``there``.

    OpenCLIP has q, k and v in one matrix, so that three weights have one name.
    """
    held = set(there)
    is_open = f"{prefix}model.ln_final.weight" in held or any(name.startswith(f"{prefix}model.") for name in held)
    return {name: _text_name(name.removeprefix("text_model."), prefix, held, is_open) for name in text.state_dict()}


def _text_name(inner: str, prefix: str, held: set[str], is_open: bool) -> str:
    if not is_open:
        between = "" if inner == "text_projection.weight" else "text_model."
        return f"{prefix}transformer.{between}{inner}"
    place = f"{prefix}model."
    if inner in _OPEN_CLIP_OUTER:
        return place + (inner if place + inner in held else _OPEN_CLIP_OUTER[inner])
    moved = _JOINED.sub(r"attn.in_proj_\1", inner).replace("encoder.layers.", "transformer.resblocks.")
    for ours, theirs in _OPEN_CLIP.items():
        moved = moved.replace(f".{ours}.", f".{theirs}.")
    return place + moved


def open_clip_state(text: Any, prefix: str, unused_layers: int = 0) -> dict[str, Tensor]:
    """The weights of a CLIPTextModel by OpenCLIP's names: q, k and v in one matrix.

    SD2.x takes the text before OpenCLIP's last layer, which diffusers therefore leaves out; hosts build it all the
    same, and ``unused_layers`` copies of the last one stand for it.
    """
    import torch

    state = {name.removeprefix("text_model."): weight for name, weight in text.state_dict().items()}
    tokens = state["embeddings.token_embedding.weight"]
    projection = state.get("text_projection.weight")
    if projection is None:
        projection = torch.eye(text.config.hidden_size, dtype=tokens.dtype, device=tokens.device)
    renamed = {
        "token_embedding.weight": tokens,
        "positional_embedding": state["embeddings.position_embedding.weight"],
        "ln_final.weight": state["final_layer_norm.weight"],
        "ln_final.bias": state["final_layer_norm.bias"],
        "text_projection": projection.t(),
    }
    layers = text.config.num_hidden_layers
    for layer in range(layers + unused_layers):
        ours, theirs = f"encoder.layers.{min(layer, layers - 1)}.", f"transformer.resblocks.{layer}."
        for kind in ("weight", "bias"):
            parts = [state[f"{ours}self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
            renamed[f"{theirs}attn.in_proj_{kind}"] = torch.cat(parts)
            for a, b in _OPEN_CLIP.items():
                weight = state[f"{ours}{a}.{kind}"]
                renamed[f"{theirs}{b}.{kind}"] = weight if layer < layers else weight.clone()
    return {prefix + name: weight for name, weight in renamed.items()}


def single_file_state(parts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Unet, vae and text_encoder of an SD1.x or SD2.x model by their names in a single file, each in its own type."""
    text = parts["text_encoder"]
    if text.config.hidden_size == 1024:
        texts = open_clip_state(text, "cond_stage_model.model.", unused_layers=1)
    else:
        texts = clip_state(text, "cond_stage_model.transformer.")
    state = unet_state(parts["unet"]) | vae_state(parts["vae"]) | texts
    return {name: weight.detach().contiguous() for name, weight in state.items()}
