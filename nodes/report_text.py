"""Plans and runs as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..sd_lowvram.planning.plan import Plan, StagePlan
from ..sd_lowvram.units import GIB, MIB, format_size, format_time
from . import host
from .node_request import PlanRecord, attachable

_PARTS = {"denoise": ("UNet", "a step"), "decode": ("VAE", "the decode"), "encode": ("VAE", "the encode")}


def verdict(record: PlanRecord, *stages: str) -> str:
    """What a person wants to know first: whether it fits, and how long it takes; then what the budget counts, and what
    there is beside it.

    Args:
        stages: those that are told of; none: all of the record.
    """
    plans = {name: plan for name, plan in record.plans.items() if not stages or name in stages}
    name = max(plans, key=lambda name: _needed_bytes(plans[name], name))
    plan, whole = plans[name], host.loading(plans[name].request.device).whole
    first = f"{_of(_needed_bytes(plan, name), plan.request.vram)}, {_duration(plans)}"
    if _fits(plan, name):
        first = f"fits: {first}"
    else:
        first = f"above the budget: {first}, with the settings that take least"
        first += ". ComfyUI keeps all weights loaded on this device" if whole else ""
    return "\n".join([first, *_accounts(record, stage_of(plan, name), plan.request.device.type == "cpu", whole)])


def warn_above(record: PlanRecord, stage: str) -> None:
    """Say that the plan of ``stage`` is above its budget, where it is: the host keeps weights whatever is asked."""
    plan = record.plans[stage]
    if not _fits(plan, stage):
        record.warn(f"{stage} {plan.request.width}x{plan.request.height} is {verdict(record, stage)}")


def _needed_bytes(plan: Plan, name: str) -> int:
    return stage_of(plan, name).reserved_bytes + plan.predicted.overhead_bytes


def _fits(plan: Plan, name: str) -> bool:
    return _needed_bytes(plan, name) <= plan.request.vram


def _accounts(record: PlanRecord, stage: StagePlan, on_cpu: bool, whole: bool) -> Iterator[str]:
    """What the budget counts of ``stage``, and what else there is."""
    part, work = _PARTS[stage.name]
    yield f"counted: {part} {format_size(stage.weights_bytes)}, {work} {format_size(stage.activation_bytes)}"
    if host.loads_freely():
        yield "not bounded: ComfyUI's dynamic VRAM keeps weights wherever there is room, whatever the budget"
    others = host.others_beside(record.model_of(stage.name))
    told = [f"{kind} {format_size(size)}" for kind, size in others.items()]
    if told:
        does = "keeps loaded" if whole else "unloads where it needs room"
        yield f"not counted: {', '.join(told)}, which ComfyUI {does}"
    if on_cpu and stage.host_bytes:
        yield f"not counted: {format_size(stage.host_bytes)} that are parked, in the same memory on a CPU"


def _of(part: int, whole: int) -> str:
    """ "3.3 of 4 GiB"."""
    step, unit = (GIB, "GiB") if whole >= GIB else (MIB, "MiB")
    return f"{_number(part / step)} of {_number(whole / step)} {unit}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0") if value < 100 else f"{value:.0f}"


def _duration(plans: Mapping[str, Plan]) -> str:
    """Of one step where the UNet is alone, else of all stages."""
    seconds = sum(stage_of(plan, name).seconds for name, plan in plans.items())
    if "denoise" not in plans:
        return f"about {format_time(seconds)}"
    steps = plans["denoise"].request.steps
    if len(plans) == 1:
        return f"about {format_time(seconds / steps)} a step"
    return f"about {format_time(seconds)} for {steps} steps"


def report_text(record: PlanRecord) -> str:
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


def measured_peaks(record: PlanRecord) -> dict[str, int]:
    """The most that each stage held, of those that have run."""
    return {name: max(one.peak_bytes for one in stages) for name, stages in record.measured.items() if stages}


def stage_of(plan: Plan, name: str) -> StagePlan:
    return next(stage for stage in plan.stages if stage.name == name)


def _choices(plan: Plan, name: str) -> str:
    attached = {knob: value for knob, _, value in attachable(plan.settings).of_stage(name).decided()}
    decided = {**attached, **stage_of(plan, name).choice}
    return ", ".join(f"{knob} {value}" for knob, value in decided.items() if value is not None) or "as it is"
