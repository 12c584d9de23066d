"""Memory that Forge, Forge Neo and reForge keep free on the device while they load weights.

For a stage they free what they estimate for it: the plan's activations, if that is less, so that more of the model
stays on the device. Under a stated budget they keep free what is not of the budget as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from modules import processing

from sd_lowvram.patches import Patch, wrap
from sd_lowvram.planning.search import Plan

from . import loading


def lower_estimates(model: Any, plan: Plan) -> Iterator[Patch]:
    """Patches of the host's estimates; none for a host that makes none."""
    held = getattr(model, "forge_objects", None)
    if held is None:
        return
    needed = {stage.name: stage.activation_bytes for stage in plan.stages}
    vae = getattr(held, "vae", None)
    estimates = (
        (getattr(getattr(held, "unet", None), "model", None), "memory_required", "denoise"),
        (vae, "memory_used_decode", "decode"),
        (vae, "memory_used_encode", "encode"),
    )
    for owner, attribute, stage in estimates:
        if stage in needed and hasattr(owner, attribute):
            yield wrap(owner, attribute, functools.partial(_capped_estimate, needed[stage]), "estimates")


def limit_weights(model: Any, plan: Plan) -> Iterator[Patch]:
    """Patches by which the host loads no more weights than a stated budget has room for; none where it has no limit."""
    managing, capacity = loading.managing(), loading.room_for_weights(plan)
    if managing is None or capacity is None:
        return
    reserved = loading.free_with_weights(model) - capacity
    half = max(stage.activation_bytes for stage in plan.stages) // 2  # of a stage's estimate is added to the second
    least = {"minimum_inference_memory": reserved, "extra_reserved_memory": reserved - half}
    kept = {name: max(least[name], getattr(managing, name)()) for name in least if hasattr(managing, name)}
    for name, number in kept.items():  # known before either is set, as the host computes the first from the second
        yield wrap(managing, name, functools.partial(_constant, number), "limit")


def unload_excess(model: Any, plan: Plan) -> bool:
    """Unload the models of Forge, which leaves loaded what is loaded, if a stated budget has no room for them.

    Returns:
        True if Forge will then load less of the model than it would without the budget.
    """
    managing, capacity = loading.managing(), loading.room_for_weights(plan)
    if capacity is None or not hasattr(managing, "current_inference_memory"):
        return False
    here, whole = loading.model_bytes(model)
    if here > capacity:
        managing.unload_all_models()
    return whole > capacity


def load_anew() -> None:
    """Unload Forge's models before its next generation, as it does after a change of its own setting."""
    processing.need_global_unload = True


def _constant(number: float, original: Callable[..., float]) -> float:
    return number


def _capped_estimate(needed: int, original: Callable[..., float], *args: Any, **kwargs: Any) -> float:
    return min(original(*args, **kwargs), needed)
