"""A switch that keeps torch's compiler off during traces: compiled models run as they were written."""

from __future__ import annotations

import contextlib

import torch

from ..compat.private import TorchDispatchMode, is_loaded
from ..memory.threads import Shared

CAN_REST = hasattr(torch.compiler, "set_stance")
"""torch 2.6 and later; the compiler of earlier versions keeps off by itself."""

_at_rest = Shared(lambda: torch.compiler.set_stance("force_eager"))


def prevent_compiling() -> contextlib.AbstractContextManager[None]:
    """Prevent compiling, and running compiled code, within the block, in any thread."""
    compiles = CAN_REST and is_loaded()  # if it is not loaded, nothing is compiled
    return _at_rest() if compiles else contextlib.nullcontext()


class Uncompiled(TorchDispatchMode):
    """A dispatch mode of traces, within :func:`prevent_compiling`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return True if torch must keep its compiler off each operator, which costs time."""
        return not CAN_REST
