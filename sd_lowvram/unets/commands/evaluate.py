"""``sd-lowvram unet evaluate``: quality of a smaller UNet's pictures, compared with its teacher's."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ...commands.exit_codes import exit_on_error
from ...commands.values import check_given
from ...errors import BadInputError
from ...units import format_size
from .unet import Debug, Json, empty_unet, unet

_PUBLISHED = (
    "FID, inception and CLIP score: torchmetrics'; FID from the training pictures. Papers have the first two of "
    "thousands of pictures; of few they mean little."
)


@unet.command()
def evaluate(
    student: Annotated[
        str, typer.Option(help="The smaller model: what `unet prune`, `combine` or `distil` wrote.", metavar="PATH")
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="Folder of pictures; a .txt file of the same name has the captions, one a line.", metavar="FOLDER"
        ),
    ],
    teacher: Annotated[
        str | None,
        typer.Option(help="The model that the student is compared with; left out: the demo model.", metavar="PATH"),
    ] = None,
    pictures: Annotated[
        int, typer.Option(help="How many pictures each model draws; the prompts are spread evenly over the captions.")
    ] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each picture.")] = 25,
    guidance: Annotated[float, typer.Option(help="Guidance scale of each picture.")] = 4.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Seed of the first picture; each further picture adds 1.")
    ] = 0,
    pairs: Annotated[int, typer.Option(min=1, help="How many guided steps of each model are timed, in turn.")] = 15,
    semantic: Annotated[
        str,
        typer.Option(
            help="The frozen network whose features give the Frechet distance and the score: efficientnet or vgg16."
        ),
    ] = "efficientnet",
    torchmetrics: Annotated[
        bool,
        typer.Option(
            "--torchmetrics",
            help="Also compute FID, inception score and CLIP score (torchmetrics); their weights must be here.",
        ),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare a smaller model with its teacher: pictures of the same seeds, Frechet distance, score, time, peak."""
    with exit_on_error(debug):
        check_given(student=student, teacher=teacher, semantic=semantic)
        if not 0 <= guidance < 100:
            raise BadInputError(f"--guidance {guidance} must lie between 0 and 100; 4 to 8 is usual")
        from rich.console import Console

        from ...commands.show import Bars
        from ..evaluate import Draw

        draw = Draw(pictures, steps, guidance, seed)
        with Bars(Console(stderr=True), not as_json).running():
            measured = _evaluate(student, teacher, data, draw, pairs, semantic, torchmetrics)
        print(json.dumps(measured, indent=2) if as_json else "\n".join(_lines(measured)))


def _evaluate(
    student: str, teacher: str | None, data: Path, draw: Any, pairs: int, semantic: str, torchmetrics: bool
) -> dict[str, Any]:
    from ..analysis import count_costs
    from ..evaluate import evaluate_unets, ground_of, pipeline_to_draw, step_times
    from ..frozen import frozen_features
    from ..layers import own_side
    from ..published_measures import published_measures, weight_paths
    from ..supervision import check_match
    from ..training_pictures import captioned_pictures, read_pictures

    weights = weight_paths() if torchmetrics else None  # before anything is drawn
    items, features = captioned_pictures(data), frozen_features(semantic)
    large, small = (pipeline_to_draw(model) for model in (teacher, student))
    check_match(large.unet, small.unet)
    ground = ground_of(large, items, features, draw)
    more = published_measures(read_pictures(items, own_side(large.unet)), weights) if weights else None
    rows: dict[str, Any] = evaluate_unets(large, small, ground, draw, more)
    times = step_times(large.unet, small.unet, pairs)
    for name, model, seconds in (("teacher", teacher, "plain_seconds"), ("student", student, "seconds")):
        rows[name] |= {"step_seconds": times[seconds], **count_costs(empty_unet(model))}
    return {"draw": asdict(draw), "features": semantic, "pairs": pairs, "rows": rows}


def _lines(values: dict[str, Any]) -> list[str]:
    """A line for each of the three rows, then what they say."""
    from ...files import table

    published = {"fid": "FID", "inception_score": "inception", "clip_score": "CLIP"}
    published = {key: head for key, head in published.items() if key in values["rows"]["teacher"]}
    heads = ["", "PSNR", "difference", "retrieved", "Frechet", "score", *published.values()]
    heads += ["step", "parameters", "activations"]
    cells = []
    for name, row in values["rows"].items():
        agreed = ("-", "-") if name == "teacher" else (f"{row['psnr']:.1f} dB", f"{row['difference']:.2f}")
        drawn = [name, *agreed, f"{row['retrieved']:.0%}", f"{row['frechet']:.3f}", f"{row['score']:.2f}"]
        drawn += [f"{row[key]:.3f}" for key in published]
        measured = ["-", "-", "-"]
        if "step_seconds" in row:
            counted = f"{row['parameters'] / 1e6:.1f} M", format_size(row["peak_bytes"])
            measured = [f"{1e3 * row['step_seconds']:.1f} ms", *counted]
        cells.append([*drawn, *measured])
    draw = values["draw"]
    return [
        *table(heads, cells),
        "",
        f"{draw['pictures']} pictures of {draw['steps']} steps, the teacher's and the student's from the same seeds; "
        "difference: of 255. Retrieved: the nearest training picture is the prompt's own.",
        f"Frechet distance and score: over the features of {values['features']}, from the training pictures.",
        *([_PUBLISHED] if published else []),
    ]
