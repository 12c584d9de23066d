"""Options generated from declarations: a knob that is added to settings.py appears on the command line by itself."""

from __future__ import annotations

import functools
import inspect
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from ..knob import FIDELITIES
from ..settings import Fidelity, Knob, knobs

Command = Callable[..., Any]
_PANEL = "Optimisations (left out: the plan chooses)"


def command_line_knobs() -> dict[str, Knob]:
    """The knobs that the command line shows."""
    return {name: knob for name, knob in knobs().items() if "cli" in knob.surfaces}


def add_knob_options(command: Command) -> Command:
    """Replace the ``settings`` parameter of ``command``, a dictionary, by one option for each knob, which ``--help``
    passes over, and add ``--help-all``, which does not."""
    kind = inspect.Parameter.KEYWORD_ONLY
    shown = command_line_knobs().items()
    options = [inspect.Parameter(_HELP_ALL, kind, default=False, annotation=_EVERYTHING)]
    options += [inspect.Parameter(name, kind, default=None, annotation=_annotation(name, knob)) for name, knob in shown]
    return _replace_parameter(command, name="settings", options=options, make=_values)


def _values(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != _HELP_ALL}


def _show_everything(context: typer.Context, wanted: bool) -> None:
    if not wanted:
        return
    passed_over = [parameter for parameter in context.command.params if getattr(parameter, "hidden", False)]
    try:
        for option in passed_over:
            option.hidden = False  # type: ignore[attr-defined]
        columns = shutil.get_terminal_size().columns
        print(
            context.get_help(), textwrap.fill(FIDELITIES, columns, initial_indent=" ", subsequent_indent=" "), sep="\n"
        )
    finally:
        for option in passed_over:
            option.hidden = True  # type: ignore[attr-defined]
    raise typer.Exit


_HELP_ALL = "help_all"
_EVERYTHING = Annotated[
    bool,
    typer.Option("--help-all", callback=_show_everything, is_eager=True, help="Show every option and exit."),
]


def add_field_options(kind: type, **fixed: Any) -> Callable[[Command], Command]:
    """Replace the ``job`` parameter of a command, which is of this dataclass, by its fields that say how they are typed
    (``Annotated``); those that are ``fixed`` are not asked for."""
    fields = inspect.signature(kind, eval_str=True).parameters.values()
    options = [field for field in fields if hasattr(field.annotation, "__metadata__") and field.name not in fixed]
    return functools.partial(_replace_parameter, name="job", options=options, make=functools.partial(kind, **fixed))


def _replace_parameter(
    command: Command, *, name: str, options: Sequence[inspect.Parameter], make: Callable[..., Any]
) -> Command:
    """``command`` with ``options`` in place of its parameter ``name``, which ``make`` makes of them."""
    signature = inspect.signature(command, eval_str=True)
    taken = [
        parameter for own in signature.parameters.values() for parameter in (options if own.name == name else [own])
    ]

    @functools.wraps(command)
    def run(**kwargs: Any) -> Any:
        value = make(**{option.name: kwargs.pop(option.name) for option in options})
        return command(**kwargs, **{name: value})

    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in taken]
    run.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in taken}
    del run.__wrapped__
    return run


def _annotation(name: str, knob: Knob) -> Any:
    flag = "--" + name.replace("_", "-")
    text = f"{knob.help} ({fidelity_words(knob)})"
    if knob.type is bool:
        negative = "--no-" + name.replace("_", "-")
        return Annotated[
            bool | None, typer.Option(f"{flag}/{negative}", help=text, rich_help_panel=_PANEL, hidden=True)
        ]
    if knob.choices:
        text = f"{', '.join(knob.choices)}: {text}"
    metavar = "NAME" if knob.choices else knob.unit or "N"
    return Annotated[
        knob.type | None, typer.Option(flag, help=text, metavar=metavar, rich_help_panel=_PANEL, hidden=True)
    ]


def fidelity_words(knob: Knob) -> str:
    """Words for the fidelity of the knob."""
    if not isinstance(knob.fidelity, Mapping):
        return knob.fidelity.words
    lossless = [choice for choice in knob.choices if knob.fidelity[choice].lossless]
    if not lossless:
        return Fidelity.APPROXIMATE.words
    if len(lossless) < len(knob.choices):
        return f"{Fidelity.APPROXIMATE.words}, except {', '.join(lossless)}"
    return max(knob.fidelity.values()).words
