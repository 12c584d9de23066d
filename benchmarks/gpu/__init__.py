"""``python -m benchmarks gpu``: what only a GPU can show, each part within four minutes and without a network.

Writes ``<out>/<gpu>.json`` with everything that was measured, row by row as it comes, and ``<gpu>.md`` with tables of
it. A call goes on with the rows that lack, as long as the machine and its libraries are the same.
"""

from __future__ import annotations

import datetime
import functools
import json
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sd_lowvram.devices.info import driver_version
from sd_lowvram.devices.this_machine import rates_of
from sd_lowvram.errors import BadInputError, OutputError

from ..tables import commit
from . import attention, correctness, peaks, sizes, streaming, workspaces
from .record import Record

PARTS = {
    "correctness": correctness,
    "attention": attention,
    "workspaces": workspaces,
    "peaks": peaks,
    "streaming": streaming,
    "max-size": sizes,
}
"""In the order in which they are worth the time, if it is short."""
PART_SECONDS = 230.0
"""A part starts nothing that would take it beyond this, and says what it left out."""


def run(
    parts: Sequence[str] = tuple(PARTS),
    out: Path = Path("benchmarks/results"),
    *,
    again: bool = False,
    device: torch.device | None = None,
    seconds: float = PART_SECONDS,
) -> Path:
    """Measure ``parts`` and write the results; returns the path of the Markdown.

    Args:
        again: measure anew what has a row already.
        device: None: the GPU; tests take a CPU.
        seconds: for each part.

    Raises:
        BadInputError: an unknown part, or no GPU.
        OutputError: ``out`` cannot be written to.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise BadInputError(f"there is no part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    device = device or _gpu()
    title = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    place = Path(out) / ("".join(letter if letter.isalnum() else "-" for letter in title.lower()) + ".json")
    results, machine = _before(place), _machine(device, title)
    rates_of(device)  # before trials that run side by side each measure them
    for part in parts:
        before = results.get(part, {})
        if again or not _same(before.get("machine", {}), machine):
            before = {}
        measured = results[part] = {"machine": machine, "spent_seconds": 0.0, "rows": []} | before
        spent, start = measured["spent_seconds"], time.monotonic()
        save = functools.partial(_write, place, results)
        save()
        try:
            PARTS[part].run(device, Record(part, measured["rows"], seconds, save))
        finally:
            measured["spent_seconds"] = spent + time.monotonic() - start
            save()
    return place.with_suffix(".md")


def unmeasured(written: Path) -> int:
    """How many rows lack because the time was too short."""
    parts = _before(written.with_suffix(".json")).values()
    return sum(bool(row.get("timed_out")) for part in parts for row in part["rows"])


def _same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return all(before.get(key) == value for key, value in now.items() if key not in ("date", "commit"))


def _gpu() -> torch.device:
    if not torch.cuda.is_available():
        built = (
            f"torch {torch.__version__} here sees none" if torch.version.cuda else "torch here is built without CUDA"
        )
        raise BadInputError(
            f"this measurement needs a CUDA device, and {built}: run it on a machine with an NVIDIA GPU"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _machine(device: torch.device, title: str) -> dict[str, Any]:
    import diffusers

    from sd_lowvram import __version__

    found = {
        "name": title,
        "sd-lowvram": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "diffusers": diffusers.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"memory_bytes": properties.total_memory, "driver": driver_version()}
    return found


def _before(place: Path) -> dict[str, Any]:
    try:
        results = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    sound = isinstance(results, dict) and all("rows" in part for part in results.values())
    return results if sound else {}


def _write(place: Path, results: dict[str, Any]) -> None:
    text = {".json": json.dumps(results, indent=1) + "\n", ".md": "\n".join(lines(results)) + "\n"}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        for suffix, content in text.items():
            unfinished = place.with_suffix(suffix + ".tmp")
            unfinished.write_text(content, encoding="utf-8")
            unfinished.replace(place.with_suffix(suffix))
    except OSError as error:
        raise OutputError(f"{place} cannot be written: {error}") from error


def lines(results: dict[str, Any]) -> Iterator[str]:
    """The results as Markdown."""
    yield from ("# Measured on a GPU", "")
    for part in (part for part in PARTS if part in results):
        machine = results[part]["machine"]
        facts = [machine["name"], f"torch {machine['torch']}", f"diffusers {machine['diffusers']}", machine["date"]]
        facts += [f"commit {machine['commit']}"] if "commit" in machine else []
        if machine.get("driver"):
            facts.insert(1, f"driver {machine['driver']}")
        yield from PARTS[part].lines(results[part])
        yield from ("", f"{', '.join(facts)}; the part took {results[part]['spent_seconds']:.0f} s.", "")
