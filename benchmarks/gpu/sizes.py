"""The largest square picture under a cap of the allocator, for us and for diffusers' most frugal combination."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sd_lowvram.files import table
from sd_lowvram.units import GIB

from .. import trial
from ..calls import timed_calls
from ..models import random_pipeline
from .peaks import held_on
from .record import Case, ResultRows, room_for, side_by_side

CAPS = tuple(cap * GIB for cap in (2, 4, 6, 8))
WAYS = ("ours", "diffusers")
_MODEL, _STEP, _LARGEST = "sd15", 128, 4096
_BESIDE = 3 * GIB
"""Bytes that a trial needs outside of its cap: the context, and for a moment the weights while they are drawn."""


def run(device: torch.device, record: ResultRows) -> None:
    """Add a row for each trial; sides of a cap and way share a process, caps and ways run in parallel."""

    def bisect(chain: Case) -> None:
        tried = _tried(record.measured, chain)
        while (side := middle(tried)) is not None:
            asked = {"device": str(device), "model": _MODEL, "tried": list(tried.items()), **chain}
            for row in trial.stream(trial_sizes, seconds=record.seconds(), **asked):
                record.add(chain | {"side": side}, row)
                if row.get("timed_out"):
                    return
                tried[side] = bool(row.get("fits"))
                if (side := middle(tried)) is None:
                    return

    chains = [{"cap": cap, "way": way} for cap in CAPS for way in WAYS]
    side_by_side("max-size", bisect, chains, room_for(device, max(CAPS) + _BESIDE))


def _tried(rows: list[dict[str, Any]], chain: Case) -> dict[int, bool]:
    """Map the sides that were tried in ``chain`` to True if they fit."""
    own = (row for row in rows if all(row[key] == value for key, value in chain.items()))
    return {row["side"]: bool(row.get("fits")) for row in own if not row.get("timed_out")}


def bounds(tried: Mapping[int, bool]) -> tuple[int, int | None]:
    """The largest side that fits (0: none), and the smallest that does not (None: all do)."""
    low = max((side for side, fits in tried.items() if fits), default=0)
    return low, min((side for side, fits in tried.items() if not fits), default=None)


def middle(tried: Mapping[int, bool]) -> int | None:
    """The side to be tried next, halfway between :func:`bounds` in multiples of the step; None: they are neighbours."""
    low, high = bounds(tried)
    first, last = low // _STEP, (high or _LARGEST + _STEP) // _STEP
    return (first + last) // 2 * _STEP if last - first > 1 else None


def trial_sizes(device: str, model: str, cap: int, way: str, tried: list[tuple[int, bool]]) -> Iterator[dict[str, Any]]:
    """Try pictures with at most ``cap`` bytes reserved by torch's allocator, one side after the other, as in
    :func:`middle`. The trial ends early if a run leaves something on the device."""
    from sd_lowvram import restore

    where, found = torch.device(device), dict(tried)
    pipe = random_pipeline(model, where)
    if where.type == "cuda":
        total = torch.cuda.get_device_properties(where).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), where)
    if way == "diffusers":
        _most_frugal(pipe, where)
    while (side := middle(found)) is not None:
        row = _paint(pipe, where, side, cap, way)
        yield row
        found[side] = row["fits"]
        restore(pipe)
        if held_on(where):
            return


def _paint(pipe: Any, where: torch.device, side: int, cap: int, way: str, steps: int = 2) -> dict[str, Any]:
    from sd_lowvram import optimize
    from sd_lowvram.devices.this_machine import overhead_of
    from sd_lowvram.errors import BudgetError
    from sd_lowvram.memory import measured_peak
    from sd_lowvram.progress import capture_events

    on_cpu = where.type == "cpu"
    start = time.perf_counter()
    if way == "ours":
        # the cap is the allocator's: what the driver takes comes on top, for both
        vram = cap + (0 if on_cpu else overhead_of(where).context_bytes)
        try:
            optimize(pipe, vram=f"{vram} b", width=side, height=side, device=where)
        except BudgetError as error:
            return {"fits": False, "why": str(error), "plan_seconds": time.perf_counter() - start}
    planned = time.perf_counter()
    pictures: list[Any] = []

    def paint() -> None:
        images = pipe("a red apple", width=side, height=side, num_inference_steps=steps, output_type="pt").images
        pictures.append(bool(images.isfinite().all()))

    told: list[str] = []
    with capture_events(told.append), timed_calls(pipe, where) as calls:
        peak = measured_peak(paint)
    return {
        "fits": peak <= cap,
        "finite": all(pictures),
        "leaner": sum("ran out of memory" in sentence for sentence in told),
        "peak_bytes": peak,
        "reserved_bytes": 0 if on_cpu else torch.cuda.max_memory_reserved(where),
        "plan_seconds": planned - start,
        "seconds": time.perf_counter() - planned,
        **calls.figures(sum),
    }


def _most_frugal(pipe: Any, device: torch.device) -> None:
    """Turn on diffusers' options that need the least: single layers on the device, tiles, torch's attention."""
    pipe.vae.enable_tiling()
    pipe.vae.enable_slicing()
    if device.type == "cuda":
        pipe.enable_sequential_cpu_offload(device=device)


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Summary for a reader."""
    for cap in sorted({row["cap"] for row in rows}):
        size, ours, theirs, _ = _cells(cap, rows)
        yield f"{size} GiB: {ours}, diffusers {theirs}"


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Largest square picture"
    yield ""
    yield f"{_MODEL} in fp16, two steps and the decode, under a cap of `set_per_process_memory_fraction`. diffusers:"
    yield "sequential offload, VAE tiling and slicing. Its tiles change the picture; ours do not."
    yield ""
    caps = sorted({row["cap"] for row in part["rows"]})
    yield from table(_HEADS, (_cells(cap, part["rows"]) for cap in caps))
    for row in part["rows"]:
        if "error" in row and not row["out_of_memory"]:
            yield ""
            yield f"{row['way']}, {row['cap'] / GIB:g} GiB, {row['side']}: {row['error']}"
        elif row.get("leaner"):
            yield ""
            yield f"{row['way']}, {row['cap'] / GIB:g} GiB, {row['side']}: with a leaner plan than the first"


_HEADS = ("cap GiB", "ours", "diffusers", "pixels, ours / diffusers")


def _cells(cap: int, rows: list[dict[str, Any]]) -> list[str]:
    ours, theirs = (_tried(rows, {"cap": cap, "way": way}) for way in WAYS)
    (largest, _), (other, _) = bounds(ours), bounds(theirs)
    return [f"{cap / GIB:g}", known(ours), known(theirs), f"{(largest / other) ** 2:.1f}" if other else ""]


def known(tried: Mapping[int, bool]) -> str:
    """The largest as it is known: up to the limit, to the step, or only between two."""
    largest, too_large = bounds(tried)
    if middle(tried) is None:
        return f"{largest}" if too_large else f"{largest} or more"
    return f"{largest} ({f'below {too_large}; ' if too_large else ''}no time for more)"
