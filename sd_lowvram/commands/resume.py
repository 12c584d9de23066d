"""``sd-lowvram resume``: continue interrupted runs from their saved latents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BadInputError
from ..saved_latents.file import ENDING, read_saved
from .exit_codes import exit_on_error
from .streams import note
from .values import check_given

if TYPE_CHECKING:
    from rich.console import Console


def resume(
    target: Annotated[
        Path,
        typer.Argument(metavar="FILE|FOLDER", help=f"Saved latents of a run (*{ENDING}), or a folder of them."),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Where the model of the run is now, if it was moved.", metavar="PATH"),
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option(
            "--vram",
            help="Another VRAM budget than the run had; the picture is then identical up to rounding.",
            metavar="SIZE",
        ),
    ] = None,
    ram: Annotated[
        str | None, typer.Option("--ram", help="Another RAM budget than the run had.", metavar="SIZE")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            help="Another number type than the run had: fp32 or bf16 help against NaN.",
            metavar="NAME",
        ),
    ] = None,
    keep_latents: Annotated[
        bool, typer.Option("--keep-latents", help="Keep the saved latents when the picture is done.")
    ] = False,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Load a .ckpt whose source you trust.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each run and nothing else.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the files' names.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Resume an interrupted run from its saved latents.

    The picture is that of a run without interruption. Latents that ComfyUI or a WebUI saved are decoded.
    """
    with exit_on_error(debug):
        check_given(model=model, vram=vram, ram=ram, precision=precision)
        files = _files(target)
        from rich.console import Console

        from .generate import print_result

        options = {"model": model, "vram": vram, "ram": ram, "precision": precision}
        asked = {name: value for name, value in options.items() if value}
        console = Console(stderr=True, quiet=quiet or as_json)
        for file in files:
            print_result(_resume(file, {**asked, "allow_pickle": allow_pickle}, keep_latents, console), as_json, quiet)


def _resume(path: Path, asked: dict[str, Any], keep: bool, console: Console) -> dict[str, Any]:
    """The run of ``path``, to its end."""
    saved = read_saved(path)
    from ..saved_latents.hosted import is_hosted

    if is_hosted(saved):
        from .decode_saved import decode_file

        return decode_file(path, saved, asked, keep, console)
    from .latents import job_of, libraries, pictures_from
    from .paint import Precaution, finish

    job, files = job_of(path, saved, asked)
    done, steps = saved.about["step"], saved.about["steps"]
    console.print(f"{path}: {done} of {steps} steps are done", highlight=False)
    if saved.about.get("libraries") != libraries():
        note(f"{path} was written with other versions of torch or diffusers: the picture may not be identical")
    precaution = Precaution(keep=keep, place=path, start=saved, retyped="precision" in asked)
    return finish(job, pictures_from(saved.tensors), files, console, precaution)


def _files(target: Path) -> list[Path]:
    if not target.is_dir():
        return [target]
    files = sorted(target.glob(f"*{ENDING}"))
    if not files:
        raise BadInputError(f"{target} holds no saved latents (*{ENDING})")
    return files
