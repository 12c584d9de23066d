"""A plan for people, from the plain values that ``plan --json`` prints: as lines of text, and as HTML with bars."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from ..knob import Fidelity
from ..units import LONG, format_share, format_size, format_time
from .wording import Kind, Reason, describe_choice, drop_peak

AT_FIRST_CALL = "at first call"
"""Words for a stage that is planned when it is called first."""

HEADS = ("stage", "allocated", "weights", "RAM", "time")

_WEIGHTS, _ACTIVATIONS, _BUDGET = "#4276ad", "#8fb4d9", "#d6384a"
"""Colours that are visible on light and on dark pages."""
_LEAST_ROOM = 0.02
"""Share of the bars' width that stays free to the right of the longest."""


def title(plan: dict[str, Any]) -> str:
    """Return the title: size, batch and steps."""
    request = plan["request"]
    size = "any size" if plan["predicted"] is None else f"{request['width']}x{request['height']}"
    return f"{size}, batch {request['batch']}, {request['steps']} steps"


def rows(plan: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each stage, with the columns of :data:`HEADS`."""
    for stage in plan["stages"]:
        if stage["at_first_call"]:
            yield _label(stage), AT_FIRST_CALL, *[""] * (len(HEADS) - 2)
            continue
        sizes = (stage["peak_bytes"], stage["weights_bytes"], stage["host_bytes"])
        yield _label(stage), *map(format_size, sizes), format_time(stage["seconds"])


def _label(stage: dict[str, Any]) -> str:
    """Name of a stage; of the second and third component that runs it with their number ("text 2")."""
    number = stage["component"].rpartition("_")[2]
    return f"{stage['name']} {number}" if number.isdecimal() else stage["name"]


def headline(plan: dict[str, Any]) -> str:
    """Line that says how much of the budget the picture needs, and how long it takes."""
    predicted = plan["predicted"]
    if predicted is None:
        return verdict(plan)
    share = format_share(needed_bytes(predicted), plan["request"]["vram"])
    return f"fits: {share}, {format_time(predicted['seconds'])}"


def needed_bytes(predicted: dict[str, Any]) -> int:
    """Return the bytes of the budget that are enough: reserved ones and the driver's share."""
    return int(predicted["reserved_bytes"] + predicted["overhead_bytes"])


def peak_of_budget(plan: dict[str, Any]) -> str:
    """Return the most bytes that are allocated, the most that are reserved, and the budget in words."""
    predicted, budget = plan["predicted"], plan["request"]["vram"]
    reserved = most_reserved_bytes(predicted, budget)
    on_gpu = reserved != predicted["peak_bytes"]
    besides = f", at most {format_size(reserved)} reserved with the driver's share," if on_gpu else ""
    return f"{format_size(predicted['peak_bytes'])} allocated{besides} of {format_size(budget)}"


def most_reserved_bytes(predicted: dict[str, Any], budget: int) -> int:
    """Return the most bytes that are reserved, with the driver's share; beyond ``budget`` torch frees what it can."""
    kept = predicted["kept_bytes"] + predicted["overhead_bytes"]
    return max(needed_bytes(predicted), int(min(kept, budget)))


def verdict(plan: dict[str, Any]) -> str:
    """Bytes, time and fidelity in one line."""
    if plan["predicted"] is None:
        return f"planned {AT_FIRST_CALL}, within {format_size(plan['request']['vram'])}"
    picture = f"picture {Fidelity[plan['fidelity'].upper()].words}"
    return f"{peak_of_budget(plan)}, {format_time(plan['predicted']['seconds'])}, {picture}"


def is_slow(plan: dict[str, Any]) -> bool:
    """True if the run takes so long that the plan says why."""
    return plan["predicted"] is not None and bool(plan["predicted"]["seconds"] >= LONG)


def choices(plan: dict[str, Any]) -> Iterator[str]:
    """Sentences on how each stage runs and why it is not faster; then on the whole run."""
    for stage in plan["stages"]:
        if stage["choice"] or stage["why"]:
            yield f"{_label(stage)}: {describe_choice(stage['choice'])}" + (
                f" ({stage['why']})" if stage["why"] else ""
            )
    settings = plan["settings"].items()
    decided = [f"{name} {_word(value)}" for name, value in settings if value not in (None, False, "off", "none")]
    yield f"settings: {', '.join(decided) or 'nothing changed'}"


def _word(value: Any) -> Any:
    return "on" if value is True else value


def reasons(plan: dict[str, Any]) -> list[Reason]:
    """Reasons of the plan in addition to its verdict, which has the peak, and the smallest budget."""
    listed = [Reason(entry["kind"], **entry["values"]) for entry in plan["reason_values"]]
    if plan["predicted"] is None:
        return listed
    least = {"least_vram": plan["minimum_vram_bytes"], "least_ram": plan["minimum_ram_bytes"]}
    return [*drop_peak(listed), Reason(Kind.SMALLEST, **least)]


def text(plan: dict[str, Any]) -> str:
    """Return title, table, verdict and reasons as lines of text."""
    table = [HEADS, *rows(plan)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADS))]
    aligned = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([title(plan), "", *aligned, "", *choices(plan), verdict(plan), *reasons(plan)])


def as_html(plan: dict[str, Any]) -> str:
    """The table with a bar of weights and activations for each stage, the budget a line through them."""
    overhead = (plan["predicted"] or {"overhead_bytes": 0})["overhead_bytes"]
    limit = plan["request"]["vram"] - overhead
    longest = max(stage["peak_bytes"] or 0 for stage in plan["stages"])
    whole = max(longest, limit if limit < 3 * longest else 0) * (1 + _LEAST_ROOM)
    lines = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}<td>{_bar(stage, whole, limit)}</td></tr>"
        for cells, stage in zip(rows(plan), plan["stages"], strict=True)
    )
    heads = "".join(f"<th>{head}</th>" for head in HEADS)
    far = "" if limit < whole else f"; the budget, {format_size(limit)} without the driver's share, is far above"
    key = (
        f"<small><span style='color:{_WEIGHTS}'>&#9632;</span> weights "
        f"<span style='color:{_ACTIVATIONS}'>&#9632;</span> activations "
        f"<span style='color:{_BUDGET}'>|</span> budget{far}</small>"
    )
    sentences = "".join(f"<div>{html.escape(line)}</div>" for line in (*choices(plan), *reasons(plan)))
    return (
        f"<b>{html.escape(title(plan))}: {html.escape(verdict(plan))}</b>"
        f"<table><tr>{heads}<th style='text-align:left'>{key}</th></tr>{lines}</table>{sentences}"
    )


def _bar(stage: dict[str, Any], whole: float, limit: int) -> str:
    if stage["at_first_call"]:
        return ""
    weights = min(stage["weights_bytes"], stage["peak_bytes"])
    parts = ((_WEIGHTS, weights), (_ACTIVATIONS, stage["peak_bytes"] - weights))
    place = f"position:absolute;left:{100 * limit / whole:.1f}%;top:0;bottom:0"
    line = f"<i style='{place};border-left:2px solid {_BUDGET}'></i>"
    filled = "".join(
        f"<i style='display:inline-block;height:100%;width:{100 * size / whole:.1f}%;background:{colour}'></i>"
        for colour, size in parts
    )
    inside = filled + (line if limit < whole else "")
    return f"<div style='position:relative;width:24em;height:1.1em;font-size:1em;line-height:0'>{inside}</div>"
