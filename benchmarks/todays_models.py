"""What plans foretell of today's transformers by name and size on a card: memory, host memory, seconds a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sd_lowvram import progress
from sd_lowvram.checkpoints.architectures import TRANSFORMERS
from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import BudgetError
from sd_lowvram.files.tables import table
from sd_lowvram.files.whole import write_json
from sd_lowvram.models.anatomy import Anatomy
from sd_lowvram.planning.as_others import request_by
from sd_lowvram.planning.search import make_plan
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB

from .tables import begun, written

SIDES = (512, 1024, 2048)
_STEPS = 20


def run(
    card: str = "rtx3060",
    vram: int = 4 * GIB,
    ram: int = 64 * GIB,
    models: Sequence[str] = TRANSFORMERS,
    *,
    out: Path | None,
) -> dict[str, Any]:
    """Plan the models in bf16; writes ``out`` and JSON, model by model, and goes on with what lacks."""
    told = {"card": card, "title": profile(card).title, "vram_bytes": vram, "ram_bytes": ram, "steps": _STEPS}
    report = begun(told, out)
    known = [row["model"] for row in report["rows"]]
    for model in progress.counted("models", [model for model in models if model not in known]):
        anatomy = meta_anatomy(model, torch.bfloat16)
        report["rows"] += [{"model": model, "side": side, **_cell(anatomy, card, vram, ram, side)} for side in SIDES]
        if out is not None:
            write_json(report, out.with_suffix(".json"))
    return written(report, lines, out)


def _cell(anatomy: Anatomy, card: str, vram: int, ram: int, side: int) -> dict[str, Any]:
    request = request_by("ours", anatomy, gpu=card, vram=vram, ram=ram, width=side, height=side, steps=_STEPS)
    try:
        plan = make_plan(anatomy, request, Settings())
    except BudgetError as error:
        return {"needed_bytes": error.needed_bytes}
    denoise = next(stage for stage in plan.stages if stage.name == "denoise")
    return {
        "card_bytes": plan.predicted.reserved_bytes + plan.predicted.overhead_bytes,
        "least_bytes": plan.minimum_vram_bytes,
        "host_bytes": plan.predicted.host_bytes,
        "seconds": denoise.seconds / _STEPS,
        "slowdown": denoise.slowdown,
        "calls": request.calls,
        "passes": request.passes,
    }


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The tables as Markdown, one for each size."""
    yield f"# Today's models in {report['vram_bytes'] / GIB:g} GiB of an {report['title']}, foretold"
    yield ""
    yield (
        f"In bf16 with {report['ram_bytes'] / GIB:g} GiB of host memory, {report['steps']} steps, as plans foretell "
        "them; nothing ran on a card. *GiB of the card*: what torch reserves and the driver holds. *Over compute*: a "
        "step's time over that with all weights on the card."
    )
    heads = (
        "model", "GiB of the card", "least", "GiB of host memory", "seconds a step", "over compute", "calls a step"
    )  # fmt: skip
    for side in SIDES:
        yield ""
        yield f"## {side}x{side}"
        yield ""
        yield from table(heads, [_row(row) for row in report["rows"] if row["side"] == side])


def _row(row: dict[str, Any]) -> list[str]:
    if "seconds" not in row:
        return [f"`{row['model']}`", f"needs {row['needed_bytes'] / GIB:.2f}", *[""] * 5]
    calls = str(row["calls"]) + (f", of {row['passes']} rows" if row["passes"] > 1 else "")
    sizes = (f"{row[name] / GIB:.2f}" for name in ("card_bytes", "least_bytes", "host_bytes"))
    return [f"`{row['model']}`", *sizes, f"{row['seconds']:.1f}", f"{row['slowdown']:.2f}", calls]
