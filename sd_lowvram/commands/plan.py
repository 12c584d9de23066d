"""``sd-lowvram plan``: what a picture would take, before anything runs and without a model's weights."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..checkpoints.architectures import BUILT_IN, PIPELINES, architecture
from ..devices.disk import DISKS, disk_rate, parse_disk
from ..devices.performance import profile
from ..errors import BadInputError, BudgetError
from ..policies import HELP, POLICIES
from ..settings import Settings
from .early import check_floor
from .exit_codes import exit_on_error
from .inputs import RAM, split_or
from .interrupts import heed_interrupts
from .knobs import add_knob_options
from .values import MOST_STEPS, check_count, check_given, check_run, checked_settings

if TYPE_CHECKING:
    from .plan_cache import Answer


@add_knob_options
def plan(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help=f"{', '.join(BUILT_IN)}, a diffusers folder or a "
                     ".safetensors file; left out: the demo model.", metavar="NAME|PATH"),
    ] = None,
    pipeline: Annotated[
        str | None,
        typer.Option(help="Pipeline of diffusers that runs the folder --model, such as LTXPipeline: its own call is "
                     "planned. Left out: the family of the folder.", metavar="CLASS"),
    ] = None,
    transformer: Annotated[
        Path | None,
        typer.Option(hidden=True, metavar="FILE", help="In place of --model: the file of a transformer, together "
                     "with --text-encoder, --vae and --tokenizer."),
    ] = None,
    text_encoder: Annotated[
        list[Path] | None, typer.Option(hidden=True, metavar="FILE", help="File of a text encoder; once for each.")
    ] = None,
    vae: Annotated[Path | None, typer.Option(hidden=True, metavar="FILE", help="File of the VAE.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(hidden=True, metavar="FOLDER", help="Folder of the tokenizer.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Width in pixels; left out: the model's own.")] = None,
    height: Annotated[int | None, typer.Option(help="Height in pixels; left out: the model's own.")] = None,
    batch: Annotated[int, typer.Option(help="Pictures made at the same time.")] = 1,
    steps: Annotated[int, typer.Option(help=f"Denoising steps, for the time; up to {MOST_STEPS}.")] = 30,
    pictures: Annotated[
        int, typer.Option(hidden=True, help="Pictures in all: compiling the model pays only for many.")
    ] = 1,
    guidance: Annotated[bool, typer.Option(hidden=True, help="Guidance, which doubles the batch.")] = True,
    vram: Annotated[
        str | None,
        typer.Option(help='VRAM that may be used, such as "4GB"; left out: all of --gpu, else what is free.',
                     metavar="SIZE"),
    ] = None,
    ram: Annotated[
        str | None, typer.Option(help=RAM, metavar="SIZE")
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(help=f"Speed of the disk with the model: {', '.join(DISKS)} or MB/s. Weights that do not fit into "
                     "--ram are read from it in each step. Left out: as measured here, or nvme with --gpu.",
                     metavar="NAME|MB/s"),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Plan for another GPU: its name, such as rtx2070, or its memory, fp32 speed and bandwidth, "
                     "such as 8GB,20TFLOPS,448GB/s.", metavar="NAME|FIGURES"),
    ] = None,
    max_size: Annotated[
        bool, typer.Option("--max-size", help="Find the largest square and 16:9 pictures that fit.")
    ] = False,
    policy: Annotated[str | None, typer.Option(help=HELP, metavar="NAME", hidden=True)] = None,
    list_policies: Annotated[
        bool, typer.Option("--list-policies", help="List the programs that --policy can imitate, and exit.")
    ] = False,
    approximate: Annotated[bool, typer.Option("--approximate", help="Allow settings that change the picture.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", hidden=True, help="Show the traceback of an error.")] = False,
    settings: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Show whether a picture fits, its peak, its time and its settings; nothing runs."""
    asked: dict[str, Any] = {"model": model, "width": width, "height": height, "batch": batch, "steps": steps}
    asked |= {"pictures": pictures, "guidance": guidance, "max_size": max_size, "approximate": approximate}
    asked |= {"vram": vram, "ram": ram, "disk": disk, "gpu": gpu, "policy": policy, "pipeline": pipeline}
    files = {"transformer": transformer, "text_encoder": text_encoder, "vae": vae, "tokenizer": tokenizer}
    with exit_on_error(debug):
        if list_policies:
            _show_policies(as_json)
            return
        from rich.console import Console

        from .plan_table import show, show_sizes

        asked, chosen = _check_request(asked, files, settings or {})
        try:
            answer = plan_as_dict(asked, chosen, shown=not as_json)
        except BudgetError as error:
            error.args = (f"does not fit: {error}",)
            raise
        if as_json:
            print(json.dumps(answer, indent=2))
        else:
            (show_sizes if max_size else show)(Console(), answer)


def _check_request(
    options: Mapping[str, Any], files: Mapping[str, Any], knobs: Mapping[str, Any]
) -> tuple[dict[str, Any], Settings]:
    """The request and the settings, as far as they can be checked before torch is imported.

    Args:
        options: values of the command line by their names.
        files: those of a model that is given in parts, with their options' names.
    """
    asked = {**options, "disk": None if options["disk"] is None else parse_disk(options["disk"])}
    check_given(**{name: asked[name] for name in ("model", "gpu", "policy", "pipeline")})
    if asked["gpu"] is not None:
        profile(asked["gpu"])
    asked["model"] = split_or(asked["model"], **files)
    if asked["pipeline"] is not None and not Path(asked["model"] or "").is_dir():
        raise BadInputError(f"--pipeline {asked['pipeline']} needs a diffusers folder: give one with --model")
    chosen = checked_settings(knobs, asked["policy"])
    check_run(*(asked[name] for name in ("width", "height", "steps", "batch", "vram", "ram")))
    check_count("--pictures", asked["pictures"], 1_000_000)
    return asked, chosen


def _show_policies(as_json: bool) -> None:
    """Print what each policy stands for, and where our knobs are not what the program does."""
    if as_json:
        listed = {
            name: {"stands_for": ladder.stands_for, "deviates": ladder.deviates} for name, ladder in POLICIES.items()
        }
        print(json.dumps(listed, indent=2))
        return
    for name, policy in POLICIES.items():
        print(f"{name}: {policy.stands_for}")
        if policy.deviates != "in nothing":
            print(f"    deviates: {policy.deviates}")


def plan_as_dict(asked: dict[str, Any], settings: Settings, *, shown: bool) -> dict[str, Any]:
    """The plan, or one for each ratio, as plain values, new or stored; ``shown`` reports that it takes time.

    Raises:
        BudgetError: nothing fits.
    """
    from .plan_cache import cached_answer

    whole = {**asked, "settings": settings.as_dict()}
    return cached_answer(whole, lambda budgets: _make_answer(asked, budgets, settings, shown))


def _make_answer(asked: dict[str, Any], budgets: Mapping[str, int], settings: Settings, shown: bool) -> Answer:
    """The plan, or one for each ratio, as plain values, and for which other budgets it is the same; takes seconds.

    Args:
        budgets: in bytes; without "vram" where it is that of a named card.
    """
    from rich.console import Console

    from ..checkpoints.inspection import configuration

    if not asked["max_size"] and not asked["pipeline"] and "vram" in budgets:
        config = configuration(asked["model"])
        check_floor(config, asked["width"], asked["height"], asked["batch"], budgets["vram"])
    asked = {**asked, "fills": asked["vram"] is not None, **budgets}

    from .show import Bars

    console = Console(stderr=True, quiet=not shown)
    gc.disable()  # from before torch is imported: looking through its objects takes a tenth of the time
    try:
        if asked["max_size"]:
            with Bars(console, shown).running():
                return _largest(asked, settings), {}
        with console.status("planning"):
            return _plan(asked, settings)
    finally:
        gc.freeze()  # or the next collection, and the last one at the exit, would look through all of them
        gc.enable()


def _plan(asked: dict[str, Any], settings: Settings) -> Answer:
    from ..planning.search import make_plan

    anatomy, request, _ = _request(asked)
    heed_interrupts()
    planned = make_plan(anatomy, request, settings, asked["approximate"])
    return planned.as_dict() | _count_sentences(asked, request), planned.alike


def _largest(asked: dict[str, Any], settings: Settings) -> dict[str, Any]:
    from ..planning.max_size import largest_plans
    from ..planning.search import make_plan

    anatomy, request, anatomy_at = _request(asked)
    plans = largest_plans(anatomy, request, settings, asked["approximate"], anatomy_at)
    if not any(plans.values()):
        least = anatomy if anatomy_at is None else anatomy_at(64, 64)
        smallest = dataclasses.replace(request, width=64, height=64, rehearsal=least.rehearsal)
        make_plan(least, smallest, settings, asked["approximate"], least=False)  # refuses it, and says what would do
    return {
        name: planned.as_dict() | _count_sentences(asked, request) if planned else None
        for name, planned in plans.items()
    }


def _count_sentences(asked: dict[str, Any], request: Any) -> dict[str, str]:
    """Sentences on the rates, and on what the plan counts in place of another program."""
    rates = {"rates": f"{request.rates.title}, {request.rates.source}"}
    if asked["policy"] is None:
        return rates
    policy = POLICIES[asked["policy"]]
    return rates | {"counted": f"{asked['policy']}: {policy.stands_for}; the plan deviates: {policy.deviates}"}


def _request(asked: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The target, the request, and for a rehearsed pipeline the function from width and height to the target; facts on
    the machine are measured here."""
    import torch

    from ..api import anatomy_for_call
    from ..checkpoints.meta_model import meta_anatomy, meta_pipeline, named_pipeline
    from ..devices.info import default_device, dtype_on
    from ..planning.as_others import request_by

    device = torch.device("cuda") if asked["gpu"] else default_device()
    run: Any = {name: asked[name] for name in ("batch", "steps")}
    pipe, call, anatomy_at = None, None, None
    if asked["pipeline"]:
        pipe = meta_pipeline(asked["pipeline"], Path(asked["model"]), dtype_on(device))
    elif asked["model"] in PIPELINES:
        pipe, call = named_pipeline(asked["model"], dtype_on(device)), architecture(asked["model"]).get("call")
    if pipe is None:
        anatomy = meta_anatomy(asked["model"], dtype_on(device))
    else:

        def anatomy_at(width: int | None, height: int | None) -> Any:
            sized: Any = {**run, "width": width, "height": height}
            return anatomy_for_call(pipe, None, sized, asked["guidance"], call)

        anatomy = anatomy_at(asked["width"], asked["height"])
    named = ("gpu", "vram", "ram", "width", "height", "batch", "steps", "pictures", "fills")
    passes = None if asked["guidance"] else 1
    if not asked["guidance"]:
        anatomy = dataclasses.replace(anatomy, calls=1)
    values: dict[str, Any] = {name: asked[name] for name in named}
    values["disk"] = asked.get("disk")
    if values["disk"] is None and asked["gpu"] is None and asked["model"] is not None and Path(asked["model"]).exists():
        values["disk"] = disk_rate(Path(asked["model"]))
    return anatomy, request_by(asked["policy"], anatomy, **values, passes=passes, device=device), anatomy_at
