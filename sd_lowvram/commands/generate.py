"""``sd-lowvram generate``: the options, and what is printed."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from ..errors import BadInputError
from ..planning.shown import peak_of_budget
from ..saved_latents.interval import parse_interval
from ..units import format_size, format_time
from .guard import guarded
from .inputs import PICTURE, RUN, Job, check_job, option
from .knobs import with_fields, with_knobs
from .previews import check_preview
from .things import show_things
from .unet_schedule import check_alone, paint_scheduled, parse_schedule
from .values import checked_settings

_OFTEN = "1min"


@with_knobs
@with_fields(Job)
def generate(
    context: typer.Context,
    job: Job,
    latents_every: Annotated[
        str,
        option(
            "--latents-every",
            text='How often a run is saved so that "resume" can go on with it: "30s", "5min", '
            '"10steps", or never; before the decode it always is.',
            panel=RUN,
            rare=True,
            metavar="INTERVAL",
        ),
    ] = _OFTEN,
    keep_latents: Annotated[
        bool,
        option("--keep-latents", text="Leave the latents beside the picture when it is there.", panel=RUN, rare=True),
    ] = False,
    preview: Annotated[
        int | None,
        option(
            "--preview",
            text="Show what the picture is about to be after every so many steps, in NAME.preview.png beside it, which "
            "goes when the picture is there.",
            panel=RUN,
            rare=True,
            metavar="STEPS",
        ),
    ] = None,
    unet_schedule: Annotated[
        str | None,
        option(
            "--unet-schedule",
            text='UNets that take the steps in turn, "small:10,full:15": full is the model\'s own, --unet names the '
            "others. The steps add up to --steps, or say how many there are. Another picture; no latents are kept.",
            panel=PICTURE,
            rare=True,
            metavar="NAME:STEPS,...",
        ),
    ] = None,
    unet: Annotated[
        list[str] | None,
        option(
            "--unet",
            text="A UNet for --unet-schedule: a folder that unet prune, combine or distil wrote, or a unet folder in "
            "one. May be repeated.",
            panel=PICTURE,
            rare=True,
            metavar="NAME=PATH",
        ),
    ] = None,
    list_things: Annotated[
        bool, option("--list-things", text="List what the demo model knows, and make nothing.", panel=RUN)
    ] = False,
    as_json: Annotated[
        bool, option("--json", text="Print one JSON object and nothing else.", panel=RUN, rare=True)
    ] = False,
    quiet: Annotated[bool, option("--quiet", "-q", text="Print only the files' names.", panel=RUN)] = False,
    debug: Annotated[bool, option("--debug", text="Show the traceback of an error.", panel=RUN, rare=True)] = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Make a picture from a prompt, within the memory that you state."""
    with guarded(debug):
        if list_things:
            show_things(as_json)
            return
        if _left_out(context, "prompt"):
            raise BadInputError("missing argument 'prompt'; sd-lowvram generate --help tells more")
        steps = None if _left_out(context, "steps") else job.steps
        parts = parse_schedule(unet_schedule, unet or (), steps)
        if parts:
            job = dataclasses.replace(job, steps=sum(part.steps for part in parts))
        job = check_job(dataclasses.replace(job, settings=checked_settings(settings or {}, job.policy)))
        interval = parse_interval(latents_every, "--latents-every")
        check_preview(preview)
        if parts:
            check_alone(job, latents_every != _OFTEN, keep_latents, preview)
        from rich.console import Console

        from .paint import Precaution, paint

        console = Console(stderr=True, quiet=quiet or as_json)
        if parts:
            print_result(paint_scheduled(job, parts, console), as_json, quiet)
            return
        print_result(paint(job, console, Precaution(interval, keep_latents), preview), as_json, quiet)


def _left_out(context: typer.Context, name: str) -> bool:
    """Whether the command line says nothing of this parameter."""
    source = context.get_parameter_source(name)
    return source is None or source.name == "DEFAULT"


def print_result(result: dict[str, Any], as_json: bool, quiet: bool) -> None:
    """Print what became of a run, as ``paint`` returns it."""
    if as_json:
        print(json.dumps(result, indent=2))
        return
    for file in result["files"]:
        print(file)
    if quiet:
        return
    if "plan" in result:
        print(_peak(result))
    seconds = result["seconds"]
    print(f"time {format_time(seconds['run'])}, and {format_time(seconds['load'])} to load the model")


def _peak(result: dict[str, Any]) -> str:
    """The peak of the budget: as planned, and beside it as measured where the device tells it."""
    told = peak_of_budget(result["plan"])
    host = result["plan"]["predicted"]["host_bytes"]
    besides = f", {format_size(host)} in host memory" if host else ""
    measured = result["measured"]
    return f"{told}{besides}" + (f" ({format_size(measured['peak_bytes'])} measured)" if measured else ", as planned")
