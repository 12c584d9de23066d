"""Predicted next to measured peaks: plans of Stable Diffusion at several sizes and budgets, each run once."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sd_lowvram.compat.private import free_matrix_workspaces
from sd_lowvram.units import GIB, MIB

from ..calls import timed_calls
from ..models import PLENTY, least_budget, random_pipeline
from ..tables import Columns, Row, mib, rows_table, yes
from .record import Case, ResultRows, fallen, in_order, room_for, side_by_side

SHAPES = (("sd15", 512), ("sd15", 1024), ("sd15", 2048), ("sdxl", 1024))
SHARES = (0.0, 0.1, 0.5, 1.0)
"""Budgets between the least that works and that of everything resident at once, whose plan is the plain one."""
_LARGEST_BYTES = 14 * GIB
"""Bytes of the largest plan on a GPU, with its context."""


def run(device: torch.device, record: ResultRows) -> None:
    """Add a row for each plan, 16 in all; ``within`` is True if the prediction is near enough.

    The plans of a size share a process, and with it the model and what was traced of it; sizes go side by side.
    """

    def measure(cases: Sequence[Case]) -> None:
        record.fill(cases, trial_peaks, device=str(device))

    sizes = [[{"model": model, "side": side, "share": share} for share in SHARES] for model, side in SHAPES]
    side_by_side("peaks", measure, sizes, room_for(device, _LARGEST_BYTES))


def trial_peaks(device: str, cases: Sequence[Case], steps: int = 2) -> Iterator[dict[str, Any]]:
    """Yield for each of ``cases``: plan, run, and report both peaks in bytes; a CPU's is that of its allocator, host
    memory
    with it. Ends early where a run leaves something on the device."""
    from sd_lowvram import plan, restore

    where = torch.device(device)
    held_on(where)  # tensors in cycles that nobody has collected yet would count as the first run's
    for (model, side), shares in itertools.groupby(cases, lambda case: (case["model"], case["side"])):
        pipe = random_pipeline(model, where)
        sizes: dict[str, Any] = {"width": side, "height": side, "device": where}
        plain = plan(pipe, vram=PLENTY, **sizes)
        most = plain.predicted.reserved_bytes + plain.predicted.overhead_bytes
        least = least_budget(pipe, **sizes)
        for case in shares:
            vram = least + int(case["share"] * (most - least)) + MIB
            yield peak_of(pipe, {"prompt": "a red apple"}, vram, sizes, steps)
            restore(pipe)
            if held_on(where):
                return


def held_on(device: torch.device) -> int:
    """Bytes of tensors that are still on the device; what the allocator caches besides is freed."""
    gc.collect()
    if device.type != "cuda":
        return 0
    _library_bytes(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def peak_of(pipe: Any, given: dict[str, Any], vram: int, sizes: dict[str, Any], steps: int) -> dict[str, Any]:
    """Plan ``pipe`` for ``vram`` bytes, which stays on, call it with ``given``, and report both peaks and times."""
    from sd_lowvram import optimize
    from sd_lowvram.devices.overhead import Overhead
    from sd_lowvram.planning.memory_profile import measured

    where = sizes["device"]
    start = time.perf_counter()
    chosen = optimize(pipe, vram=f"{vram} b", **sizes)
    planned = time.perf_counter() - start
    with measured(pipe) as run, timed_calls(pipe, where) as calls:
        pipe(
            **given, width=sizes["width"], height=sizes["height"], num_inference_steps=steps, output_type="pt"
        )  # fmt: skip
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
        "overhead_bytes": chosen.predicted.overhead_bytes,
        "overhead_measured": not on_cpu and chosen.request.overhead != Overhead(),
        "predicted_reserved_bytes": chosen.most_reserved_bytes - chosen.predicted.overhead_bytes,
        "reserved_bytes": run.reserved_bytes,
        "plan_seconds": planned,
        "predicted_seconds": chosen.predicted.seconds * steps / chosen.request.steps,
        "predicted_step_seconds": next(one.seconds for one in chosen.stages if one.name == "denoise")
        / chosen.request.steps,
        "measured_seconds": run.seconds,
        **calls.figures(sum),
        "stages": run.as_dict()["stages"],
        "within": within(predicted, run.peak_bytes - libraries),
    }


def within(predicted: int, measured: int) -> bool:
    """True if the prediction is at most 5 % or 24 MiB above, and at most 1 % or 8 MiB below the measurement."""
    return -max(measured // 100, 8 * MIB) <= predicted - measured <= max(measured // 20, 24 * MIB)


def _library_bytes(device: torch.device) -> int:
    """Bytes of cuBLAS' workspaces among torch's allocations, which a plan counts in its overhead."""
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_allocated(device)
    free_matrix_workspaces()
    return before - torch.cuda.memory_allocated(device)


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Summary for a reader."""
    ran = [row for row in rows if "measured_bytes" in row]
    if ran:
        apart = [100 * (row["predicted_bytes"] / (row["measured_bytes"] - row["library_bytes"]) - 1) for row in ran]
        enough = sum(row["reserved_bytes"] - row["library_bytes"] <= row["predicted_reserved_bytes"] for row in ran)
        yield f"{sum(row['within'] for row in ran)} of {len(ran)} plans allocated as predicted"
        yield f"off by {min(apart):+.1f} to {max(apart):+.1f} %"
        sized = [row for row in ran if "overhead_bytes" in row]  # not in the oldest rows
        kept = sum(map(is_in_budget, sized))
        yield f"reserved bytes, with the driver's share, stayed within the budget in {kept} of {len(sized)}"
        yield f"the allocator reserved at most what the plan says in {enough}"
        yield f"{sum(row.get('overhead_measured', False) for row in ran)} by measured workspaces"
        yield from fallen(claim for row in ran for claim in byte_claims(row))


def is_in_budget(row: Row) -> bool:
    """True if reserved bytes and the driver's share stayed within the budget."""
    return bool(row["reserved_bytes"] + row["overhead_bytes"] <= row["vram"])


def in_budget(row: Row) -> str:
    """A cell; empty where an older row does not have the driver's share."""
    if "overhead_bytes" not in row:
        return ""
    return "yes" if is_in_budget(row) else "**no**"


def byte_claims(row: Row) -> Iterator[tuple[str, bool]]:
    """Claims on a row of :func:`peak_of`, each with True if it holds."""
    name = f"{row['model']} at {row['side']} in {row['vram'] / MIB:.0f} MiB"
    allocated, predicted = row["measured_bytes"] - row["library_bytes"], row["predicted_bytes"]
    yield f"{name}: allocated {allocated / MIB:.0f} MiB, predicted {predicted / MIB:.0f}", row["within"]
    if "overhead_bytes" in row:
        reserved = row["reserved_bytes"] + row["overhead_bytes"]
        yield f"{name}: reserved {reserved / MIB:.0f} MiB with the driver's share", is_in_budget(row)


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Allocated bytes"
    yield ""
    yield "Plans at budgets from the least that works to the one of everything resident, two steps each. *Measured* is"
    yield "the largest `torch.cuda.max_memory_allocated` of any stage; cuBLAS' workspace, a part of the overhead, is"
    yield "taken off. *Within*: at most 5 % or 24 MiB above the measurement, 1 % or 8 MiB below it. *To reserve*: what"
    yield "the plan says that the allocator reserves at most; *reserved*: what it did. *In budget*: reserved bytes and"
    yield "overhead together, to which torch's allocator is limited since 2026-11-27. *Overhead*: what the plan counts"
    yield "for the driver's context, as calibrated or, in brackets, by stated defaults. *Plan*:"
    yield "seconds until the plan was there and attached. *Host*: seconds until the calls of the models returned,"
    yield "Python's and torch's work and what they waited for; *device*: between the events around those calls, gaps"
    yield "included: where both are as long, the device waited for the host. Sizes may have run side by side."
    yield ""
    yield from rows_table(_COLUMNS, in_order(part["rows"], "model", "side", "share"), of=2)


def difference(row: Row) -> str:
    measured = row["measured_bytes"] - row["library_bytes"]
    return f"{100 * (row['predicted_bytes'] - measured) / max(measured, 1):+.1f} %"


def _beside(row: Row) -> str:
    told = mib("overhead_bytes", unknown="?")(row)
    return told if row.get("overhead_measured") else f"({told})"


def _seconds(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row[name] is None else f"{row[name]:.1f}"


_COLUMNS: Columns = (
    ("model", "{model}"),
    ("picture", "{side}x{side}"),
    ("budget MiB", lambda row: f"{row['vram'] // MIB}"),
    ("offload", lambda row: row["settings"].get("offload", "none")),
    ("stage", "{stage}"),
    ("predicted MiB", mib("predicted_bytes")),
    ("measured MiB", lambda row: f"{(row['measured_bytes'] - row['library_bytes']) / MIB:.0f}"),
    ("difference", difference),
    ("within", yes("within")),
    ("to reserve MiB", mib("predicted_reserved_bytes")),
    ("reserved MiB", mib("reserved_bytes")),
    ("in budget", in_budget),
    ("overhead MiB", _beside),
    ("plan s", _seconds("plan_seconds")),
    ("host s", _seconds("host_seconds")),
    ("device s", _seconds("device_seconds")),
)
