"""Options generated from the knobs: one that is added to settings.py appears on the command line by itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from ..settings import Fidelity, Knob, knobs

_PANEL = "Optimisations (left out: chosen by the plan)"


def command_line_knobs() -> dict[str, Knob]:
    """The knobs that the command line shows."""
    return {name: knob for name, knob in knobs().items() if "cli" in knob.surfaces}


def with_knobs(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the ``settings`` parameter of ``command``, a dictionary, by one option for each knob."""
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "settings"]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name, knob))
        for name, knob in command_line_knobs().items()
    ]

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        chosen = {name: kwargs.pop(name) for name in command_line_knobs()}
        return command(*args, settings=chosen, **kwargs)

    run.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *added]}
    del run.__wrapped__
    return run


def _annotation(name: str, knob: Knob) -> Any:
    flag = "--" + name.replace("_", "-")
    text = f"{knob.help} ({fidelity_words(knob)})"
    if knob.type is bool:
        negative = "--no-" + name.replace("_", "-")
        return Annotated[bool | None, typer.Option(f"{flag}/{negative}", help=text, rich_help_panel=_PANEL)]
    if knob.choices:
        text = f"{', '.join(knob.choices)}: {text}"
    metavar = "NAME" if knob.choices else knob.unit or "N"
    return Annotated[knob.type | None, typer.Option(flag, help=text, metavar=metavar, rich_help_panel=_PANEL)]


def fidelity_words(knob: Knob) -> str:
    """How near the knob stays to the model, for people."""
    if not isinstance(knob.fidelity, Mapping):
        return str(knob.fidelity)
    lossless = [choice for choice in knob.choices if knob.fidelity[choice].lossless]
    if not lossless:
        return str(Fidelity.APPROXIMATE)
    return f"approximate, except {', '.join(lossless)}" if len(lossless) < len(knob.choices) else "lossless"
