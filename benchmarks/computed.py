"""``tables``: tables that are computed, not measured, each by its command of ``python -m benchmarks``."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sd_lowvram.files import write_json

from .commands.options import run_command
from .tables import commit, commit_words, is_recorded

_REACHED = ("consciencia-modified", "basujindal-turbo", "basujindal", "consciencia-turbo", "compvis", "ours")
_STREAMED = ["gtx1650", "rtx2070", "rtx3050-laptop", "rtx3060", "rtx4060", "rtx4090", "t4", "a10g", "h100", "h200"]

TABLES = {
    "plans": "plans",
    "cards": "cards",
    "cards_sdxl": "cards --model sdxl",
    "h100_steps": "h100-steps",
    "todays_models": "todays-models",
    "todays_models_laptop": "todays-models --gpu rtx3050-laptop --vram 4GB --ram 16GB",
    "published": "published",
    "schedule": "schedule" + "".join(f" --gpu {card}" for card in _STREAMED),
    "todays_memory": "todays-memory",
    "largest_rtx2070": "max-size" + "".join(f" --policy {name}" for name in _REACHED) + " --gpu rtx2070",
}
"""Commands by the table's name in ``benchmarks/``, those of a few minutes first."""
_BEGUN = "begun"
"""Folder, next to the tables, of what is not whole yet."""


def make(names: Sequence[str], folder: Path, seconds: float, program: Any) -> Iterator[str]:
    """Compute the tables ``names`` anew in ``folder``; yield a line on each, before it is begun or where it is left.

    A table replaces the one that is there when it is whole. A table of this commit is left as it is, and the rows of an
    interrupted one stay if they are of this commit.

    Args:
        names: empty: all that are done within ``seconds``, by the time that each took before.
        program: the typer group of the commands.
    """
    start, now = time.monotonic(), commit()
    if not is_recorded(now):
        yield f"{commit_words({'commit': now})}: the tables will say so; commit first"
    for number, name in enumerate(names or TABLES, 1):
        place = f"{name}, {number} of {len(names or TABLES)}"
        made = _made(folder / f"{name}.json")
        if made.get("commit") == now and is_recorded(now):
            yield f"{place}: is of commit {now}"
        elif not names and time.monotonic() - start + made.get("seconds", 0) > seconds:
            yield f"{place}: stays of {made.get('date')}, as time is short; name it, or call again"
        else:
            yield f"{place}: python -m benchmarks {TABLES[name]}"
            _compute(name, folder, made.get("seconds", 0), program)


def _compute(name: str, folder: Path, seconds: int, program: Any) -> None:
    """Compute one of ``TABLES``, which took so many ``seconds`` before."""
    begun = folder / _BEGUN / f"{name}.md"
    begun.parent.mkdir(exist_ok=True)
    now = commit()
    resumed = _made(begun.with_suffix(".json")).get("commit") == now and is_recorded(now)
    if not resumed:
        begun.with_suffix(".json").unlink(missing_ok=True)
    start = time.monotonic()
    report = run_command(program, TABLES[name], begun)
    took = round(time.monotonic() - start)
    report["made"]["seconds"] = max(took, seconds) if resumed else took
    write_json(report, begun.with_suffix(".json"))
    for suffix in (".json", ".md"):
        shutil.move(begun.with_suffix(suffix), folder / f"{name}{suffix}")
    if not any(begun.parent.iterdir()):
        begun.parent.rmdir()


def _made(file: Path) -> dict[str, Any]:
    """The origin of a table; empty where there is none."""
    made: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")).get("made", {}) if file.is_file() else {}
    return made
