"""Common parts of all tables: their origin, the format of figures, and their files."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sd_lowvram import __version__, progress
from sd_lowvram.devices.info import default_device
from sd_lowvram.errors import BadInputError
from sd_lowvram.files import table, write_json, write_whole
from sd_lowvram.units import MIB

Report = dict[str, Any]
Row = dict[str, Any]
Lines = Callable[[Report], Iterable[str]]
Cell = str | Callable[[Row], str]
"""Cell of a column: a format of a row's values, or a function of the row."""
Columns = Sequence[tuple[str, Cell]]
"""Heads and cells."""

LEAST_OWN = 0.8
"""Share of the time that the measuring thread must have had a processor, or its seconds are other programs'."""
MOST_SPREAD = 0.25
"""Half the distance of the quartiles over the median: figures that scatter more are left out."""
BUSY = "omitted: the machine was busy"
_SPIN_SECONDS = 0.2
_UNKNOWN = "not recorded"

_command: ContextVar[str] = ContextVar("command", default="")


@contextlib.contextmanager
def told_as(command: str) -> Iterator[None]:
    """Record ``command`` as the origin of reports within the block."""
    before = _command.set(command)
    try:
        yield
    finally:
        _command.reset(before)


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    """Use an empty cache folder within the block, so that a plan in it is a first plan."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, SD_LOWVRAM_CACHE=folder):
        yield


def facts(model: str | None, **asked: Any) -> dict[str, Any]:
    """Head of a report: versions, the kind of machine, the model (None: the demo model), and the request."""
    device = default_device()
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {platform.machine()}"
    versions = {"sd_lowvram": __version__, "torch": torch.__version__, "python": platform.python_version()}
    about = {"device": card, "threads": torch.get_num_threads(), "model": model or "demo", "seed": 1}
    return {**versions, **about, **asked}


def origin() -> dict[str, Any]:
    """Date, commit, machine and command of a measurement made now; ``own``: see :func:`own_share`."""
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
    """Commit of the code, with a plus if files differ from it; a packed tree has it in a file."""
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
    """Name of the processor as the system reports it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def own_share() -> float:
    """Share of some tenths of a second in which a thread that computes has one; below 1 other programs run too."""
    start, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() < start + _SPIN_SECONDS:
        pass
    return min(1.0, (time.thread_time() - used) / _SPIN_SECONDS)


def origin_line(report: Report) -> str:
    """Sentence on the origin of ``report``."""
    made = report.get("made", {})
    where = ", ".join(
        [made.get("date", _UNKNOWN), commit_words(made),
         f"processor or card {made.get('processor', _UNKNOWN)}", f"torch {made.get('torch', _UNKNOWN)}"]
    )  # fmt: skip
    own = made.get("own")
    load = " Whether the machine was busy was not recorded." if own is None else ""
    if own is not None and own < LEAST_OWN:
        load = f" The machine was busy: a thread had {own:.0%} of a processor."
    before = "".join(f" Some rows: {one['date']}, {commit_words(one)}." for one in report.get("earlier", ()))
    return f"*Made {where}, by `{made.get('command', _UNKNOWN)}`.{load}{before}*"


def commit_words(made: Mapping[str, Any]) -> str:
    """The commit of an origin in words."""
    number: str = made.get("commit", _UNKNOWN)
    changes = f" ({number[:-1]} and changes)" if number.endswith("+") else ""
    return f"commit {number if is_recorded(number) else _UNKNOWN}{changes}"


def is_recorded(number: str) -> bool:
    """True if ``number`` is a commit that has all that was run: not with a plus (:func:`commit`), and not missing."""
    return number != _UNKNOWN and not number.endswith("+")


def whole(report: Report, lines: Lines) -> Iterator[str]:
    """``report`` as Markdown, with where and when it was made."""
    yield from lines(report)
    yield from ("", origin_line(report))


@dataclass(frozen=True)
class Sheet:
    """Layout of a report.

    Attributes:
        title, note: formats of the report's values.
        of: number of columns that name the case; a row's ``error``, a sentence, follows these.
    """

    title: str
    note: str
    columns: Columns
    of: int = 1

    def lines(self, report: Report) -> Iterator[str]:
        """The rows as Markdown, and why other rows are left out."""
        yield from (f"# {self.title.format_map(report)}", "", self.note.format_map(report), "")
        yield from self.table(report["rows"])
        yield from left_out(report.get("left_out", ()))

    def table(self, rows: Iterable[Row]) -> Iterator[str]:
        """The rows as a Markdown table."""
        return rows_table(self.columns, rows, self.of)


def rows_table(columns: Columns, rows: Iterable[Row], of: int = 1) -> Iterator[str]:
    """A Markdown table with a line for each row; see :class:`Sheet`."""

    def cells(row: Row) -> Iterator[str]:
        error = row["error"] if isinstance(row.get("error"), str) else None
        for number, (_, cell) in enumerate(columns):
            if error is not None and number >= of:
                yield error.replace("|", "/") if number == of else ""
            else:
                yield cell.format_map(row) if isinstance(cell, str) else cell(row)

    return table([head for head, _ in columns], (list(cells(row)) for row in rows))


def left_out(why: Mapping[str, str] | Sequence[str]) -> Iterator[str]:
    """Sentence on omissions of a report: names with reasons, or policies that need an accelerator."""
    if isinstance(why, Mapping):
        for name, reason in why.items():
            yield from ("", f"Left out: {name}: {reason}.")
    elif why:
        yield from ("", f"Left out, as they need an accelerator: {', '.join(why)}.")


def filled(
    asked: Report, cases: Sequence[Row], measure: Callable[..., Row], lines: Lines, out: Path | None, what: str
) -> Report:
    """A report with a row for each of ``cases``, which begins with the case and ends with when and of which commit the
    row was computed; written row by row as they come. Rows that ``out`` has already stay.

    Args:
        asked: what the report begins with.
        measure: called with a case, gives what is found of it.
        what: is counted, in words.

    Raises:
        BadInputError: what ``out`` has was asked for in another way.
    """
    report = begun(asked, out)
    missing = [case for case in cases if not any(case.items() <= row.items() for row in report["rows"])]
    made = begin_rows(report) if missing else {}
    for case in progress.report_each(what, missing):
        report["rows"].append({**case, **measure(**case), "made": made})
        if out is not None:
            write_json(report, out.with_suffix(".json"))
    return written(report, lines, out, report.get("made", {}))


def begin_rows(report: Report) -> dict[str, str]:
    """Note in ``report`` that its next rows are computed now, and return when and of which commit that is; rows that
    are there keep their origin."""
    before, now = report.get("made"), origin()
    stamp = {name: now[name] for name in ("date", "commit")}
    if report["rows"] and not (before is not None and stamp.items() <= before.items()):
        known = {name: (before or {}).get(name, _UNKNOWN) for name in stamp}
        report["earlier"] = [*(one for one in report.get("earlier", ()) if one != before), before or known]
    report["made"] = now
    return stamp


def begun(asked: Report, out: Path | None) -> Report:
    """The report next to ``out`` that is not finished yet, or a new one with no ``rows``.

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


def written(report: Report, lines: Lines, out: Path | None, made: Any = None) -> Report:
    """``report`` with its :func:`origin`, also as Markdown in ``out`` where that is given, and as JSON next to it.

    Args:
        made: its origin where it is another one: what was measured earlier is not of today.
    """
    report = {**report, "made": origin() if made is None else made}
    if out is not None:
        write_json(report, out.with_suffix(".json"))
        write_whole(("\n".join(whole(report, lines)) + "\n").encode(), out)
    return report


def show(report: Any, lines: Iterable[str], as_json: bool) -> None:
    """Print ``report`` as one JSON value, or ``lines``."""
    print(json.dumps(report, indent=2) if as_json else "\n".join(lines))


def trusted(row: Mapping[str, Any], spread: str = "ratio_spread") -> bool:
    """True if the seconds of a row are undisturbed. Older rows, which do not say, count as undisturbed."""
    return row.get("own", 1.0) >= LEAST_OWN and (row.get(spread) or 0.0) <= MOST_SPREAD


def figure(value: float, spread: float | None, form: str = "{:.3f}") -> str:
    """A cell: ``value`` with its spread in percent, where that is known."""
    return form.format(value) + ("" if spread is None else f" ± {spread:.0%}")


def mib(name: str, form: str = "{:.0f}", unknown: str = "") -> Callable[[Row], str]:
    """A cell: the bytes of that name in MiB; ``unknown`` where a row does not have them."""
    return lambda row: unknown if row.get(name) is None else form.format(row[name] / MIB)


def ms(name: str) -> Callable[[Row], str]:
    """A cell: the seconds of that name in milliseconds, empty where none were measured."""
    return lambda row: milliseconds(row.get(name))[0]


def yes(name: str, no: str = "**no**") -> Callable[[Row], str]:
    """A cell: whether what is of that name is so."""
    return lambda row: "yes" if row[name] else no


def pair_columns(plain: str, ours: str, form: str = "{:.3f}", unit: float = 1.0) -> Columns:
    """Three columns: those of :func:`pair_cells`, with heads for both sides."""

    def cell(number: int) -> Callable[[Row], str]:
        return lambda row: pair_cells(row, form, unit)[number]

    return [(head, cell(number)) for number, head in enumerate((plain, ours, "times as fast"))]


def pair_cells(row: Mapping[str, Any], form: str = "{:.3f}", unit: float = 1.0) -> list[str]:
    """Both sides' times, in units of so many seconds, and the ratio, of what :func:`sd_lowvram.devices.pairs.figures`
    gave; neither where other programs disturbed them."""
    if not trusted(row):
        return ["", "", BUSY]
    sides = (("plain_seconds", "plain_spread"), ("seconds", "spread"))
    times = [figure(row[name] / unit, row.get(spread), form) for name, spread in sides]
    return [*times, figure(row["ratio"], row.get("ratio_spread"), "{:.2f}")]


def milliseconds(*seconds: float | None) -> list[str]:
    """Cells of a table; None: nothing was measured."""
    return ["" if one is None else f"{1000 * one:.2f}" for one in seconds]


def eight_bits(pixels: Tensor) -> Tensor:
    """Pixels in [0, 1] as a file would hold them: whole numbers up to 255."""
    return pixels.clamp(0, 1).mul(255).round()
