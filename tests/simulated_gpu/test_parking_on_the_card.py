"""What is parked comes back as it was, whoever reads it and whenever the copies run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_card import GPU, SCHEDULES
from torch import Tensor

from sd_lowvram.memory import Parked, fetch, park, send
from sd_lowvram.memory.pinned_buffers import PINNED_BUFFERS

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
    "whole": park, "sent": send, "by rows": by_rows, "on another stream": on_another_stream, "twice": twice
}  # fmt: skip
WAYS_OUT: dict[str, Callable[[Parked], Tensor]] = {
    "whole": fetch,
    "recalled": lambda parked: parked.recall(),
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


@pytest.mark.parametrize("put", [park, send])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_dropped_while_copies_run_hurts_nobody(
    gpu: Any, schedule: str, put: Callable[[Tensor], Parked]
) -> None:
    """Memory of a map that is dropped goes to the next one only when its copies are done."""
    with gpu.watched(schedule) as seen:
        for number in range(6):
            tensor = torch.full((1, 8, 32, 32), float(number), device=GPU)
            back = fetch(put(tensor))
            del tensor
            assert torch.equal(back.cpu(), torch.full((1, 8, 32, 32), float(number)))
            del back
    assert seen.clean, seen


def test_the_compute_goes_on_while_a_map_leaves(gpu: Any) -> None:
    """Until its memory goes to other tensors, or something else leaves."""

    def copied(parked: Parked) -> bool:
        (torch.ones(4, device=GPU) * 2).sum()
        torch.cuda.current_stream().synchronize()
        return parked._event is not None and parked._event.query()

    with gpu.watched("lazy") as seen, PINNED_BUFFERS.keep():
        tensor = torch.full((1, 8, 32, 32), 1.0, device=GPU)
        parked, place = send(tensor), tensor.data_ptr()
        del tensor
        assert not copied(parked)
        again = parked.recall()
        assert again.data_ptr() == place
        assert not copied(parked)
        del again
        assert copied(parked)
        parked = send(torch.full((1, 8, 32, 32), 2.0, device=GPU))
        assert not copied(parked)
        other = send(torch.full((1, 8, 32, 32), 3.0, device=GPU))
        assert copied(parked) and not copied(other)
        del parked, other
    assert seen.clean, seen
