"""The panel's arguments: the same list for page, HTTP API, infotext, X/Y/Z grid and the settings section.

The order is append-only, because saved API payloads are positional: the panel's own arguments, then every knob of
:class:`sd_lowvram.Settings` in its order, with what came later between them. The API also takes one object of names in
place of the list.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sd_lowvram.errors import BadInputError
from sd_lowvram.knob import GROUPS
from sd_lowvram.saved_latents.hosted import CHOICES
from sd_lowvram.settings import Knob, Settings, knobs
from sd_lowvram.units import parse_size

NAME = "sd-lowvram"
TITLE = "Low VRAM"
AUTO = "auto"
PRESETS = ("exact", "exact and fastest", "smallest")
_SWITCH: dict[Any, bool] = {"on": True, "off": False, True: True, False: False}
_WORDS: dict[Any, str] = {True: "on", False: "off"}


@dataclass(frozen=True)
class Argument:
    """A control.

    Attributes:
        kind: "switch" (a checkbox), "size" (a text such as 4GB), "choice" (a list) or "number" (whole, 0 for none).
        knob: True if it is one of the Settings; then "auto" and 0 leave it to the plan.
        example: what an empty field shows, short enough for a narrow window.
        group: one of ``GROUPS``, under which the panel shows it.
    """

    name: str
    label: str
    help: str
    kind: str
    default: Any
    choices: tuple[str, ...] = ()
    maximum: int = 0
    knob: bool = False
    example: str = ""
    group: str = GROUPS[0]

    def check(self, value: Any) -> Any:
        """``value`` as the control would hold it.

        Raises:
            BadInputError: it is none that the control takes.
        """
        if value is None:
            return self.default
        if not isinstance(value, str | int | float):
            raise BadInputError(f"{self.name}={value!r} is not one value: give the arguments as one flat list")
        if self.kind == "size":
            text = str(value).strip()
            if text:
                parse_size(text, self.name)
            return text
        if self.kind == "switch" and value in _SWITCH:
            return _SWITCH[value]
        if self.kind == "choice":
            word = _WORDS.get(value, value) if "on" in self.choices else value
            if word in self.choices:
                return word
        number = None if isinstance(value, str | bool) else value
        if self.kind == "number" and number is not None and 0 <= number <= self.maximum and number == int(number):
            return int(number)
        takes = {"choice": f"one of {', '.join(self.choices)}", "number": f"a whole number from 0 to {self.maximum}"}
        message = f"{self.name}={value!r} is not {takes.get(self.kind, 'true or false')}"
        raise BadInputError(message, plainly=message.replace("=", " ", 1))

    def setting(self, value: Any) -> Any:
        """The value of the knob that a checked ``value`` stands for; None: undecided."""
        if value == AUTO or (self.kind == "number" and value == 0):
            return None
        return _SWITCH.get(value, value) if "on" in self.choices else value


_OWN = (
    Argument("enabled", "Enable", "make pictures within the budget", "switch", False),
    Argument(
        "vram", "VRAM", 'such as "4GB" or "3.5 GiB"; empty: all that is free now', "size", "", example="4GB; empty: all"
    ),
    Argument("ram", "RAM", "for what does not fit in VRAM; empty: all that is free now", "size", ""),
    Argument(
        "preset",
        "Preset",
        "exact: changes only what the budget requires; exact and fastest: also uses faster ways that need no less "
        "memory; smallest: the least memory, however slow. All give the same picture",
        "choice",
        PRESETS[0],
        PRESETS,
    ),
)

_SAVING = Argument(
    "save_latents",
    "Save latents first",
    "writes the latents to a file in the output folder before they are decoded, until the pictures are done or for "
    "good; sd-lowvram resume FILE decodes them",
    "choice",
    CHOICES[0],
    CHOICES,
    group=GROUPS[-1],
)
_PLACE_OF_SAVING = 30
"""The knobs before this place come before it: payloads are positional."""

IN_SIGHT = ("vram", "preset")
"""The arguments that the panel shows; the rest is folded under "Advanced"."""


def arguments() -> tuple[Argument, ...]:
    """All arguments in the order of the positional list."""
    shown = {name: knob for name, knob in knobs().items() if "panel" in knob.surfaces}
    before = [_knob_argument(name, knob) for name, knob in shown.items() if knob.place < _PLACE_OF_SAVING]
    after = [_knob_argument(name, knob) for name, knob in shown.items() if knob.place >= _PLACE_OF_SAVING]
    return (*_OWN, *before, _SAVING, *after)


def _knob_argument(name: str, knob: Knob) -> Argument:
    label = f"{knob.label} ({knob.unit})" if knob.unit else knob.label
    if knob.type is int:
        help = f"{knob.help}; 0: automatic"
        return Argument(name, label, help, "number", 0, maximum=knob.maximum, knob=True, group=knob.group)
    choices = knob.choices or ("on", "off")
    named = [choice for choice in knob.choices if choice != AUTO]
    changing = [choice for choice in named if not knob.fidelity_of(choice).lossless]
    same = [choice for choice in named if choice not in changing]
    which = f"all but {', '.join(same)}" if 0 < len(same) < len(changing) else ", ".join(changing)
    help = f"{knob.help}; {which}: another picture, however close" if changing else knob.help
    values = (AUTO, *(choice for choice in choices if choice != AUTO))
    return Argument(name, label, help, "choice", AUTO, values, knob=True, group=knob.group)


def read(values: Sequence[Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, from the panel's list or from an API call's.

    Args:
        values: in the positional order, or one object of names; what is left out, or None, is taken from ``defaults``.
        defaults: the values of what is not named.

    Raises:
        BadInputError: an unknown name, or a value that its control does not take.
    """
    by_name = {argument.name: argument for argument in arguments()}
    if values and isinstance(values[0], Mapping):
        named = dict(values[0])
    else:
        named = dict(zip(by_name, values, strict=False))
    for name in named:
        if name not in by_name:
            near = difflib.get_close_matches(str(name), by_name, 1)
            raise BadInputError(f"unknown argument {name!r}: " + (f"{near[0]!r}?" if near else ", ".join(by_name)))
    merged = {**defaults, **{name: value for name, value in named.items() if value is not None}}
    return {name: argument.check(merged.get(name)) for name, argument in by_name.items()}


def settings_of(chosen: Mapping[str, Any]) -> Settings:
    """The knobs that the panel decides, those of its preset included.

    In a host, autograd is off already, and inference tensors would get in the way of a LoRA that changes weights.
    """
    decided = {argument.name: argument.setting(chosen[argument.name]) for argument in arguments() if argument.knob}
    settings = Settings(**decided).filled(inference_mode=False)
    if settings.weights_mib is not None:
        settings = settings.filled(offload="blocks")
    if chosen["preset"] == "smallest":
        return settings.filled(**Settings.smallest().as_dict())
    return settings.filled(channels_last=False) if chosen["preset"] == "exact" else settings


def knob_values(settings: Settings) -> dict[str, Any]:
    """The arguments that stand for the knobs of ``settings``, the undecided ones automatic."""
    values = ((argument, getattr(settings, argument.name)) for argument in arguments() if argument.knob)
    return {argument.name: argument.default if value is None else argument.check(value) for argument, value in values}
