"""Predicted beside measured peaks: plans of Stable Diffusion at several sizes and budgets, each run once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ... import progress
from ...units import MIB
from ..models import random_pipeline
from ..report import table
from ..trial import measure

SHAPES = (("sd15", 512), ("sd15", 1024), ("sd15", 2048), ("sdxl", 1024))
SHARES = (0.0, 0.1, 0.5, 1.0)
"""Budgets between the least that works and that of everything resident at once, whose plan is the plain one."""
_PLENTY = "1000 TB"


def run(device: torch.device, seconds: Callable[[], float]) -> Any:
    """One row for each plan, 16 in all; each has ``within``: whether the prediction is as near as it has to be."""
    plans: list[dict[str, Any]]
    plans = [{"model": model, "side": side, "share": share} for model, side in SHAPES for share in SHARES]
    rows = [
        plan | measure(trial_peak, seconds=seconds(), device=str(device), **plan)
        for plan in progress.counted("peaks", plans)
    ]
    return {"rows": rows}


def trial_peak(device: str, model: str, side: int, share: float, steps: int = 2) -> dict[str, Any]:
    """Plan, run, and tell both peaks in bytes; a CPU's is that of its allocator, host memory with it."""
    from ... import optimize, plan
    from ...planning.memory_profile import measured

    where = torch.device(device)
    pipe = random_pipeline(model, where)
    sizes: dict[str, Any] = {"width": side, "height": side, "device": where}
    plain = plan(pipe, vram=_PLENTY, **sizes)
    least, most = plain.minimum_vram_bytes, plain.predicted.peak_bytes + plain.predicted.overhead_bytes
    vram = least + int(share * (most - least)) + MIB
    chosen = optimize(pipe, vram=f"{vram} b", **sizes)
    with measured(pipe) as run:
        pipe("a red apple", width=side, height=side, num_inference_steps=steps, output_type="pt")
    on_cpu = where.type == "cpu"
    predicted = max(stage.held_bytes for stage in chosen.stages) if on_cpu else chosen.predicted.peak_bytes
    libraries = _library_bytes(where)
    return {
        "vram": vram,
        "settings": {name: value for name, _, value in chosen.settings.decided()},
        "stage": chosen.predicted.stage,
        "predicted_bytes": predicted,
        "measured_bytes": run.peak_bytes,
        "library_bytes": libraries,
        "reserved_bytes": 0 if on_cpu else torch.cuda.max_memory_reserved(where),
        "predicted_seconds": chosen.predicted.seconds * steps / chosen.request.steps,
        "measured_seconds": run.seconds,
        "stages": run.as_dict()["stages"],
        "within": within(predicted, run.peak_bytes - libraries),
    }


def within(predicted: int, measured: int) -> bool:
    """Whether the prediction is at most 5 % or 24 MiB above, and at most 1 % or 8 MiB below what was measured."""
    return -max(measured // 100, 8 * MIB) <= predicted - measured <= max(measured // 20, 24 * MIB)


def _library_bytes(device: torch.device) -> int:
    """Of torch's own allocations, those that are cuBLAS' workspaces: a plan counts them in its overhead."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if device.type != "cuda" or clear is None:
        return 0
    before = torch.cuda.memory_allocated(device)
    clear()
    return before - torch.cuda.memory_allocated(device)


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Peaks"
    yield ""
    yield "Plans at budgets from the least that works to the one of everything resident, two steps each. *Measured* is"
    yield "the largest `torch.cuda.max_memory_allocated` of any stage; cuBLAS' workspace, a part of the overhead, is"
    yield "taken off. *Within*: at most 5 % or 24 MiB above the measurement, 1 % or 8 MiB below it."
    yield ""
    yield from table(_HEADS, map(_cells, part["rows"]))


_HEADS = "model", "picture", "budget MiB", "offload", "stage", "predicted MiB", "measured MiB", "difference", "within"


def _cells(row: dict[str, Any]) -> list[str]:
    what = [row["model"], f"{row['side']}x{row['side']}"]
    if "error" in row:
        return [*what, row["error"], *[""] * 6]
    predicted, measured = row["predicted_bytes"], row["measured_bytes"] - row["library_bytes"]
    plan = [f"{row['vram'] // MIB}", row["settings"].get("offload", "none"), row["stage"]]
    apart = f"{100 * (predicted - measured) / max(measured, 1):+.1f} %"
    within = "yes" if row["within"] else "**no**"
    return [*what, *plan, f"{predicted / MIB:.0f}", f"{measured / MIB:.0f}", apart, within]
