"""A table of distilled UNets, A-SDM's in our terms: what ``run`` is called with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sd_lowvram.commands.pictures import check_writable
from sd_lowvram.commands.values import check_count, check_given
from sd_lowvram.errors import BadInputError, OutputError

from .options import Out


def students(
    students: Annotated[
        Path,
        typer.Option(
            "--students", help="Each student in a folder of its name: the models cut and trained.", metavar="FOLDER"
        ),
    ],
    data: Annotated[
        Path, typer.Option(help="Pictures, each with a .txt of its name, a caption a line.", metavar="FOLDER")
    ],
    teacher: Annotated[
        str | None, typer.Option(help="The model beside them; left out: the demo model.", metavar="PATH")
    ] = None,
    pictures: Annotated[int, typer.Option(help="Prompts, evenly over the captions.")] = 100,
    steps: Annotated[int, typer.Option(help="Of each picture.")] = 25,
    guidance: Annotated[float, typer.Option(help="Of each picture.")] = 4.0,
    pairs: Annotated[int, typer.Option(help="Times that steps of both are timed, in turn.")] = 15,
    bf16: Annotated[bool, typer.Option("--bf16", help="Draw and time in bfloat16, where the CPU has it.")] = False,
    sheet: Annotated[
        Path | None, typer.Option("--sheet", help="Show some pictures of each in this PNG file.", metavar="FILE")
    ] = None,
    out: Out = None,
) -> dict[str, Any]:
    """Smaller UNets beside their teacher: agreement before and after training, retrieval, operations, times here."""
    check_given(teacher=teacher)
    check_count("--pairs", pairs, 1000)
    check_count("--steps", steps, 1000, 3)
    if not 0 <= guidance < 100:
        raise BadInputError(f"--guidance {guidance} must lie between 0 and 100; 4 to 8 is usual")
    if sheet is not None and sheet.suffix.lower() != ".png":
        raise OutputError(f"--sheet {sheet} must end in .png")
    for file in filter(None, (sheet, out)):
        check_writable(file, 1 << 20)
    import torch

    from sd_lowvram.unets.evaluate import Draw

    drawn = {"draw": Draw(pictures, steps, guidance), "dtype": torch.bfloat16 if bf16 else torch.float32}
    places = {"students": students, "data": data, "teacher": teacher, "out": out, "sheet": sheet}
    return {**places, **drawn, "pairs": pairs}
