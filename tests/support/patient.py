"""Child processes that a busy machine cannot fail."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from typing import Any

import psutil


def run(command: Sequence[Any], still_seconds: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run ``command`` to its end, however long that takes, and return what it wrote.

    A child that, with its own children, has used no processor time for ``still_seconds`` waits for what will not come,
    and is killed.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        used, since = _used(child.pid), time.monotonic()
        while True:
            try:
                out, errors = child.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                now = _used(child.pid)
                if now != used:
                    used, since = now, time.monotonic()
                elif time.monotonic() - since > still_seconds:
                    child.kill()
                    _, errors = child.communicate()
                    raise AssertionError(f"{command} stood still for {still_seconds:.0f} s: {errors[-2000:]}") from None
            else:
                return subprocess.CompletedProcess(command, child.returncode, out, errors)


def _used(pid: int) -> float:
    """Seconds of the processor that a process and all below it have used."""
    try:
        child = psutil.Process(pid)
        family = [child, *child.children(recursive=True)]
    except psutil.NoSuchProcess:
        return float("inf")
    return sum(_own(one) for one in family)


def _own(process: psutil.Process) -> float:
    """Seconds of the processor that a process has used, and those that it has waited for."""
    try:
        return float(sum(process.cpu_times()[:4]))
    except psutil.NoSuchProcess:
        return 0.0
