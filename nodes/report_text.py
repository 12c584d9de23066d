"""Plans and runs as lines for people."""

from __future__ import annotations

from ..sd_lowvram.planning.plan import Plan, StagePlan
from ..sd_lowvram.units import GIB, MIB, format_size, format_time
from .node_request import Record, attachable


def verdict(record: Record) -> str:
    """What a person wants to know first: whether it fits, and how long it takes."""
    plans = record.plans
    peak = max(plan.predicted.reserved_bytes + plan.predicted.overhead_bytes for plan in plans.values())
    budget = max(plan.request.vram for plan in plans.values())
    takes = f"{_of(peak, budget)}, {_duration(record)}"
    if peak <= budget:
        return f"fits: {takes}"
    return f"above the budget: {takes}. ComfyUI keeps all weights loaded on this device"


def _of(part: int, whole: int) -> str:
    """ "3.3 of 4 GiB"."""
    step, unit = (GIB, "GiB") if whole >= GIB else (MIB, "MiB")
    return f"{_number(part / step)} of {_number(whole / step)} {unit}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0") if value < 100 else f"{value:.0f}"


def _duration(record: Record) -> str:
    """Of all stages where there is a VAE, else of one step."""
    steps = record.plans["denoise"].request.steps
    if len(record.plans) == 1:
        return f"about {format_time(stage_of(record.plans['denoise'], 'denoise').seconds / steps)} a step"
    seconds = sum(stage_of(plan, name).seconds for name, plan in record.plans.items())
    return f"about {format_time(seconds)} for {steps} steps"


def report_text(record: Record) -> str:
    """The record as lines: the verdict, a table of the stages, and what was chosen for each."""
    request = record.plans["denoise"].request
    lines = [
        verdict(record),
        f"{request.width}x{request.height}, batch {request.batch}, budget {format_size(request.vram)}, "
        f"seconds for {request.steps} steps",
        f"{'stage':<9}{'planned':>10}{'weights':>10}{'host':>10}{'seconds':>9}{'measured':>10}",
    ]
    peaks = measured_peaks(record)
    for name, plan in record.plans.items():
        stage = stage_of(plan, name)
        sizes = (stage.peak_bytes, stage.weights_bytes, stage.host_bytes)
        figures = "".join(f"{format_size(size):>10}" for size in sizes)
        measured = format_size(peaks[name]) if name in peaks else "-"
        lines.append(f"{name:<9}{figures}{stage.seconds:>9.1f}{measured:>10}")
    if peaks and request.device.type == "cpu":
        both = (f"{name} {format_size(stage_of(plan, name).held_bytes)}" for name, plan in record.plans.items())
        lines.append(f"on a CPU device and host are measured together: planned {', '.join(both)}")
    lines += [f"{name}: {_choices(plan, name)}" for name, plan in record.plans.items()]
    if record.sites:
        lines.append("sites: " + ", ".join(f"{name} {count}" for name, count in sorted(record.sites.items())))
    return "\n".join([*lines, *record.notes])


def measured_peaks(record: Record) -> dict[str, int]:
    """The most that each stage held, of those that have run."""
    return {name: max(one.peak_bytes for one in stages) for name, stages in record.measured.items() if stages}


def stage_of(plan: Plan, name: str) -> StagePlan:
    return next(stage for stage in plan.stages if stage.name == name)


def _choices(plan: Plan, name: str) -> str:
    attached = {knob: value for knob, _, value in attachable(plan.settings).of_stage(name).decided()}
    decided = {**attached, **stage_of(plan, name).choice}
    return ", ".join(f"{knob} {value}" for knob, value in decided.items() if value is not None) or "as it is"
