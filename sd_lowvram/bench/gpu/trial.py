"""One measurement in a process of its own: what an earlier one left behind on the GPU would be measured with it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).resolve().parents[3]
_TRIALS = {
    "peak": "peaks",
    "step": "streaming",
    "units": "streaming",
    "size": "sizes",
    "attention": "attention",
}


def measure(kind: str, *, seconds: float = 240.0, **arguments: Any) -> dict[str, Any]:
    """What the function ``trial_<kind>(**arguments)`` returns in a new process.

    Where it fails: a dictionary with ``error``, a sentence; ``out_of_memory`` tells whether the device was too small,
    ``timed_out`` whether the time was too short.

    Args:
        seconds: after which the process is ended.
        arguments: plain values.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", __name__]
    try:
        run = subprocess.run(
            command,
            input=json.dumps({"kind": kind, "arguments": arguments}),
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(1.0, seconds),
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
    kind = asked["kind"]
    module = importlib.import_module(f"{__package__ or 'sd_lowvram.bench.gpu'}.{_TRIALS[kind]}")
    try:
        result = getattr(module, f"trial_{kind}")(**asked["arguments"])
    except torch.cuda.OutOfMemoryError as error:
        result = _failed(str(error), out_of_memory=True)
    except Exception as error:  # the driver tells which trial failed and goes on
        result = _failed(f"{type(error).__name__}: {error}", out_of_memory="out of memory" in str(error).lower())
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    _main()
