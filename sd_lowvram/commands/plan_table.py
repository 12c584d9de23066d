"""A plan as a table for people, from the plain values that ``plan --json`` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ..units import LONG, format_least, format_size, format_time


def show(console: Console, plan: dict[str, Any]) -> None:
    """Every stage with its peak, time and reason; what the whole needs, and what more memory would buy."""
    request, predicted = plan["request"], plan["predicted"]
    title = f"{request['width']}x{request['height']}, batch {request['batch']}, {request['steps']} steps"
    table = Table("stage", "peak", "weights", "in host memory", "time", title=title)
    for stage in plan["stages"]:
        sizes = (stage["peak_bytes"], stage["weights_bytes"], stage["host_bytes"])
        table.add_row(stage["name"], *map(format_size, sizes), format_time(stage["seconds"]))
    console.print(table)
    for stage in plan["stages"]:
        if stage["choice"] or stage["why"]:
            why = f" ({stage['why']})" if stage["why"] else ""
            console.print(f"{stage['name']}: {_how(stage)}{why}", highlight=False)
    console.print("settings: " + ", ".join(_decided(plan["settings"])), highlight=False)
    more = predicted["reserved_bytes"] - predicted["peak_bytes"] + predicted["overhead_bytes"]
    overhead = f" + {format_size(more)} for the allocator and the driver" if more else ""
    peak = f"peak {format_size(predicted['peak_bytes'])}{overhead} of {format_size(request['vram'])}"
    seconds = predicted["seconds"]
    style = "bold yellow" if seconds >= LONG else None
    console.print(f"{peak}, {format_time(seconds)}, {plan['fidelity']}", highlight=False, style=style)
    for reason in plan["reasons"][1:]:
        console.print(reason, highlight=False, style="bold yellow" if reason.startswith("slow") else None)
    console.print(
        f"the smallest budget that works is about {format_least(plan['minimum_vram_bytes'])}, with "
        f"{format_least(plan['minimum_ram_bytes'])} in host memory",
        highlight=False,
    )
    console.print(f"rates: {plan['rates']}", style="dim", highlight=False)


def show_sizes(console: Console, plans: dict[str, Any]) -> None:
    """The largest size of every ratio."""
    some = next(plan for plan in plans.values() if plan)
    table = Table(
        "", "largest size", "peak", "in host memory", "time", title=f"in {format_size(some['request']['vram'])}"
    )
    for name, plan in plans.items():
        if plan is None:
            table.add_row(name, "none fits", "", "", "")
            continue
        request, predicted = plan["request"], plan["predicted"]
        size = f"{request['width']}x{request['height']}"
        needed = format_size(predicted["peak_bytes"] + predicted["overhead_bytes"])
        table.add_row(name, size, needed, format_size(predicted["host_bytes"]), format_time(predicted["seconds"]))
    console.print(table)
    console.print(f"peaks with the driver's share; {some['request']['steps']} steps", highlight=False)
    console.print(f"rates: {some['rates']}", style="dim", highlight=False)


def _how(stage: dict[str, Any]) -> str:
    chosen = [f"{name} {value}" for name, value in stage["choice"].items() if value not in (False, "off")]
    return ", ".join(chosen) or "plain"


def _decided(settings: dict[str, Any]) -> list[str]:
    return [f"{name} {value}" for name, value in settings.items() if value not in (None, False, "off", "none")]
