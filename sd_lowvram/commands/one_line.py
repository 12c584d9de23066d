"""Errors in the words of a command line, in one line like every other error."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import BadInputError
from .exit_codes import exit_on_error
from .streams import tell

_ORDER = ("generate", "plan", "batch", "resume", "doctor", "install")

_KINDS = {"integer": "a whole number", "number": "a number", "float": "a number"}
"""Our words for a type, by the word in the library's own message."""


class OneLine(TyperGroup):
    """The program's commands, whose errors are one line each, without the library's boxes."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands in the order in which people meet them; those of batches and unets last."""
        return sorted(
            super().list_commands(ctx), key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER)
        )

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command that ``args`` name and leave with its exit code."""
        typed = list(sys.argv[1:] if args is None else args)
        with exit_on_error():
            try:
                code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
            except typer.Abort:
                raise KeyboardInterrupt from None
            except Exception as error:
                # The library's classes have moved from one package to another; what they can do has not.
                if not hasattr(error, "format_message"):
                    raise
                if type(error).__name__ != "NoArgsIsHelpError":  # the help has been printed
                    tell(sentence(error, typed))
                code = BadInputError.exit_code
        raise SystemExit(code)


def sentence(error: Any, typed: list[str]) -> str:
    """Sentence on ``error`` in the words ``typed``, with the command for help."""
    command = getattr(getattr(error, "ctx", None), "command_path", "sd-lowvram")
    message = _value_message(error, typed) or " ".join(error.format_message().split()).rstrip(".")
    return f"{message[:1].lower()}{message[1:]}; {command} --help shows all options"


def _value_message(error: Any, typed: list[str]) -> str | None:
    """The option and its value as they were typed, and what the value must be; None: it is not about a value."""
    names = getattr(getattr(error, "param", None), "opts", ())
    wanted = next((kind for word, kind in _KINDS.items() if re.search(rf"\b{word}\b", error.format_message())), None)
    for place, word in enumerate(typed):
        name, _, value = word.partition("=")
        if wanted and name in names:
            value = value if "=" in word else "".join(typed[place + 1 : place + 2])
            return f"{name} {value!r} must be {wanted}"
    return None
