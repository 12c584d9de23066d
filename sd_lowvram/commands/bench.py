"""``sd-lowvram bench``: measurements, each in pairs within one process."""

from __future__ import annotations

from typing import Annotated

import typer

from .guard import guarded

bench = typer.Typer(help="Measure: both sides in one process in turn, ratio of medians.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@bench.command()
def vae(as_json: Json = False, debug: Debug = False) -> None:
    """Exact tiles beside the plain decode: time, and how far every way is from it."""
    with guarded(debug):
        from rich.console import Console

        from ..bench.vae import run
        from .show import Bars

        with Bars(Console(stderr=True), shown=not as_json).running():
            run(json=as_json)


@bench.command()
def attention(as_json: Json = False, debug: Debug = False) -> None:
    """Every attention backend: error against float64, peak, time."""
    with guarded(debug):
        from ..bench.attention import run

        run(json=as_json)
