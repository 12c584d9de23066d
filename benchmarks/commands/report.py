"""Measurements of this machine on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sd_lowvram.plots.style import check_plots

from .options import Debug, measuring


def report(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", help="Folder of index.html, report.md and what was measured.")],
    quick: Annotated[bool, typer.Option("--quick", help="Small measurements, within 10 minutes on two cores.")] = False,
    known: Annotated[
        Path | None,
        typer.Option("--from", help="Folder of JSON that measurements wrote before: it is not measured anew."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure the demo model, predict SD1.5 on GPUs, and write one page with charts; resumes where it stopped."""
    with measuring(debug):
        check_plots()
        from ..report.run import run

        program = context.find_root().command
        print(f"written: {run(out, quick, lambda line: typer.echo(line, err=True), program, known)}")
