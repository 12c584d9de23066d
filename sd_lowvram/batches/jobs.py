"""Reads the jobs of a batch: CSV with a header, one JSON object a line, or text with one prompt a line.

Columns are the options of ``generate``, by their declarations. Everything is checked before any work, and messages name
the line.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import functools
import hashlib
import io
import itertools
import json
import stat
import typing
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..commands.exit_codes import name_options
from ..commands.inputs import SPLIT, Job, check_job
from ..commands.knobs import command_line_knobs
from ..commands.values import check_printable, check_text, checked_settings
from ..errors import BadInputError, LowVRAMError
from ..units import MIB, format_size

MOST_JOBS = 100_000
_LARGEST_FILE = 64 * MIB
_LONGEST_NAME = 200
"""Bytes of a file's name: file systems take 255, and something is put before and after it."""

_SHOWN = 60
"""Characters of a value that a message repeats."""

_ELSEWHERE = ("vram", "ram", "device", "allow_pickle")
"""Options that change where a picture is made, not the picture: they do not make another job."""

_NO_COLUMNS = ("memory_plot", "settings", *SPLIT)
_DELIMITERS = ",;\t"
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_KINDS = {int: "a whole number", float: "a number", bool: "yes or no"}

Row = tuple[int, dict[str, Any]]
"""The line at which a job begins, from 1, and its columns."""


@dataclass(frozen=True)
class Task:
    """A job of a batch.

    Attributes:
        key: identifies the job among all jobs of the file, and does not change when lines are moved.
        line: number of its line in the file, from 1.
        job: the checked job; a missing seed is drawn.
        name: the file in the batch's folder that its ``output`` names.
    """

    key: str
    line: int
    job: Job
    name: str | None


@functools.cache
def columns() -> dict[str, type]:
    """Options of ``generate`` by name, each with the type of its values."""
    hints = typing.get_type_hints(Job)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(Job) if field.name not in _NO_COLUMNS}
    kinds = {name: next(iter(typing.get_args(hint)), hint) for name, hint in fields.items()}
    return kinds | {name: knob.type for name, knob in command_line_knobs().items()}


def read_jobs(path: Path, base: Job, chosen: dict[str, Any]) -> list[Task]:
    """Read the jobs in ``path``, in order.

    Args:
        base: options of jobs whose line does not set them.
        chosen: the same for knobs.

    Raises:
        BadInputError: the file, or lines of it, cannot be used; the message has the first line in full.
    """
    tasks, wrong, errors = [], [], []
    seen: Counter[str] = Counter()
    for line, row in _rows(path):
        try:
            job, key = _job(row, base, chosen)
            seen[key] += 1
            tasks.append(Task(f"{key}-{seen[key]}", line, job, job.output))
        except LowVRAMError as error:
            errors.append(error)
            wrong.append(line)
    if errors:
        raise BadInputError(f"{path}, line {wrong[0]}: {name_options(str(errors[0]))}{_more(wrong[1:])}")
    if not tasks:
        raise BadInputError(f"{path} holds no jobs: write one prompt a line, or a table with the column prompt")
    _check_names(path, tasks)
    return tasks


def _more(wrong: list[int]) -> str:
    if not wrong:
        return ""
    return f" (and wrong too: line {', '.join(map(str, wrong[:8]))}{', ...' if len(wrong) > 8 else ''})"


def _rows(path: Path) -> Iterator[Row]:
    text = _text(path)
    read = {".csv": _table, ".jsonl": _objects, ".txt": _prompts}[_suffix(path)]
    for number, row in enumerate(read(path, text)):
        if number == MOST_JOBS:
            raise BadInputError(f"{path} has more than {MOST_JOBS} jobs: split it")
        yield row


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".jsonl", ".txt"):
        raise BadInputError(
            f"{path} must end in .csv (a table with a header), .jsonl (an object a line) or .txt (a prompt a line)"
        )
    return suffix


def _text(path: Path) -> str:
    _suffix(path)
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # a pipe could be read once only, and the batch may have to go on
            raise BadInputError(f"{path} cannot be read: it is not a regular file")
        if about.st_size > _LARGEST_FILE:
            size, most = format_size(about.st_size), format_size(_LARGEST_FILE)
            raise BadInputError(f"{path} has {size}, and a file of jobs at most {most}: split it")
        data = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInputError(f"{path}, line {line}: it is not UTF-8; save the file as UTF-8") from error


def _prompts(_: Path, text: str) -> Iterator[Row]:
    for line, prompt in enumerate(io.StringIO(text), 1):
        if prompt.strip():
            yield line, {"prompt": prompt.strip()}


def _table(path: Path, text: str) -> Iterator[Row]:
    if not text.strip():
        return
    first = text.lstrip("\r\n").partition("\n")[0]
    # Spreadsheets of countries that write 7,5 put semicolons between their columns.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(_DELIMITERS, key=first.count), strict=True)
    header: list[str] | None = None
    try:
        while True:
            line = reader.line_num + 1
            cells = next(reader, None)
            if cells is None:
                return
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                _check_header(path, line, header)
            elif len(cells) > len(header):
                raise BadInputError(
                    f"{path}, line {line}: {len(cells)} values for {len(header)} columns; put a prompt that holds a "
                    'comma in "quotes"'
                )
            else:
                yield line, {name: cell for name, cell in zip(header, cells, strict=False) if cell.strip()}
    except csv.Error as error:
        raise BadInputError(f"{path}, line {reader.line_num}: it is not a CSV that can be read ({error})") from error


def _check_header(path: Path, line: int, header: list[str]) -> None:
    try:
        names = [_column(name) for name in header]
    except BadInputError as error:
        raise BadInputError(f"{path}, line {line}: {error}") from error
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise BadInputError(f"{path}, line {line}: the column {twice[0]} stands there twice")
    if "prompt" not in names:
        raise BadInputError(f"{path}, line {line}: the first line names the columns, and none of them is prompt")


def _objects(path: Path, text: str) -> Iterator[Row]:
    for line, row in enumerate(io.StringIO(text), 1):
        if not row.strip():
            continue
        try:
            yield line, _refuse_repeats(json.loads(row, object_pairs_hook=_Pairs))
        except (ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())[:_SHOWN]
            raise BadInputError(f"{path}, line {line}: it is not a JSON object that can be read ({reason})") from error


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as it is written, with duplicate names."""


def _refuse_repeats(pairs: Any) -> dict[str, Any]:
    if not isinstance(pairs, _Pairs):
        raise ValueError("it is not an object")
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands there twice")
    return table


def _job(row: dict[str, Any], base: Job, chosen: dict[str, Any]) -> tuple[Job, str]:
    """The checked job of a row, and what makes its picture, as a digest."""
    values: dict[str, Any] = {}
    for written, raw in row.items():
        name = _column(written)
        if name in values:
            raise BadInputError(f"the column {name} stands there twice")
        if raw is not None:
            values[name] = _value(name, raw)
    if not str(values.get("prompt", "")).strip():
        raise BadInputError("it has no prompt")
    knobs = {name: values.pop(name) for name in list(values) if name in command_line_knobs()}
    settings = checked_settings({**chosen, **knobs}, values.get("policy", base.policy))
    asked = dataclasses.replace(base, **values, settings=settings)
    if asked.output is not None:
        _check_name(asked.output)
    job = check_job(asked)
    return job, digest_of(dataclasses.replace(job, seed=None if asked.seed == -1 else asked.seed))


def _column(written: str) -> str:
    name = written.strip().lstrip("-").replace("-", "_").lower()
    if name in columns():
        return name
    if name == "memory_plot":
        raise BadInputError("the column memory_plot is of generate alone: one picture's memory is drawn there")
    if name in SPLIT:
        raise BadInputError(f"{name} is not a column: it is given once, to batch itself")
    near = difflib.get_close_matches(name, columns(), 1)
    guess = f" (did you mean {near[0]}?)" if near else "; sd-lowvram generate --help-all lists them"
    raise BadInputError(f"the column {written[:_SHOWN]!r} is not an option of generate{guess}")


def _value(name: str, raw: Any) -> Any:
    """Value of an option as written in a file: text, or another JSON type."""
    kind = columns()[name]
    if isinstance(raw, bool) and kind is bool:
        return raw
    text = str(raw).strip() if isinstance(raw, str | int | float) and not isinstance(raw, bool) else None
    try:
        if text is None:
            raise ValueError
        if kind is bool:
            return _WORDS[text.lower()]
        if "\0" in text:
            raise ValueError
        return kind(text)
    except (ValueError, KeyError):
        shown = str(raw)[:_SHOWN]
        wanted = _KINDS.get(kind, "a text")
        raise BadInputError(f"{name} {shown!r} must be {wanted}") from None


def _check_name(name: str) -> None:
    """Raise BadInputError unless ``name`` is that of a PNG file inside the batch's folder, on every system."""
    check_text("output", name)
    check_printable("output", name)
    path, windows = PurePosixPath(name), PureWindowsPath(name)
    outside = path.is_absolute() or windows.drive or windows.root or ".." in windows.parts
    if outside or path.suffix.lower() != ".png" or path.name.startswith("."):
        raise BadInputError(f"output {name[:_SHOWN]!r} must be a file's name inside --out that ends in .png")
    if any(len(part.encode()) > _LONGEST_NAME for part in path.parts):
        raise BadInputError(f"output {name[:_SHOWN]!r} is longer than {_LONGEST_NAME} bytes: give a shorter name")


def comparable(name: str) -> str:
    """Return what names of one file have in common: some file systems ignore case, or in which of Unicode's forms
    (NFC, NFD) an accent is written."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def _check_names(path: Path, tasks: Iterable[Task]) -> None:
    """Raise BadInputError where two jobs ask for one file, on any file system."""
    named = sorted((comparable(task.name), task.line) for task in tasks if task.name is not None)
    for (first, line), (other, again) in itertools.pairwise(named):
        if first == other:
            raise BadInputError(
                f"{path}, lines {line} and {again}: both have the output {first[:_SHOWN]!r}; name them apart"
            )


def stated_options(job: Job) -> dict[str, Any]:
    """Options of ``job`` that are not the default, as plain values."""
    fields = [field for field in dataclasses.fields(Job) if field.name != "settings"]
    values = {field.name: getattr(job, field.name) for field in fields if getattr(job, field.name) != field.default}
    knobs = {name: value for name, value in job.settings.as_dict().items() if value is not None}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()} | knobs


def digest_of(job: Job) -> str:
    """Digest of everything that determines the pictures of ``job``."""
    picture = {name: value for name, value in stated_options(job).items() if name not in _ELSEWHERE}
    return hashlib.sha256(json.dumps(picture, sort_keys=True).encode()).hexdigest()[:24]
