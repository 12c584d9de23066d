"""``sd-lowvram install``: puts the nodes into ComfyUI, or the panel into a WebUI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import exit_on_error


def install(
    host: Annotated[str, typer.Argument(help="comfyui or webui (AUTOMATIC1111, Forge, Forge Neo)", metavar="HOST")],
    path: Annotated[Path, typer.Argument(help="the folder that the host is in", metavar="PATH")],
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Take it off again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Put the nodes into ComfyUI, or the panel into a WebUI; restart it afterwards.

    From a clone they are linked, from an installed package copied.
    """
    with exit_on_error(debug):
        from .. import hosting as adapters

        if uninstall:
            place, done = adapters.uninstall(host, path), "removed"
        else:
            place, done = adapters.install(host, path)
        if as_json:
            print(json.dumps({"host": host, "path": str(place), "done": done}))
        else:
            print(f"{place}: {done}")
