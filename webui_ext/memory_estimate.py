"""The estimate for which Forge and reForge free the device before a stage: the plan's activations, if that is less than
their own estimate, so that more of the model stays on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from sd_lowvram.patches import Patch, wrap
from sd_lowvram.planning.search import Plan


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


def _capped_estimate(needed: int, original: Callable[..., float], *args: Any, **kwargs: Any) -> float:
    return min(original(*args, **kwargs), needed)
