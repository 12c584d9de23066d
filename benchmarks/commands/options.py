"""What the commands that measure share: their options, and how progress and errors are shown."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from sd_lowvram.commands.guard import guarded

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write the table as Markdown too, and JSON beside it.")]


@contextlib.contextmanager
def measuring(debug: bool, shown: bool = True) -> Iterator[None]:
    """Inside, progress is shown, and errors as :func:`guarded` tells them."""
    with guarded(debug):
        from rich.console import Console

        from sd_lowvram.commands.show import Bars

        with Bars(Console(stderr=True), shown).running():
            yield
