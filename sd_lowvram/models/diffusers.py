"""The anatomy of diffusers' pipelines and models, recognised by their attributes, without importing diffusers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from . import calls_diffusers, support
from .anatomy import (
    Anatomy,
    AttentionOverMap,
    Family,
    Residual,
    TokenAttention,
    Transformer,
    UNetPath,
    has,
    having,
    is_3x3,
    is_pointwise,
)
from .calls import SAFETY_CHECKER
from .causal_autoencoder import sees_frames
from .interfaces import DiffusersUNet, KLAutoencoder, MapAttention
from .latents import latent_channels


def components_of(target: Any) -> dict[str, nn.Module]:
    """The models of a pipeline, or a UNet, autoencoder or text encoder by itself; empty for all else.

    Raises:
        UnsupportedModelError, ConflictError: as :func:`find_served`.
    """
    return find_served(target, SERVED, _ALONE)


def find_served(target: Any, served: support.Served, alone: Iterable[str]) -> dict[str, nn.Module]:
    """The models of a pipeline in the order of ``served``, or a model by itself; empty for all else.

    Args:
        alone: the names of models that are served by themselves.

    Raises:
        UnsupportedModelError: a pipeline with a part that is not among ``served``.
        ConflictError: a part whose weights diffusers casts layer by layer.
    """
    if isinstance(target, nn.Module):
        components = next(({name: target} for name in alone if served[name](target)), {})
    else:
        parts = getattr(target, "components", None)
        named = parts if isinstance(parts, dict) else {}
        modules = {name: part for name, part in named.items() if isinstance(part, nn.Module)}
        support.check(target, modules, served)
        components = {name: modules[name] for name in served if name in modules}
    support.check_casting(components)
    return components


def unchecked_components_of(target: Any, served: support.Served | None = None) -> dict[str, nn.Module]:
    """The parts of a pipeline that are ``served``, of whatever kind they are now; a model by itself has none."""
    names = () if isinstance(target, nn.Module) else SERVED if served is None else served
    named = {name: getattr(target, name, None) for name in names}
    return {name: part for name, part in named.items() if isinstance(part, nn.Module)}


def _anatomy_fields(target: Any, anatomy: Anatomy) -> dict[str, Any]:
    """Fields of the anatomy that describe runs of ``target``, a pipeline or a model."""
    unet = anatomy.denoiser_module
    if unet is None:
        return {}
    return {
        "passes": calls_diffusers.passes(target, unet),
        "encodes": calls_diffusers.encodes(target, unet, latent_channels(anatomy)),
        "processors": calls_diffusers.run_processors(target, unet),
    }


def is_unet(module: Any) -> bool:
    """True for a UNet2DConditionModel with the conditions of Stable Diffusion."""
    if not has(module, "down_blocks", "mid_block", "up_blocks", "conv_in", "time_embedding"):
        return False
    kinds = {type(block).__name__ for block in (*module.down_blocks, module.mid_block, *module.up_blocks)}
    asked = module.config.get
    return kinds <= _BLOCKS and all(asked(name) in served for name, served in _CONDITIONS.items())


_BLOCKS = {
    *("DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"),
    *("UNetMidBlock2D", "UNetMidBlock2DCrossAttn", "NoneType"),
}
_CONDITIONS: dict[str, tuple[str | None, ...]] = {
    "addition_embed_type": (None, "text_time"),
    "encoder_hid_dim_type": (None, "ip_image_proj"),
    "attention_type": (None, "default"),
}
"""Supported conditions of a UNet in addition to text, by the names in its configuration."""


def is_autoencoder(module: Any) -> bool:
    """True for an AutoencoderKL, the autoencoders of FLUX.2, Qwen-Image and Wan, and an AutoencoderTiny."""
    if not has(module, "encoder", "decoder", "encode", "decode"):
        return False
    if hasattr(module, "latent_magnitude") or (sees_frames(module) and hasattr(module, "post_quant_conv")):
        return True
    odd = hasattr(module, "quantize") or hasattr(module.decoder, "condition_encoder")
    blocks = {type(block).__name__ for block in getattr(module.decoder, "up_blocks", ())}
    return hasattr(module, "post_quant_conv") and not odd and {"UpDecoderBlock2D"} <= blocks <= _DECODER_BLOCKS


_DECODER_BLOCKS = {"UpDecoderBlock2D", "AttnUpDecoderBlock2D"}


def is_of_type(*types: str) -> Callable[[Any], bool]:
    """Function that returns True if a model of transformers has one of these types in its configuration."""
    return lambda module: getattr(getattr(module, "config", None), "model_type", None) in types


def _is_controlnet(module: Any) -> bool:
    nets = getattr(module, "nets", [module])
    return all(hasattr(net, "controlnet_cond_embedding") for net in nets)


SERVED: support.Served = {
    "text_encoder": is_of_type("clip_text_model"),
    "text_encoder_2": is_of_type("clip_text_model"),
    "image_encoder": lambda module: is_of_type("clip_vision_model")(module) and hasattr(module, "visual_projection"),
    "depth_estimator": is_of_type("dpt"),
    "adapter": having("total_downscale_factor"),
    "controlnet": _is_controlnet,
    "unet": is_unet,
    "vae": is_autoencoder,
    SAFETY_CHECKER: having("vision_model", "concept_embeds"),
}
"""The parts of a pipeline that are planned, in the order in which a run uses them."""

_ALONE = ("unet", "vae", "text_encoder")


is_attention = having("to_q", "to_k", "to_v", "to_out", "processor")
is_residual_block = having("norm1", "conv1", "norm2", "conv2", "time_emb_proj")
is_transformer_block = having("norm1", "attn1", "norm2", "attn2", "norm3", "ff")


def is_feed_forward(module: nn.Module) -> bool:
    """True for a feed-forward layer of diffusers."""
    net = getattr(module, "net", None)
    return isinstance(net, nn.ModuleList) and len(net) >= 2 and hasattr(net[0], "proj")


def unet_path(unet: DiffusersUNet) -> UNetPath:
    """The way of a UNet's maps."""
    blocks = [*unet.down_blocks, *([] if unet.mid_block is None else [unet.mid_block]), *unet.up_blocks]
    makers = [unet.conv_in]
    for block in unet.down_blocks:
        last = "attentions" if any(True for _ in _list_modules(block, "attentions")) else "resnets"
        makers += [*_list_modules(block, last), *_list_modules(block, "downsamplers")]
    return UNetPath(
        modules=(unet.conv_in, *(module for block in blocks for module in _modules_in_order(block))),
        makers=tuple(makers),
        tail=tuple(module for module in (unet.conv_norm_out, unet.conv_out) if module is not None),
    )


def _modules_in_order(block: Any) -> Iterator[nn.Module]:
    """The modules of a block: each residual block, with its transformer after it where there is one, and a sampler."""
    pairs = itertools.zip_longest(_list_modules(block, "resnets"), _list_modules(block, "attentions"))
    yield from (module for pair in pairs for module in pair if module is not None)
    yield from (module for kind in ("downsamplers", "upsamplers") for module in _list_modules(block, kind))


def _list_modules(block: Any, kind: str) -> Iterator[nn.Module]:
    yield from (module for module in getattr(block, kind, None) or () if module is not None)


def residual(block: Any, *more: Any) -> Residual | None:
    """The parts of a ResnetBlock2D; None when it resamples inside, or conditions its second norm on time."""
    resamples = getattr(block, "upsample", None) is not None or getattr(block, "downsample", None) is not None
    plain_time = getattr(block, "time_embedding_norm", "default") == "default"
    norms = all(hasattr(norm, "num_groups") for norm in (block.norm1, block.norm2))
    shortcut = getattr(block, "conv_shortcut", None)
    pointwise = shortcut is None or is_pointwise(shortcut)
    if resamples or not (plain_time and norms and pointwise and all(map(is_3x3, (block.conv1, block.conv2)))):
        return None
    if block.training and block.dropout.p > 0:
        return None
    return Residual(
        block.norm1,
        block.conv1,
        block.norm2,
        block.conv2,
        block.nonlinearity,
        functools.partial(_shift, block),
        shortcut,
        float(block.output_scale_factor),
    )


def _shift(block: Any, temb: Tensor | None) -> Tensor | None:
    if block.time_emb_proj is None or temb is None:
        return None
    shift: Tensor = block.time_emb_proj(temb if block.skip_time_act else block.nonlinearity(temb))
    return shift[:, :, None, None]


_ROW_BY_ROW = frozenset({"AttnProcessor", "AttnProcessor2_0", "SlicedAttnProcessor", "XFormersAttnProcessor"})


def transformer(
    block: Any,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Tensor | None = None,
    *args: Any,
    cross_attention_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Transformer | None:
    """The parts of a BasicTransformerBlock; None for any but the plain kind, and for processors in which a query's row
    depends on the other queries."""
    extra = cross_attention_kwargs or {}
    attentions = [attention for attention in (block.attn1, block.attn2) if attention is not None]
    masks = (attention_mask, encoder_attention_mask)
    leave = args or not _is_plain(block) or not all(map(_is_row_by_row, attentions))
    leave = leave or "gligen" in extra or isinstance(encoder_hidden_states, (tuple, list))
    if leave or any(map(_differs_by_query, masks)):
        return None
    own = isinstance(block.attn1, MapAttention)
    if own and attention_mask is not None:
        return None
    parts: list[TokenAttention | AttentionOverMap] = [
        AttentionOverMap(block.norm1, block.attn1)
        if own
        else _token_attention(block.norm1, block.attn1, None, {"attention_mask": attention_mask, **extra})
    ]
    if block.attn2 is not None:
        options = {"attention_mask": encoder_attention_mask, **extra}
        parts.append(_token_attention(block.norm2, block.attn2, encoder_hidden_states, options))
    return Transformer(tuple(parts), block.norm3, block.ff)


def _differs_by_query(mask: Tensor | None) -> bool:
    return mask is not None and mask.shape[1] > 1


def _token_attention(
    norm: nn.Module, attention: Any, context: Tensor | None, extra: Mapping[str, Any]
) -> TokenAttention:
    # of a context whose keys and values are there, the processor only looks at the batch and the length
    return TokenAttention(
        norm,
        attention.to_k,
        attention.to_v,
        context,
        lambda rows, keys: attention(rows, encoder_hidden_states=keys, **extra),
    )


def _is_plain(block: Any) -> bool:
    """True for x + attn1(norm1(x)), x + attn2(norm2(x), context), x + ff(norm3(x)), and nothing else."""
    norms = [block.norm1, block.norm3] + ([] if block.attn2 is None else [block.norm2])
    layer_norm = getattr(block, "norm_type", "layer_norm") == "layer_norm"
    extras = [getattr(block, name, None) for name in ("pos_embed", "only_cross_attention", "_chunk_size")]
    merges = hasattr(block, "_tome_info")  # tokens are merged across the picture
    return layer_norm and all(isinstance(norm, nn.LayerNorm) for norm in norms) and not any(extras) and not merges


def _is_row_by_row(attention: Any) -> bool:
    mixes = (getattr(attention, name, None) for name in ("group_norm", "spatial_norm", "norm_cross"))
    is_listed = type(attention.processor).__name__ in _ROW_BY_ROW or isinstance(attention, MapAttention)
    return is_listed and not any(mixes)


def _mixes_rows(attention: Any) -> bool:
    """True if the processor splits the batch (perturbed attention guidance), or may do so because it is a user's."""
    if isinstance(attention, MapAttention):
        return False
    kind = type(attention.processor)
    return "PAG" in kind.__name__ or not kind.__module__.startswith("diffusers.")


def _upcasts(attention: Any) -> bool:
    return bool(getattr(attention, "upcast_attention", False))


def decode(vae: KLAutoencoder, latents: Tensor) -> Tensor:
    """Decode unscaled latents to pixels."""
    pixels: Tensor = vae.decode(latents, return_dict=False)[0]
    return pixels


def encode(vae: KLAutoencoder, pixels: Tensor) -> Tensor:
    """Encode pixels to moments: mean and log-variance."""
    encoded = vae.encode(pixels)
    moments: Tensor = encoded.latents if hasattr(encoded, "latents") else encoded.latent_dist.parameters
    return moments


FAMILY = Family(
    components_of=components_of,
    unchecked_components_of=unchecked_components_of,
    entry_methods=("check_inputs",),
    is_attention=is_attention,
    is_feed_forward=is_feed_forward,
    is_residual_block=is_residual_block,
    is_transformer_block=is_transformer_block,
    unet_path=unet_path,
    residual=residual,
    transformer=transformer,
    upcasts=_upcasts,
    mixes_rows=_mixes_rows,
    step_inputs=None,
    predict=None,
    decode=decode,
    encode=encode,
    conditions=calls_diffusers.conditions,
    arguments=calls_diffusers.arguments,
    anatomy_fields=_anatomy_fields,
)
