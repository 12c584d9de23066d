"""Fallback steps of a run that ran out of memory although its plan fitted, in order.

The first step frees cached memory and repeats the call. Each further step opens some knobs to the search and fixes the
rest, so that no step changes more than it needs. Number types are never opened: a lossless run stays lossless.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..settings import Settings

AS_BEFORE = "cache emptied"

_Opened = tuple[tuple[str, tuple[str, ...]], ...]

_STRIPS = (
    "feed_forward_chunks",
    "residual_strips",
    "transformer_chunks",
    "guidance_in_turn",
    "vae_tiles",
    "vae_strip_mib",
    "compile",
    "packed_weights",
    "cuda_graphs",
    "traced",
)
_MAPS, _WEIGHTS, _DECODER = ("park_skips", "vae_map"), ("offload", "weights_mib"), ("decoder_device",)

_DEVICE_IS_SHORT: _Opened = (
    ("smaller strips", _STRIPS),
    ("parked maps", _MAPS),
    ("smaller ring", _WEIGHTS),
    ("decoder on the CPU", _DECODER),
)
_HOST_IS_SHORT: _Opened = (
    ("weights from their file", ()),
    ("smaller strips", _STRIPS),
    ("fewer parked maps", _MAPS),
    ("larger ring", _WEIGHTS),
    ("decoder on the GPU", _DECODER),
)

_CLOSED: dict[str, Any] = {"park_skips": False, "vae_map": "held", "decoder_device": "gpu"}
"""Values to which open knobs are fixed until their step opens them."""


def ladder(chosen: Settings, fixed: Settings, of_host: bool) -> Iterator[tuple[str, Settings]]:
    """Yield the fallback steps, each with its name and the knobs that stay fixed on it.

    Args:
        chosen: settings of the plan that ran out of memory.
        fixed: the knobs among them that a person has set.
        of_host: True if host memory is short, False if the device's is.
    """
    held = chosen.filled(**_CLOSED)
    for name, opened in _HOST_IS_SHORT if of_host else _DEVICE_IS_SHORT:
        held = dataclasses.replace(held, **{knob: getattr(fixed, knob) for knob in opened})
        yield name, held


def without_closed(settings: Settings, before: Settings) -> Settings:
    """Drop knobs that were pinned only to freeze the search and still hold their default.

    Args:
        settings: settings of the new plan.
        before: settings before the search was frozen.
    """
    exact = settings.vae_tiles == "exact"
    said_nothing = [
        knob
        for knob, value in _CLOSED.items()
        if getattr(settings, knob) == value and getattr(before, knob) is None and not (knob == "vae_map" and exact)
    ]
    return dataclasses.replace(settings, **dict.fromkeys(said_nothing))
