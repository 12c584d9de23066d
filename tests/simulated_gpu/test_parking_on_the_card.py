"""What is parked comes back as it was, whoever reads it and whenever the copies run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_card import GPU, SCHEDULES
from torch import Tensor

from sd_lowvram.memory import Parked, fetch, park

ROWS = slice(4, 9)


def by_rows(tensor: Tensor) -> Parked:
    parked = Parked.empty(tensor.shape, tensor.dtype, like=tensor)
    for row in range(0, tensor.shape[2], 8):
        parked.store(slice(row, row + 8), tensor[:, :, row : row + 8])
    return parked


def on_another_stream(tensor: Tensor) -> Parked:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        parked = by_rows(tensor)
    tensor.record_stream(stream)
    return parked


def twice(tensor: Tensor) -> Parked:
    """Written over while the first copies are under way."""
    parked = by_rows(torch.zeros_like(tensor))
    for row in range(0, tensor.shape[2], 4):
        parked.store(slice(row, row + 4), tensor[:, :, row : row + 4])
    return parked


WAYS_IN: dict[str, Callable[[Tensor], Parked]] = {
    "whole": park, "by rows": by_rows, "on another stream": on_another_stream, "twice": twice
}  # fmt: skip
WAYS_OUT: dict[str, Callable[[Parked], Tensor]] = {
    "whole": fetch,
    "rows": lambda parked: fetch(parked, ROWS),
    "whole, to the host": lambda parked: fetch(parked, device="cpu"),
    "rows, to the host": lambda parked: fetch(parked, ROWS, device="cpu"),
}


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["planar", "channels last"])
@pytest.mark.parametrize("out", WAYS_OUT)
@pytest.mark.parametrize("into", WAYS_IN)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_parked_comes_back(gpu: Any, schedule: str, into: str, out: str, format: torch.memory_format) -> None:
    noise = torch.randn(2, 8, 32, 32, generator=torch.Generator().manual_seed(0)).to(memory_format=format)
    with gpu.watched(schedule) as seen:
        tensor = noise.to(GPU)
        back = WAYS_OUT[out](WAYS_IN[into](tensor)).cpu()
        del tensor
    assert torch.equal(back, noise[:, :, ROWS] if "rows" in out else noise)
    assert seen.clean, seen


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_dropped_while_copies_run_hurts_nobody(gpu: Any, schedule: str) -> None:
    """Pinned memory of a map that is dropped goes to the next one only when its copies are done."""
    with gpu.watched(schedule) as seen:
        for number in range(6):
            tensor = torch.full((1, 8, 32, 32), float(number), device=GPU)
            back = fetch(park(tensor))
            del tensor
            assert torch.equal(back.cpu(), torch.full((1, 8, 32, 32), float(number)))
            del back
    assert seen.clean, seen
