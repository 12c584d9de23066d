"""``sd-lowvram batch``: many pictures, none made twice and none lost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import doors
from ..commands.exit_codes import exit_on_error
from ..commands.inputs import RUN, Job, option
from ..commands.knobs import add_field_options, add_knob_options
from ..commands.values import check_count
from ..errors import BadInputError
from ..saved_latents.interval import parse_interval

_MOST_TIMES = 1000


@add_knob_options
@add_field_options(Job, prompt="", output=None, memory_plot=None)
def batch(
    jobs: Annotated[Path, typer.Argument(help="A .csv or .jsonl file whose columns are options of generate, or a .txt "
                                         "file with one prompt a line.", metavar="JOBS")],
    out: Annotated[Path, option("--out", text="Folder for pictures, journal and contact sheet.", panel=RUN)],
    job: Job,
    retry: Annotated[int, option("--retry", text="How often a failed job is tried again.", panel=RUN)] = 0,
    stop_on_error: Annotated[
        bool, option("--stop-on-error", text="Stop after a failed job.", panel=RUN)
    ] = False,
    latents_every: Annotated[
        str,
        option("--latents-every", text='How often the latents of a running job are saved, from which the same command '
               'continues: "30s", "5min", "10steps" or never. They are always saved before the decode.', panel=RUN,
               metavar="INTERVAL"),
    ] = "1min",
    on: Annotated[
        str | None,
        option("--on", text="local: one process for each GPU of this machine. ray: a Ray cluster on this machine "
               "alone. ray://HOST: an existing cluster. Left out: this process.", panel=RUN, metavar="WHERE"),
    ] = None,
    workers: Annotated[
        int | None, option("--workers", text="With --on: number of workers; left out: one for each GPU.", panel=RUN)
    ] = None,
    dry_run: Annotated[bool, option("--dry-run", text="Check and plan; draw nothing.", panel=RUN)] = False,
    as_json: Annotated[bool, option("--json", text="Print one JSON object and nothing else.", panel=RUN)] = False,
    quiet: Annotated[bool, option("--quiet", "-q", text="Print only the files' names.", panel=RUN)] = False,
    debug: Annotated[bool, option("--debug", text="Show the traceback of an error.", panel=RUN)] = False,
    settings: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Make the pictures of a file of jobs; the same command continues an interrupted batch.

    All other options are those of generate, for jobs that do not state them.
    """
    with exit_on_error(debug):
        _check(retry, on, workers, job.device)
        interval = parse_interval(latents_every, "--latents-every")
        from .dry_run import dry_run as plan_all
        from .run import Wanted, check, run

        wanted = Wanted(jobs, out, on, workers, interval, retry, stop_on_error, as_json, quiet)
        tasks = check(wanted, job, settings or {})
        raise SystemExit(plan_all(tasks, out, as_json) if dry_run else run(tasks, wanted))


def _check(retry: int, on: str | None, workers: int | None, device: str | None) -> None:
    """Raise BadInputError where options cannot be used, or not together."""
    check_count("--retry", retry, _MOST_TIMES, least=0)
    if on is None:
        if workers is not None:
            raise BadInputError(f"--workers {workers} needs --on, the place of the workers: --on local, for example")
        return
    places = ("local", "ray", *doors.CREWS)
    if on not in places and not (on.startswith("ray://") and len(on) > len("ray://")):
        raise BadInputError(f"--on {on!r} is unknown: choose {', '.join(places)} or ray://HOST")
    if workers is not None:
        check_count("--workers", workers, _MOST_TIMES)
    if device is not None:
        raise BadInputError(f"--device {device} and --on {on} exclude each other: each worker has a device of its own")
