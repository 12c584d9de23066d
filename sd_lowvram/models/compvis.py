"""The anatomy of the UNets and autoencoders that descend from CompVis' latent diffusion: ``ldm`` and ``sgm``, as
AUTOMATIC1111 runs them, ``comfy.ldm`` and reForge's ``ldm_patched``, and Forge's integrated models.

They share the names of classes and children, which is all that is looked at; where their calls differ, what a call
brings decides. Layers are called, never unpacked: LoRAs act, and weights are cast and fetched, inside the call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..patches import is_foreign
from . import calls_compvis, support
from .anatomy import Family, Residual, TokenAttention, Transformer, UNetPath, has, having, is_3x3, is_pointwise, layer
from .causal_autoencoder import hosted_patch, is_causal, is_hosted, sees_frames, sees_pictures
from .interfaces import CompVisUNet, KLAutoencoder

_ATTENTIONS = ("CrossAttention", "MemoryEfficientCrossAttention")
_MAP_ATTENTIONS = ("AttnBlock", "MemoryEfficientAttnBlock")


def components_of(target: Any) -> dict[str, nn.Module]:
    """The "unet" and "vae" of a UNetModel, an AutoencoderKL, or whatever a host keeps these in; empty for all else.

    Hosts' shells are: CompVis' LatentDiffusion, sgm's DiffusionEngine, ComfyUI's ModelPatcher, BaseModel and VAE, and
    Forge's and reForge's engines with their ``forge_objects``.

    Raises:
        UnsupportedModelError: a shell whose denoiser or autoencoder is of another kind.
    """
    parts = unchecked_components_of(target)
    support.check(target, parts, {"unet": is_unet, "vae": is_autoencoder})
    return parts


def unchecked_components_of(target: Any) -> dict[str, nn.Module]:
    """Components like :func:`components_of`, of any kind."""
    if is_unet(target):
        return {"unet": target}
    if is_autoencoder(target):
        return {"vae": target}
    forge = getattr(target, "forge_objects", None)
    holders = (target,) if forge is None else (getattr(forge, "unet", None), getattr(forge, "vae", None))
    unets = (_follow_path(holder, *path) for holder in holders for path in _UNET_PATHS)
    unet = next((module for module in unets if isinstance(module, nn.Module)), None)
    vae = next((module for module in (_follow_path(holder, "first_stage_model") for holder in holders) if module), None)
    components = {"unet": unet, "vae": vae}
    return {name: module for name, module in components.items() if isinstance(module, nn.Module)}


_UNET_PATHS = (("model", "diffusion_model"), ("diffusion_model",))


def _follow_path(start: Any, *path: str) -> Any:
    for name in path:
        start = getattr(start, name, None)
    return start


def is_unet(module: Any) -> bool:
    """True for a UNetModel of CompVis' code or of its descendants."""
    matches = has(module, "time_embed", "input_blocks", "middle_block", "output_blocks", "out")
    return matches and isinstance(module, nn.Module) and not support.is_of_video(module)


def is_autoencoder(module: Any) -> bool:
    """True for an autoencoder of CompVis' code or of its descendants."""
    if not (isinstance(module, nn.Module) and has(module, "encoder", "decoder", "encode", "decode")):
        return False
    if sees_frames(module) or sees_pictures(module):
        return (is_hosted(module) or sees_pictures(module)) and is_causal(module)
    return has(module.decoder, "conv_in", "mid", "up", "norm_out", "conv_out") and not support.is_of_video(module)


def is_attention(module: nn.Module) -> bool:
    """True for an attention of a kind that is known."""
    return type(module).__name__ in (*_ATTENTIONS, *_MAP_ATTENTIONS) and attend_kind(module) is not None


def attend_kind(module: Any) -> str | None:
    """Return "tokens" for an attention of (N, tokens, C), "map" for one of (N, C, H, W), None for an unknown one."""
    if has(module, "to_q", "to_k", "to_v", "to_out", "heads"):
        return "tokens"
    return "map" if has(module, "norm", "q", "k", "v", "proj_out") else None


def is_feed_forward(module: nn.Module) -> bool:
    """True for a feed-forward layer."""
    net = getattr(module, "net", None)
    return type(module).__name__ == "FeedForward" and isinstance(net, nn.Sequential) and len(net) >= 2


is_residual_block = having("in_layers", "emb_layers", "out_layers", "skip_connection")
is_transformer_block = having("norm1", "attn1", "attn2", "norm3", "ff")


def unet_path(unet: CompVisUNet) -> UNetPath:
    """The way of a UNet's maps."""
    blocks = [*unet.input_blocks, *([] if unet.middle_block is None else [unet.middle_block]), *unet.output_blocks]
    return UNetPath(
        modules=tuple(module for block in blocks for module in block),
        makers=tuple(list(block)[-1] for block in unet.input_blocks),
        tail=(unet.out,),
    )


def residual(block: Any, *more: Any) -> Residual | None:
    """The parts of a ResBlock; None when it resamples inside, conditions its second norm on time, or works on video."""
    if _is_unusual(block) or any(isinstance(options, Mapping) and "group_norm_wrapper" in options for options in more):
        return None
    norm1, act, conv1 = block.in_layers
    norm2, _, dropout, conv2 = block.out_layers
    shortcut = None if isinstance(block.skip_connection, nn.Identity) else block.skip_connection
    norms = all(hasattr(norm, "num_groups") for norm in (norm1, norm2))
    pointwise = shortcut is None or is_pointwise(shortcut)
    if not (norms and pointwise and is_3x3(conv1) and is_3x3(conv2)) or (block.training and dropout.p > 0):
        return None
    return Residual(norm1, conv1, norm2, conv2, act, functools.partial(_shift, block), shortcut)


def _is_unusual(block: Any) -> bool:
    """True for a ResBlock that has other layers, resamples inside, or conditions its second norm on time."""
    if len(block.in_layers) != 3 or len(block.out_layers) != 4 or hasattr(block, "time_stack"):
        return True
    return any(getattr(block, name, False) for name in ("updown", "use_scale_shift_norm", "exchange_temb_dims"))


def _shift(block: Any, time: Tensor | None) -> Tensor | None:
    if block.emb_layers is None or getattr(block, "skip_t_emb", False) or time is None:
        return None
    shift: Tensor = block.emb_layers(time)
    return shift[:, :, None, None]


TOKEN_PATCHES = ("attn1_patch", "attn1_output_patch", "attn2_patch", "attn2_output_patch", "middle_patch")
"""Hooks of ComfyUI and Forge that pass the tokens of a transformer block, or its queries, keys and values."""


def transformer(
    block: Any, context: Any = None, transformer_options: Mapping[str, Any] | None = None, **more: Any
) -> Transformer | None:
    """The parts of a BasicTransformerBlock; None for any but the plain kind, and where a host's patch sees tokens."""
    odd = (getattr(block, name, False) for name in ("ff_in", "switch_temporal_ca_to_sa", "_tome_info"))
    attentions = [attention for attention in (block.attn1, block.attn2) if attention is not None]
    plain = all(map(_is_row_by_row, attentions)) and _is_unpatched(transformer_options)
    if any(odd) or any(more.values()) or not plain:
        return None
    extra = {} if transformer_options is None else {"transformer_options": transformer_options}
    own = context if getattr(block, "disable_self_attn", False) else None
    parts = [_token_attention(block.norm1, block.attn1, own, extra)]
    if block.attn2 is not None:
        parts.append(_token_attention(block.norm2, block.attn2, context, extra))
    return Transformer(tuple(parts), block.norm3, block.ff)


def _token_attention(
    norm: nn.Module, attention: Any, context: Tensor | None, extra: Mapping[str, Any]
) -> TokenAttention:
    takes = "transformer_options" in calls_compvis.arguments(type(attention)) or not extra
    passed = extra if takes else {}
    return TokenAttention(
        norm, attention.to_k, attention.to_v, context, lambda rows, keys: attention(rows, context=keys, **passed)
    )


def _is_row_by_row(attention: Any) -> bool:
    """True if the host's forward treats every query's row separately; a forward set on the instance may not."""
    return type(attention).__name__ in _ATTENTIONS and not is_foreign(attention, "forward")


def _is_unpatched(options: Mapping[str, Any] | None) -> bool:
    """True if no foreign function sees a transformer block's tokens or queries."""
    options = options or {}
    patches, replaced = (options.get(name) or {} for name in ("patches", "patches_replace"))
    return not any(patches.get(name) for name in TOKEN_PATCHES) and not any(map(replaced.get, ("attn1", "attn2")))


def attend(attention: Any, original: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Result of the attention's forward, computed with torch's own scaled_dot_product_attention.

    Calls with arguments of one host only, and foreign layers, go to ``original``.
    """
    if attend_kind(attention) == "map":
        return _attend_map(attention, x) if not args else original(x, *args, **kwargs)
    context, value, mask, options = (kwargs.get(name) for name in ("context", "value", "mask", "transformer_options"))
    served = {"context", "value", "mask", "transformer_options"}
    if len(args) > 1 or (args and context is not None) or any(kwargs[name] for name in kwargs.keys() - served):
        return original(x, *args, **kwargs)
    context = args[0] if args else context
    query = attention.to_q(x)
    context = x if context is None else context
    key, values = attention.to_k(context), attention.to_v(context if value is None else value)
    override = (options or {}).get("optimized_attention_override")
    run = functools.partial(override, _optimized_attention) if override else _optimized_attention
    precision = getattr(attention, "attn_precision", None)
    extra = {} if options is None else {"transformer_options": options}
    out: Tensor = attention.to_out(run(query, key, values, attention.heads, mask, attn_precision=precision, **extra))
    return out


def _optimized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **more: Any,
) -> Tensor:
    """Attention by torch's function under the signature of ComfyUI's: (N, tokens, heads * width), or heads apart."""
    if not skip_reshape:
        q, k, v = (tensor.unflatten(2, (heads, -1)).transpose(1, 2) for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=_broadcast(mask, len(q), k.shape[2]))
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def _broadcast(mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """A mask as torch's function takes it: of keys (N, ...) as ldm has them, or of scores with or without batch and
    heads."""
    if mask is None:
        return None
    if mask.dtype == torch.bool and (mask.dim() == 2 or mask.dim() > 4) and mask.numel() == batch * keys:
        return mask.reshape(batch, 1, 1, keys)
    mask = mask[None] if mask.dim() == 2 else mask
    return mask[:, None] if mask.dim() == 3 else mask


def _attend_map(block: Any, x: Tensor) -> Tensor:
    normed = block.norm(x)
    query, key, value = (_tokens(project(normed)) for project in (block.q, block.k, block.v))
    del normed
    mixed = F.scaled_dot_product_attention(query, key, value)
    del query, key, value
    out: Tensor = x + block.proj_out(mixed[:, 0].transpose(1, 2).unflatten(2, x.shape[2:]))
    return out


def _tokens(x: Tensor) -> Tensor:
    """(N, C, H, W) as one head of tokens (N, 1, H * W, C)."""
    return x.flatten(2).transpose(1, 2).contiguous()[:, None]


def _upcasts(attention: Any) -> bool:
    """True if ComfyUI or ldm requests float32; ldm does so unless an environment variable forbids it."""
    if getattr(attention, "attn_precision", None) is torch.float32:
        return True
    ours = attend_kind(attention) == "tokens" and not hasattr(attention, "attn_precision")
    return ours and getattr(sys.modules.get(type(attention).__module__), "_ATTN_PRECISION", None) == "fp32"


def _decode(vae: KLAutoencoder, latents: Tensor) -> Tensor:
    pixels: Tensor = vae.decode(latents)
    return pixels


def _encode(vae: KLAutoencoder, pixels: Tensor) -> Tensor:
    """The moments, whatever the host's encode makes of them."""
    source: Any = vae.conv1 if sees_frames(vae) else getattr(vae, "quant_conv", None)  # type: ignore[attr-defined]
    seen: list[Tensor] = []
    handle = (vae.encoder if source is None else source).register_forward_hook(lambda *call: seen.append(call[2]))
    try:
        vae.encode(pixels)
    finally:
        handle.remove()
    return torch.cat(seen) if len(seen) > 1 else seen[0]


def _configs(components: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Configurations in diffusers' words, read from the layers of models that have none."""
    configs: dict[str, dict[str, Any]] = {}
    if "unet" in components:
        unet: CompVisUNet = components["unet"]
        last: Any = [module for module in unet.out.modules() if hasattr(module, "out_channels")][-1]
        configs["unet"] = {"out_channels": int(last.out_channels)}
        if next(calls_compvis.linears(getattr(unet, "label_emb", None)), None) is not None:
            configs["unet"]["sample_size"] = 128
    if "vae" in components and is_causal(components["vae"]):
        configs["vae"] = _config_of_frames(components["vae"])
    elif "vae" in components:
        decoder = components["vae"].decoder
        widths = [int(level.block[-1].norm2.num_channels) for level in decoder.up]
        side = support.packed_side(components["vae"])
        channels = int(layer(decoder.conv_in).in_channels) * side**2
        configs["vae"] = {"block_out_channels": widths, "latent_channels": channels}
        if side > 1:
            configs["vae"]["latent_scale"] = 2 ** (len(widths) - 1) * side
    return configs


def _config_of_frames(vae: Any) -> dict[str, Any]:
    pictures = sees_pictures(vae)
    return {
        "dim_mult": vae.dim_mult,
        "z_dim": vae.z_dim,
        "in_channels": layer(vae.encoder.conv_in if pictures else vae.encoder.conv1).in_channels,
        "patch_size": 1 if pictures else hosted_patch(vae),
    }


RANGES = ("_v",)
"""The place in a range of addresses where ComfyUI's layers look for their weights under dynamic VRAM. Layers without it
use the weights that they hold, which is what a trace has to see."""


FAMILY = Family(
    components_of=components_of,
    unchecked_components_of=unchecked_components_of,
    entry_methods=("apply_model", "decode_first_stage", "encode_first_stage"),
    is_attention=is_attention,
    is_feed_forward=is_feed_forward,
    is_residual_block=is_residual_block,
    is_transformer_block=is_transformer_block,
    unet_path=unet_path,
    residual=residual,
    transformer=transformer,
    upcasts=_upcasts,
    attend=attend,
    hosted=True,
    left_out=RANGES,
    step_inputs=calls_compvis.step_inputs,
    predict=calls_compvis.predict,
    decode=_decode,
    encode=_encode,
    configs=_configs,
)
