"""One measurement in a process of its own: what an earlier one left behind would be measured with it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_LEAST = 5
"""Seconds below which nothing is begun."""


def measure(
    trial: Callable[..., dict[str, Any]],
    *,
    seconds: float | None = 240.0,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """What ``trial(**arguments)``, a function of a module, returns in a new process.

    Where it fails: a dictionary with ``error``, a sentence; ``out_of_memory`` tells whether the device was too small,
    ``timed_out`` whether the time was too short.

    Args:
        seconds: after which the process is ended; None: never.
        environment: variables for the process, besides those that are there.
        arguments: plain values.
    """
    if seconds is not None and seconds < _LEAST:
        return _failed("no time was left") | {"timed_out": True}
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        run = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps({"module": trial.__module__, "name": trial.__name__, "arguments": arguments}),
            env={**os.environ, **_QUIET, "PYTHONPATH": path, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _failed(f"took longer than {seconds:.0f} s") | {"timed_out": True}
    try:
        result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        return result
    except (IndexError, ValueError):
        last = [line for line in run.stderr.splitlines() if line.strip()][-1:] or [f"exit code {run.returncode}"]
        return _failed(last[0])


def _failed(error: str, out_of_memory: bool = False) -> dict[str, Any]:
    return {"error": error[:400], "out_of_memory": out_of_memory}


def _main() -> None:
    asked = json.loads(sys.stdin.read())
    module = importlib.import_module(asked["module"])
    try:
        result = getattr(module, asked["name"])(**asked["arguments"])
    except Exception as error:  # the driver tells which trial failed and goes on
        result = _failed(f"{type(error).__name__}: {error}", out_of_memory="out of memory" in str(error).lower())
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    _main()
