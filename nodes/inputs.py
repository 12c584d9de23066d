"""Inputs generated from the knobs of ``sd_lowvram.settings``: one that is added there appears here by itself.

Saved workflows hold the values by position. What a node has of its own comes first and never changes; the knobs follow
in their append-only order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..sd_lowvram.errors import BadInputError
from ..sd_lowvram.planning.request import DEFAULT_STEPS, check_size
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
        "tooltip": 'device memory that may be used, such as "4GB" or "3.5 GiB"; empty: what is free',
    },
)
MODEL = ("MODEL", {"tooltip": "a model of SD1.x, SD2.x or SDXL, as its loader or a LoRA gives it"})
VAE = ("VAE", {"tooltip": "the VAE of SD1.x, SD2.x, SDXL, SD3, FLUX.1 or a model that shares one of theirs"})
PLAN = (
    "LOWVRAM_PLAN",
    {
        "tooltip": "of a Plan node: what it shows is what runs, and budget and knobs here count no more. Of Optimize "
        "Model: its Report then tells of the VAE too"
    },
)
BATCH = ("INT", {"default": 1, "min": 1, "max": 4096, "tooltip": "pictures at a time; guidance doubles them inside"})
STEPS = (
    "INT",
    {"default": DEFAULT_STEPS, "min": 1, "max": 10000, "tooltip": "of the sampler: times are told for them"},
)

SAVE_LATENTS = (
    list(CHOICES),
    {
        "default": CHOICES[0],
        "tooltip": "Save latents first: in a file in the output folder, until they are decoded or to keep; "
        "sd-lowvram resume FILE decodes them",
    },
)


def side(what: str) -> tuple[str, dict[str, Any]]:
    """The input for a picture's width or height."""
    help = f"{what} of the picture in pixels; 0: the size that the model was made for"
    return "INT", {"default": 0, "min": 0, "max": _LONGEST_SIDE, "step": 8, "tooltip": help}


def validated(budget: str | None = None, **sides: int | None) -> bool | str:
    """What a node answers when a prompt is queued: True, or what is wrong with a budget or with a picture's sides.

    None stands for what another node will give.
    """
    try:
        if budget is not None and budget.strip():
            _checked_budget(budget)
        for name, pixels in sides.items():
            if pixels:
                check_size(**{"width": 8, "height": 8, name: pixels})
                if pixels > _LONGEST_SIDE:
                    raise BadInputError(f"{name} {pixels} is above {_LONGEST_SIDE}")
    except BadInputError as error:
        return str(error)
    return True


def _checked_budget(written: str) -> None:
    size = parse_size(written, "budget")
    if written.strip().isdigit() and size < _SMALLEST_BUDGET:
        raise BadInputError(f'budget {written.strip()} means MiB: write "{written.strip()}GB" for gigabytes')


def knob_inputs(*stages: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """An input for each knob that nodes show and that touches one of ``stages`` ("denoise", "decode", "encode")."""
    shown = ((name, knob) for name, knob in knobs().items() if "node" in knob.surfaces)
    return {name: _input(knob) for name, knob in shown if not knob.stages or {*stages} & {*knob.stages}}


def with_steps(inputs: dict[str, Any]) -> dict[str, Any]:
    """``inputs`` with steps where saved workflows have them."""
    return _with(inputs, "steps", STEPS, place=21)


def with_save_latents(inputs: dict[str, Any]) -> dict[str, Any]:
    """``inputs`` with the choice whether latents are saved, where saved workflows have it."""
    return _with(inputs, "save_latents", SAVE_LATENTS, place=30)


def _with(inputs: dict[str, Any], name: str, one: Any, place: int) -> dict[str, Any]:
    """``inputs`` with one more before the knobs that have this place or a later one."""
    later = {name: one for name, one in inputs.items() if name in knobs() and knobs()[name].place >= place}
    return {**{name: one for name, one in inputs.items() if name not in later}, name: one, **later}


_DIVIDE_TOKENS = ("transformer_chunks", "guidance_in_turn")
_UNDIVIDED = "; transformers that ToMe, HyperTile or the like watch stay undivided, and see both halves of guidance"


def _input(knob: Knob) -> tuple[Any, dict[str, Any]]:
    unit = f" in {knob.unit}" if knob.unit else ""
    help = f"{knob.label}{unit}: {knob.help} ({_fidelity(knob)}){_UNDIVIDED if knob.hook in _DIVIDE_TOKENS else ''}"
    if knob.type is int:
        shown = {"default": 0, "min": 0, "max": knob.maximum, "tooltip": f"{help}; 0: left to the plan"}
        return "INT", {**shown, "advanced": True}
    choices = knob.choices or tuple(_SWITCH)
    words = [AUTO, *(choice for choice in choices if choice != AUTO)]
    return words, {"default": AUTO, "tooltip": f"{help}; auto: left to the plan", "advanced": True}


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
