"""Plans and runs as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..sd_lowvram.planning.memory_profile import budget_passed
from ..sd_lowvram.planning.plan import Plan, StagePlan
from ..sd_lowvram.settings import knobs
from ..sd_lowvram.units import GIB, MIB, format_size, format_time
from . import host
from .loading import non_weight_bytes
from .node_request import PlanRecord, attachable

_PARTS = {"denoise": ("model", "a step"), "decode": ("VAE", "decoding"), "encode": ("VAE", "encoding")}


def verdict(record: PlanRecord, *stages: str) -> str:
    """The verdict: fits or not, and the time; then the bytes that the budget counts, and the ones that it does not.

    Args:
        stages: names of the stages in the verdict; empty: all of the record.
    """
    plans = {name: plan for name, plan in record.plans.items() if not stages or name in stages}
    standing = [] if stages else record.standing
    if not plans or (record.untold and not stages):
        return "\n".join([record.untold, *standing])
    name = max(plans, key=lambda name: needed_bytes(plans[name], name))
    plan, whole = plans[name], host.loading(plans[name].request.device).whole
    duration = _duration(plans, record.steps, seconds_a_step(record))
    needed, free = needed_bytes(plan, name), host.budget("", plan.request.device)
    first = f"{_share_text(needed, plan.request.vram)}, {duration}"
    if fits(plan, name):
        stated = bool(record.budgets.get(name)) and free < plan.request.vram
        first = f"{'more than is free' if stated and free < needed else 'fits'}: {first}"
        first += f". Only {format_size(free)} are free" if stated else ""
    else:
        first = f"above the budget: {first}, with the settings that need least"
        first += ". ComfyUI keeps all weights loaded on this device" if whole else ""
    accounts = _accounts(record, stage_of(plan, name), plan.request.device.type == "cpu", whole)
    return "\n".join([first, *accounts, *standing])


def warn_above(record: PlanRecord, stage: str) -> None:
    """Warn if the plan of ``stage`` is above its budget: the host keeps weights whatever is requested."""
    plan = record.plans[stage]
    if not fits(plan, stage):
        record.warn(f"{stage} {plan.request.width}x{plan.request.height} is {verdict(record, stage)}")


def needed_bytes(plan: Plan, name: str) -> int:
    """Bytes of VRAM that a stage needs, with the driver's overhead."""
    return stage_of(plan, name).reserved_bytes + plan.predicted.overhead_bytes


def room_for_weights(plan: Plan, name: str) -> int:
    """Bytes that the budget leaves for weights after all else that a stage needs."""
    return plan.request.vram - plan.predicted.overhead_bytes - non_weight_bytes(stage_of(plan, name))


def fits(plan: Plan, name: str) -> bool:
    """True if a stage is within the budget."""
    return needed_bytes(plan, name) <= plan.request.vram


def _accounts(record: PlanRecord, stage: StagePlan, on_cpu: bool, whole: bool) -> Iterator[str]:
    """Lines on the bytes of ``stage`` that the budget counts, and on the rest."""
    part, work = _PARTS[stage.name]
    sizes = f"{part} {format_size(stage.weights_bytes)}, intermediate results {format_size(stage.activation_bytes)}"
    yield f"largest moment: {work} ({sizes})"
    passing = stage.host_bytes - stage.parked_bytes
    if not on_cpu and host.loads_freely() and passing:
        yield f"limited: dynamic VRAM copies in the remaining {format_size(passing)} of the {part} for {work}"
    loaded = host.other_model_bytes(record.model_of(stage.name))
    if loaded:
        does = "does not unload them on this device" if whole else "unloads them when it needs memory"
        shown = ", ".join(f"{kind} {format_size(size)}" for kind, size in loaded.items())
        yield f"also loaded: {shown}; ComfyUI {does}"
    if on_cpu and stage.host_bytes:
        yield f"also needed: {format_size(stage.host_bytes)} for parked results, in the same memory on a CPU"


def _share_text(part: int, whole: int) -> str:
    """ "3.3 of 4 GiB"."""
    step, unit = (GIB, "GiB") if whole >= GIB else (MIB, "MiB")
    if part < step / 10:
        return f"{format_size(part)} of {_number(whole / step)} {unit}"
    return f"{_number(part / step)} of {_number(whole / step)} {unit}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0") if value < 100 else f"{value:.0f}"


def _duration(plans: Mapping[str, Plan], steps: int, a_step: float) -> str:
    """Time of one step until the step count is known, then of the whole run."""
    if "denoise" not in plans:
        return f"about {format_time(sum(stage_of(plan, name).seconds for name, plan in plans.items()))}"
    if not steps:
        return f"about {format_time(a_step)} a step"
    decode = stage_of(plans["decode"], "decode").seconds if "decode" in plans else 0.0
    parts = f"{steps} steps of {format_time(a_step)}" + (f", decode {format_time(decode)}" if "decode" in plans else "")
    return f"about {format_time(steps * a_step + decode)} ({parts})"


def seconds_a_step(record: PlanRecord) -> float:
    """Predicted seconds of a sampler step; 0 without a prediction."""
    return record.calls * _seconds_a_call(record)


def _seconds_a_call(record: PlanRecord) -> float:
    plan = record.plans.get("denoise")
    return 0.0 if plan is None else stage_of(plan, "denoise").seconds / plan.request.steps


def measured_step(record: PlanRecord) -> float | None:
    """Seconds of a step in the latest sampling; of one that has no other, the first, with which a model warms up."""
    steps = record.step_seconds[1:] or record.step_seconds
    return sum(steps) / len(steps) if steps else None


def run_line(record: PlanRecord, calls: int) -> str:
    """A sampling in one line."""
    plan = record.plans["denoise"]
    took = measured_step(record)
    seconds = "" if took is None else f" of {format_time(took)} ({format_time(seconds_a_step(record))} predicted)"
    return (
        f"{_sampling_size(record)}, {calls} calls of the model, {len(record.step_seconds)} steps"
        f"{seconds}, planned {_share_text(needed_bytes(plan, 'denoise'), plan.request.vram)}"
    )


def _sampling_size(record: PlanRecord) -> str:
    """The size of the picture, and of the pieces of it with which the model is called, where it is called so."""
    plans = record.plans
    planned = (plans["denoise"] if "denoise" in plans else next(iter(plans.values()))).request
    piece = planned.width, planned.height, planned.frames
    width, height, frames = record.size or piece
    whole = f"{width}x{height}"
    if piece[:2] != (width, height):
        whole += f" in pieces of {piece[0]}x{piece[1]}"
    return whole if piece[2] == frames else f"{whole}, {frames} frames in windows of {piece[2]}"


def report_text(record: PlanRecord) -> str:
    """The record as a sentence, a table and notes; behind an empty line, which the page folds, the details.

    The table has a row for each stage: the most memory and the time, predicted and measured, and the weights loaded.
    """
    if not record.plans:
        return "\n".join([verdict(record), *record.notes])
    sentence, *details = verdict(record).splitlines()
    peaks = measured_peaks(record)
    table = [_columns("", "predicted", "measured", ""), *(_row(record, name, peaks.get(name)) for name in record.plans)]
    return "\n".join([sentence, "", *table, *record.notes, "", *details, *_details(record, peaks)])


def _details(record: PlanRecord, peaks: Mapping[str, int]) -> Iterator[str]:
    request = next(iter(record.plans.values())).request
    yield f"{_sampling_size(record)}, batch {request.batch}, budget {format_size(request.vram)}"
    if record.step_seconds:
        predicted = sum(record.step_calls) * _seconds_a_call(record)
        whole = f"{format_time(sum(record.step_seconds))} measured, {format_time(predicted)} predicted"
        first = f", the first {format_time(record.step_seconds[0])}" if len(record.step_seconds) > 1 else ""
        yield f"{len(record.step_seconds)} steps ran: {whole}{first}"
    yield from _reserved_lines(record)
    if peaks and request.device.type == "cpu":
        both = (f"{name} {format_size(stage_of(plan, name).held_bytes)}" for name, plan in record.plans.items())
        yield f"on a CPU, VRAM and RAM are the same memory, measured together: planned {', '.join(both)}"
    for name, plan in record.plans.items():
        stage = stage_of(plan, name)
        planned = f"{format_size(stage.weights_bytes)} of weights in VRAM, {format_size(stage.host_bytes)} in RAM"
        yield f"planned for {name}: {planned}"
        yield f"{name}: {_choices(plan, name)}"
    for name, bound in record.bounds.items():
        loaded = format_size(record.kept.get(name, 0))
        yield f"{name}: dynamic VRAM was limited to {format_size(bound)} of weights and loaded {loaded}"
    if record.sites:
        yield "sites: " + ", ".join(f"{name} {count}" for name, count in sorted(record.sites.items()))


def _row(record: PlanRecord, name: str, peak: int | None) -> str:
    """The figures of a stage, or of one of its steps."""
    stage = stage_of(record.plans[name], name)
    row, predicted, took = name, stage.seconds, record.seconds.get(name)
    if name == "denoise":
        row, predicted, took = "a step", seconds_a_step(record), measured_step(record)
    loaded = record.kept.get(name)
    note = "" if loaded is None else f"{format_size(loaded)} weights loaded"
    return _columns(row, _figures(stage.peak_bytes, predicted), _figures(peak, took), note)


def _columns(row: str, predicted: str, measured: str, note: str) -> str:
    return f"{row:<8}{predicted:<18}{measured:<18}{note}".rstrip()


def _figures(size: int | None, seconds: float | None) -> str:
    """ "3.2 GiB, 1.25 s", of what is known."""
    known = [*([] if size is None else [format_size(size)]), *([] if seconds is None else [f"{_seconds(seconds)} s"])]
    return ", ".join(known) or "-"


def _reserved_lines(record: PlanRecord) -> Iterator[str]:
    """A line for each stage whose reserved bytes were measured, next to its budget."""
    for name, stages in record.measured.items():
        reserved = max((stage.reserved_bytes for stage in stages), default=0)
        plan = record.plans.get(name)
        if not reserved or plan is None:
            continue
        whole = reserved + record.paged.get(name, 0)
        held, budget = format_size(whole + plan.predicted.overhead_bytes), format_size(plan.request.vram)
        yield f"{name}: {held} reserved with the driver's share, by all models of this process; budget {budget}"
        if (passed := budget_passed(whole, plan)) is not None:
            yield f"{name}: {passed}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


def measured_peaks(record: PlanRecord) -> dict[str, int]:
    """The most that each stage held, of those that have run, with the weights that torch's allocator does not see."""
    peaks = {name: max(stage.peak_bytes for stage in stages) for name, stages in record.measured.items() if stages}
    return {name: peak + record.paged.get(name, 0) for name, peak in peaks.items()}


def stage_of(plan: Plan, name: str) -> StagePlan:
    """The stage ``name`` of a plan."""
    return next(stage for stage in plan.stages if stage.name == name)


def _choices(plan: Plan, name: str) -> str:
    attached = {knob: value for knob, _, value in attachable(plan.settings).of_stage(name).decided()}
    decided = {**attached, **stage_of(plan, name).choice}
    named = (f"{knobs()[name].label}: {_value_text(value)}" for name, value in decided.items() if value is not None)
    return ", ".join(named) or "unchanged"


def _value_text(value: Any) -> str:
    return "on" if value is True else "off" if value is False else str(value)
