"""Plans held against whole runs: peak and time at budgets from the least to everything, and what was turned down.

Every run has a process of its own, and each is measured by the allocator. At each budget the plan is run, and so is the
next faster candidate that the search rejected: it has to exceed the budget, or to be slower.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sd_lowvram import progress
from sd_lowvram.files import table
from sd_lowvram.planning.plan import Candidate
from sd_lowvram.units import MIB

from .tables import written
from .trial import measure

BUDGETS = 6
CASES: dict[str, dict[str, Any]] = {
    "demo": {"size": 128, "steps": 8, "apart": True},
    "sd15": {"size": 256, "steps": 2, "apart": False},
}
"""``apart``: time is that of three more runs the fastest, as watching the allocator slows operators this small."""

_PLENTY = 1 << 50
"""Bytes: no limit. Of host memory there is none here, because the weights are in it already."""
PEAK_TOLERANCE, TIME_TOLERANCE = 0.05, 1.5


def run(models: Sequence[str] = tuple(CASES), budgets: int = BUDGETS, out: Path | None = None) -> dict[str, Any]:
    """Measure ``models`` ("demo", "sd15"), also into ``out`` as Markdown and JSON next to it, model by model.

    What the files hold of other models stays.
    """
    data = out.with_suffix(".json") if out is not None else None
    report = json.loads(data.read_text(encoding="utf-8")) if data is not None and data.is_file() else {}
    for model in models:
        report = written({**report, model: measured_rows(model, budgets)}, lines, out)
    return report


def measured_rows(model: str, budgets: int = BUDGETS) -> dict[str, Any]:
    """The runs of one model: a row for each budget."""
    case = {**CASES[model], "model": model}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        survey = _apart({**case, "budget": _PLENTY, "survey": True}, cache)
        least, most = survey["minimum_peak_bytes"], survey["planned"]["peak_bytes"]
        for number in range(budgets):
            budget = int(least * (most / least) ** (number / max(budgets - 1, 1))) + 1
            row = _apart({**case, "budget": budget}, cache)
            if row["rival"]:
                row["rival"] |= _apart({**case, "budget": budget, "settings": row["rival"]["settings"]}, cache)
            rows.append({"budget": budget, **row})
            progress.report(model, number + 1, budgets)
    return {**case, "threads": survey["threads"], "torch": survey["torch"], "rows": rows}


def _apart(task: Mapping[str, Any], cache: str) -> dict[str, Any]:
    """Result of :func:`trial_run` for ``task`` in a new process."""
    answer = measure(trial_run, seconds=None, environment={"SD_LOWVRAM_CACHE": cache}, task=dict(task))
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def trial_run(task: dict[str, Any]) -> dict[str, Any]:
    """Plan, unless the task brings settings, and run."""
    import torch

    from sd_lowvram import Settings, attached, plan
    from sd_lowvram.devices.this_machine import rates_of

    from .models import demo_pipeline, random_pipeline

    pipe = demo_pipeline() if task["model"] == "demo" else random_pipeline(task["model"], torch.device("cpu"))
    if "settings" in task:
        with attached(pipe, Settings(**task["settings"]), device="cpu"):
            return {"measured": _measured(pipe, task)}
    rates_of(torch.device("cpu"), recalibrate=True)  # what else the machine does changes from run to run
    sizes: dict[str, Any] = {"width": task["size"], "height": task["size"], "steps": task["steps"]}
    chosen = plan(pipe, vram=f"{task['budget']} b", ram=f"{_PLENTY} b", device="cpu", **sizes)
    planned = {"planned": _described(Candidate(chosen.settings, chosen.stages, 0, chosen.settings))}
    if task.get("survey"):
        facts = {"threads": torch.get_num_threads(), "torch": torch.__version__}
        return {"minimum_peak_bytes": chosen.minimum_peak_bytes, **planned, **facts}
    with attached(pipe, chosen.settings, device="cpu"):
        measured = _measured(pipe, task)
    return {**planned, "measured": measured, "rival": chosen.next_faster and _described(chosen.next_faster)}


def _described(candidate: Candidate) -> dict[str, Any]:
    kept = ("name", "component", "peak_bytes", "held_bytes", "seconds")
    return {
        "settings": {name: value for name, _, value in candidate.settings.decided()},
        "peak_bytes": candidate.peak_bytes,
        "held_bytes": max(stage.held_bytes for stage in candidate.stages),
        "seconds": candidate.seconds,
        "stages": [{name: getattr(stage, name) for name in kept} for stage in candidate.stages],
    }


def _measured(pipe: Any, task: dict[str, Any]) -> dict[str, Any]:
    """The allocator's peaks stage by stage, and the seconds of the processor and of the wall."""
    from sd_lowvram.planning.memory_profile import measured

    if task["apart"]:
        _paint(pipe, {**task, "steps": 1})  # kernels are made at their first call
    times = [_timed(pipe, task) for _ in range(3 if task["apart"] else 0)]
    with measured(pipe) as run:
        watched = _timed(pipe, task)
    processor, wall = min(times, default=watched)
    stages = [dataclasses.asdict(stage) | {"curve": None} for stage in run.stages]
    return {"held_bytes": run.peak_bytes, "seconds": processor, "wall_seconds": wall, "stages": stages}


def _timed(pipe: Any, task: dict[str, Any]) -> tuple[float, float]:
    """Seconds of computation (all threads' over their number) and of the wall."""
    import torch

    processor, wall = time.process_time(), time.perf_counter()
    _paint(pipe, task)
    return (time.process_time() - processor) / torch.get_num_threads(), time.perf_counter() - wall


def _paint(pipe: Any, task: dict[str, Any]) -> None:
    import torch

    pipe(
        "a red apple", width=task["size"], height=task["size"], num_inference_steps=task["steps"],
        generator=torch.Generator().manual_seed(0), output_type="pt",
    )  # fmt: skip


def device_bytes(planned: Mapping[str, Any], measured: Mapping[str, Any]) -> int:
    """Bytes of a run on the device: all measured bytes less the planned host bytes."""
    hosts = {(s["name"], s["component"]): s["held_bytes"] - s["peak_bytes"] for s in planned["stages"]}
    most: int = max(s["peak_bytes"] - hosts.get((s["name"], s["component"]), 0) for s in measured["stages"])
    return most


def verdict(row: Mapping[str, Any]) -> str:
    """Verdict on the rejected rival of a plan; "" if there is none."""
    rival = row["rival"]
    if not rival:
        return ""
    if device_bytes(rival, rival["measured"]) > row["budget"]:
        return "exceeds the budget"
    return "slower" if rival["measured"]["seconds"] > row["measured"]["seconds"] else "MISS: fits and is faster"


def cases(report: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The models of a report, and what was measured of each."""
    return [(model, report[model]) for model in CASES if model in report]


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """All cases as Markdown."""
    yield "# Plans against runs, on a CPU"
    yield ""
    yield (
        "Each run in a process of its own; no GPU was at hand. *Held* is "
        "the most that torch's allocator saw, device and host memory together, and what the plan predicted of it. "
        "Seconds are those of the processor over the threads, so that other programs do not count; planned ones from "
        "a calibration just before. The rival is the next faster candidate that the search rejected; what it held on "
        "the device is what it held less what was planned to wait in host memory. Misses are marked: bytes off by "
        f"more than {PEAK_TOLERANCE:.0%}, times off by more than a factor of {TIME_TOLERANCE}."
    )
    for model, case in cases(report):
        yield from ("", f"## {model}, {case['size']}x{case['size']}, {case['steps']} steps", "")
        yield f"torch {case['torch']}, {case['threads']} threads, float32, guidance."
        yield ""
        yield from table(("budget", "chosen", *_HEADS), (_cells(row["budget"], row) for row in case["rows"]))
        yield ""
        turned_down = (_rival_cells(row) for row in case["rows"] if row["rival"])
        yield from table(("budget", "rival", *_HEADS, "on device", "verdict"), turned_down)
    yield ""
    yield "Sizes in MiB."


_HEADS = ("planned held", "measured", "off", "planned s", "measured s", "off")


def _cells(budget: int, row: Mapping[str, Any]) -> list[str]:
    planned, measured = row["planned"], row["measured"]
    off = measured["held_bytes"] / planned["held_bytes"] - 1
    times = measured["seconds"] / planned["seconds"]
    miss = "" if abs(off) <= PEAK_TOLERANCE else " MISS"
    late = "" if 1 / TIME_TOLERANCE <= times <= TIME_TOLERANCE else " MISS"
    held = [f"{one['held_bytes'] / MIB:.1f}" for one in (planned, measured)]
    seconds = [f"{one['seconds']:.2f}" for one in (planned, measured)]
    words = _words(planned["settings"])
    return [f"{budget / MIB:.1f}", words, *held, f"{off:+.1%}{miss}", *seconds, f"x {times:.2f}{late}"]


def _rival_cells(row: Mapping[str, Any]) -> list[str]:
    rival = row["rival"]
    held = device_bytes(rival, rival["measured"]) / MIB
    return [*_cells(row["budget"], {"planned": rival, "measured": rival["measured"]}), f"{held:.1f}", verdict(row)]


def _words(settings: Mapping[str, Any]) -> str:
    plain = {"attention": "sdpa", "inference_mode": True, "vae_tiles": "off", "offload": "none"}
    changed = [f"{name}={value}" for name, value in settings.items() if plain.get(name) != value]
    return ", ".join(changed) or "nothing changed"
