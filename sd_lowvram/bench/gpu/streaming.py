"""A step with weights streamed, by us at several shares of the weights on the device and by each way of diffusers'."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...units import MIB
from .models import TINY, embeddings, random_denoiser
from .trial import measure

SHARES = (100, 50, 25, 10)
"""Per cent of the UNet's weight bytes that are on the device, ring included."""
BASELINES = ("resident", "model offload", "group offload, leaves", "group offload, blocks", "sequential offload")
_TASKS = (("sd15", 512), ("sdxl", 1024))
_WARM, _STEPS = 3, 10
_SIMULATED = 0.15
_PLENTY = "1000 TB"


def run(device: torch.device, model: str | None, seconds: Callable[[], float], report: Callable[..., None]) -> Any:
    """For each model: a row for every way, the simulated steps, and what is claimed of them."""
    tasks = [(TINY, 64)] if model == TINY else _TASKS
    tables = []
    for number, (name, side) in enumerate(tasks):
        task = {"device": str(device), "model": name, "side": side}
        tables.append(_table(task, seconds))
        report("streaming", number + 1, len(tasks))
    return {"tables": tables}


def _table(task: dict[str, Any], seconds: Callable[[], float]) -> dict[str, Any]:
    def timed(way: str, **settings: Any) -> dict[str, Any]:
        if seconds() < 10:
            return {"way": way, "settings": settings, "error": "no time was left"}
        return {"way": way, "settings": settings} | measure(
            "step", seconds=seconds(), way=way, settings=settings, **task
        )

    rows = [timed("ours", offload="none") | {"share": 100}]
    weights = rows[0].get("weights_bytes", 0)
    for share in SHARES[1:]:
        rows.append(timed("ours", offload="blocks", weights_mib=max(1, weights * share // 100 // MIB)))
        rows[-1]["share"] = share
    rows += [timed(way) for way in BASELINES]
    if "peak_bytes" in rows[0]:
        activations = rows[0]["peak_bytes"] - weights
        for row in [row for row in rows if row["way"].startswith(("group", "sequential")) and "peak_bytes" in row]:
            room = (row["peak_bytes"] - activations) // MIB
            rows.append(timed("ours", offload="blocks", weights_mib=max(1, room)) | {"instead_of": row["way"]})
    table = {"model": task["model"], "side": task["side"], "rows": rows}
    if weights and seconds() > 10:
        rooms = {str(share): weights * share // 100 for share in SHARES[1:]}
        table["simulated"] = measure("units", seconds=seconds(), rooms=rooms, **task)
    return table | {"claims": list(_claims(table))}


def _claims(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What is promised, with the figures that hold or break it."""
    rows = [row for row in table["rows"] if "step_seconds" in row]
    by_way = {row["way"]: row for row in rows if row["way"] != "ours"}
    for row in rows:
        if row.get("instead_of") in by_way:
            theirs = by_way[row["instead_of"]]
            ratio = theirs["step_seconds"] / row["step_seconds"]
            least = 2.0 if row["instead_of"].startswith("sequential") else 1.0
            fair = row["peak_bytes"] <= theirs["peak_bytes"]
            claim = f"at the device bytes of {row['instead_of']}, {least:g} times as fast or more"
            yield {"claim": claim, "figure": ratio, "holds": fair and ratio >= least, "same_bytes": fair}
    simulated = table.get("simulated", {}).get("step_seconds", {})
    for row in rows:
        foretold = simulated.get(str(row.get("share")))
        if foretold is not None:
            ratio = row["step_seconds"] / foretold
            claim = f"{row['share']} % on the device: a step as long as simulated, to {_SIMULATED:.0%}"
            yield {"claim": claim, "figure": ratio, "holds": abs(ratio - 1) <= _SIMULATED}


def trial_step(device: str, model: str, side: int, way: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of a denoising step, and the largest number of bytes on the device during the run."""
    from ...memory import measured_peak
    from ...weights import weight_bytes

    where = torch.device(device)
    dtype = _dtype(where)
    pipe = random_denoiser(model, where, dtype)
    weights = weight_bytes(pipe.unet)
    _place(pipe, where, side, way, settings)
    given = embeddings(pipe, where, dtype)
    _denoise(pipe, given, side, 2)
    start = time.perf_counter()
    times = _denoise(pipe, given, side, _WARM + _STEPS)
    whole = time.perf_counter() - start
    # the peak in a run of its own: watching it may cost time; what stays on the device counts too
    before = torch.cuda.memory_allocated(where) if where.type == "cuda" else 0
    peak = before + measured_peak(lambda: _denoise(pipe, given, side, 2))
    return {
        "weights_bytes": weights,
        "step_seconds": statistics.median(times[_WARM:]),
        "slowest_seconds": max(times[_WARM:]),
        "run_seconds": whole,
        "peak_bytes": peak,
    }


def _place(pipe: Any, device: torch.device, side: int, way: str, settings: dict[str, Any]) -> None:
    """Have the weights where ``way`` puts them."""
    if way == "ours":
        from ... import Settings, optimize

        optimize(pipe, vram=_PLENTY, width=side, height=side, device=device, settings=Settings(**settings))
        return
    if way == "resident":
        pipe.to(device)
    elif way == "model offload":
        pipe.enable_model_cpu_offload(device=device)
    elif way == "sequential offload":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        leaves = way.endswith("leaves")
        pipe.enable_group_offload(
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="leaf_level" if leaves else "block_level",
            num_blocks_per_group=None if leaves else 1,
            use_stream=True,
        )


def _denoise(pipe: Any, given: dict[str, Any], side: int, steps: int) -> list[float]:
    """Seconds of every step; nothing waits for the device until all are done, so that copies run ahead as they do."""
    on_gpu = next(iter(given.values())).is_cuda
    marks: list[Any] = []

    def mark(*_: Any) -> dict[str, Any]:
        if on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append(event)
        else:
            marks.append(time.perf_counter())
        return {}

    mark()
    pipe(
        **given,
        width=side,
        height=side,
        num_inference_steps=steps,
        guidance_scale=5.0,
        output_type="latent",
        callback_on_step_end=mark,
    )
    if on_gpu:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(marks)]
    return [end - start for start, end in itertools.pairwise(marks)]


def trial_units(device: str, model: str, side: int, rooms: dict[str, int]) -> dict[str, Any]:
    """Steps as the simulator foretells them from block times and a copy rate that are measured here.

    Args:
        rooms: bytes on the device, ring included, by name.
    """
    from ... import Settings, plan
    from ...hooks.offload import policy_of
    from ...streaming.layers import layers_of
    from ...streaming.layout import lay_down
    from ...streaming.schedule import Unit
    from ...streaming.simulator import Copies, simulate

    where = torch.device(device)
    pipe = random_denoiser(model, where, _dtype(where))
    chosen = {
        name: plan(
            pipe,
            vram=_PLENTY,
            width=side,
            height=side,
            device=where,
            settings=Settings(offload="blocks", weights_mib=max(1, room // MIB)),
        )
        for name, room in rooms.items()
    }
    copies = Copies(_copy_rate(where), overlap=where.type == "cuda")
    layers = layers_of({"unet": pipe.unet})
    pipe.to(where)
    given = embeddings(pipe, where, _dtype(where))
    step = statistics.median(_denoise(pipe, given, side, _WARM + _STEPS)[_WARM:])
    found: dict[str, float] = {}
    for name, one in chosen.items():
        policy = policy_of(one.settings, True, one.timing)
        starts = _block_starts(pipe, given, side, lay_down(layers, policy, {}).blocks, where)
        layout = lay_down(layers, policy, {"unet": sorted(starts, key=lambda block: starts[block])})
        moments = [starts[block.name] for block in layout.blocks]
        ends = [*moments[1:], moments[0] + step]  # the last one's share reaches to the next step's first
        units = [
            Unit(block.name, block.bytes, max(0.0, end - start))
            for block, start, end in zip(layout.blocks, moments, ends, strict=True)
        ]
        found[name] = simulate(units, layout.schedule, copies)
    return {"step_seconds": found, "copy_rate": copies.bandwidth, "resident_step_seconds": step}


def _block_starts(pipe: Any, given: Any, side: int, blocks: Any, device: torch.device) -> dict[str, float]:
    """When every block begins in a step, in seconds since the first one did; medians of a few steps."""
    marks: list[tuple[str, Any]] = []

    def marking(name: str) -> Callable[..., None]:
        def mark(*_: Any) -> None:
            if device.type == "cuda":
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                marks.append((name, event))
            else:
                marks.append((name, time.perf_counter()))

        return mark

    handles = [block.layers[0].module.register_forward_pre_hook(marking(block.name)) for block in blocks]
    try:
        _denoise(pipe, given, side, _WARM + _STEPS)
    finally:
        for handle in handles:
            handle.remove()
    per_step = len(marks) // (_WARM + _STEPS)
    times: dict[str, list[float]] = {block.name: [] for block in blocks}
    for first in range(_WARM * per_step, len(marks), per_step):
        origin = marks[first][1]
        for name, at in marks[first : first + per_step]:
            times[name].append(origin.elapsed_time(at) / 1000 if device.type == "cuda" else at - origin)
    return {name: statistics.median(moments) for name, moments in times.items()}


def _copy_rate(device: torch.device) -> float:
    """Bytes a second from pinned memory, of a copy as large as a layer."""
    on_gpu = device.type == "cuda"
    host = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=on_gpu)
    target = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(host, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize(device)
        best = max(best, len(host) / (time.perf_counter() - start))
    return best


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.float16


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Streamed weights"
    for table in part["tables"]:
        yield ""
        size = f"{table['side']}x{table['side']}"
        yield f"{table['model']} at {size} with guidance, the UNet alone; medians of {_STEPS} steps. *Peak*: of torch's"
        yield "allocator, all that is on the device. *Simulated*: from measured block times and copy rate."
        yield ""
        yield "| way | weights on the device | step ms | / resident | simulated ms | peak MiB |"
        yield "|---|---|---|---|---|---|"
        resident = next((row.get("step_seconds") for row in table["rows"] if row["way"] == "resident"), None)
        simulated = table.get("simulated", {}).get("step_seconds", {})
        for row in table["rows"]:
            yield _row(row, resident, simulated)
        for claim in table["claims"]:
            verdict = "holds" if claim["holds"] else "**does not hold**"
            yield ""
            yield f"- {claim['claim']}: {verdict} ({claim['figure']:.2f})"


def _row(row: dict[str, Any], resident: float | None, simulated: dict[str, float]) -> str:
    way = row["way"] + (f", at the bytes of {row['instead_of']}" if "instead_of" in row else "")
    if "share" in row:
        held = f"{row['share']} %"
    else:
        held = f"{row['settings']['weights_mib']} MiB" if "weights_mib" in row["settings"] else ""
    if "error" in row:
        return f"| {way} | {held} | {row['error'].replace('|', '/')} | | | |"
    ratio = f"{row['step_seconds'] / resident:.2f}" if resident else ""
    foretold = simulated.get(str(row.get("share")))
    return (
        f"| {way} | {held} | {1000 * row['step_seconds']:.1f} | {ratio} | "
        f"{'' if foretold is None else f'{1000 * foretold:.1f}'} | {row['peak_bytes'] / MIB:.0f} |"
    )
