"""The card is in its place before torch is imported; where that cannot be, all is skipped in one sentence.

``SIMULATED_GPU`` asks for it, as other tests of the same process would run on this card too: ``make
test-simulated-gpu`` sets it. As ``required`` it makes a skip a failure.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from simulated_card.build import hindrance

_M_MMAP_THRESHOLD = -3
ASKED = os.environ.get("SIMULATED_GPU", "")


def _why_not() -> str | None:
    if not ASKED:
        return "on a simulated card, by themselves: make test-simulated-gpu"
    if "torch" in sys.modules:
        return "the simulated card must be there before torch is imported: run these tests by themselves"
    return hindrance()


WHY_NOT = _why_not()
if WHY_NOT is None:
    from simulated_card.card import card

    card()
    # Weights of 1 MiB and more are given back to the system as they end; in a heap some GB of a large model stay taken.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


@pytest.fixture(scope="session", autouse=True)
def gpu() -> Any:
    """The card with its kernels."""
    if WHY_NOT is not None:
        (pytest.fail if ASKED == "required" else pytest.skip)(WHY_NOT)
    return _simulated()


@pytest.fixture(autouse=True)
def without_cycles(gpu: Any) -> None:
    """Free what earlier tests left in cycles, which a peak would count until something is collected."""
    import torch

    if torch.cuda.memory_allocated():
        gc.collect()


@pytest.fixture(autouse=True)
def without_workspaces(gpu: Any) -> Iterator[None]:
    """Free and forget cuBLAS' workspaces after a test: tensors of other tests would lie in their segments."""
    yield
    from sd_lowvram.memory import limit

    gpu.kernels.forget()
    limit._workspaces.clear()


@pytest.fixture(autouse=True)
def on_the_same_stream(gpu: Any) -> Iterator[None]:
    """Fail a test after which another stream than before is current: nothing of ours may leave one behind."""
    import torch

    before = torch.cuda.current_stream()
    yield
    after = torch.cuda.current_stream()
    torch.cuda.set_stream(before)
    assert after == before, f"{after} is left current"


@functools.cache
def _simulated() -> Any:
    import diffusers  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from on_card import Simulated

    torch.set_num_threads(1)
    return Simulated()
