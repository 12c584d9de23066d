"""Facts on the WebUI: which of the three it is, its model, and who moves the weights. Everything by duck typing.

AUTOMATIC1111 holds an ldm or sgm shell; reForge the same shell and ``forge_objects``; Forge only ``forge_objects``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from modules import devices, shared
from torch import Tensor, nn

from sd_lowvram.devices.info import available_ram, free_vram
from sd_lowvram.devices.this_machine import budget_of
from sd_lowvram.errors import UnsupportedModelError
from sd_lowvram.models.anatomy import Anatomy
from sd_lowvram.patches import is_foreign
from sd_lowvram.session import anatomy_of
from sd_lowvram.units import parse_size
from sd_lowvram.weights import all_tensors

WEIGHTS = frozenset({"offload", "weights_mib", "split_layers", "weight_storage"})
"""Knobs of where weights live and in which form: only for a host that leaves them alone."""

_AND = re.compile(r"\bAND\b")
"""Separator of prompts in the WebUIs."""


def kind(model: Any) -> str:
    """Kind of the host, from the loaded model or a blueprint: "a1111", "reforge" or "forge"."""
    if is_blueprint(model):
        return str(model.kind)
    if not hasattr(model, "forge_objects"):
        return "a1111"
    return "reforge" if isinstance(model, nn.Module) else "forge"


def is_blueprint(model: Any) -> bool:
    """True for a checkpoint that is not loaded."""
    return hasattr(model, "other_bytes")


def is_loaded(model: Any) -> bool:
    """True for a loaded model, False for the placeholder before the first load, whose autoencoder is None."""
    return getattr(model, "first_stage_model", None) is not None or hasattr(model, "forge_objects")


def encodes_always(model: Any) -> bool:
    """True if the host encodes a picture for this model in txt2img too, as for inpainting and editing models."""
    by_flag = getattr(model, "is_inpaint", False) or getattr(model, "is_sdxl_inpaint", False)
    return bool(by_flag) or getattr(getattr(model, "model", None), "conditioning_key", None) in ("hybrid", "concat")


def moves_weights(model: Any) -> bool:
    """True if the host moves weights itself: Forge and reForge always, AUTOMATIC1111 with --medvram and --lowvram."""
    return kind(model) != "a1111" or bool(getattr(model, "lowvram", False))


def without_effect() -> frozenset[str]:
    """Arguments that do nothing in this host, as it moves weights itself, whatever the model."""
    flags = vars(shared.cmd_opts)
    moves = "modules_forge" in sys.modules or flags.get("lowvram") or flags.get("medvram")
    return WEIGHTS | {"decoder_device"} if moves else frozenset()


def swaps_layers(model: Any) -> bool:
    """True if the host keeps as many layers of a model as fit on the device, and fetches the rest for their calls."""
    return kind(model) != "a1111"


def plannable_anatomy(model: Any) -> Any:
    """The host's model if all of it can be planned, else its autoencoder.

    Transformers in Forge and Forge Neo are planned unless they cannot be traced, see :mod:`webui_ext.hosted`.

    Raises:
        UnsupportedModelError: neither can be planned.
    """
    try:
        anatomy_of(model)
    except UnsupportedModelError as error:
        if "vae" not in error.works:
            raise
        held = getattr(model, "forge_objects", model)
        return getattr(held, "vae", held).first_stage_model
    return model


def anatomy(model: Any) -> Anatomy:
    """The anatomy of a model, or of a blueprint that brings its own, with the types in which the host computes."""
    if is_blueprint(model):
        return cast(Anatomy, model.anatomy)
    dissected = anatomy_of(plannable_anatomy(model))
    if kind(model) == "a1111" and getattr(devices, "fp8", False):
        assert dissected.family.predict is not None
        predict = functools.partial(_predict_wide, dissected.family.predict)
        dissected = dataclasses.replace(dissected, family=dataclasses.replace(dissected.family, predict=predict))
    return dataclasses.replace(dissected, computes=_computes(model, dissected))


def _predict_wide(predict: Callable[..., Tensor], *args: Any) -> Tensor:
    """A prediction with weights of 8 bits: they are widened as for the host, in a type as wide, and in the denoiser
    alone."""
    with torch.autocast("cpu", torch.bfloat16):
        return predict(*args)


def _computes(model: Any, dissected: Anatomy) -> dict[str, torch.dtype]:
    """The type in which the host lets a component compute, by name, where it says so."""
    held = getattr(model, "forge_objects", None)
    types: dict[str | None, Any] = {}
    if held is not None:
        base = getattr(getattr(held, "unet", None), "model", None)
        names = ("computation_dtype", "manual_cast_dtype")  # Forge's and reForge's; the latter has None for its own
        types[dissected.denoiser] = next((getattr(base, name) for name in names if getattr(base, name, None)), None)
        types[dissected.autoencoder] = getattr(getattr(held, "vae", None), "vae_dtype", None)
    elif getattr(devices, "fp8", False):  # weights in 8 bits, under autocast or its substitute
        types[dissected.denoiser] = torch.bfloat16 if device().type == "cpu" else devices.dtype
    return {name: dtype for name, dtype in types.items() if name is not None and isinstance(dtype, torch.dtype)}


def is_tiled_elsewhere(model: Any) -> bool:
    """True if another extension has replaced the autoencoder's decode or encode, like Tiled VAE."""
    vae = None if is_blueprint(model) else anatomy_of(plannable_anatomy(model)).vae
    parts = (getattr(vae, name, None) for name in ("decoder", "encoder"))
    return any(part is not None and is_foreign(part, "forward") for part in parts)


def attention_elsewhere(model: Any) -> list[tuple[Any, Any]]:
    """Attention modules of the denoiser with the forwards that another extension has put on them, like NegPiP.

    Such a forward may need the rows of prompt and negative prompt in one call. AUTOMATIC1111's Hypertile leaves its
    own on a model once it was on: switched off, they do nothing."""
    sites = () if is_blueprint(model) else anatomy_of(plannable_anatomy(model)).attentions
    modules = (site.module for site in sites if getattr(vars(site.module).get(_HYPERTILE), "enabled", True))
    return [(module, module.forward) for module in modules if is_foreign(module, "forward")]


_HYPERTILE = "__webui_hypertile_params"
"""Attribute of modules on which AUTOMATIC1111 has put a Hypertile, on or off."""


def passes(model: Any, scale: float, prompts: Sequence[str] = (), image_scale: float | None = None) -> int:
    """Rows of the denoiser's batch for each picture, at most, in a generation with this CFG scale.

    A prompt brings a row for each of its parts between ANDs, and the negative prompt one: in AUTOMATIC1111 at every
    scale, in Forge and reForge unless the scale is 1.

    Args:
        image_scale: the image's CFG scale, which is for models that edit pictures.
    """
    conditions = max((len(_AND.split(prompt)) for prompt in prompts), default=1)
    if kind(model) != "a1111":
        return conditions if math.isclose(scale, 1) else conditions + 1
    if not getattr(shared.opts, "batch_cond_uncond", True):
        return 1
    if getattr(model, "cond_stage_key", None) == "edit" and image_scale not in (None, 1):
        return 3
    return conditions if getattr(shared.opts, "skip_early_cond", 0) >= 1 else conditions + 1


def unscale(model: Any, latents: Tensor) -> Tensor:
    """Latents of the denoiser's scale as the autoencoder takes them."""
    if kind(model) == "forge":
        scaled: Tensor = model.forge_objects.vae.first_stage_model.process_out(latents)
        return scaled
    taken: Tensor = latents / model.scale_factor
    return taken


def autoencoder_file(model: Any) -> str | None:
    """The file that the autoencoder came from; None: the host does not report which of several."""
    from modules import sd_models

    if getattr(getattr(sd_models, "model_data", None), "forge_loading_parameters", {}).get("additional_modules"):
        return None
    own = getattr(sys.modules.get("modules.sd_vae"), "loaded_vae_file", None)
    checkpoint = getattr(getattr(model, "sd_checkpoint_info", None), "filename", None)
    return str(own or checkpoint) if own or checkpoint else None


def device() -> torch.device:
    """The host's compute device."""
    return torch.device(devices.device)


def budget(text: str, model: Any, where: torch.device) -> tuple[int, int]:
    """Bytes for the run as the user states them, or what this process can have now with the model's own weights counted
    as free; and how many of them the host's other modules hold on the device, the text encoders above all."""
    if is_blueprint(model):
        return parse_size(text, "vram") if text else budget_of(where, free_vram(where)), model.other_bytes
    ours = _bytes_on(where, all_tensors(*anatomy_of(plannable_anatomy(model)).components.values()))
    shell = all_tensors(model) if isinstance(model, nn.Module) and not moves_weights(model) else []
    other_bytes = max(0, _bytes_on(where, shell) - ours)
    if text:
        return parse_size(text, "vram"), other_bytes
    return budget_of(where, free_vram(where) + ours + other_bytes), other_bytes


def _bytes_on(where: torch.device, tensors: list[Tensor]) -> int:
    here = (tensor for tensor in tensors if tensor.device.type == where.type)
    return sum(tensor.numel() * tensor.element_size() for tensor in here)


def free_in_steps(text: str) -> int:
    """Free memory in steps of 256 MiB if no budget is stated, as a part of an answer's key."""
    return 0 if text else free_vram(device()) >> 28


def queue() -> Any:
    """The lock of the host's queue of generations."""
    from modules import call_queue

    return call_queue.queue_lock


def host_budget(text: str) -> int:
    """Bytes of host memory: as stated, or what is free now."""
    return parse_size(text, "ram") if text else available_ram()


@contextlib.contextmanager
def precision_of_attention() -> Iterator[None]:
    """Make ldm's and sgm's attentions request float32 within the block only if the host's own setting does."""
    wanted = "fp32" if getattr(shared.opts, "upcast_attn", False) else "fp16"
    names = ("ldm.modules.attention", "sgm.modules.attention")
    modules: list[Any] = [sys.modules[name] for name in names if name in sys.modules]
    modules = [module for module in modules if hasattr(module, "_ATTN_PRECISION")]
    before = [module._ATTN_PRECISION for module in modules]
    for module in modules:
        module._ATTN_PRECISION = wanted
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module._ATTN_PRECISION = value


@contextlib.contextmanager
def use_compute_type(dissected: Anatomy) -> Iterator[None]:
    """Start ldm's UNet in its compute type within the block, a trace, if the host leaves that to autocast.

    Bytes that autocast holds in float32 during a norm are not predicted."""
    unet: Any = dissected.denoiser_module
    before = vars(unet).get("dtype") if unet is not None else None
    if not isinstance(before, torch.dtype):
        yield
        return
    unet.dtype = dissected.computes.get(dissected.denoiser or "", next(unet.parameters()).dtype)
    try:
        yield
    finally:
        unet.dtype = before
