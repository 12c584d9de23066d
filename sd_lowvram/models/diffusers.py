"""The anatomy of diffusers' pipelines and models, told by what they have, so that diffusers itself is not imported."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import BadInputError
from .anatomy import Anatomy, sites

_TEXT = ("text_encoder", "text_encoder_2", "text_encoder_3")
_ORDER = (*_TEXT, "image_encoder", "controlnet", "unet", "vae", "safety_checker")


def dissect(target: Any) -> Anatomy | None:
    """The anatomy of a pipeline, UNet, AutoencoderKL or text encoder; None when ``target`` is none of these."""
    components = _components(target)
    return anatomy_of(components) if components else None


def anatomy_of(components: dict[str, nn.Module]) -> Anatomy:
    """The anatomy of a pipeline's models by name."""
    denoiser = next((name for name, module in components.items() if is_unet(module)), None)
    autoencoder = next((name for name, module in components.items() if is_autoencoder(module)), None)
    unet = components[denoiser] if denoiser else nn.Module()
    return Anatomy(
        family="diffusers",
        components=components,
        entries={name: ("encode", "decode") if name == autoencoder else ("forward",) for name in components},
        denoiser=denoiser,
        autoencoder=autoencoder,
        attentions=sum((sites(name, module, is_attention) for name, module in components.items()), ()),
        feed_forwards=sites(denoiser or "", unet, is_feed_forward),
        residual_blocks=sites(denoiser or "", unet, is_residual_block),
    )


def _components(target: Any) -> dict[str, nn.Module]:
    if isinstance(target, nn.Module):
        if is_unet(target):
            return {"unet": target}
        if is_autoencoder(target):
            return {"vae": target}
        return {"text_encoder": target} if is_text_encoder(target) else {}
    parts = getattr(target, "components", None)
    if not isinstance(parts, dict) or not any(is_unet(part) or is_autoencoder(part) for part in parts.values()):
        return {}
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    if any(hasattr(part, "transformer_blocks") and not is_unet(part) for part in modules.values()):
        raise BadInputError(
            f"{type(target).__name__} denoises with a transformer: sd-lowvram serves SD1.x, SD2.x and SDXL"
        )
    first = [name for name in _ORDER if name in modules]
    return {name: modules[name] for name in first + [name for name in modules if name not in first]}


def is_unet(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("down_blocks", "mid_block", "up_blocks", "conv_in", "time_embedding"))


def is_autoencoder(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("encoder", "decoder", "encode", "decode", "post_quant_conv"))


def is_text_encoder(module: nn.Module) -> bool:
    return hasattr(module, "text_model") or hasattr(module, "get_input_embeddings")


def is_attention(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("to_q", "to_k", "to_v", "to_out", "processor"))


def is_feed_forward(module: nn.Module) -> bool:
    net = getattr(module, "net", None)
    return isinstance(net, nn.ModuleList) and len(net) >= 2 and hasattr(net[0], "proj")


def is_residual_block(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("norm1", "conv1", "norm2", "conv2", "time_emb_proj"))
