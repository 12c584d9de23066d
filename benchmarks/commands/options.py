"""Common parts of measurement commands: options, progress, errors, and printing."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from sd_lowvram.commands.exit_codes import exit_on_error

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write the table as Markdown too, and JSON next to it.")]
_SHARED = {"out": (Out, None), "as_json": (Json, False), "debug": (Debug, False)}
_IN_PYTHON = object()
"""Mark in a command's context: it is run by :func:`run_command`."""


def measurement(function: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """A command of ``function``, which checks its options and returns what to call ``run`` with, of the module of its
    name in ``benchmarks``. ``--out``, ``--json`` and ``--debug`` are added; ``lines`` of that module is printed."""

    def measured(context: typer.Context, asked: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., Any]]:
        out = {} if "out" in own else {"out": asked.pop("out")}
        arguments = function(**asked)
        module = importlib.import_module(f"benchmarks.{function.__name__}")
        from ..tables import told_as

        with told_as(_typed(context)):
            return module.run(**arguments, **out), module.lines

    @functools.wraps(function)
    def command(context: typer.Context, as_json: bool = False, debug: bool = False, **asked: Any) -> Any:
        if context.obj is _IN_PYTHON:
            return measured(context, asked)[0]
        with measuring(debug, not as_json):
            from ..tables import show, whole

            report, lines = measured(context, asked)
            show(report, whole(report, lines), as_json)
        return None  # what is returned would be the exit code

    own = inspect.signature(function, eval_str=True).parameters
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in _SHARED.items()
        if name not in own
    ]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own.values()), *added]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def run_command(program: Any, words: str, out: Path) -> dict[str, Any]:
    """Run ``python -m benchmarks WORDS`` without printing; write the result to ``out`` unless ``words`` name another
    file.

    Args:
        program: the typer group of all commands.
    """
    name, *options = shlex.split(words)
    command = program.commands[name]
    if "--out" not in options:
        options += ["--out", str(out)]
    with command.make_context(name, options, obj=_IN_PYTHON) as context:
        report: dict[str, Any] = command.invoke(context)
    return report


@contextlib.contextmanager
def measuring(debug: bool, shown: bool = True) -> Iterator[None]:
    """Show progress, and report errors like :func:`exit_on_error`, within the block."""
    with exit_on_error(debug):
        from rich.console import Console

        from sd_lowvram.commands.show import Bars

        with Bars(Console(stderr=True), shown).running():
            yield


def _typed(context: typer.Context) -> str:
    """The command as it was typed, but for where its results go, and with names for paths."""
    words = ["python", "-m", "benchmarks", context.info_name or ""]
    for option in context.command.params:
        name = option.name or ""
        source, value = context.get_parameter_source(name), context.params.get(name)
        if source is None or source.name != "COMMANDLINE" or name in _SHARED or value is None:
            continue
        flag = [option.opts[0]] if option.opts[0].startswith("-") else []
        for one in value if isinstance(value, list | tuple) else [value]:
            words += flag if one is True else [*flag, Path(one).name if Path(str(one)).exists() else str(one)]
    return shlex.join(words)
