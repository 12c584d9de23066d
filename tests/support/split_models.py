"""Tiny random models of today's transformers in the widths that headers show, and their weights as ComfyUI's files
name them, written down from those files' own code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import todays
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection, Qwen3ForCausalLM, Qwen3Model

from sd_lowvram.checkpoints.architectures import vocabulary, write_tokenizer
from sd_lowvram.checkpoints.single_file_names import vae_state

Weights = dict[str, Tensor]
_HEAD = 32
_SIZES = {"attention_head_dim": _HEAD, "num_attention_heads": 2, "num_layers": 2}
_FLUX_SCALE = {"scaling_factor": 0.3611, "shift_factor": 0.1159}


def _vae(kind: Any = diffusers.AutoencoderKL, **more: Any) -> Any:
    torch.manual_seed(4)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    sizes = {"block_out_channels": (32, 32, 64, 64), "latent_channels": 16, "layers_per_block": 1}
    return kind(**sizes, **blocks, **more).eval()


def _kl(**scale: float) -> Any:
    return _vae(use_quant_conv=False, use_post_quant_conv=False, **scale)


def _clip(kind: Any = CLIPTextModel, width: int = 64) -> Any:
    torch.manual_seed(width)
    config = {
        "hidden_size": width,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": width // 64,
    }
    ends = {"vocab_size": len(vocabulary()), "bos_token_id": 0, "eos_token_id": 2, "projection_dim": width}
    return kind(kind.config_class(**config, **ends, hidden_act="quick_gelu")).eval()


def _t5() -> Any:
    return todays.t5(num_layers=2)


def _scheduler(**more: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**more)


def flux1() -> Any:
    torch.manual_seed(0)
    more = {"num_single_layers": 2, "joint_attention_dim": 64, "pooled_projection_dim": 64, "guidance_embeds": True}
    model = diffusers.FluxTransformer2DModel(in_channels=64, **_SIZES, **more, axes_dims_rope=(4, 14, 14))
    return diffusers.FluxPipeline(
        _scheduler(shift=3.0, use_dynamic_shifting=True), _kl(**_FLUX_SCALE), _clip(), None, _t5(), None, model.eval()
    )


def chroma() -> Any:
    torch.manual_seed(0)
    more = {"num_single_layers": 2, "joint_attention_dim": 64, "axes_dims_rope": (4, 14, 14)}
    more |= {"approximator_hidden_dim": 32, "approximator_layers": 1, "approximator_num_channels": 16}
    model = diffusers.ChromaTransformer2DModel(in_channels=64, **_SIZES, **more).eval()
    return diffusers.ChromaPipeline(_scheduler(), _kl(**_FLUX_SCALE), _t5(), None, model)


def sd3() -> Any:
    torch.manual_seed(0)
    more = {"caption_projection_dim": 128, "joint_attention_dim": 256, "pooled_projection_dim": 192}
    more |= {"pos_embed_max_size": 32, "dual_attention_layers": (0,), "qk_norm": "rms_norm", "sample_size": 128}
    sizes = {"attention_head_dim": 64, "num_attention_heads": 2, "num_layers": 2}
    model = diffusers.SD3Transformer2DModel(in_channels=16, out_channels=16, patch_size=2, **sizes, **more).eval()
    texts = [_clip(CLIPTextModelWithProjection, width) for width in (64, 128)]
    torch.manual_seed(1)
    t5 = todays.t5(num_layers=2, d_model=256)
    vae = _kl(scaling_factor=1.5305, shift_factor=0.0609)
    return diffusers.StableDiffusion3Pipeline(
        model, _scheduler(shift=3.0), vae, texts[0], None, texts[1], None, t5, None
    )


def z_image() -> Any:
    torch.manual_seed(0)
    sizes = {"dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 64}
    model = diffusers.ZImageTransformer2DModel(**sizes, axes_dims=[8, 12, 12], axes_lens=[1024, 512, 512]).eval()
    with torch.no_grad():
        model.x_pad_token.fill_(1)
        model.cap_pad_token.fill_(1)
    text = todays.qwen3(Qwen3Model, max_position_embeddings=40960, tie_word_embeddings=True)
    return diffusers.ZImagePipeline(_scheduler(shift=3.0), _kl(**_FLUX_SCALE), text, None, model)


def flux2() -> Any:
    torch.manual_seed(0)
    more = {"num_single_layers": 2, "joint_attention_dim": 192, "guidance_embeds": False, "in_channels": 64}
    model = diffusers.Flux2Transformer2DModel(**_SIZES, **more, axes_dims_rope=(8, 8, 8, 8)).eval()
    text = todays.qwen3(Qwen3ForCausalLM, tie_word_embeddings=True, num_hidden_layers=28, max_position_embeddings=40960)
    scheduler = _scheduler(shift=3.0, use_dynamic_shifting=True)
    vae = _vae(diffusers.AutoencoderKLFlux2)
    return diffusers.Flux2KleinPipeline(scheduler, vae, text, None, model, is_distilled=True)


def qwen_image() -> Any:
    torch.manual_seed(0)
    more = {"out_channels": 16, "joint_attention_dim": 128, "axes_dims_rope": (4, 14, 14)}
    model = diffusers.QwenImageTransformer2DModel(**_SIZES, **more).eval()
    vae = diffusers.AutoencoderKLQwenImage(base_dim=16).eval()
    shift = {"use_dynamic_shifting": True, "max_image_seq_len": 8192, "max_shift": 0.9, "shift_terminal": 0.02}
    return diffusers.QwenImagePipeline(_scheduler(**shift), vae, _qwen25_vl(), None, model)


def _qwen25_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from sd_lowvram.checkpoints.architectures import parts_of_transformers

    whole = parts_of_transformers()["qwen2.5-vl-7b"]
    text = whole["text_config"] | {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 1000}
    seen = {"depth": 1, "hidden_size": 80, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 128}
    torch.manual_seed(3)
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=seen)).eval()


def save(pipe: Any, folder: Path) -> None:
    """Write a pipeline as a diffusers folder, with CLIP's own tokenizer and further ones that know letters."""
    todays.save(pipe, folder)
    for name, pad in (("tokenizer", "<|endoftext|>"), ("tokenizer_2", "!")):
        if (folder / name).is_dir() and type(getattr(pipe, name)).__name__.startswith("CLIP"):
            for file in (folder / name).iterdir():
                file.unlink()
            write_tokenizer({"pad_token": pad, "model_max_length": 77}, folder / name)


_QKV = {"to_q": 0, "to_k": 1, "to_v": 2, "add_q_proj": 0, "add_k_proj": 1, "add_v_proj": 2}


def _renamed(state: Weights, pairs: list[tuple[str, str]], fused: str) -> Weights:
    """Weights by the names of a file: queries, keys and values of an attention in one, and all else renamed.

    Args:
        pairs: of regular expressions and what is put in their place, in turn.
        fused: what the file calls them together.
    """
    made: Weights = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for ours, tensor in state.items():
        place = _QKV.get(f".{ours}".split(".")[-2])
        name = ours if place is None else re.sub(r"\.(to|add)_[qkv](_proj)?\.", rf".\1_{fused}.", ours)
        for pattern, new in pairs:
            name = re.sub(pattern, new, name)
        if place is None:
            made[name] = tensor
        else:
            parts.setdefault(name, {})[place] = tensor
    return made | {name: torch.cat([one[0], one[1], one[2]]) for name, one in parts.items()}


def _swapped(made: Weights, name: str) -> None:
    """Scale and shift of the last norm are the other way round in such files."""
    for last in ("weight", "bias"):
        if f"{name}.{last}" in made:
            scale, shift = made[f"{name}.{last}"].chunk(2)
            made[f"{name}.{last}"] = torch.cat([shift, scale])


_STREAMS = [
    (r"^x_embedder\.", "img_in."),
    (r"^context_embedder\.", "txt_in."),
    (r"^time(_text|_guidance)_embed\.timestep_embedder\.", "time_in."),
    (r"^time(_text|_guidance)_embed\.guidance_embedder\.", "guidance_in."),
    (r"^time_text_embed\.text_embedder\.", "vector_in."),
    (r"(_in|guidance_layer\.layers\.\d+)\.linear_1\.", r"\1.in_layer."),
    (r"(_in|guidance_layer\.layers\.\d+)\.linear_2\.", r"\1.out_layer."),
    (r"^proj_out\.", "final_layer.linear."),
    (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
    (r"^(.*_stream_modulation.*)\.linear\.", r"\1.lin."),
    (r"^transformer_blocks\.", "double_blocks."),
    (r"^single_transformer_blocks\.", "single_blocks."),
    (r"(double_blocks\.\d+)\.norm1\.linear\.", r"\1.img_mod.lin."),
    (r"(double_blocks\.\d+)\.norm1_context\.linear\.", r"\1.txt_mod.lin."),
    (r"(double_blocks\.\d+)\.attn\.to_qkv\.", r"\1.img_attn.qkv."),
    (r"(double_blocks\.\d+)\.attn\.add_qkv\.", r"\1.txt_attn.qkv."),
    (r"(double_blocks\.\d+)\.attn\.to_out\.0\.", r"\1.img_attn.proj."),
    (r"(double_blocks\.\d+)\.attn\.to_add_out\.", r"\1.txt_attn.proj."),
    (r"(double_blocks\.\d+)\.attn\.norm_([qk])\.weight", r"\1.img_attn.norm.\2_norm.scale"),
    (r"(double_blocks\.\d+)\.attn\.norm_added_([qk])\.weight", r"\1.txt_attn.norm.\2_norm.scale"),
    (r"\.ff\.(net\.0\.proj|linear_in)\.", ".img_mlp.0."),
    (r"\.ff\.(net\.2|linear_out)\.", ".img_mlp.2."),
    (r"\.ff_context\.(net\.0\.proj|linear_in)\.", ".txt_mlp.0."),
    (r"\.ff_context\.(net\.2|linear_out)\.", ".txt_mlp.2."),
    (r"(single_blocks\.\d+)\.norm\.linear\.", r"\1.modulation.lin."),
    (r"(single_blocks\.\d+)\.attn\.to_qkv_mlp_proj\.", r"\1.linear1."),
    (r"(single_blocks\.\d+)\.(proj_out|attn\.to_out)\.", r"\1.linear2."),
    (r"(single_blocks\.\d+)\.attn\.norm_([qk])\.weight", r"\1.norm.\2_norm.scale"),
    (r"\.q_norm\.scale", ".query_norm.scale"),
    (r"\.k_norm\.scale", ".key_norm.scale"),
    (r"(distilled_guidance_layer\.norms\.\d+)\.weight", r"\1.scale"),
]


def _streams(state: Weights) -> Weights:
    """FLUX.1, FLUX.2 and Chroma."""
    made = _renamed(state, _STREAMS, "qkv")
    for name in [name for name in made if ".attn.to_qkv." in name]:  # single blocks have their MLP next to them
        block, _, last = name.partition(".attn.to_qkv.")
        made[f"{block}.linear1.{last}"] = torch.cat([made.pop(name), made.pop(f"{block}.proj_mlp.{last}")])
    _swapped(made, "final_layer.adaLN_modulation.1")
    return made


_MMDIT = [
    (r"^pos_embed\.pos_embed", "pos_embed"),
    (r"^pos_embed\.proj\.", "x_embedder.proj."),
    (r"^time_text_embed\.timestep_embedder\.linear_(\d)\.", lambda found: f"t_embedder.mlp.{2 * int(found[1]) - 2}."),
    (r"^time_text_embed\.text_embedder\.linear_(\d)\.", lambda found: f"y_embedder.mlp.{2 * int(found[1]) - 2}."),
    (r"^proj_out\.", "final_layer.linear."),
    (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
    (r"^transformer_blocks\.", "joint_blocks."),
    (r"\.norm1\.linear\.", ".x_block.adaLN_modulation.1."),
    (r"\.norm1_context\.linear\.", ".context_block.adaLN_modulation.1."),
    (r"\.(attn2?)\.to_qkv\.", r".x_block.\1.qkv."),
    (r"\.attn\.add_qkv\.", ".context_block.attn.qkv."),
    (r"\.(attn2?)\.to_out\.0\.", r".x_block.\1.proj."),
    (r"\.attn\.to_add_out\.", ".context_block.attn.proj."),
    (r"\.(attn2?)\.norm_([qk])\.", r".x_block.\1.ln_\2."),
    (r"\.attn\.norm_added_([qk])\.", r".context_block.attn.ln_\1."),
    (r"\.ff\.net\.0\.proj\.", ".x_block.mlp.fc1."),
    (r"\.ff\.net\.2\.", ".x_block.mlp.fc2."),
    (r"\.ff_context\.net\.0\.proj\.", ".context_block.mlp.fc1."),
    (r"\.ff_context\.net\.2\.", ".context_block.mlp.fc2."),
]


def _mmdit(state: Weights) -> Weights:
    """SD3."""
    made = _renamed(state, _MMDIT, "qkv")
    last = max(int(name.split(".")[1]) for name in made if name.startswith("joint_blocks."))
    _swapped(made, "final_layer.adaLN_modulation.1")
    _swapped(made, f"joint_blocks.{last}.context_block.adaLN_modulation.1")
    return {f"model.diffusion_model.{name}": tensor for name, tensor in made.items()}


_LUMINA = [
    (r"^all_final_layer\.2-1\.", "final_layer."),
    (r"^all_x_embedder\.2-1\.", "x_embedder."),
    (r"\.attention\.to_qkv\.", ".attention.qkv."),
    (r"\.attention\.to_out\.0\.", ".attention.out."),
    (r"\.attention\.norm_([qk])\.", r".attention.\1_norm."),
]

TRANSFORMERS: dict[str, Callable[[Weights], Weights]] = {
    **dict.fromkeys(("flux1", "chroma", "flux2"), _streams),
    "sd3": _mmdit,
    "z_image": lambda state: _renamed(state, _LUMINA, "qkv"),
    "qwen_image": dict,
}

_WAN = [
    (r"(encoder|decoder)\.conv_in\.", r"\1.conv1."),
    (r"(encoder|decoder)\.norm_out\.", r"\1.head.0."),
    (r"(encoder|decoder)\.conv_out\.", r"\1.head.2."),
    (r"^quant_conv\.", "conv1."),
    (r"^post_quant_conv\.", "conv2."),
    (r"mid_block\.attentions\.0\.", "middle.1."),
    (r"mid_block\.resnets\.(\d)\.", lambda found: f"middle.{2 * int(found[1])}."),
    (r"^encoder\.down_blocks\.", "encoder.downsamples."),
    (r"up_blocks\.(\d)\.resnets\.(\d)\.", lambda found: f"upsamples.{4 * int(found[1]) + int(found[2])}."),
    (r"up_blocks\.(\d)\.upsamplers\.0\.", lambda found: f"upsamples.{4 * int(found[1]) + 3}."),
    (r"\.conv_shortcut\.", ".shortcut."),
    (r"\.norm1\.", ".residual.0."),
    (r"(\d)\.conv1\.", r"\1.residual.2."),
    (r"\.norm2\.", ".residual.3."),
    (r"(\d)\.conv2\.", r"\1.residual.6."),
]


def vae_file(vae: Any) -> Weights:
    """The weights of an autoencoder by the names of its file."""
    if type(vae).__name__ == "AutoencoderKLQwenImage":
        return _renamed(dict(vae.state_dict()), _WAN, "")
    plain = {name.removeprefix("first_stage_model."): tensor for name, tensor in vae_state(vae).items()}
    inside = {"quant_conv.": "encoder.quant_conv.", "post_quant_conv.": "decoder.post_quant_conv."}
    return {next((new + name[len(old) :] for old, new in inside.items() if name.startswith(old)), name): tensor
            for name, tensor in plain.items()}  # fmt: skip


def text_file(text: Any) -> Weights:
    """The weights of a text encoder by the names of its file."""
    kind, state = type(text).__name__, dict(text.state_dict())
    if kind.startswith("T5"):
        return {name: tensor for name, tensor in state.items() if name != "encoder.embed_tokens.weight"}
    if kind.startswith("CLIP"):
        own = "text_projection.weight"
        return {
            name if name == own else f"text_model.{name.removeprefix('text_model.')}": one
            for name, one in state.items()
        }
    if kind == "Qwen3Model":
        return {f"model.{name}": tensor for name, tensor in state.items()}
    if kind == "Qwen3ForCausalLM":
        return {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    shorter = (("model.language_model.", "model."), ("model.visual.", "visual."))
    return {next((new + name[len(old) :] for old, new in shorter if name.startswith(old)), name): tensor
            for name, tensor in state.items()}  # fmt: skip


def write(pipe: Any, family: str, folder: Path) -> list[str]:
    """Write a pipeline's split files and a folder with its tokenizer; returns the options of the command line."""
    folder.mkdir()
    given = []
    parts = {"transformer": TRANSFORMERS[family](dict(pipe.transformer.state_dict())), "vae": vae_file(pipe.vae)}
    texts = [name for name in pipe.components if name.startswith("text_encoder")]
    parts |= {name: text_file(getattr(pipe, name)) for name in reversed(texts)}  # in any order
    for name, state in parts.items():
        save_file(
            {key: one.detach().clone().contiguous() for key, one in state.items()}, folder / f"{name}.safetensors"
        )
        option = "text-encoder" if name.startswith("text_encoder") else name
        given += [f"--{option}", str(folder / f"{name}.safetensors")]
    last = texts[-1].replace("text_encoder", "tokenizer")
    getattr(pipe, last).save_pretrained(folder / "tokenizer")
    return [*given, "--tokenizer", str(folder / "tokenizer")]
