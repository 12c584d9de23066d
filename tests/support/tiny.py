"""Small pipelines with the topology of the real ones: every level, block and attention, narrow."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

from sd_lowvram.checkpoints.architectures import architecture, build_components, write_folder

_UNET = {"cross_attention_dim": 32, "norm_num_groups": 8, "sample_size": 8}
_VAE = {"block_out_channels": [16, 32, 32, 32], "norm_num_groups": 8, "sample_size": 64}
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 32,
}
_NARROW = {
    "sd15": {"block_out_channels": [32, 64, 64, 64], "attention_head_dim": 4},
    "sd21": {"block_out_channels": [32, 64, 64, 64], "attention_head_dim": [2, 4, 4, 4]},
    "sdxl": {
        "block_out_channels": [32, 64, 64],
        "attention_head_dim": [2, 4, 4],
        "cross_attention_dim": 64,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 32,
    },
}
FAMILIES = tuple(_NARROW)
ATTENTIONS = {"sd15": 32, "sd21": 32, "sdxl": 140}
RESIDUAL_BLOCKS = {"sd15": 22, "sd21": 22, "sdxl": 17}


def config(name: str) -> dict[str, Any]:
    """The architecture ``name`` with narrow layers."""
    parts = architecture(name)
    parts["unet"] = {**parts["unet"], **_UNET, **_NARROW[name]}
    parts["vae"] = {**parts["vae"], **_VAE}
    for encoder in ("text_encoder", "text_encoder_2"):
        if encoder in parts:
            parts[encoder] = {**parts[encoder], **_TEXT}
    return parts


@functools.lru_cache
def _folder(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="sd-lowvram-test-"))
    write_folder(config(name), "StableDiffusionXLPipeline" if name == "sdxl" else "StableDiffusionPipeline", folder)
    return folder


@functools.lru_cache
def _tokenizers(name: str) -> dict[str, Any]:
    from transformers import CLIPTokenizer

    parts = ("tokenizer", "tokenizer_2") if name == "sdxl" else ("tokenizer",)
    return {part: CLIPTokenizer.from_pretrained(_folder(name) / part) for part in parts}


def components(name: str, seed: int = 0, **changed: dict[str, Any]) -> dict[str, Any]:
    """Everything that a pipeline of family ``name`` is made of, with new random weights in float32; ``changed`` are
    values of the configurations of its parts."""
    from diffusers import DDIMScheduler

    configs = config(name)
    configs |= {part: {**configs[part], **values} for part, values in changed.items()}
    parts = {**build_components(configs, seed=seed), **_tokenizers(name)}
    parts["scheduler"] = DDIMScheduler(**_schedule(name))
    if name != "sdxl":
        parts |= {"safety_checker": None, "feature_extractor": None}
    return parts


def _schedule(name: str) -> dict[str, Any]:
    keep = ("beta_start", "beta_end", "beta_schedule", "prediction_type", "num_train_timesteps")
    schedule = {key: value for key, value in architecture(name)["scheduler"].items() if key in keep}
    return {**schedule, "steps_offset": 1, "clip_sample": False}


def pipeline(name: str, task: str = "", seed: int = 0, **parts: Any) -> Any:
    """A new pipeline of family ``name``; ``task`` is "", "Img2Img" or "Inpaint"; ``parts`` in place of its own."""
    import diffusers

    prefix = "StableDiffusionXL" if name == "sdxl" else "StableDiffusion"
    extra = {} if name == "sdxl" else {"requires_safety_checker": False}
    pipe = getattr(diffusers, f"{prefix}{task}Pipeline")(**{**components(name, seed), **parts}, **extra)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiniest() -> Any:
    """A new pipeline as small as those that diffusers tests itself with: two levels, the largest layer of 3 KiB."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(4, 8),
        layers_per_block=1,
        sample_size=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        norm_num_groups=2,
    )
    vae = AutoencoderKL(
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=2,
    )
    text = CLIPTextConfig(
        hidden_size=8, intermediate_size=16, num_attention_heads=2, num_hidden_layers=2, vocab_size=49408
    )
    pipe = StableDiffusionPipeline(
        unet=unet.eval(),
        vae=vae.eval(),
        text_encoder=CLIPTextModel(text).eval(),
        scheduler=DDIMScheduler(**_schedule("sd15")),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **_tokenizers("sd15"),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(pipe: Any, *, size: int = 64, steps: int = 2, batch: int = 1, **options: Any) -> torch.Tensor:
    """The pipeline's picture as a tensor (batch, 3, size, size), from a fixed seed."""
    kind = type(pipe).__name__
    if "Img2Img" in kind or "Inpaint" in kind:
        noise = torch.Generator().manual_seed(7)
        options = {"image": torch.rand(1, 3, size, size, generator=noise), "strength": 0.9, **options}
    if "Inpaint" in kind:
        mask = torch.zeros(1, 1, size, size)
        mask[..., : size // 2] = 1
        options["mask_image"] = mask
    if "Img2Img" not in kind:
        options = {"width": size, "height": size, **options}
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        return pipe(
            "a red apple",
            num_inference_steps=steps,
            num_images_per_prompt=batch,
            guidance_scale=5.0,
            generator=generator,
            output_type="pt",
            **options,
        ).images.float()


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b|| over the whole tensor."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
