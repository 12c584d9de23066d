"""A step with weights streamed, by us at several shares of the weights on the device and by each way of diffusers'."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ... import progress
from ...devices.calibration import copy_rate
from ...units import MIB
from ..models import embeddings, random_denoiser
from ..report import table
from ..trial import measure

SHARES = (100, 50, 25, 10)
"""Per cent of the UNet's weight bytes that are on the device, ring included."""
BASELINES = ("resident", "model offload", "group offload, leaves", "group offload, blocks", "sequential offload")
TASKS = (("sd15", 512), ("sdxl", 1024))
_WARM, _STEPS = 3, 10
_SIMULATED = 0.15
_PLENTY = "1000 TB"


def run(device: torch.device, seconds: Callable[[], float]) -> Any:
    """For each model: a row for every way, the simulated steps, and what is claimed of them."""
    tasks = [{"device": str(device), "model": model, "side": side} for model, side in TASKS]
    return {"tables": [_table(task, seconds) for task in progress.counted("streaming", tasks)]}


def _table(task: dict[str, Any], seconds: Callable[[], float]) -> dict[str, Any]:
    def timed(way: str, **settings: Any) -> dict[str, Any]:
        asked: dict[str, Any] = {"way": way, "settings": settings}
        return asked | measure(trial_step, seconds=seconds(), **asked, **task)

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
    found = {"model": task["model"], "side": task["side"], "rows": rows}
    if weights:
        rooms = {str(share): weights * share // 100 for share in SHARES[1:]}
        found["simulated"] = measure(trial_units, seconds=seconds(), rooms=rooms, **task)
    return found | {"claims": list(_claims(found))}


def _claims(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What is promised, with the figures that hold or break it."""
    rows = [row for row in found["rows"] if "step_seconds" in row]
    by_way = {row["way"]: row for row in rows if row["way"] != "ours"}
    for row in rows:
        if row.get("instead_of") in by_way:
            theirs = by_way[row["instead_of"]]
            ratio = theirs["step_seconds"] / row["step_seconds"]
            least = 2.0 if row["instead_of"].startswith("sequential") else 1.0
            fair = row["peak_bytes"] <= theirs["peak_bytes"]
            claim = f"at the device bytes of {row['instead_of']}, {least:g} times as fast or more"
            yield {"claim": claim, "figure": ratio, "holds": fair and ratio >= least, "same_bytes": fair}
    simulated = found.get("simulated", {}).get("step_seconds", {})
    for row in rows:
        if str(row.get("share")) in simulated:
            ratio = row["step_seconds"] / simulated[str(row["share"])]
            claim = f"{row['share']} % on the device: a step as long as simulated, to {_SIMULATED:.0%}"
            yield {"claim": claim, "figure": ratio, "holds": abs(ratio - 1) <= _SIMULATED}


def trial_step(device: str, model: str, side: int, way: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of a denoising step, and the largest number of bytes on the device during the run."""
    from ...memory import measured_peak
    from ...weights import weight_bytes

    where = torch.device(device)
    pipe = random_denoiser(model, where)
    weights = weight_bytes(pipe.unet)
    _place(pipe, where, side, way, settings)
    given = embeddings(pipe, where)
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


def _moment(device: torch.device) -> Any:
    """This moment of a run, for :func:`_seconds`; nothing waits for the device before that asks."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(first: Any, later: Any) -> float:
    """Seconds between two moments."""
    if isinstance(later, float):
        return float(later - first)
    later.synchronize()
    return float(first.elapsed_time(later) / 1000)


def _denoise(pipe: Any, given: dict[str, Any], side: int, steps: int) -> list[float]:
    """Seconds of every step; copies run ahead as they do in any run."""
    device = next(iter(given.values())).device
    moments = [_moment(device)]

    def mark(*_: Any) -> dict[str, Any]:
        moments.append(_moment(device))
        return {}

    pipe(
        **given, width=side, height=side, num_inference_steps=steps, guidance_scale=5.0, output_type="latent",
        callback_on_step_end=mark,
    )  # fmt: skip
    return [_seconds(start, end) for start, end in itertools.pairwise(moments)]


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
    pipe = random_denoiser(model, where)
    sizes: dict[str, Any] = {"width": side, "height": side, "device": where}
    streamed = {name: Settings(offload="blocks", weights_mib=max(1, room // MIB)) for name, room in rooms.items()}
    chosen = {name: plan(pipe, vram=_PLENTY, settings=settings, **sizes) for name, settings in streamed.items()}
    copies = Copies(copy_rate(where), overlap=where.type == "cuda")
    layers = layers_of({"unet": pipe.unet})
    pipe.to(where)
    given = embeddings(pipe, where)
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
    handles = [
        block.layers[0].module.register_forward_pre_hook(
            lambda *_, name=block.name: marks.append((name, _moment(device)))
        )
        for block in blocks
    ]
    try:
        _denoise(pipe, given, side, _WARM + _STEPS)
    finally:
        for handle in handles:
            handle.remove()
    per_step = len(marks) // (_WARM + _STEPS)
    times: dict[str, list[float]] = {block.name: [] for block in blocks}
    for first in range(_WARM * per_step, len(marks), per_step):
        for name, moment in marks[first : first + per_step]:
            times[name].append(_seconds(marks[first][1], moment))
    return {name: statistics.median(moments) for name, moments in times.items()}


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Streamed weights"
    for found in part["tables"]:
        yield ""
        size = f"{found['side']}x{found['side']}"
        yield f"{found['model']} at {size} with guidance, the UNet alone; medians of {_STEPS} steps. *Peak*: of torch's"
        yield "allocator, all that is on the device. *Simulated*: from measured block times and copy rate."
        yield ""
        resident = next((row.get("step_seconds") for row in found["rows"] if row["way"] == "resident"), None)
        simulated = found.get("simulated", {}).get("step_seconds", {})
        yield from table(_HEADS, (_cells(row, resident, simulated) for row in found["rows"]))
        for claim in found["claims"]:
            verdict = "holds" if claim["holds"] else "**does not hold**"
            yield ""
            yield f"- {claim['claim']}: {verdict} ({claim['figure']:.2f})"


_HEADS = ("way", "weights on the device", "step ms", "/ resident", "simulated ms", "peak MiB")


def _cells(row: dict[str, Any], resident: float | None, simulated: dict[str, float]) -> list[str]:
    way = row["way"] + (f", at the bytes of {row['instead_of']}" if "instead_of" in row else "")
    room = row["settings"].get("weights_mib")
    held = f"{row['share']} %" if "share" in row else f"{room} MiB" if room else ""
    if "error" in row:
        return [way, held, row["error"].replace("|", "/"), "", "", ""]
    ratio = f"{row['step_seconds'] / resident:.2f}" if resident else ""
    expected = simulated.get(str(row.get("share")))
    expected_ms = "" if expected is None else f"{1000 * expected:.1f}"
    return [way, held, f"{1000 * row['step_seconds']:.1f}", ratio, expected_ms, f"{row['peak_bytes'] / MIB:.0f}"]
