"""Tiny random pipelines of today's transformers, called with embeddings: they have no tokenizers."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from string import ascii_letters
from typing import Any

import diffusers
import torch
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLModel,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

import sd_lowvram

SIZE = 64
WORDS = 512
"""Tokens of a prompt, as T5 is asked for."""


def noise(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vae(channels: int = 16) -> Any:
    torch.manual_seed(4)
    return diffusers.AutoencoderKL(
        block_out_channels=(16, 32, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=channels,
        norm_num_groups=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1,
        scaling_factor=0.36,
    ).eval()


def t5(**more: Any) -> Any:
    torch.manual_seed(1)
    sizes = {"d_model": 64, "d_kv": 8, "d_ff": 256, "num_layers": 4, "num_heads": 4, "vocab_size": 1000, **more}
    return T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu", is_encoder_decoder=False)).eval()


def clip(kind: Any = CLIPTextModel) -> Any:
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return kind(CLIPTextConfig(**sizes, vocab_size=1000, bos_token_id=0, eos_token_id=2, projection_dim=32)).eval()


def qwen3(kind: Any, **more: Any) -> Any:
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 1024, "head_dim": 16}
    return kind(Qwen3Config(**{**sizes, **more})).eval()


def flux(kind: str = "FluxPipeline", channels: int = 64, **transformer: Any) -> Any:
    """A pipeline of FLUX.1.

    Args:
        channels: that its transformer is given, packed.
    """
    sizes = {"num_layers": 2, "num_single_layers": 3, "attention_head_dim": 16, "num_attention_heads": 4}
    sizes |= {"joint_attention_dim": 64, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}
    torch.manual_seed(0)
    made = diffusers.FluxTransformer2DModel(
        in_channels=channels, out_channels=64, **{**sizes, "guidance_embeds": True, **transformer}
    )
    parts = {"vae": vae(), "text_encoder": clip(), "text_encoder_2": t5(), "transformer": made.eval()}
    empty = {"tokenizer": None, "tokenizer_2": None}
    return _quiet(getattr(diffusers, kind)(diffusers.FlowMatchEulerDiscreteScheduler(), **parts, **empty))


def sd3(kind: str = "StableDiffusion3Pipeline", channels: int = 16) -> Any:
    """A pipeline of SD3, with a table of positions much larger than what is cut from it.

    Args:
        channels: that its transformer is given.
    """
    sizes = {"num_layers": 4, "attention_head_dim": 16, "num_attention_heads": 4, "caption_projection_dim": 64}
    sizes |= {"joint_attention_dim": 64, "pooled_projection_dim": 64, "sample_size": 32, "pos_embed_max_size": 96}
    sizes |= {"dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}
    torch.manual_seed(0)
    made = diffusers.SD3Transformer2DModel(in_channels=channels, out_channels=16, patch_size=2, **sizes)
    parts = {"transformer": made.eval(), "vae": vae(), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    parts |= {name: clip(CLIPTextModelWithProjection) for name in ("text_encoder", "text_encoder_2")}
    tokenizers = dict.fromkeys(("tokenizer", "tokenizer_2", "tokenizer_3"))
    return _quiet(getattr(diffusers, kind)(**parts, text_encoder_3=t5(), **tokenizers))


def z_image(kind: str = "ZImagePipeline") -> Any:
    """A pipeline of Z-Image, whose transformer is given lists."""
    parts = {"transformer": z_image_transformer(), "vae": vae(), "text_encoder": qwen3(Qwen3Model)}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return _quiet(getattr(diffusers, kind)(**parts, scheduler=scheduler, tokenizer=None))


def z_image_transformer(layers: int = 3) -> Any:
    sizes = {"dim": 64, "n_layers": layers, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4, "cap_feat_dim": 64}
    torch.manual_seed(0)
    made = diffusers.ZImageTransformer2DModel(**sizes, axes_dims=[8, 4, 4], axes_lens=[1024, 64, 64]).eval()
    with torch.no_grad():
        made.x_pad_token.fill_(1)
        made.cap_pad_token.fill_(1)
    return made


def qwen_image() -> Any:
    """QwenImagePipeline, whose autoencoder is one of frames."""
    torch.manual_seed(0)
    made = diffusers.QwenImageTransformer2DModel(
        out_channels=16, num_layers=3, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=64,
        axes_dims_rope=(8, 4, 4),
    ).eval()  # fmt: skip
    parts = {"transformer": made, "vae": frames(), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    return _quiet(diffusers.QwenImagePipeline(**parts, text_encoder=qwen25_vl(), tokenizer=None))


def frames() -> Any:
    """The autoencoder of Qwen-Image and Krea 2."""
    torch.manual_seed(4)
    return diffusers.AutoencoderKLQwenImage(
        base_dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 16, latents_std=[1.0] * 16,
    ).eval()  # fmt: skip


def qwen25_vl() -> Any:
    rope = {"mrope_section": [4, 4, 8], "rope_type": "default", "type": "default"}
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 2, "rope_scaling": rope, "rope_theta": 1e6, "vocab_size": 1000}
    seen = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    torch.manual_seed(3)
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=seen)).eval()


def chroma(kind: str = "ChromaPipeline") -> Any:
    sizes = {"num_layers": 2, "num_single_layers": 3, "attention_head_dim": 16, "num_attention_heads": 4}
    sizes |= {"joint_attention_dim": 64, "axes_dims_rope": (4, 4, 8), "approximator_hidden_dim": 32}
    sizes |= {"approximator_layers": 1, "approximator_num_channels": 16}
    torch.manual_seed(0)
    made = diffusers.ChromaTransformer2DModel(in_channels=64, **sizes).eval()
    parts = {"transformer": made, "vae": vae(), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    return _quiet(getattr(diffusers, kind)(**parts, text_encoder=t5(), tokenizer=None))


def klein(kind: str = "Flux2KleinPipeline", **more: Any) -> Any:
    """A pipeline of FLUX.2 Klein, whose text encoder's table is tied, as that of 4B is."""
    sizes = {"num_layers": 2, "num_single_layers": 3, "attention_head_dim": 16, "num_attention_heads": 4}
    sizes |= {"joint_attention_dim": 192, "axes_dims_rope": (4, 4, 4, 4), "guidance_embeds": False}
    torch.manual_seed(0)
    made = diffusers.Flux2Transformer2DModel(in_channels=64, **sizes).eval()
    torch.manual_seed(4)
    frames = diffusers.AutoencoderKLFlux2(
        block_out_channels=(16, 32, 32, 32), latent_channels=16, norm_num_groups=8, layers_per_block=1
    ).eval()
    parts = {"transformer": made, "vae": frames, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    text = qwen3(Qwen3ForCausalLM, tie_word_embeddings=True, num_hidden_layers=28)  # it reads the 27th
    return _quiet(getattr(diffusers, kind)(**parts, text_encoder=text, tokenizer=None, **more))


def krea2() -> Any:
    """Krea2Pipeline, whose transformer is given what several layers of its text encoder make."""
    sizes = {"num_layers": 3, "attention_head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 128, "timestep_embed_dim": 32, "text_hidden_dim": 64, "num_text_layers": 2}
    sizes |= {"text_num_attention_heads": 4, "text_num_key_value_heads": 4, "text_intermediate_size": 64}
    torch.manual_seed(0)
    made = diffusers.Krea2Transformer2DModel(in_channels=64, **sizes, axes_dims_rope=(4, 4, 8)).eval()
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000, "max_position_embeddings": 1024}
    text["rope_parameters"] = {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [4, 2, 2]}
    seen = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    seen["deepstack_visual_indexes"] = [0]
    torch.manual_seed(3)
    reader = Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=seen)).eval()
    parts = {"transformer": made, "vae": frames(), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    return _quiet(
        diffusers.Krea2Pipeline(**parts, text_encoder=reader, tokenizer=None, text_encoder_select_layers=(1, 3))
    )


def lumina2() -> Any:
    """Lumina2Pipeline, of no family that is planned, without its text encoder."""
    sizes = {"hidden_size": 48, "num_layers": 3, "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1}
    torch.manual_seed(0)
    made = diffusers.Lumina2Transformer2DModel(
        **sizes, in_channels=16, cap_feat_dim=64, axes_dim_rope=(8, 4, 4), axes_lens=(64, 32, 32)
    ).eval()
    parts = {"transformer": made, "vae": vae(), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    return _quiet(diffusers.Lumina2Pipeline(**parts, text_encoder=None, tokenizer=None))


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save(pipe: Any, folder: Path) -> None:
    """Write a pipeline as a diffusers folder, with tokenizers that know letters."""
    known = {"clip_text_model": clip_tokenizer, "t5": t5_tokenizer}
    names = [name for name in pipe.components if name.startswith("text_encoder") and getattr(pipe, name) is not None]
    made = {name: known.get(getattr(pipe, name).config.model_type, qwen_tokenizer)() for name in names}
    pipe.register_modules(**{name.replace("text_encoder", "tokenizer"): one for name, one in made.items()})
    pipe.save_pretrained(folder)


def _letters() -> list[str]:
    return list(bytes_to_unicode().values())


def clip_tokenizer() -> Any:
    words = [*_letters(), *(letter + "</w>" for letter in _letters()), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[], model_max_length=77)


def t5_tokenizer() -> Any:
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), *((one, -3.0) for one in ascii_letters)]
    return T5Tokenizer(vocab=scores, extra_ids=0)


def qwen_tokenizer() -> Any:
    words = [*_letters(), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    special = dict.fromkeys(("unk_token", "pad_token", "eos_token"), "<|endoftext|>")
    made = Qwen2Tokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[], **special)
    made.chat_template = "{% for one in messages %}<|im_start|>{{ one['content'] }}<|im_end|>{% endfor %}"
    return made


def prompts(pipe: Any, guided: bool = True) -> dict[str, Any]:
    """What stands for a prompt, and for a negative one, in a call of the pipeline."""
    return _prompts(type(pipe.transformer).__name__, guided)


@functools.cache  # made before a run is measured
def _prompts(kind: str, guided: bool) -> dict[str, Any]:
    positive: dict[str, Any] = {"prompt_embeds": noise(1, _WORDS_OF.get(kind, WORDS), 64)}
    if kind == "FluxTransformer2DModel":
        return positive | {"pooled_prompt_embeds": noise(1, 32)}
    if kind == "ZImageTransformer2DModel":
        text = {"prompt_embeds": [noise(500, 64)]}
        return text | ({"negative_prompt_embeds": [noise(20, 64)]} if guided else {"guidance_scale": 0.0})
    if kind == "Flux2Transformer2DModel":
        embeds = noise(1, WORDS, 192)
        return {"prompt_embeds": embeds, "negative_prompt_embeds": -embeds}
    if kind == "Krea2Transformer2DModel":
        embeds, mask = noise(1, WORDS, 2, 64), torch.arange(WORDS)[None] < 40
        negative = {"negative_prompt_embeds": -embeds, "negative_prompt_embeds_mask": mask}
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask, **negative}
    if kind == "SD3Transformer2DModel":
        positive["pooled_prompt_embeds"] = noise(1, 64)
    if kind == "ChromaTransformer2DModel":
        positive["prompt_attention_mask"] = torch.ones(1, WORDS)
    negative = {f"negative_{name}": -given for name, given in positive.items() if "embeds" in name}
    masks = {f"negative_{name}": given for name, given in positive.items() if "mask" in name}
    return positive | negative | masks


_WORDS_OF = {"SD3Transformer2DModel": 333}


def picture(pipe: Any, width: int = SIZE, height: int = SIZE, steps: int = 2, **options: Any) -> Tensor:
    """The pipeline's picture (1, 3, height, width), the same for the same sizes."""
    given = {**prompts(pipe), "width": width, "height": height, "output_type": "pt", **options}
    seed = torch.Generator().manual_seed(3)
    made = pipe(**given, num_inference_steps=steps, generator=seed)
    return torch.as_tensor(made.images)


def with_embeddings(_model: str, device: Any) -> tuple[Any, dict[str, Any]]:
    """A tiny pipeline in the place of one at full size, and what it is called with, on ``device``."""
    pipe = flux()
    return pipe, {name: one.to(device) if isinstance(one, Tensor) else one for name, one in prompts(pipe).items()}


def within(plan: Any, run: Any) -> bool:
    """Whether a run took no more than was planned and 2 %; a CPU's allocator sees both accounts."""
    planned: int = max(stage.held_bytes for stage in plan.stages)
    return bool(run.peak_bytes <= planned + planned // 50)


def agrees(plan: Any, made: Tensor, expected: Tensor) -> bool:
    """Whether a picture has the bits of ``expected``, or, where each half of a batch was computed by itself, is off by
    no more than rounding."""
    off = (made - expected).abs().max().item()
    return off == 0 or (bool(plan.settings.guidance_in_turn) and off < 1e-5)


def check_budgets(pipe: Any) -> None:
    """Hold the picture of ``pipe`` and its peaks with plenty of memory and with a tenth more than the least."""
    few = dataclasses.replace(sd_lowvram.Settings.policy("diffusers-default"), offload=None, vae_tiles=None)
    asked: dict[str, Any] = {"width": SIZE, "height": SIZE, "device": "cpu", "settings": few}
    wanted = picture(pipe)
    about = sd_lowvram.plan(pipe, vram="1GB", **asked).minimum_vram_bytes
    for budget in (1 << 30, int(1.1 * about)):
        plan = sd_lowvram.optimize(pipe, vram=f"{budget} B", **asked)
        with sd_lowvram.measured(pipe) as run:
            assert torch.equal(picture(pipe), wanted)
        assert within(plan, run), (max(stage.held_bytes for stage in plan.stages), run.peak_bytes)
        sd_lowvram.restore(pipe)
    assert plan.settings.offload != "none" and torch.equal(picture(pipe), wanted)
