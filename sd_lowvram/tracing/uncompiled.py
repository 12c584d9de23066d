"""torch's compiler at rest while traces run: what it has compiled runs as it was written."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import torch

CAN_REST = hasattr(torch.compiler, "set_stance")
"""torch 2.6 and later; before, the compiler keeps away by itself."""

_lock = threading.Lock()
_inside: list[int] = []
_stance = contextlib.ExitStack()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, in whichever thread, nothing is compiled, nor does what was compiled run."""
    if not CAN_REST or "torch._dynamo" not in sys.modules:  # without it nothing can have been compiled
        yield
        return
    with _lock:
        if not _inside:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
        _inside.append(threading.get_ident())
    try:
        yield
    finally:
        with _lock:
            _inside.remove(threading.get_ident())
            if not _inside:
                _stance.close()
