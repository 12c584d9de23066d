"""Weights that a host which moves them itself leaves on the device while a component runs.

AUTOMATIC1111 has one component there with --medvram, and of the UNet one block with --lowvram; Forge and reForge fill
what is free and fetch the other layers for their call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from modules import shared
from torch import nn

from sd_lowvram.devices.info import free_vram
from sd_lowvram.models.anatomy import Anatomy
from sd_lowvram.planning.plan import Plan
from sd_lowvram.planning.wording import Kind, Reason
from sd_lowvram.weights import all_tensors, weight_bytes

from . import host
from .estimate import HOST

_BLOCKS = ("time_embed", "input_blocks", "middle_block", "output_blocks")


def ways(model: Any, dissected: Anatomy) -> Iterator[dict[str, int]]:
    """The bytes of each component that stay, by name, from the fastest of the host's ways to the one that leaves least.

    A component that is not named stays whole.
    """
    if host.swaps_layers(model):
        yield {}
        yield {name: _two_layers(component) for name, component in dissected.components.items()}
    elif dissected.denoiser_module is not None and getattr(shared.cmd_opts, "lowvram", False):
        yield {dissected.denoiser or "": _largest_block(dissected.denoiser_module)}
    else:
        yield {}


def keeps_all(model: Any) -> bool:
    """True if the host keeps all weights of the model loaded: Forge on a CPU."""
    return host.swaps_layers(model) and host.device().type == "cpu"


def bytes_beside(model: Any, dissected: Anatomy) -> int:
    """Bytes of the model's weights that are not of planned components, as those of text encoders."""
    parts = [*_components(model, dissected).values(), *_texts(model)]
    return weight_bytes(*parts) - weight_bytes(*dissected.components.values())


_FOR_INFERENCE = 1 << 30
"""Bytes that Forge and reForge leave free in addition to the weights, if they do not report how many."""
_MANAGEMENT = ("backend.memory_management", "ldm_patched.modules.model_management")
"""Forge's and reForge's own."""


def decision(model: Any, dissected: Anatomy, plan: Plan) -> Reason:
    """Bytes of the model that Forge and reForge will keep on the device, and of a run by ``plan`` with them.

    They decide by free memory, not by a budget: on a CPU they keep everything. On a GPU they keep as many parts of the
    model as fit, text encoders too, down to one part, and finally only some layers of that part.
    """
    components = _components(model, dissected)
    parts = [*components.values(), *_texts(model)]
    free, whole = _free(), weight_bytes(*parts)
    sizes = {name: weight_bytes(part) for name, part in components.items()}
    limit, capacity = room_for_weights(plan), free + _here(parts) - _inference_bytes()
    bounded = limit is not None and limit <= capacity and limit < whole
    capacity = max(0, capacity if limit is None else min(capacity, limit))
    if keeps_all(model) or whole <= capacity:
        keeps, resident = "all", dict.fromkeys(sizes, whole)
    elif max(sizes.values()) <= capacity:
        keeps, resident = "one part", sizes
    else:
        keeps, resident = "some layers", {name: min(size, capacity) for name, size in sizes.items()}
    stages = (stage.reserved_bytes - stage.weights_bytes + resident.get(stage.component, 0) for stage in plan.stages)
    takes = max(stages) + plan.predicted.overhead_bytes
    decided = {"host": HOST, "free_bytes": free, "model_bytes": whole, "keeps": keeps, "needed_bytes": takes}
    return Reason(Kind.HOST_DECIDES, **decided, bounded=bounded, over_budget=takes > plan.request.vram)


def room_for_weights(plan: Plan) -> int | None:
    """Bytes of a stated budget that no stage needs besides weights; None without one, or on a CPU, where the host keeps
    everything."""
    if not plan.request.fills or host.device().type == "cpu":
        return None
    beside = max(stage.reserved_bytes - stage.weights_bytes for stage in plan.stages)
    return plan.request.vram - beside - plan.predicted.overhead_bytes


def free_with_weights(model: Any) -> int:
    """Bytes that are free on the device, or would be without the weights of ``model``."""
    return _free() + model_bytes(model)[0]


def model_bytes(model: Any) -> tuple[int, int]:
    """Bytes of the weights of ``model``, text encoders included, that are on the device, and of all."""
    parts = [*host.anatomy(model).components.values(), *_texts(model)]
    return _here(parts), weight_bytes(*parts)


def managing() -> Any:
    """The module by which Forge or reForge moves weights; None elsewhere."""
    return next((sys.modules[name] for name in _MANAGEMENT if name in sys.modules), None)


def _components(model: Any, dissected: Anatomy) -> dict[str, nn.Module]:
    """Components, also those that are not planned."""
    return {**dissected.components, **dissected.family.unchecked_components_of(model)}


def _texts(model: Any) -> list[nn.Module]:
    texts = getattr(getattr(getattr(model, "forge_objects", None), "clip", None), "cond_stage_model", None)
    return [texts] if isinstance(texts, nn.Module) else []


def _free() -> int:
    return free_vram(host.device())


def _here(parts: Iterable[nn.Module]) -> int:
    kind = host.device().type
    return sum(tensor.nbytes for tensor in all_tensors(*parts) if tensor.device.type == kind)


def _inference_bytes() -> int:
    return int(getattr(managing(), "minimum_inference_memory", lambda: _FOR_INFERENCE)())


def _largest_block(unet: Any) -> int:
    """Bytes outside of all blocks, such as the last convolution, plus the largest block."""
    groups = [getattr(unet, name) for name in _BLOCKS if getattr(unet, name, None) is not None]
    blocks = [child for group in groups for child in (group if isinstance(group, nn.ModuleList) else [group])]
    sizes = [weight_bytes(block) for block in blocks]
    return weight_bytes(unet) - sum(sizes) + max(sizes)


def _two_layers(component: nn.Module) -> int:
    """The layer that computes and the next, which may come meanwhile, in a type no narrower than float32."""
    sizes = (sum(tensor.numel() for tensor in all_tensors(layer)) for layer in _layers(component))
    return 2 * 4 * max(sizes, default=0)


def _layers(component: nn.Module) -> Iterator[nn.Module]:
    return (module for module in component.modules() if next(module.children(), None) is None)
