"""``batch --dry-run``: what a batch would take, shape by shape, without a model's weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..commands.exit_codes import name_options
from ..commands.inputs import Job
from ..commands.paint import start_pictures, start_size
from ..commands.plan import plan_as_dict
from ..errors import BudgetError
from ..units import format_size, format_time
from .alike import group_by_shape, pictures_by_line
from .jobs import Task
from .journal import finished_jobs


def dry_run(tasks: Sequence[Task], folder: Path, as_json: bool) -> int:
    """Print a row for each shape; returns the exit code: that of a budget where one cannot hold its jobs."""
    done, _ = finished_jobs(folder)
    waiting = [task for task in tasks if task.key not in done]
    pictures = pictures_by_line(tasks, workers=1)
    rows = [_row(alike, pictures[alike[0].line]) for alike in group_by_shape(waiting)]
    total = sum(row["seconds"] or 0 for row in rows)
    counts = {"jobs": len(tasks), "done": len(tasks) - len(waiting), "seconds": total}
    if as_json:
        print(json.dumps({**counts, "shapes": rows}, indent=2))
    else:
        _show(rows, counts)
    return BudgetError.exit_code if any(row["refused"] for row in rows) else 0


def _row(alike: Sequence[Task], pictures: int) -> dict[str, Any]:
    """The plan of jobs of one shape, as plain values; ``seconds`` are those of all of them.

    Args:
        pictures: that the plan makes in all, those of jobs that are done included.
    """
    job = alike[0].job
    width, height = start_size(job, start_pictures(job))
    row = {"lines": [task.line for task in alike], "model": job.model, "width": width, "height": height}
    row |= {"batch": job.batch, "steps": job.steps_run, "peak_bytes": None, "seconds": None, "refused": None}
    try:
        plan = _plan(job, width, height, pictures)
    except BudgetError as error:
        return row | {"refused": name_options(str(error))}
    size = {name: plan["request"][name] for name in ("width", "height")}
    predicted = plan["predicted"]
    peak = predicted["reserved_bytes"] + predicted["overhead_bytes"]
    return row | size | {"peak_bytes": peak, "seconds": predicted["seconds"] * len(alike)}


def _plan(job: Job, width: int | None, height: int | None, pictures: int) -> dict[str, Any]:
    asked = {"width": width, "height": height, "batch": job.batch, "steps": max(1, job.steps_run), "model": job.model}
    asked |= {"guidance": job.guidance is None or job.guidance > 1, "max_size": False, "gpu": None, "policy": None}
    asked |= {"pipeline": None, "pictures": pictures, "vram": job.vram, "ram": job.ram, "approximate": job.approximate}
    return plan_as_dict(asked, job.settings, shown=False)


def _show(rows: Sequence[dict[str, Any]], counts: dict[str, Any]) -> None:
    console = Console()
    table = Table("jobs", "first line", "size", "batch", "steps", "peak", "total time")
    for row in rows:
        size = f"{row['width'] or '?'}x{row['height'] or '?'}"
        took = (format_size(row["peak_bytes"]), format_time(row["seconds"])) if not row["refused"] else ("too much", "")
        table.add_row(*map(str, (len(row["lines"]), row["lines"][0], size, row["batch"], row["steps"], *took)))
    console.print(table)
    done = f", {counts['done']} of them done" if counts["done"] else ""
    console.print(f"{counts['jobs']} jobs{done}; {format_time(counts['seconds'])} for the rest on one device like this")
    for row in rows:
        if row["refused"]:
            console.print(f"line {row['lines'][0]}: {row['refused']}", highlight=False, markup=False)
