"""What all tables have in common: where and when they were made, how figures are told, and the files they are in."""

from __future__ import annotations

import contextlib
import datetime
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_lowvram.devices.info import default_device
from sd_lowvram.errors import BadInputError
from sd_lowvram.files.whole import write_json, write_whole

Report = dict[str, Any]
Lines = Callable[[Report], Iterable[str]]

LEAST_OWN = 0.8
"""Share of the time that the measuring thread must have had a processor, or its seconds are other programs'."""
MOST_SPREAD = 0.25
"""Half the distance of the quartiles over the median: figures that scatter more are not told."""
BUSY = "not told: busy"
_SPIN_SECONDS = 0.2
_UNKNOWN = "not recorded"

_command: ContextVar[str] = ContextVar("command", default="")


@contextlib.contextmanager
def told_as(command: str) -> Iterator[None]:
    """Inside, reports say that they were made by ``command``."""
    before = _command.set(command)
    try:
        yield
    finally:
        _command.reset(before)


def origin() -> dict[str, Any]:
    """When, of which commit, where and by which command something is measured now; ``own``: see :func:`own_share`."""
    device = default_device()
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "processor": card or f"{processor()}, threads: {torch.get_num_threads()}",
        "torch": torch.__version__,
        "command": _command.get() or "a call in Python",
        "own": own_share(),
    }


def commit() -> str:
    """That of the code, with a plus where files differ from it; what was carried elsewhere has it in a file."""
    with contextlib.suppress(OSError):
        return Path(__file__).parents[1].joinpath("COMMIT").read_text(encoding="utf-8").strip()

    def told(*words: str) -> str:
        folder = Path(__file__).parent
        run = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
        return run.stdout.strip()

    with contextlib.suppress(OSError):
        if number := told("rev-parse", "--short", "HEAD"):
            code = ("*.py", "*.cpp", "*.c")
            return number + ("+" if told("status", "--porcelain", "--untracked-files=no", "--", *code) else "")
    return _UNKNOWN


def processor() -> str:
    """Its name as the system has it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def own_share() -> float:
    """Share of some tenths of a second in which a thread that computes has a processor; below 1 others have it too."""
    start, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() < start + _SPIN_SECONDS:
        pass
    return min(1.0, (time.thread_time() - used) / _SPIN_SECONDS)


def origin_line(report: Report) -> str:
    """Where and when ``report`` was made."""
    made = report.get("made", {})
    where = ", ".join(
        [made.get("date", _UNKNOWN), f"commit {made.get('commit', _UNKNOWN)}",
         f"processor or card {made.get('processor', _UNKNOWN)}", f"torch {made.get('torch', _UNKNOWN)}"]
    )  # fmt: skip
    own = made.get("own")
    load = " Whether the machine was busy was not recorded." if own is None else ""
    if own is not None and own < LEAST_OWN:
        load = f" The machine was busy: a thread had {own:.0%} of a processor."
    return f"*Made {where}, by `{made.get('command', _UNKNOWN)}`.{load}*"


def whole(report: Report, lines: Lines) -> Iterator[str]:
    """``report`` as Markdown, with where and when it was made."""
    yield from lines(report)
    yield from ("", origin_line(report))


def begun(asked: Report, out: Path | None) -> Report:
    """The report beside ``out`` that is not finished yet, or a new one with no ``rows``.

    Raises:
        BadInputError: what is there was asked for in another way.
    """
    file = out.with_suffix(".json") if out is not None else None
    if file is None or not file.is_file():
        return {**asked, "rows": []}
    report: Report = json.loads(file.read_text(encoding="utf-8"))
    other = [name for name in asked if report.get(name) != asked[name]]
    if other:
        told = ", ".join(f"{name} {report.get(name)}" for name in other)
        raise BadInputError(f"{file} was made with {told}: begin anew with another --out")
    return report


def written(report: Report, lines: Lines, out: Path | None) -> Report:
    """``report`` with its :func:`origin`, also as Markdown in ``out`` where that is given, and as JSON beside it."""
    report = {**report, "made": origin()}
    if out is not None:
        write_json(report, out.with_suffix(".json"))
        write_whole(("\n".join(whole(report, lines)) + "\n").encode(), out)
    return report


def show(report: Any, lines: Iterable[str], as_json: bool) -> None:
    """Print ``report`` as one JSON value, or ``lines``."""
    print(json.dumps(report, indent=2) if as_json else "\n".join(lines))


def trusted(row: Mapping[str, Any], spread: str = "ratio_spread") -> bool:
    """Whether the seconds of a row are those of what it measures. Rows that do not say (older ones) are."""
    return row.get("own", 1.0) >= LEAST_OWN and (row.get(spread) or 0.0) <= MOST_SPREAD


def figure(value: float, spread: float | None, form: str = "{:.3f}") -> str:
    """A cell: ``value`` with its spread in percent, where that is known."""
    return form.format(value) + ("" if spread is None else f" ± {spread:.0%}")


def pair_cells(row: Mapping[str, Any], form: str = "{:.3f}", unit: float = 1.0) -> list[str]:
    """Both sides' times, in units of so many seconds, and the ratio, of what :func:`sd_lowvram.devices.pairs.figures`
    gave; no ratio where it says nothing."""
    sides = (("plain_seconds", "plain_spread"), ("seconds", "spread"))
    times = [figure(row[name] / unit, row.get(spread), form) for name, spread in sides]
    return [*times, figure(row["ratio"], row.get("ratio_spread"), "{:.2f}") if trusted(row) else BUSY]


def milliseconds(*seconds: float | None) -> list[str]:
    """Cells of a table; None: nothing was measured."""
    return ["" if one is None else f"{1000 * one:.2f}" for one in seconds]


def eight_bits(pixels: Tensor) -> Tensor:
    """Pixels in [0, 1] as a file would hold them: whole numbers up to 255."""
    return pixels.clamp(0, 1).mul(255).round()
