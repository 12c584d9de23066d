"""``sd-lowvram bench gpu``: what only a GPU can show, each part within five minutes and without a network.

Writes ``<out>/<gpu>.json`` with everything that was measured, and ``<gpu>.md`` with tables of it; parts that are run
later are added to what is there.
"""

from __future__ import annotations

import datetime
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...devices.info import driver_version
from ...errors import BadInputError, OutputError
from . import attention, peaks, sizes, streaming

PARTS = {"peaks": peaks, "streaming": streaming, "max-size": sizes, "attention": attention}
PART_SECONDS = 285.0
"""A part starts nothing that would take it beyond this, and says what it left out."""


def run(
    parts: Sequence[str] = tuple(PARTS),
    out: Path = Path("benchmarks/results"),
    *,
    device: torch.device | None = None,
    seconds: float = PART_SECONDS,
) -> Path:
    """Measure ``parts`` and write the results; returns the path of the Markdown.

    Args:
        device: None: the GPU; tests take a CPU.

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
    results = _before(place)
    _write(place, results)
    for part in parts:
        deadline = time.monotonic() + seconds
        measured = PARTS[part].run(device, lambda end=deadline: end - time.monotonic())
        spent = seconds - (deadline - time.monotonic())
        results[part] = {"machine": _machine(device, title), "spent_seconds": spent} | measured
        _write(place, results)
    return place.with_suffix(".md")


def _gpu() -> torch.device:
    if not torch.cuda.is_available():
        built = (
            f"torch {torch.__version__} here sees none" if torch.version.cuda else "torch here is built without CUDA"
        )
        raise BadInputError(f"bench gpu needs a CUDA device, and {built}: run it on a machine with an NVIDIA GPU")
    return torch.device("cuda", torch.cuda.current_device())


def _machine(device: torch.device, title: str) -> dict[str, Any]:
    import diffusers

    found = {
        "name": title,
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
    return results if isinstance(results, dict) else {}


def _write(place: Path, results: dict[str, Any]) -> None:
    text = {".json": json.dumps(results, indent=1) + "\n", ".md": "\n".join(_lines(results)) + "\n"}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        for suffix, content in text.items():
            unfinished = place.with_suffix(suffix + ".tmp")
            unfinished.write_text(content, encoding="utf-8")
            unfinished.replace(place.with_suffix(suffix))
    except OSError as error:
        raise OutputError(f"{place} cannot be written: {error}") from error


def _lines(results: dict[str, Any]) -> list[str]:
    found = [part for part in PARTS if part in results]
    lines = ["# Measured on a GPU", ""]
    for part in found:
        machine = results[part]["machine"]
        facts = [machine["name"], f"torch {machine['torch']}", f"diffusers {machine['diffusers']}", machine["date"]]
        if machine.get("driver"):
            facts.insert(1, f"driver {machine['driver']}")
        lines += PARTS[part].lines(results[part])
        lines += ["", f"{', '.join(facts)}; the part took {results[part]['spent_seconds']:.0f} s.", ""]
    return lines
