"""Inputs generated from the knobs of ``sd_lowvram.settings``: one that is added there appears here by itself.

Saved workflows hold the values by position. What a node has of its own comes first and never changes; the knobs follow
in their append-only order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..sd_lowvram.settings import Fidelity, Knob, Settings, knobs

AUTO = "auto"
_SWITCH = {"on": True, "off": False}
_LONGEST_SIDE = 16384

BUDGET = (
    "STRING",
    {
        "default": "",
        "placeholder": "4GB",
        "tooltip": 'device memory that may be used, such as "4GB" or "3.5 GiB"; empty: what is free',
    },
)
PLAN = ("LOWVRAM_PLAN", {"tooltip": "of Optimize Model: its Report then tells of the VAE too"})
BATCH = ("INT", {"default": 1, "min": 1, "max": 4096, "tooltip": "pictures at a time; guidance doubles them inside"})


def side(what: str) -> tuple[str, dict[str, Any]]:
    """The input for a picture's width or height."""
    help = f"{what} of the picture in pixels; 0: the size that the model was made for"
    return "INT", {"default": 0, "min": 0, "max": _LONGEST_SIDE, "step": 8, "tooltip": help}


def knob_inputs(*stages: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """An input for each knob that nodes show and that touches one of ``stages`` ("denoise", "decode", "encode")."""
    shown = ((name, knob) for name, knob in knobs().items() if "node" in knob.surfaces)
    return {name: _input(knob) for name, knob in shown if not knob.stages or {*stages} & {*knob.stages}}


def _input(knob: Knob) -> tuple[Any, dict[str, Any]]:
    unit = f" in {knob.unit}" if knob.unit else ""
    help = f"{knob.label}{unit}: {knob.help} ({_fidelity(knob)})"
    if knob.type is int:
        return "INT", {"default": 0, "min": 0, "max": knob.maximum, "tooltip": f"{help}; 0: left to the plan"}
    choices = knob.choices or tuple(_SWITCH)
    words = [AUTO, *(choice for choice in choices if choice != AUTO)]
    return words, {"default": AUTO, "tooltip": f"{help}; auto: left to the plan"}


def _fidelity(knob: Knob) -> str:
    if not isinstance(knob.fidelity, Mapping):
        return str(knob.fidelity)
    farther = [choice for choice in knob.choices if not knob.fidelity[choice].lossless]
    return f"{Fidelity.ROUNDING}, {', '.join(farther)} {Fidelity.APPROXIMATE}" if farther else str(Fidelity.ROUNDING)


def settings_of(values: Mapping[str, Any]) -> Settings:
    """The settings that a node's inputs decide; "auto" and 0 leave a knob to the plan.

    Raises:
        SettingsError: a value that its knob does not take.
    """
    return Settings(**{name: _setting(knobs()[name], value) for name, value in values.items() if name in knobs()})


def _setting(knob: Knob, value: Any) -> Any:
    if value == AUTO or (knob.type is int and value == 0):
        return None
    return _SWITCH.get(value, value) if knob.type is bool else value
