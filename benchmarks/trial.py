"""Measurements in processes of their own: what an earlier one left behind would be measured with it."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_ROOT = Path(__file__).resolve().parents[1]
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
PYTHON: tuple[str, ...] = (sys.executable,)
"""Command that starts a process; another one sets up a simulated GPU first."""
LEAST = 5
"""Seconds below which nothing is begun."""

Row = dict[str, Any]


def measure(
    trial: Callable[..., Row],
    *,
    seconds: float | None = 240.0,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Row:
    """Run ``trial(**arguments)``, a function of a module, in a new process, and return its result.

    A failure returns a dictionary with ``error``, a sentence; ``out_of_memory`` is True if the device was too small,
    ``timed_out`` if the time was too short.

    Args:
        seconds: time limit of the process; None: no limit.
        environment: additional variables for the process.
        arguments: plain values.
    """
    return next(stream(trial, seconds=seconds, environment=environment, **arguments), failed("it reported nothing"))


def measure_each(
    trial: Callable[..., Iterator[Row]], cases: Sequence[Row], *, seconds: Callable[[], float], **shared: Any
) -> Iterator[Row]:
    """Yield the results of ``trial(cases=cases, **shared)`` for each of ``cases``, as they come.

    Cases share a process, its models and its plans. If one fails, or the trial ends early because it left something
    behind, the rest continues in a new process.

    Args:
        seconds: function that returns the seconds left for all of them.
    """
    waiting = list(cases)
    while waiting:
        rows = stream(trial, seconds=seconds(), cases=list(waiting), **shared)
        for row in itertools.chain([next(rows, failed("it reported nothing"))], rows):
            if waiting:  # a process may still fail after its last row
                waiting.pop(0)
                yield row


def stream(
    trial: Callable[..., Any],
    *,
    seconds: float | None,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Iterator[Row]:
    """Like :func:`measure`, for a trial that yields rows: each as it comes; a failure is the last row."""
    if seconds is not None and seconds < LEAST:
        yield failed("no time was left") | {"timed_out": True}
        return
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        process = subprocess.Popen(
            [*PYTHON, "-m", __name__],
            env={**os.environ, **_QUIET, "PYTHONPATH": path, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        )
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        clock = threading.Timer(seconds or 0, end)
        try:
            if seconds is not None:
                clock.start()
            asked = {"module": trial.__module__, "name": trial.__name__, "arguments": arguments}
            yield from _told(process, json.dumps(asked))
        finally:
            clock.cancel()
            process.kill()
            process.wait()
        if late.is_set():
            yield failed(f"took longer than {seconds:.0f} s") | {"timed_out": True}
        elif process.returncode:
            complaints.seek(0)
            last = [line for line in complaints if line.strip()][-1:] or [f"exit code {process.returncode}"]
            yield failed(last[0].strip())


def _told(process: subprocess.Popen[str], asked: str) -> Iterator[Row]:
    """The rows that ``process`` prints, until it ends."""
    assert process.stdin is not None and process.stdout is not None
    with process.stdout, contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(asked + "\n")
        process.stdin.flush()  # and stays open: it ends with this process, however that ends
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                yield json.loads(line)
    process.wait()


def failed(error: str, out_of_memory: bool = False) -> Row:
    """The row of a measurement that did not come about."""
    return {"error": error[:400], "out_of_memory": out_of_memory}


def serve(asks: IO[str], rows: IO[str]) -> None:
    """Run the trial in the first line of ``asks``; where ``asks`` ends before it, so does this process."""
    asked = json.loads(asks.readline())
    threading.Thread(target=_end_with, args=(asks,), daemon=True).start()
    module = importlib.import_module(asked["module"])
    try:
        result = getattr(module, asked["name"])(**asked["arguments"])
        for row in [result] if isinstance(result, dict) else result:
            print(json.dumps(row), file=rows, flush=True)
    except Exception as error:  # the driver reports which trial failed and continues
        row = failed(f"{type(error).__name__}: {error}", out_of_memory="out of memory" in str(error).lower())
        print(json.dumps(row), file=rows, flush=True)


def _end_with(asks: IO[str]) -> None:
    """Nobody would read the rows, and the device is in use meanwhile."""
    while os.read(asks.fileno(), 1):  # a thread that waits in ``asks`` itself would hold it when the process ends
        pass
    os._exit(1)


def main() -> None:
    """Be the process of a trial; only rows are printed to its output."""
    rows = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        serve(sys.stdin, rows)


if __name__ == "__main__":
    main()
