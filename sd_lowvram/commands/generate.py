"""``sd-lowvram generate``: the options, and what is printed."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

from ..saved_latents.interval import parse_interval
from .guard import guarded
from .inputs import RUN, Job, check_job, option
from .knobs import with_fields, with_knobs
from .previews import check_preview
from .values import checked_settings


@with_knobs
@with_fields(Job)
def generate(
    job: Job,
    latents_every: Annotated[
        str,
        option(
            "--latents-every",
            text='How often a run is saved so that "resume" can go on with it: "30s", "5min", '
            '"10steps", or never; before the decode it always is.',
            panel=RUN,
            metavar="INTERVAL",
        ),
    ] = "1min",
    keep_latents: Annotated[
        bool, option("--keep-latents", text="Leave the latents beside the picture when it is there.", panel=RUN)
    ] = False,
    preview: Annotated[
        int | None,
        option(
            "--preview",
            text="Show what the picture is about to be after every so many steps, in NAME.preview.png beside it, which "
            "goes when the picture is there.",
            panel=RUN,
            metavar="STEPS",
        ),
    ] = None,
    as_json: Annotated[bool, option("--json", text="Print one JSON object and nothing else.", panel=RUN)] = False,
    quiet: Annotated[bool, option("--quiet", "-q", text="Print only the files' names.", panel=RUN)] = False,
    debug: Annotated[bool, option("--debug", text="Show the traceback of an error.", panel=RUN)] = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Make a picture from a prompt, within the memory that you state."""
    with guarded(debug):
        job = check_job(dataclasses.replace(job, settings=checked_settings(settings or {}, job.policy)))
        interval = parse_interval(latents_every, "--latents-every")
        check_preview(preview)
        from rich.console import Console

        from .paint import Precaution, paint

        console = Console(stderr=True, quiet=quiet or as_json)
        print_result(paint(job, console, Precaution(interval, keep_latents), preview), as_json, quiet)


def print_result(result: dict[str, Any], as_json: bool, quiet: bool) -> None:
    """Print what became of a run, as ``paint`` returns it."""
    if as_json:
        print(json.dumps(result, indent=2))
        return
    for file in result["files"]:
        print(file)
    if not quiet:
        seconds = result["seconds"]
        print(f"loaded in {seconds['load']:.1f} s, made in {seconds['run']:.1f} s")
