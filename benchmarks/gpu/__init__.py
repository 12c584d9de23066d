"""``python -m benchmarks gpu``: what only a GPU can show, each part within nine minutes and without a network.

Writes ``<out>/<gpu>.json`` with everything that was measured, row by row as it comes, and ``<gpu>.md`` with a summary
and tables of it. A call goes on with the rows that lack or have failed, as long as the machine and its libraries are
the same. Rows of another commit are measured anew, and stay until then.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import itertools
import json
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sd_lowvram.devices.info import driver_version
from sd_lowvram.devices.this_machine import rates_of
from sd_lowvram.errors import BadInputError, OutputError

from ..tables import commit, commit_words
from . import (
    attention,
    calibration,
    correctness,
    decodes,
    drawn,
    kernels,
    peaks,
    peers,
    sizes,
    streaming,
    suite,
    todays,
    workspaces,
)
from .record import ResultRows


class GpuPart(NamedTuple):
    """A part of the measurement.

    Attributes:
        module: module with ``run``, and ``lines`` and ``summary`` of the results.
        seconds: time limit; nothing is started that would exceed it, and omissions are listed.
    """

    module: Any
    seconds: float


PARTS = {
    "tests": GpuPart(suite, 270.0),
    "calibration": GpuPart(calibration, 270.0),
    "workspaces": GpuPart(workspaces, 90.0),
    "peaks": GpuPart(peaks, 450.0),
    "kernels": GpuPart(kernels, 540.0),
    "correctness": GpuPart(correctness, 150.0),
    "attention": GpuPart(attention, 390.0),
    "streaming": GpuPart(streaming, 540.0),
    "todays": GpuPart(todays, 270.0),
    "decodes": GpuPart(decodes, 60.0),
    "peers": GpuPart(peers, 180.0),
    "drawn": GpuPart(drawn, 240.0),
    "max-size": GpuPart(sizes, 540.0),
}
"""Parts in the order of their dependencies, then of their value if time is short: 67 minutes in all. Neighbours
share commands of nine minutes, as docs/gpu.md says."""


def run(
    parts: Sequence[str] = tuple(PARTS),
    out: Path = Path("benchmarks/results"),
    *,
    again: bool = False,
    device: torch.device | None = None,
    seconds: float | None = None,
) -> Path:
    """Measure ``parts`` and write the results; returns the path of the Markdown.

    Args:
        again: measure anew what has a row already.
        device: None: the GPU; tests take a CPU.
        seconds: for each part; None: its own.

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
    for part in parts:
        before = results.get(part, {})
        if again or not _same(before.get("machine", {}), machine):
            before = {}
        rows = [_with_commit(row, before["machine"]) for row in before.get("rows", ()) if not _is_tried_again(row)]
        measured = results[part] = {"spent_seconds": 0.0} | before | {"machine": machine, "rows": rows}
        _prepare(part, results, device)
        clock = PARTS[part].seconds if seconds is None else seconds
        spent, start = measured["spent_seconds"], time.monotonic()
        save = functools.partial(_write, place, results)
        save()
        record = ResultRows(rows, clock, save, machine["commit"], place.parent)
        try:
            PARTS[part].module.run(device, record)
            record.drop_earlier()
        finally:
            measured["spent_seconds"] = spent + time.monotonic() - start
            save()
    return place.with_suffix(".md")


def _with_commit(row: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """The row with its commit, which older files name for the whole part."""
    return row if "commit" in row else row | {"commit": machine.get("commit", "")}


def _is_tried_again(row: dict[str, Any]) -> bool:
    """True for rows that failed, except for want of memory, and for test files with failures."""
    return _broke(row) or (isinstance(failed := row.get("failed"), int) and failed > 0)


def _broke(row: dict[str, Any]) -> bool:
    return isinstance(row.get("error"), str) and not row.get("out_of_memory")


def _prepare(part: str, results: dict[str, Any], device: torch.device) -> None:
    """Load known facts on the device, before parallel trials would each measure them."""
    if part not in ("tests", "calibration"):
        calibration.recall(results.get("calibration", {}).get("rows", ()), device)
        rates_of(device)


def results_in(written: Path) -> dict[str, Any]:
    """Contents of the JSON file next to ``written``, by part."""
    return _before(written.with_suffix(".json"))


def unmeasured(results: dict[str, Any]) -> int:
    """Number of rows that are missing for want of time."""
    return sum(map(_lacking, results.values()))


def _lacking(part: dict[str, Any]) -> int:
    return sum(bool(row.get("timed_out")) for row in part["rows"])


def failures(results: dict[str, Any]) -> int:
    """Number of failed tests."""
    return sum(row.get("failed", 0) for row in results.get("tests", {}).get("rows", ()))


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
    from sd_lowvram import __version__

    found: dict[str, Any] = {
        "name": title,
        "sd-lowvram": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{package: _version(package) for package in ("diffusers", "transformers", "triton")},
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"memory_bytes": properties.total_memory, "driver": driver_version()}
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
    yield from ("# Measured on a GPU", "", *summary(results), "", *tables(results))


def tables(results: dict[str, Any]) -> Iterator[str]:
    """Tables of all parts that have results."""
    for part in (part for part in PARTS if part in results):
        machine = results[part]["machine"]
        facts = [machine["name"], f"torch {machine['torch']}", f"diffusers {machine['diffusers']}", machine["date"]]
        facts.append(commit_words(machine))
        if machine.get("driver"):
            facts.insert(1, f"driver {machine['driver']}")
        yield from PARTS[part].module.lines(results[part])
        yield from ("", f"{', '.join(facts)}; the part took {results[part]['spent_seconds']:.0f} s.", "")
        yield from (line for sentence in _earlier(results[part]) for line in (f"- {sentence}", ""))


def _earlier(part: dict[str, Any]) -> Iterator[str]:
    """Sentence on the rows of each commit that is not the one of ``part``."""
    now, named = part.get("machine", {}).get("commit"), dict[str, list[str]]()
    for row in part["rows"]:
        if (number := row.get("commit", now)) != now:
            named.setdefault(number, []).append(_name(row))
    for number, names in named.items():
        yield f"measured by {commit_words({'commit': number})}, not anew yet: {'; '.join(names)}"


def _name(row: dict[str, Any]) -> str:
    """Key of a row in words, which ends before the commit; of an older file's row, its first values."""
    key = itertools.takewhile(lambda name: name != "commit", row)
    return ", ".join(str(row[name]) for name in itertools.islice(key, 4) if isinstance(row[name], str | int | float))


def summary(results: dict[str, Any]) -> Iterator[str]:
    """Summary and missing rows of each part, as a Markdown list."""
    for part, (module, _) in PARTS.items():
        if part not in results:
            yield f"- {part}: not yet"
            continue
        rows = results[part]["rows"]
        sentences = list(module.summary(rows))
        if failed := sum(_broke(row) and not row.get("timed_out") for row in rows):
            sentences.append(f"**{failed} of {len(rows)} rows failed**")
        if lacking := _lacking(results[part]):
            sentences.append(f"no time was left for {lacking} rows")
        sentences += (f"**{sentence}**" for sentence in _earlier(results[part]))
        yield f"- {part}: {'; '.join(sentences)}" if len(sentences) < 2 else f"- {part}:"
        yield from (f"  - {sentence}" for sentence in sentences if len(sentences) > 1)
