"""Which hooks the settings ask for.

A hook is a function ``(anatomy, settings, device)`` that yields patches and changes and acts on nothing itself. It lies
in the file of its name, and the knob that asks for it names it: nothing is registered here but an order.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable

import torch

from ..models.anatomy import Anatomy
from ..patches import Change, Patch
from ..settings import Settings
from ..streaming.timing import Timing

Hook = Callable[[Anatomy, Settings, torch.device], Iterable[Patch | Change]]

_ORDER = (
    "precision",
    "channels_last",
    "weight_storage",
    "attention",
    "vae_exact",
    "vae_fast",
    "vae_slices",
    "offload",
    "feed_forward",
    "residual_strips",
    "transformer_chunks",
    "skip_parking",
    "guidance_in_turn",
    "inference_mode",
)
"""From the innermost to the outermost: what converts weights lies below what moves them, and what divides a call into
pieces lies above. A hook that is not named here comes outside of all."""


def active_hooks(settings: Settings, timing: Timing | None = None) -> list[Hook]:
    """The hooks that ``settings`` ask for, in the order in which they wrap the model: the last is the outermost.

    Args:
        timing: how long a step's modules take, where a plan knows it: weights are then streamed by schedule.
    """
    wanted = {knob.hook_of(value) for _, knob, value in settings.decided()} - {""}
    ordered = [name for name in _ORDER if name in wanted] + sorted(wanted - {*_ORDER})
    hooks = [getattr(importlib.import_module(f".{name}", __package__), name) for name in ordered]
    return [functools.partial(hook, timing=timing) if hook.__name__ == "offload" else hook for hook in hooks]
