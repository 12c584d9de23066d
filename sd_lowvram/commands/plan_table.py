"""A plan as a table for people, from the plain values that ``plan --json`` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ..planning import shown
from ..planning.wording import Kind
from ..units import format_size, format_time


def show(console: Console, plan: dict[str, Any]) -> None:
    """Print whether it fits; every stage with its peak, time and reason; what the whole needs, and what more memory
    would buy."""
    console.print(shown.headline(plan), highlight=False, style="bold")
    table = Table(*shown.HEADS, title=shown.title(plan))
    for row in shown.rows(plan):
        table.add_row(*row)
    console.print(table)
    for line in shown.choices(plan):
        console.print(line, highlight=False)
    console.print(shown.verdict(plan), highlight=False, style="bold yellow" if shown.is_slow(plan) else None)
    for reason in shown.reasons(plan):
        console.print(reason, highlight=False, style="bold yellow" if reason.kind is Kind.SLOW else None)
    if "counted" in plan:
        console.print(f"counted as {plan['counted']}", highlight=False)
    console.print(f"rates: {plan['rates']}", style="dim", highlight=False)


def show_sizes(console: Console, plans: dict[str, Any]) -> None:
    """The largest size of every ratio."""
    some = next(plan for plan in plans.values() if plan)
    table = Table("", "largest size", "needed", "RAM", "time", title=f"in {format_size(some['request']['vram'])}")
    for name, plan in plans.items():
        if plan is None:
            table.add_row(name, "none fits", "", "", "")
            continue
        request, predicted = plan["request"], plan["predicted"]
        size = f"{request['width']}x{request['height']}"
        needed, ram = (format_size(nbytes) for nbytes in (shown.needed_bytes(predicted), predicted["host_bytes"]))
        table.add_row(name, size, needed, ram, format_time(predicted["seconds"]))
    console.print(table)
    console.print(
        f"needed: reserved bytes and the driver's share; for {some['request']['steps']} steps", highlight=False
    )
    if "counted" in some:
        console.print(f"counted as {some['counted']}", highlight=False)
    console.print(f"rates: {some['rates']}", style="dim", highlight=False)
