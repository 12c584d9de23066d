"""Pipelines that need no download: the demo model, and random weights of full size."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import Any, cast

import torch

from sd_lowvram.api import plan
from sd_lowvram.checkpoints.architectures import architecture, build_components, pipeline_class, write_folder
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.devices.info import dtype_on
from sd_lowvram.errors import BudgetError

_STEADY = ("beta_start", "beta_end", "beta_schedule", "prediction_type", "num_train_timesteps")

PLENTY = "1000 TB"
"""A budget that no model exceeds."""


def demo_pipeline() -> Any:
    """The demo model in float32, without a bar of its own."""
    pipe: Any = load_pipeline(None, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def least_budget(pipe: Any, **asked: Any) -> int:
    """The least bytes of a device with which a plan of what is ``asked`` is made, which was traced whole; a plan's
    ``minimum_vram_bytes`` is traced in parts."""
    try:
        return plan(pipe, vram="1 B", **asked).minimum_vram_bytes
    except BudgetError as refusal:
        return refusal.needed_bytes


def random_pipeline(model: str, device: torch.device) -> Any:
    """A pipeline of "sd15", "sd21" or "sdxl", its weights in host memory.

    They are drawn on ``device``, where that takes a moment: set a cap on its memory afterwards.
    """
    import diffusers

    config = architecture(model)
    parts: dict[str, Any] = {}
    for name, component in build_components(config, dtype_on(device), str(device)).items():
        parts[name] = torch.nn.Module.to(component, "cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    parts |= _tokenizers(config)
    schedule = {key: value for key, value in config["scheduler"].items() if key in _STEADY}
    parts["scheduler"] = diffusers.DDIMScheduler(**schedule, steps_offset=1, clip_sample=False)
    if config["pipeline"] == "StableDiffusion":
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    pipe = getattr(diffusers, config["pipeline"] + "Pipeline")(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def random_denoiser(model: str, device: torch.device) -> Any:
    """A pipeline of which only the UNet is there: run it with :func:`embeddings` and ``output_type="latent"``."""
    pipe = random_pipeline(model, device)
    others = [name for name, part in pipe.components.items() if name not in ("unet", "scheduler") and part is not None]
    pipe.register_modules(**dict.fromkeys(others))
    return pipe


def random_transformer(
    model: str, device: torch.device, **changes: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """A pipeline of one of today's models in bf16, without text encoders, its weights in host memory, and what it is
    called with: embeddings of a prompt on ``device``.

    Args:
        changes: of the configurations of its ``transformer`` and ``vae``.
    """
    import diffusers

    config = architecture(model)
    for part, values in changes.items():
        config[part] |= values
    parts = build_components(config, torch.bfloat16, str(device), only=("transformer", "vae"))
    parts = {name: torch.nn.Module.to(component, "cpu") for name, component in parts.items()}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    cast(Any, parts["vae"]).register_to_config(shift_factor=0.1)
    kind = pipeline_class(config["pipeline"])
    taken = dict.fromkeys(list(inspect.signature(kind.__init__).parameters)[1:])
    pipe = kind(**taken | parts | {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler()})
    pipe.set_progress_bar_config(disable=True)
    sizes, drawn = pipe.transformer.config, torch.Generator().manual_seed(1)

    def embedding(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn).to(device, torch.bfloat16)

    if config["pipeline"] == "ZImage":
        return pipe, {"prompt_embeds": [embedding(128, sizes.cap_feat_dim)], "guidance_scale": 0.0}
    text, pooled = embedding(1, 512, sizes.joint_attention_dim), embedding(1, sizes.pooled_projection_dim)
    return pipe, {"prompt_embeds": text, "pooled_prompt_embeds": pooled, "guidance_scale": 3.5}


def _tokenizers(config: dict[str, Any]) -> dict[str, Any]:
    from transformers import CLIPTokenizer

    with tempfile.TemporaryDirectory(prefix="sd-lowvram-") as folder:
        write_folder(config, config["pipeline"] + "Pipeline", Path(folder))
        names = [name for name in config if name.startswith("tokenizer")]
        return {name: CLIPTokenizer.from_pretrained(Path(folder) / name) for name in names}


def random_vae(model: str, dtype: torch.dtype, device: str) -> Any:
    """The autoencoder of a model alone, with random weights that are drawn on ``device``.

    They do not overflow, so that SDXL's is planned in ``dtype`` too.
    """
    vae: Any = build_components(architecture(model), dtype, device, only=("vae",))["vae"]
    vae.register_to_config(force_upcast=False)
    return vae


def embeddings(pipe: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """Stand-ins for an encoded prompt and its negative: a run with them needs no text encoder."""
    noise = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise).to(device, dtype_on(device))

    width = pipe.unet.config.cross_attention_dim
    found = {"prompt_embeds": random(1, 77, width), "negative_prompt_embeds": random(1, 77, width)}
    if pipe.unet.config.addition_embed_type == "text_time":
        pooled = pipe.unet.config.projection_class_embeddings_input_dim - 6 * pipe.unet.config.addition_time_embed_dim
        found |= {"pooled_prompt_embeds": random(1, pooled), "negative_pooled_prompt_embeds": random(1, pooled)}
    return found
