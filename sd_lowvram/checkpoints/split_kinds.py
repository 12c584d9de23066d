"""What one of ComfyUI's split files is, and the configuration of what is in it, from its header.

Names and widths of the layers tell both: heads from the norms of queries, which are as wide as a head, depths from the
numbers of blocks. What no header tells is as the published models have it (``data/architectures/transformers.json``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .architectures import parts_of_transformers
from .gguf_files import gguf_header, is_gguf_file
from .inspection import describe
from .safetensors_header import Header, read_header
from .scaled_files import check_formats

_INNER = "model.diffusion_model."
"""Before the names of a transformer, in files that were cut out of whole checkpoints."""

Shapes = Mapping[str, tuple[int, ...]]
"""Of the weights in a file, by name."""


@dataclass(frozen=True)
class SplitFile:
    """One file.

    Attributes:
        kind: "flux1", "t5", "kl"; what the file holds.
        config: of the model in it, as diffusers or transformers write it.
        is_gguf: a GGUF file, else .safetensors.
    """

    path: Path
    kind: str
    config: dict[str, Any]
    is_gguf: bool = False


def split_file(path: Path, role: str) -> SplitFile:
    """The file at ``path``, which was given for a ``role``: "transformer", "text encoder" or "vae".

    Raises:
        CheckpointError: unreadable, truncated, stored in a way that is not served, or for another role.
    """
    blocks = is_gguf_file(path)
    header = gguf_header(path) if blocks else read_header(path)
    if blocks and role != "transformer":
        raise CheckpointError(f"{path} is a GGUF file: these are read of transformers; get the {role} as .safetensors")
    check_formats(path, header)
    shapes = {name.removeprefix(_INNER): entry.shape for name, entry in header.tensors.items()}
    found = next(((kind, known) for kind, known in _KINDS.items() if known.mark in shapes), None)
    if found is None or found[1].role != role:
        what = f"{found[1].title}, a {found[1].role}" if found else described(header)
        served = ", ".join(known.title for known in _KINDS.values() if known.role == role)
        raise CheckpointError(f"{path} is no {role} that is served: it looks like {what}. Served are those of {served}")
    kind, known = found
    try:
        return SplitFile(path, kind, known.config(shapes), blocks)
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"{path} looks like {known.title}, but its weights do not go together ({type(error).__name__}: {error})"
        ) from error


def described(header: Header) -> str:
    """In a few words, what else a file might be."""
    whole = any(name.startswith("first_stage_model.") for name in header.tensors)
    return "a whole checkpoint (give it with --model)" if whole else describe(header)


def _count(shapes: Shapes, before: str) -> int:
    """How many blocks there are whose names begin so."""
    number = re.compile(rf"{re.escape(before)}\.(\d{{1,4}})\.")
    found = {int(match[1]) for name in shapes if (match := number.match(name))}
    if found != set(range(len(found))):
        raise ValueError(f"of {before} some are missing")
    return len(found)


def _axes(head: int, parts: tuple[int, ...]) -> list[int]:
    """How many of a head's channels turn with each axis: of published heads, 128 wide, ``parts``."""
    return [head * part // 128 for part in parts]


def _heads(width: int, head: int) -> dict[str, int]:
    return {"attention_head_dim": head, "num_attention_heads": width // head}


def _double_stream(shapes: Shapes) -> dict[str, Any]:
    """What the transformers of Black Forest Labs and their descendants have in common."""
    norm = "double_blocks.0.img_attn.norm.query_norm"
    head = shapes[f"{norm}.scale" if f"{norm}.scale" in shapes else f"{norm}.weight"][0]
    width, channels = shapes["img_in.weight"]
    return {
        "in_channels": channels,
        "num_layers": _count(shapes, "double_blocks"),
        "num_single_layers": _count(shapes, "single_blocks"),
        "joint_attention_dim": shapes["txt_in.weight"][1],
        **_heads(width, head),
    }


def _flux1(shapes: Shapes) -> dict[str, Any]:
    told = _double_stream(shapes)
    if told["in_channels"] != shapes["final_layer.linear.weight"][0]:
        raise ValueError("it is given more than a picture's latents, as Fill, Depth and Canny are: give its folder")
    return parts_of_transformers()["flux1-dev"] | told | {
        "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "axes_dims_rope": _axes(told["attention_head_dim"], (16, 56, 56)),
    }  # fmt: skip


def _chroma(shapes: Shapes) -> dict[str, Any]:
    told = _double_stream(shapes)
    hidden, channels = shapes["distilled_guidance_layer.in_proj.weight"]
    return parts_of_transformers()["chroma1"] | told | {
        "approximator_num_channels": channels,
        "approximator_hidden_dim": hidden,
        "approximator_layers": _count(shapes, "distilled_guidance_layer.layers"),
        "axes_dims_rope": _axes(told["attention_head_dim"], (16, 56, 56)),
    }  # fmt: skip


def _flux2(shapes: Shapes) -> dict[str, Any]:
    told = _double_stream(shapes)
    width = shapes["img_in.weight"][0]
    return parts_of_transformers()["klein-4b"] | told | {
        "mlp_ratio": shapes["double_blocks.0.img_mlp.2.weight"][1] / width,
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "axes_dims_rope": _axes(told["attention_head_dim"], (32, 32, 32, 32)),
    }  # fmt: skip


def _sd3(shapes: Shapes) -> dict[str, Any]:
    width, channels = shapes["x_embedder.proj.weight"][:2]
    normed = "joint_blocks.0.x_block.attn.ln_q.weight" in shapes
    dual = re.compile(r"joint_blocks\.(\d{1,4})\.x_block\.attn2\.qkv\.weight")
    return {
        "_class_name": "SD3Transformer2DModel",
        "sample_size": 128,
        "in_channels": channels,
        "out_channels": channels,
        "num_layers": _count(shapes, "joint_blocks"),
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "caption_projection_dim": width,
        "pooled_projection_dim": shapes["y_embedder.mlp.0.weight"][1],
        "pos_embed_max_size": math.isqrt(shapes["pos_embed"][1]),
        "qk_norm": "rms_norm" if normed else None,
        "dual_attention_layers": sorted(int(match[1]) for name in shapes if (match := dual.fullmatch(name))),
        **_heads(width, shapes["joint_blocks.0.x_block.attn.ln_q.weight"][0] if normed else 64),
    }


def _z_image(shapes: Shapes) -> dict[str, Any]:
    head = shapes["layers.0.attention.q_norm.weight"][0]
    width, texts = shapes["cap_embedder.1.weight"]
    return parts_of_transformers()["z-image"] | {
        "in_channels": shapes["x_embedder.weight"][1] // 4,
        "dim": width,
        "n_layers": _count(shapes, "layers"),
        "n_refiner_layers": _count(shapes, "noise_refiner"),
        "n_heads": width // head,
        "n_kv_heads": width // head,
        "cap_feat_dim": texts,
        "axes_dims": _axes(head, (32, 48, 48)),
    }


def _qwen_image(shapes: Shapes) -> dict[str, Any]:
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    width, channels = shapes["img_in.weight"]
    return parts_of_transformers()["qwen-image"] | {
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // 4,
        "num_layers": _count(shapes, "transformer_blocks"),
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "axes_dims_rope": _axes(head, (16, 56, 56)),
        **_heads(width, head),
    }


def _t5(shapes: Shapes) -> dict[str, Any]:
    layer = "encoder.block.0.layer"
    buckets, heads = shapes[f"{layer}.0.SelfAttention.relative_attention_bias.weight"]
    tokens, width = shapes.get("shared.weight") or shapes["encoder.embed_tokens.weight"]
    return parts_of_transformers()["t5-xxl"] | {
        "vocab_size": tokens,
        "d_model": width,
        "d_kv": shapes[f"{layer}.0.SelfAttention.q.weight"][0] // heads,
        "d_ff": shapes[f"{layer}.1.DenseReluDense.wi_0.weight"][0],
        "num_layers": _count(shapes, "encoder.block"),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
    }


def _clip(shapes: Shapes) -> dict[str, Any]:
    """Heads are 64 wide in both that are in use; the wider of them is OpenCLIP's, of another activation."""
    tokens, width = shapes["text_model.embeddings.token_embedding.weight"]
    projection = shapes.get("text_projection.weight", (width, width))[0]
    return parts_of_transformers()["clip-g" if width >= 1280 else "clip-l"] | {
        "vocab_size": tokens,
        "hidden_size": width,
        "intermediate_size": shapes["text_model.encoder.layers.0.mlp.fc1.weight"][0],
        "num_hidden_layers": _count(shapes, "text_model.encoder.layers"),
        "num_attention_heads": width // 64,
        "projection_dim": projection,
    }


def _decoder_only(shapes: Shapes, head: int) -> dict[str, Any]:
    layer = "model.layers.0"
    tokens, width = shapes["model.embed_tokens.weight"]
    return {
        "vocab_size": tokens,
        "hidden_size": width,
        "intermediate_size": shapes[f"{layer}.mlp.gate_proj.weight"][0],
        "num_hidden_layers": _count(shapes, "model.layers"),
        "num_attention_heads": shapes[f"{layer}.self_attn.q_proj.weight"][0] // head,
        "num_key_value_heads": shapes[f"{layer}.self_attn.k_proj.weight"][0] // head,
    }


def _qwen3(shapes: Shapes) -> dict[str, Any]:
    """Its second table is never looked at by a pipeline, and stands for the first where a file has none."""
    head = shapes["model.layers.0.self_attn.q_norm.weight"][0]
    tied = not {"lm_head.weight", "model.lm_head.weight"} & shapes.keys()
    own = {"head_dim": head, "tie_word_embeddings": tied}
    return parts_of_transformers()["qwen3-4b"] | _decoder_only(shapes, head) | own


def _qwen25_vl(shapes: Shapes) -> dict[str, Any]:
    """Heads are 128 wide, those of what sees pictures 80."""
    whole = parts_of_transformers()["qwen2.5-vl-7b"]
    width = shapes["visual.patch_embed.proj.weight"][0]
    seen = {
        "depth": _count(shapes, "visual.blocks"),
        "hidden_size": width,
        "intermediate_size": shapes["visual.blocks.0.mlp.gate_proj.weight"][0],
        "num_heads": width // 80,
        "out_hidden_size": shapes["model.embed_tokens.weight"][1],
    }
    text = whole["text_config"] | _decoder_only(shapes, 128)
    tied = not {"lm_head.weight", "model.lm_head.weight"} & shapes.keys()
    return whole | {"text_config": text, "vision_config": whole["vision_config"] | seen, "tie_word_embeddings": tied}


def _kl(shapes: Shapes) -> dict[str, Any]:
    levels = range(_count(shapes, "decoder.up"))
    widths = [shapes[f"decoder.up.{level}.block.0.conv2.weight"][0] for level in levels]
    return parts_of_transformers()["kl-16"] | {
        "block_out_channels": widths,
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
        "layers_per_block": _count(shapes, "encoder.down.0.block"),
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
    }


def _kl_flux2(shapes: Shapes) -> dict[str, Any]:
    told = _kl(shapes)
    quantised = any(name.endswith(".quant_conv.weight") or name == "quant_conv.weight" for name in shapes)
    both = {"use_quant_conv": quantised, "use_post_quant_conv": quantised}
    return told | both | {"_class_name": "AutoencoderKLFlux2"}


def _kl_qwen(shapes: Shapes) -> dict[str, Any]:
    base = shapes["encoder.conv1.weight"][0]
    return parts_of_transformers()["kl-qwen"] | {"base_dim": base, "z_dim": shapes["conv2.weight"][0]}


@dataclass(frozen=True)
class _Kind:
    role: str
    title: str
    mark: str
    config: Callable[[Shapes], dict[str, Any]]


_KINDS = {
    "flux2": _Kind("transformer", "FLUX.2 Klein", "double_stream_modulation_img.lin.weight", _flux2),
    "chroma": _Kind("transformer", "Chroma", "distilled_guidance_layer.in_proj.weight", _chroma),
    "flux1": _Kind("transformer", "FLUX.1", "double_blocks.0.img_mod.lin.weight", _flux1),
    "sd3": _Kind("transformer", "SD3", "joint_blocks.0.x_block.attn.qkv.weight", _sd3),
    "z-image": _Kind("transformer", "Z-Image", "noise_refiner.0.attention.qkv.weight", _z_image),
    "qwen-image": _Kind("transformer", "Qwen-Image", "transformer_blocks.0.attn.add_q_proj.weight", _qwen_image),
    "t5": _Kind("text encoder", "T5", "encoder.block.0.layer.1.DenseReluDense.wi_0.weight", _t5),
    "clip": _Kind("text encoder", "CLIP", "text_model.encoder.layers.0.mlp.fc1.weight", _clip),
    "qwen3": _Kind("text encoder", "Qwen3", "model.layers.0.self_attn.q_norm.weight", _qwen3),
    "qwen2.5-vl": _Kind("text encoder", "Qwen2.5-VL", "visual.patch_embed.proj.weight", _qwen25_vl),
    "kl-flux2": _Kind("vae", "FLUX.2", "bn.running_mean", _kl_flux2),
    "kl": _Kind("vae", "FLUX.1, SD3, Z-Image and Chroma", "decoder.up.0.block.0.conv2.weight", _kl),
    "kl-qwen": _Kind("vae", "Qwen-Image and Wan 2.1", "decoder.middle.0.residual.0.gamma", _kl_qwen),
}
"""By name; the first whose mark is in a file is what it holds."""
