"""The tests that need a GPU, a file at a time."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from sd_lowvram import progress
from sd_lowvram.files import table

from .. import trial
from .record import ResultRows, not_run

ROOT = Path(__file__).resolve().parents[2]
_MARKED = re.compile(r"^(pytestmark = |@)pytest\.mark\.gpu\b", re.MULTILINE)


_WHOLE_MODELS = ("benchmarks", "gpu")
"""Folders whose tests run whole models: last, so that all other tests have run if the time is short."""


def files() -> list[str]:
    """Files with GPU tests, as paths below the root of this tree, in the order in which they run."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda file: (file.parent.name in _WHOLE_MODELS, file))
    return [str(file.relative_to(ROOT)) for file in tests if _MARKED.search(file.read_text(encoding="utf-8"))]


def run(_device: torch.device, record: ResultRows) -> None:
    """Add a row for each file; a file that exceeded the time starts from the beginning in a later call."""
    for file in progress.report_each("tests", files()):
        if record.find({"file": file}) is None:
            record.add({"file": file}, outcome(file, record.seconds()))


def outcome(file: str, seconds: float) -> dict[str, Any]:
    """Counts of ``passed``, ``failed`` and ``skipped`` tests, the ``failures`` in short, and ``seconds``."""
    if seconds < trial.LEAST:
        return trial.failed("no time was left") | {"timed_out": True}
    with tempfile.TemporaryDirectory(prefix="sd-lowvram-") as folder:
        report = Path(folder, "report.xml")
        options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", file]
        asked: dict[str, Any] = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        try:
            done = subprocess.run([*trial.PYTHON, "-m", "pytest", *options], **asked, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return trial.failed(f"took longer than {seconds:.0f} s") | {"timed_out": True}
        if not report.exists():
            last = (done.stderr or done.stdout).strip().rpartition("\n")[2]
            return trial.failed(last or f"exit code {done.returncode}")
        return _counted(ElementTree.parse(report))


def _counted(report: ElementTree.ElementTree[Any]) -> dict[str, Any]:
    cases = list(report.iter("testcase"))
    skipped = sum(case.find("skipped") is not None for case in cases)
    wrong = [(case.get("name"), found) for case in cases for found in case if found.tag in ("failure", "error")]
    return {
        "passed": len(cases) - skipped - len(wrong),
        "failed": len(wrong),
        "skipped": skipped,
        "failures": [f"{name}: {' '.join((found.get('message') or '').split())}"[:400] for name, found in wrong],
        "skips": [_skip(case) for case in cases if case.find("skipped") is not None],
        "seconds": sum(float(case.get("time") or 0) for case in cases),
    }


def _skip(case: ElementTree.Element) -> dict[str, str]:
    """A test that did not run, without its parameters, and why."""
    why = case.find("skipped")
    message = "" if why is None else why.get("message") or ""
    return {"test": (case.get("name") or "").partition("[")[0], "failed": message or "it gives no reason"}


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Summary for a reader."""
    ran = [row for row in rows if "passed" in row]
    passed, failed, skipped = (sum(row[name] for row in ran) for name in ("passed", "failed", "skipped"))
    yield f"{passed} passed, {f'**{failed} failed**' if failed else 'none failed'}, {skipped} skipped"
    yield from not_run((skip for row in ran for skip in row.get("skips", ())), lambda skip: skip["test"])


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Tests"
    yield ""
    yield from table(("file", "passed", "failed", "skipped", "s"), map(_cells, part["rows"]))
    for row in part["rows"]:
        for failure in row.get("failures", ()):
            yield ""
            yield f"- {row['file']}: {failure}"


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["file"], row["error"].replace("|", "/"), "", "", ""]
    failed = f"**{row['failed']}**" if row["failed"] else "0"
    return [row["file"], str(row["passed"]), failed, str(row["skipped"]), f"{row['seconds']:.1f}"]
