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
from .exit_codes import exit_on_error
from .inputs import RUN, Job, check_job, option
from .knobs import add_field_options, add_knob_options
from .previews import check_preview
from .things import show_things
from .values import checked_settings


@add_knob_options
@add_field_options(Job)
def generate(
    context: typer.Context,
    job: Job,
    latents_every: Annotated[
        str,
        option(
            "--latents-every",
            text='How often the latents are saved, from which "resume" continues an interrupted run: "30s", '
            '"5min", "10steps" or never. They are always saved before the decode.',
            panel=RUN,
            rare=True,
            metavar="INTERVAL",
        ),
    ] = "1min",
    keep_latents: Annotated[
        bool,
        option("--keep-latents", text="Keep the saved latents when the picture is done.", panel=RUN, rare=True),
    ] = False,
    preview: Annotated[
        int | None,
        option(
            "--preview",
            text="Write a preview every N steps to NAME.preview.png (deleted at the end).",
            panel=RUN,
            rare=True,
            metavar="N",
        ),
    ] = None,
    list_things: Annotated[
        bool, option("--list-things", text="List the things that the demo model can draw, and exit.", panel=RUN)
    ] = False,
    as_json: Annotated[
        bool, option("--json", text="Print one JSON object and nothing else.", panel=RUN, rare=True)
    ] = False,
    quiet: Annotated[bool, option("--quiet", "-q", text="Print only the files' names.", panel=RUN)] = False,
    debug: Annotated[bool, option("--debug", text="Show the traceback of an error.", panel=RUN, rare=True)] = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Make a picture from a prompt, within the memory that you state."""
    with exit_on_error(debug):
        if list_things:
            show_things(as_json)
            return
        check_prompt_given(context)
        job = check_job(dataclasses.replace(job, settings=checked_settings(settings or {}, job.policy)))
        interval = parse_interval(latents_every, "--latents-every")
        check_preview(preview)
        from rich.console import Console

        from .paint import Precaution, paint

        console = Console(stderr=True, quiet=quiet or as_json)
        print_result(paint(job, console, Precaution(interval, keep_latents), preview), as_json, quiet)


def check_prompt_given(context: typer.Context) -> None:
    """Raise BadInputError where the command line has no prompt: an empty one is another thing."""
    source = context.get_parameter_source("prompt")
    if source is None or source.name == "DEFAULT":
        raise BadInputError(f"missing argument 'prompt'; {context.command_path} --help shows all options")


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
    run, load = (format_time(result["seconds"][part]) for part in ("run", "load"))
    print(f"time {run}{_planned_time(result)}, and {load} to load the model")


def _planned_time(result: dict[str, Any]) -> str:
    """The planned time, in brackets; on a GPU that of a later picture, with what this one took besides."""
    predicted = result.get("plan", {}).get("predicted")
    if predicted is None:
        return ""
    planned = f"planned: {format_time(predicted['seconds'])}"
    if result["plan"]["request"]["device"] != "cpu":
        longer = result["seconds"].get("first_step_excess", 0.0)
        first = f"; all before the second step took {format_time(longer)} longer than a later step"
        planned += " for a picture after the first" + (first if longer >= _SHOWN_SECONDS else "")
    return f" ({planned})"


_SHOWN_SECONDS = 0.1
"""The least time by which a first step is said to take longer."""


def _peak(result: dict[str, Any]) -> str:
    """Bytes of the budget as planned, then as measured if the device reports them."""
    planned = peak_of_budget(result["plan"])
    host = result["plan"]["predicted"]["host_bytes"]
    ram = f", {format_size(host)} of RAM" if host else ""
    measured = result["measured"]
    if not measured:
        return f"{planned}{ram}, as planned"
    allocated, reserved = measured["peak_bytes"], measured["reserved_bytes"]
    whole = reserved + result["plan"]["predicted"]["overhead_bytes"]
    held = f"{format_size(allocated)} allocated" + (f", {format_size(whole)} reserved" if reserved else "")
    return f"{planned}{ram} (measured: {held})"
