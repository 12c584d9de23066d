"""``sd-lowvram generate``: the options, and what is printed."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

from .guard import guarded
from .inputs import RUN, Job, check_job, option
from .knobs import with_fields, with_knobs
from .values import checked_settings


@with_knobs
@with_fields(Job)
def generate(
    job: Job,
    as_json: Annotated[bool, option("--json", text="Print one JSON object and nothing else.", panel=RUN)] = False,
    quiet: Annotated[bool, option("--quiet", "-q", text="Print only the files' names.", panel=RUN)] = False,
    debug: Annotated[bool, option("--debug", text="Show the traceback of an error.", panel=RUN)] = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Make a picture from a prompt, within the memory that you state."""
    with guarded(debug):
        job = check_job(dataclasses.replace(job, settings=checked_settings(settings or {})))
        from rich.console import Console

        from .paint import paint

        _print_result(paint(job, Console(stderr=True, quiet=quiet or as_json)), as_json, quiet)


def _print_result(result: dict[str, Any], as_json: bool, quiet: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    for file in result["files"]:
        print(file)
    if not quiet:
        seconds = result["seconds"]
        print(f"loaded in {seconds['load']:.1f} s, made in {seconds['run']:.1f} s")
