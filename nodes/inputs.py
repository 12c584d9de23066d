"""Inputs generated from the knobs of ``sd_lowvram.settings``: one that is added there appears here by itself.

A node asks only for facts that the user alone knows. Low VRAM Settings has all knobs, grouped by the part of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..sd_lowvram.errors import BadInputError
from ..sd_lowvram.knob import GROUPS
from ..sd_lowvram.planning.request import DEFAULT_STEPS
from ..sd_lowvram.saved_latents.hosted import CHOICES
from ..sd_lowvram.settings import Fidelity, Knob, Settings, knobs
from ..sd_lowvram.units import parse_size

AUTO = "auto"
_SWITCH = {"on": True, "off": False}
_LONGEST_SIDE = 16384
_SMALLEST_BUDGET = 128 << 20
"""Bytes below which a bare number is likely meant as gigabytes."""

BUDGET = (
    "STRING",
    {
        "default": "",
        "placeholder": "4GB",
        "display_name": "budget, such as 4GB",
        "tooltip": 'VRAM that may be used, such as "4GB" or "3.5 GiB"; empty: all that is free',
    },
)
BUDGET_OF_VAE = (
    "STRING",
    {
        **BUDGET[1],
        "tooltip": f"{BUDGET[1]['tooltip'].split(';')[0]}; empty: the budget of Low VRAM, or all that is free",
    },
)
MODEL = ("MODEL", {"tooltip": "the model from its loader or a LoRA"})
VAE = ("VAE", {"tooltip": "a VAE of SD1.x, SD2.x, SDXL, SD3, FLUX, Qwen-Image, Wan or a model that uses one of these"})
CLIP = ("CLIP", {"tooltip": "the text encoder, to limit its weights too; not connected: ComfyUI's own limit"})
SETTINGS = ("LOWVRAM_SETTINGS", {"tooltip": "from Low VRAM Settings; not connected: the plan chooses"})
BATCH = ("INT", {"default": 1, "min": 1, "max": 4096, "tooltip": "pictures made at the same time"})
STEPS = (
    "INT",
    {"default": DEFAULT_STEPS, "min": 1, "max": 10000, "tooltip": "steps of the sampler, for the predicted time"},
)

SAVE_LATENTS = (
    list(CHOICES),
    {
        "default": CHOICES[0],
        "display_name": "Picture · Save latents first",
        "tooltip": "VAE Decode (low VRAM) saves the latents to the output folder before it decodes them, until they "
        "are decoded or for good; sd-lowvram resume FILE decodes them",
    },
)


def side(what: str) -> tuple[str, dict[str, Any]]:
    """The input for a picture's width or height."""
    help = f"{what} of the picture in pixels; 0: the model's own size"
    return "INT", {"default": 0, "min": 0, "max": _LONGEST_SIDE, "step": 8, "tooltip": help}


def checked_budget(budget: str | None) -> bool | str:
    """Answer of a node when a prompt is queued: True, or the error in its budget.

    None means a value from another node. The host shows the answer at every input of this check, so the check takes the
    budget alone.
    """
    try:
        if budget is not None and budget.strip():
            _checked_budget(budget)
    except BadInputError as error:
        return str(error)
    return True


def _checked_budget(written: str) -> None:
    size = parse_size(written, "budget")
    if written.strip().isdigit() and size < _SMALLEST_BUDGET:
        raise BadInputError(f'budget {written.strip()} means MiB: write "{written.strip()}GB" for gigabytes')


IN_SIGHT = ("deterministic", "deep_cache", "merge_tokens", "vae_tiles", "decoder_device", "save_latents")
"""Settings that a person who draws decides; the page folds the others under *Advanced*."""


def knob_inputs() -> dict[str, tuple[Any, dict[str, Any]]]:
    """An input for each knob that nodes show, group by group."""
    shown = [(name, knob) for name, knob in knobs().items() if "node" in knob.surfaces]
    inputs = {name: _input(knob) for group in GROUPS for name, knob in shown if knob.group == group}
    for name, (_, options) in inputs.items():
        options["advanced"] = name not in IN_SIGHT
    return inputs


_DIVIDE_TOKENS = ("pieces.transformer_chunks", "pieces.guidance_in_turn")
_UNDIVIDED = "; does nothing in transformers that ToMe, HyperTile or a similar node changes"


def _input(knob: Knob) -> tuple[Any, dict[str, Any]]:
    help = f"{knob.help} ({_fidelity(knob)}){_UNDIVIDED if knob.hook in _DIVIDE_TOKENS else ''}"
    label = f"{knob.group} · {knob.label}" + (f" ({knob.unit})" if knob.unit else "")
    if knob.type is int:
        number = {"default": 0, "min": 0, "max": knob.maximum}
        return "INT", {**number, "display_name": label, "tooltip": f"{help}; 0: the plan chooses"}
    choices = knob.choices or tuple(_SWITCH)
    words = [AUTO, *(choice for choice in choices if choice != AUTO)]
    return words, {"default": AUTO, "display_name": label, "tooltip": f"{help}; auto: the plan chooses"}


def _fidelity(knob: Knob) -> str:
    if not isinstance(knob.fidelity, Mapping):
        return knob.fidelity.words
    farther = [choice for choice in knob.choices if not knob.fidelity[choice].lossless]
    most = max(knob.fidelity_of(choice) for choice in knob.choices if choice not in farther).words
    return f"{most}, {', '.join(farther)} {Fidelity.APPROXIMATE.words}" if farther else most


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
