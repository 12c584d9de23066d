"""A process that runs one command: its environment, its streams, and how it ends."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from .interrupts import remember_interrupts
from .streams import open_all


def run(app: Callable[..., Any], name: str) -> None:
    """Run the commands of ``app``; exit codes are those of :mod:`.exit_codes`.

    Args:
        name: what a person types before a command.
    """
    # Idle threads of torch spin by default, and starve each other where another program computes too: 30 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch's profiler, which counts bytes for --memory-plot, is talkative.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    open_all()
    remember_interrupts()
    try:
        app(prog_name=name)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to undo: the system ends the program at once
        if "triton" not in sys.modules:  # its newer versions report all objects that are left as leaks
            gc.freeze()  # Python looks through all of torch's objects on its way out, which takes a second
