"""A step with weights streamed, by us at several shares of the weights on the device and by each way of diffusers'."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sd_lowvram import progress
from sd_lowvram.devices.calibration import copy_rate
from sd_lowvram.files import table
from sd_lowvram.units import MIB
from sd_lowvram.weights import first_tensor

from ..calls import timed_calls
from ..h100_steps import WITHIN
from ..models import PLENTY, embeddings, random_denoiser
from ..tables import milliseconds, yes
from .peaks import held_on
from .record import Case, ResultRows, fallen, not_run, predicted_step

SHARES = (100, 50, 25, 10)
"""Per cent of the UNet's weight bytes that are on the device, ring included."""
LIMITED = "ours, limited"
"""Ours under a budget that just holds its settings, to which torch's allocator is limited."""
RECORDED = "ours, recorded"
"""Ours with steps recorded as CUDA graphs; attached without a plan, as plans refuse the knob."""
_OURS = "ours", LIMITED, RECORDED
_SLACK = 32 * MIB
"""More than a run may hold beyond its plan, so that no leaner one takes its place."""
_RECORD_STREAM = ", recorded streams"
"""Suffix of diffusers' ways with ``record_stream``: the host does not wait, and memory is freed later."""
BASELINES = (
    "resident",
    "model offload",
    "group offload, leaves",
    f"group offload, leaves{_RECORD_STREAM}",
    "group offload, blocks",
    f"group offload, blocks{_RECORD_STREAM}",
    "sequential offload",
)
TASKS = (("sd15", 1024), ("sdxl", 1024), ("sd15", 2048))
"""A step of SD1.5 at 512x512 is some milliseconds on a large card, less than the host needs to ask for it."""
_WARM, _STEPS = 3, 10
COMPARED = 4
"""Steps of a run whose latents are compared."""
_SIMULATED = 0.15


def run(device: torch.device, record: ResultRows) -> None:
    """Add for each model a row for every way, ours again at the device bytes of diffusers' ways, and simulated steps.

    Ours of all models come first. One at a time, as their times are compared; those of a model share a process, unless
    one leaves something behind.
    """
    tasks: list[Case] = [{"model": model, "side": side} for model, side in TASKS]
    ways = ("ours", LIMITED) if device.type == "cuda" else ("ours",)
    for task in tasks:
        ours = [task | {"way": way, "share": share} for share in SHARES for way in ways]
        if task == tasks[0] and device.type == "cuda":
            ours += [task | {"way": RECORDED, "share": share} for share in SHARES[1:]]
        record.fill(ours, trial_steps, device=str(device))
    for task in progress.report_each("streaming", tasks):
        record.fill([task | {"way": way} for way in BASELINES], trial_steps, device=str(device))
        record.fill([task | way for way in _instead(record, task)], trial_steps, device=str(device))
        simulated = [task | {"way": "simulated", "share": share} for share in SHARES[1:]]
        record.fill(simulated, trial_units, device=str(device))


def _instead(record: ResultRows, task: Case) -> Iterator[Case]:
    """Our way with the bytes on the device that each of diffusers' streaming ways took."""
    resident = record.find(task | {"way": "ours", "share": 100}) or {}
    for way in BASELINES[2:]:
        theirs = record.find(task | {"way": way}) or {}
        if "peak_bytes" in resident and "peak_bytes" in theirs:
            activations = resident["peak_bytes"] - resident["weights_bytes"]
            yield {"way": "ours", "instead_of": way, "room_mib": max(1, (theirs["peak_bytes"] - activations) // MIB)}


def claims(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Claims on a model's rows, with the figures that confirm or refute them."""
    rows = [row for row in rows if "step_seconds" in row]
    by_way = {row["way"]: row for row in rows if row["way"] in BASELINES}
    for row in rows:
        if row.get("instead_of") in by_way:
            theirs = by_way[row["instead_of"]]
            ratio = theirs["step_seconds"] / row["step_seconds"]
            least = 2.0 if row["instead_of"].startswith("sequential") else 1.0
            fair = row["peak_bytes"] <= theirs["peak_bytes"]
            claim = f"at the device bytes of {row['instead_of']}, {least:g} times as fast or more"
            yield {"claim": claim, "figure": ratio, "holds": fair and ratio >= least, "same_bytes": fair}
    simulated, plain = _by_share(rows, "simulated"), _by_share(rows, "ours")
    for row in rows:
        share = row.get("share")
        if row["way"] == "ours" and share in simulated:
            yield _as_long(row, "simulated", simulated[share], _SIMULATED)
        if row["way"] == "ours" and share is not None and "predicted_step_seconds" in row:
            yield _as_long(row, "predicted", row["predicted_step_seconds"], WITHIN)
        if row["way"] == RECORDED and share in plain:
            ratio = plain[share] / row["step_seconds"]
            claim = f"{share} % on the device: a recorded step is no longer than one that is not recorded"
            yield {"claim": claim, "figure": ratio, "holds": ratio >= 1.0}
        if row.get("same_bits") is not None:
            place = f"{share} %" if share is not None else f"{row['room_mib']} MiB"
            yield {"claim": f"{row['way']}, {place}: the bits of the resident run", "holds": row["same_bits"]}


def _as_long(row: dict[str, Any], name: str, seconds: float, within: float) -> dict[str, Any]:
    ratio = row["step_seconds"] / seconds
    claim = f"{row['share']} % on the device: a step as long as {name}, to {within:.0%}"
    return {"claim": claim, "figure": ratio, "holds": abs(ratio - 1) <= within}


def _by_share(rows: Sequence[dict[str, Any]], way: str) -> dict[int, float]:
    """Seconds of a step of ``way``, by the share of the weights on the device."""
    own = (row for row in rows if row["way"] == way and "share" in row and "step_seconds" in row)
    return {row["share"]: row["step_seconds"] for row in own}


def trial_steps(device: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield for each of ``cases``: median seconds of a denoising step, and the most bytes on the device during the run.

    Ours take turns on one model; diffusers' ways cannot all be taken off, and each gets its own. Ends early where one
    leaves something on the device.
    """
    from sd_lowvram import restore

    where = torch.device(device)
    pipe = wanted = None
    for case in cases:
        if pipe is None or case["way"] not in _OURS:
            pipe = None  # what was there goes before the next is drawn
            held_on(where)
            pipe = random_denoiser(case["model"], where)
            wanted = _resident_latents(pipe, where, case["side"]) if case["way"] in _OURS else None
        yield _steps(pipe, where, case, wanted)
        if case["way"] in _OURS:
            restore(pipe)
        else:
            pipe = None
        if held_on(where):
            return


def _resident_latents(pipe: Any, where: torch.device, side: int) -> Tensor | None:
    """Latents of a run with all weights on the device; None if they do not fit."""
    from sd_lowvram import Settings, attached

    try:
        with attached(pipe, Settings(offload="none", inference_mode=True), device=where):
            return _latents(pipe, where, side)
    except torch.cuda.OutOfMemoryError:
        return None


def _latents(pipe: Any, where: torch.device, side: int) -> Tensor:
    """Latents of a short run in host memory; its last steps are replays if steps are recorded."""
    made: list[Tensor] = []
    denoise(pipe, embeddings(pipe, where), side, COMPARED, made)
    return made[0].cpu()


def _steps(pipe: Any, where: torch.device, case: Case, wanted: Tensor | None) -> dict[str, Any]:
    from sd_lowvram.errors import BudgetError
    from sd_lowvram.progress import capture_events
    from sd_lowvram.weights import weight_bytes

    side, weights = case["side"], weight_bytes(pipe.unet)
    settings: dict[str, Any] = {}
    if case["way"] in _OURS:
        room = case["room_mib"] if "room_mib" in case else max(1, weights * case["share"] // 100 // MIB)
        settings = {"offload": "none"} if case.get("share") == 100 else {"offload": "blocks", "weights_mib": room}
    try:
        row = _place(pipe, where, side, case["way"], settings)
    except BudgetError:
        if "room_mib" not in case:
            raise
        settings = {"offload": "layer"}  # less memory than blocks need: the least that there is
        row = _place(pipe, where, side, case["way"], settings)
    row |= {"settings": settings, "weights_bytes": weights}
    messages: list[str] = []
    with capture_events(messages.append):
        if wanted is not None:
            row["same_bits"] = torch.equal(_latents(pipe, where, side), wanted)
        row |= measured_steps(pipe, where, embeddings(pipe, where), side)
    refused = [sentence for sentence in messages if sentence.startswith("streamed_graphs: ")]
    return {"failed": refused[0]} if refused else row


def measured_steps(pipe: Any, where: torch.device, given: dict[str, Any], side: int) -> dict[str, Any]:
    """Seconds of a step, those of the host and of the device apart, and the most bytes on the device."""
    from sd_lowvram.memory import measured_peak

    denoise(pipe, given, side, 2)
    start = time.perf_counter()
    with timed_calls(pipe, where, "unet") as calls:
        times = denoise(pipe, given, side, _WARM + _STEPS)
    whole = time.perf_counter() - start
    # the peak in a run of its own: watching it may cost time; what stays on the device counts too
    before = torch.cuda.memory_allocated(where) if where.type == "cuda" else 0
    peak = before + measured_peak(lambda: denoise(pipe, given, side, 2))
    return {
        "step_seconds": statistics.median(times[_WARM:]),
        "slowest_seconds": max(times[_WARM:]),
        **calls.figures(statistics.median, first=_WARM),
        "run_seconds": whole,
        "peak_bytes": peak,
    }


def _place(pipe: Any, device: torch.device, side: int, way: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Place the weights as ``way`` says, and return what a plan predicts of a step, if there is one."""
    if way in _OURS:
        chosen = _attach_ours(pipe, device, side, way, settings)
        return {} if way == RECORDED else predicted_step(chosen)
    if way == "resident":
        pipe.to(device)
    elif way == "model offload":
        pipe.enable_model_cpu_offload(device=device)
    elif way == "sequential offload":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        leaves = "leaves" in way
        pipe.enable_group_offload(
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="leaf_level" if leaves else "block_level",
            num_blocks_per_group=None if leaves else 1,
            use_stream=True,
            record_stream=way.endswith(_RECORD_STREAM),
        )
    return {}


def _attach_ours(pipe: Any, device: torch.device, side: int, way: str, settings: dict[str, Any]) -> Any:
    """Attach the plan with these ``settings``, or for :data:`RECORDED` the plan's settings with recorded steps."""
    from sd_lowvram import Settings, optimize, plan
    from sd_lowvram.session import attach

    asked: dict[str, Any] = {"width": side, "height": side, "device": device}
    if way == RECORDED:
        chosen = plan(pipe, vram=PLENTY, settings=Settings(**settings), **asked)
        attach(pipe, dataclasses.replace(chosen.settings, streamed_graphs=True), device, chosen.timing)
        return chosen
    chosen = optimize(pipe, vram=PLENTY, settings=Settings(**settings), **asked)
    if way == LIMITED:
        held = chosen.predicted.reserved_bytes + chosen.predicted.overhead_bytes
        optimize(pipe, vram=f"{held + _SLACK} b", settings=chosen.settings, **asked)
    return chosen


def moment(device: torch.device) -> Any:
    """A timestamp of a run, for :func:`seconds_between`, without synchronising."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Any, later: Any) -> float:
    """Seconds between two moments."""
    if isinstance(later, float):
        return float(later - first)
    later.synchronize()
    return float(first.elapsed_time(later) / 1000)


def denoise(pipe: Any, given: dict[str, Any], side: int, steps: int, latents: list[Any] | None = None) -> list[float]:
    """Seconds of every step; copies run ahead as they do in any run. ``latents`` has what the last one made then."""
    first = first_tensor(given)
    assert first is not None
    moments = [moment(first.device)]

    def mark(*_: Any) -> dict[str, Any]:
        moments.append(moment(first.device))
        return {}

    noise = torch.Generator().manual_seed(0)
    made = pipe(
        **{"guidance_scale": 5.0, **given}, width=side, height=side, num_inference_steps=steps, generator=noise,
        output_type="latent", callback_on_step_end=mark,
    )  # fmt: skip
    if latents is not None:
        latents.append(made.images)
    return [seconds_between(start, end) for start, end in itertools.pairwise(moments)]


def trial_units(device: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield for each of ``cases`` a step as simulated from block times and a copy rate measured here."""
    from sd_lowvram import Settings, plan
    from sd_lowvram.hooks.parking.offload import policy_of
    from sd_lowvram.streaming.layers import layers_of
    from sd_lowvram.streaming.layout import lay_down
    from sd_lowvram.streaming.schedule import WeightGroup
    from sd_lowvram.streaming.simulator import CopyQueue, simulate
    from sd_lowvram.weights import weight_bytes

    where, (model, side) = torch.device(device), (cases[0]["model"], cases[0]["side"])
    pipe = random_denoiser(model, where)
    rooms = [max(1, weight_bytes(pipe.unet) * case["share"] // 100 // MIB) for case in cases]
    sizes: dict[str, Any] = {"vram": PLENTY, "width": side, "height": side, "device": where}
    chosen = [plan(pipe, settings=Settings(offload="blocks", weights_mib=room), **sizes) for room in rooms]
    copies = CopyQueue(copy_rate(where), overlap=where.type == "cuda")
    layers = layers_of({"unet": pipe.unet})
    pipe.to(where)
    given = embeddings(pipe, where)
    step = statistics.median(denoise(pipe, given, side, _WARM + _STEPS)[_WARM:])
    for one in chosen:
        policy = policy_of(one.settings, True, one.timing)
        starts = _block_starts(pipe, given, side, lay_down(layers, policy, {}).blocks, where)
        layout = lay_down(layers, policy, {"unet": sorted(starts, key=lambda block: starts[block])})
        moments = [starts[block.name] for block in layout.blocks]
        ends = [*moments[1:], moments[0] + step]  # the last one's share reaches to the next step's first
        units = [
            WeightGroup(block.name, block.bytes, max(0.0, end - start))
            for block, start, end in zip(layout.blocks, moments, ends, strict=True)
        ]
        predicted = simulate(units, layout.schedule, copies)
        yield {"step_seconds": predicted, "copy_rate": copies.bandwidth, "resident_step_seconds": step}


def _block_starts(pipe: Any, given: Any, side: int, blocks: Any, device: torch.device) -> dict[str, float]:
    """Start of every block in a step, in seconds since the first; medians of a few steps."""
    marks: list[tuple[str, Any]] = []
    handles = [
        block.layers[0].module.register_forward_pre_hook(
            lambda *_, name=block.name: marks.append((name, moment(device)))
        )
        for block in blocks
    ]
    try:
        denoise(pipe, given, side, _WARM + _STEPS)
    finally:
        for handle in handles:
            handle.remove()
    per_step = len(marks) // (_WARM + _STEPS)
    times: dict[str, list[float]] = {block.name: [] for block in blocks}
    for first in range(_WARM * per_step, len(marks), per_step):
        for name, reached in marks[first : first + per_step]:
            times[name].append(seconds_between(marks[first][1], reached))
    return {name: statistics.median(moments) for name, moments in times.items()}


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Summary for a reader."""
    for model, side in dict.fromkeys((row["model"], row["side"]) for row in rows):
        own = [row for row in rows if (row["model"], row["side"]) == (model, side)]
        judged = list(claims(own))
        resident = next((row.get("step_seconds") for row in own if row["way"] == "resident"), None)
        ours, limited, recorded = (_by_share(own, way) for way in _OURS)
        judgement = f"{sum(claim['holds'] for claim in judged)} of {len(judged)} claims hold"
        if resident and ours:
            whole = dict.fromkeys(ours, resident)
            judgement += f", a step by the share on the device over the resident one: {_over(ours, whole)}"
        if limited:
            judgement += f", limited to its bytes over not limited: {_over(limited, ours)}"
        if recorded:
            judgement += f", recorded over not recorded: {_over(recorded, ours)}"
        yield f"{model} at {side}: {judgement}"
        if ours:
            yield f"{model} at {side}, ms a step: {_beside_predicted(own)}"
        yield from fallen((f"{model} at {side}, {_with_figure(claim)}", claim["holds"]) for claim in judged)
    yield from not_run(rows, lambda row: f"{row['model']} at {row['side']}, {row['way']}, {row['share']} %")


def _beside_predicted(rows: Sequence[dict[str, Any]]) -> str:
    """Our steps by the share of the weights on the device, each with the predicted one."""
    own = [row for row in rows if row["way"] == "ours" and "share" in row and "step_seconds" in row]
    steps = (f"{row['share']} % {1000 * row['step_seconds']:.1f}{_predicted(row)}" for row in own)
    return ", ".join(steps)


def _predicted(row: dict[str, Any]) -> str:
    seconds = row.get("predicted_step_seconds")
    return "" if seconds is None else f" (predicted {1000 * seconds:.1f})"


def _with_figure(claim: dict[str, Any]) -> str:
    more = "" if claim.get("same_bytes", True) else ", in more bytes"
    figure = f" ({claim['figure']:.2f}{more})" if "figure" in claim else ""
    return f"{claim['claim']}{figure}"


def _over(seconds: dict[int, float], plain: dict[int, float]) -> str:
    """Ratios of steps by the share of the weights on the device."""
    return ", ".join(f"{share} % {one / plain[share]:.2f}" for share, one in seconds.items() if share in plain)


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Streamed weights"
    for model, side in dict.fromkeys((row["model"], row["side"]) for row in part["rows"]):
        rows = [row for row in part["rows"] if (row["model"], row["side"]) == (model, side)]
        yield ""
        resident = next((row.get("step_seconds") for row in rows if row["way"] == "resident"), None)
        simulated = _by_share(rows, "simulated")
        cells = [_cells(row, resident, simulated) for row in rows if row["way"] != "simulated"]
        heads, cells = _filled_columns(_HEADS, cells)
        yield f"{model} at {side}x{side} with guidance, the UNet alone; medians of {_STEPS} steps. *Host*: until the"
        yield "call of the UNet returned, Python's and torch's work and what they waited for; *device*: between the"
        yield "events around that call, gaps included: where both are as long, the device waited for the host."
        yield "*Allocated*: the most, in MiB."
        yield from (sentence for head, sentence in _OF_COLUMNS.items() if head in heads)
        if _by_share(rows, LIMITED):
            yield "*Limited*: the same settings, and torch's allocator is limited to a budget that just holds them."
        if _by_share(rows, RECORDED):
            yield "*Recorded*: the same settings, and steps are recorded as CUDA graphs, their copies too."
        yield ""
        yield from table(heads, cells)
        for row in rows:
            if row["way"] == "simulated" and "error" in row:
                yield ""
                yield f"Not simulated: {row['share']} % on the device: {row['error']}"
        for claim in claims(rows):
            verdict = "holds" if claim["holds"] else "**does not hold**"
            yield ""
            yield f"- {_with_figure(claim)}: {verdict}"


_HEADS = (
    "way", "weights on the device", "step ms", "/ resident", "predicted ms", "simulated ms", "host ms",
    "predicted host ms", "device ms", "predicted device ms", "allocated", "same bits",
)  # fmt: skip


_OF_COLUMNS = {
    "predicted ms": "*Predicted*: by the plan with these settings; of the device without gaps.",
    "simulated ms": "*Simulated*: from measured block times and copy rate.",
    "same bits": "*Bits*: of the latents, compared with those of all weights on the device.",
}
"""Sentences on columns that a table may lack."""


def _filled_columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The columns of a table in which a row has a figure."""
    filled = [any(row[number] for row in rows) for number in range(len(heads))]
    shown, *cells = ([*itertools.compress(row, filled)] for row in (heads, *rows))
    return shown, cells


def _cells(row: dict[str, Any], resident: float | None, simulated: dict[int, float]) -> list[str]:
    way = row["way"] + (f", at the bytes of {row['instead_of']}" if "instead_of" in row else "")
    held = f"{row['share']} %" if "share" in row else f"{row['room_mib']} MiB" if "room_mib" in row else ""
    if (error := row.get("error") or row.get("failed")) is not None:
        return [way, held, error.replace("|", "/"), *[""] * (len(_HEADS) - 3)]
    ratio = f"{row['step_seconds'] / resident:.2f}" if resident else ""
    expected = simulated.get(row["share"]) if row["way"] == "ours" and "share" in row else None
    host, device = ((row[f"{name}_seconds"], row.get(f"predicted_{name}_seconds")) for name in ("host", "device"))
    times = [row.get("predicted_step_seconds"), expected, *host, *device]
    step, *others = milliseconds(row["step_seconds"], *times)
    bits = "" if row.get("same_bits") is None else yes("same_bits")(row)
    return [way, held, step, ratio, *others, f"{row['peak_bytes'] / MIB:.0f}", bits]
