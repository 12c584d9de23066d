"""``ladder`` and ``fastest``: how much faster than diffusers' own a step and a decode are."""

from __future__ import annotations

from typing import Annotated

import typer

from sd_lowvram.commands.values import check_count, check_names, check_side

from .options import Debug, Json, Out, measuring

_MODELS = ("demo", "sd15")
Model = Annotated[str, typer.Option("--model", "-m", help="sd15 or demo.", metavar="NAME")]


def ladder(
    of: Annotated[str, typer.Option("--of", help="B or E: whose ladder.", metavar="SOURCE")] = "B",
    model: Model = "sd15",
    size: Annotated[int | None, typer.Option(help="Of the picture; left out: 512 on a GPU, 256 on a CPU.")] = None,
    pairs: Annotated[int, typer.Option(help="Calls of each side.")] = 5,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """A published ladder's rungs, and ours, as they are here: seconds of a guided step of SD1.5, published beside."""
    with measuring(debug, not as_json):
        check_names("--of", [of], ("B", "E"))
        check_names("--model", [model], _MODELS)
        check_count("--pairs", pairs, 1000)
        if size is not None:
            check_side("size", size)
        from ..ladder import lines, run
        from ..tables import show

        report = run(of, model=model, size=size, pairs=pairs, out=out)
        show(report, lines(report), as_json)


def fastest(
    model: Model = "sd15",
    pairs: Annotated[int, typer.Option(help="Steps of each side.")] = 15,
    decode_pairs: Annotated[int, typer.Option("--decode-pairs", help="Decodes of each side.")] = 3,
    compiled: Annotated[bool, typer.Option("--compiled", help="What takes minutes to compile, too.")] = False,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """A guided step at 256x256 and a decode at 512x512 as fast as they get here, beside diffusers as it is."""
    with measuring(debug, not as_json):
        check_names("--model", [model], _MODELS)
        check_count("--pairs", pairs, 1000)
        check_count("--decode-pairs", decode_pairs, 1000)
        from ..fastest import lines, run
        from ..tables import show

        report = run(model, pairs=pairs, decode_pairs=decode_pairs, compiled=compiled, out=out)
        show(report, lines(report), as_json)
