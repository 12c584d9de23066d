"""The model for which the page's line plans: the loaded one, or before that the chosen checkpoint's architecture.

A checkpoint's header alone is read; its modules are made on the meta device, where they take no memory.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from modules import devices, sd_models, shared

from sd_lowvram.checkpoints.safetensors_header import Header, read_header
from sd_lowvram.errors import LowVRAMError
from sd_lowvram.models.anatomy import Anatomy
from sd_lowvram.session import anatomy_of

from . import host

_SD2 = "cond_stage_model.model.transformer.resblocks.0.attn.in_proj_weight"
_TEXT = ("cond_stage_model.", "conditioner.")


@dataclass(frozen=True, eq=False)
class PreviewedModel:
    """A checkpoint that is not loaded yet.

    Attributes:
        other_bytes: bytes of its text encoders, in the type in which the host will hold them.
        kind: which host it is for, see :func:`host.kind`.
        lowvram: whether AUTOMATIC1111 will move its weights.
    """

    anatomy: Anatomy
    other_bytes: int
    kind: str
    lowvram: bool = False


def model() -> Any:
    """The loaded model, or a :class:`PreviewedModel`; None when no checkpoint is chosen, or it is none that we can
    read, or the host has not decided yet in which type it will load it."""
    loaded = getattr(sd_models.model_data, "sd_model", None)
    if host.is_loaded(loaded):
        return loaded
    if getattr(shared.cmd_opts, "no_half", False) and getattr(devices, "dtype_unet", None) is torch.float16:
        return None
    try:
        return preview_model(sd_models.select_checkpoint())
    except (ImportError, AttributeError, KeyError, ValueError):
        return None


def preview_model(checkpoint: Any) -> PreviewedModel | None:
    """The blueprint of a checkpoint as the host lists it; None where it is none that we can read."""
    try:
        return _draw_model(checkpoint.filename, os.path.getmtime(checkpoint.filename)) if checkpoint else None
    except (LowVRAMError, ImportError, OSError, AttributeError, KeyError, ValueError):
        return None


_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next = itertools.count()


def identity(target: Any) -> Hashable:
    """Differs for every model that is loaded, and for every blueprint; no later one has it, as it may have an id."""
    return _numbers.setdefault(target, next(_next))


@functools.lru_cache(maxsize=2)
def _draw_model(file: str, changed: float) -> PreviewedModel:
    try:
        from modules import sd_models_config

        find_config = sd_models_config.find_checkpoint_config_near_filename
    except (ImportError, AttributeError):  # Forge has nothing in that module, and Forge Neo has no such module
        return _diffusers_model(file)
    header = read_header(Path(file))
    config = find_config(SimpleNamespace(filename=file))
    if config is None and header.shape(_SD2)[1:] == (1024,):
        config = sd_models_config.config_sd2  # the kind of its prediction makes no difference here
    if config is None:
        shapes = {name: torch.empty(entry.shape, device="meta") for name, entry in header.tensors.items()}
        config = sd_models_config.guess_model_config_from_state_dict(shapes, file)
    from omegaconf import OmegaConf

    parts = OmegaConf.load(config).model.params
    flags = vars(shared.cmd_opts)
    lowvram = flags.get("lowvram") or flags.get("medvram") or (flags.get("medvram_sdxl") and "network_config" in parts)
    kind = "reforge" if "modules_forge" in sys.modules else "a1111"
    text_bytes = 0 if lowvram or kind == "reforge" else _text_bytes(header)
    return PreviewedModel(anatomy_of(_empty(parts)), text_bytes, kind, bool(lowvram))


def _empty(parts: Any) -> Any:
    """The model that the host would make of its own configuration, without weights and text encoders."""
    from ldm.util import instantiate_from_config

    with torch.device("meta"):
        unet = instantiate_from_config(parts.get("unet_config") or parts.network_config)
        vae = instantiate_from_config(parts.first_stage_config)
    unet, vae = unet.to(devices.dtype_unet), vae.to(devices.dtype_vae)
    return SimpleNamespace(model=SimpleNamespace(diffusion_model=unet), first_stage_model=vae)


def _text_bytes(header: Header) -> int:
    elements = (torch.Size(entry.shape).numel() for name, entry in header.tensors.items() if name.startswith(_TEXT))
    return sum(elements) * torch.empty(0, dtype=devices.dtype).element_size()


def _diffusers_model(file: str) -> PreviewedModel:
    """Forge's own modules have the same layers as diffusers', which it brings along."""
    from sd_lowvram.checkpoints.meta_model import meta_anatomy

    dtype = torch.float32 if host.device().type == "cpu" else torch.float16
    return PreviewedModel(meta_anatomy(file, dtype), 0, kind="forge")
