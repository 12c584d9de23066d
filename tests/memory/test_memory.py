"""Parking: bit for bit, never aliasing, strides preserved."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sd_lowvram.memory import Parked, fetch, host_empty, park, send, to_device, to_host

FORMATS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (5,), (2, 7), (2, 3, 5, 7)])
def test_what_is_parked_comes_back(shape, dtype):
    tensor = (torch.randn(shape) * 9).to(dtype)
    parked = park(tensor)
    expected = tensor.clone()
    tensor.zero_()
    back = fetch(parked)
    assert torch.equal(back, expected)
    back.zero_()
    assert torch.equal(fetch(parked), expected)
    assert (parked.shape, parked.dtype, parked.nbytes) == (tensor.shape, dtype, tensor.numel() * tensor.element_size())


def test_strides_survive_parking():
    tensor = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    assert fetch(park(tensor)).stride() == tensor.stride()
    assert torch.equal(fetch(park(tensor[:, :, ::2])), tensor[:, :, ::2])
    assert to_device(tensor, "cpu").stride() == to_host(tensor).stride() == tensor.stride()


def test_copies_between_the_accounts_never_alias():
    tensor = torch.randn(4, 4, requires_grad=True)
    for copy in (to_device(tensor, "cpu"), to_host(tensor), fetch(park(tensor))):
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        assert torch.equal(copy, tensor) and not copy.requires_grad


def test_what_was_sent_last_is_called_back_without_a_copy():
    first, second = torch.randn(2, 3, 5, 7), torch.randn(4)
    sent = send(first)
    assert sent.is_there
    assert sent.recall() is first
    assert not sent.is_there
    assert sent.recall() is not first and torch.equal(sent.recall(), first)  # it was let go

    left = send(first)
    send(second)
    assert left.recall() is not first
    part = send(first[:1])  # keeping it would keep all of the memory
    assert part.recall().untyped_storage().nbytes() == first[:1].nbytes


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_are_stored_and_loaded(batch, memory_format):
    image = torch.randn(batch, 3, 11, 6).to(memory_format=memory_format)
    parked = Parked.empty(image.shape, image.dtype, "cpu", like=image)
    for start in range(0, 11, 4):
        rows = slice(start, min(start + 4, 11))
        parked.store(rows, image[:, :, rows])
    strip = parked.load(slice(3, 9))
    assert torch.equal(strip, image[:, :, 3:9])
    assert strip.is_contiguous(memory_format=memory_format)
    strip.zero_()
    assert torch.equal(fetch(parked), image)
    assert torch.equal(fetch(parked, rows=slice(9, 11)), image[:, :, 9:])
    assert torch.equal(fetch(park(image), rows=slice(2, 5)), image[:, :, 2:5])


@pytest.mark.parametrize("rows", [slice(0, 12), slice(4, 4), slice(0, 8, 2), slice(-3, 15)])
def test_rows_outside_the_map_are_refused(rows):
    with pytest.raises(ValueError, match="rows"):
        Parked.empty((1, 3, 11, 6), torch.float32).load(rows)


def test_a_strip_of_another_shape_or_type_is_refused():
    parked = Parked.empty((1, 3, 11, 6), torch.float32)
    with pytest.raises(ValueError, match="does not fill rows"):
        parked.store(slice(0, 2), torch.zeros(1, 3, 3, 6))
    with pytest.raises(ValueError, match="does not fill rows"):
        parked.store(slice(0, 3), torch.zeros(1, 3, 3, 6, dtype=torch.float16))
    with pytest.raises(ValueError, match="N, C, H, W"):
        Parked.empty((3, 11, 6), torch.float32)


def test_host_memory_has_the_shape_and_type_asked_for():
    empty = host_empty((2, 3), torch.float16)
    assert (tuple(empty.shape), empty.dtype, empty.device.type) == ((2, 3), torch.float16, "cpu")


def test_the_host_waits_for_copies_under_way():
    """A copy from a GPU into pinned memory goes on after the call; here a stand-in for its event records who waited."""
    waited = []

    class Event:
        def synchronize(self):
            waited.append(True)

    parked = park(torch.zeros(1, 2, 8, 4))
    parked._event = Event()
    fetch(parked, device="cpu")
    fetch(parked, slice(0, 2), device="cpu")
    parked.store(slice(0, 2), torch.ones(1, 2, 2, 4))
    assert len(waited) == 3


def test_the_recorder_of_the_allocator_writes_nothing_to_the_console() -> None:
    """In a thread that did not import torch it wrote an error and two lines a recording; other output stays."""
    code = """
import os, threading, torch
from sd_lowvram.memory import measured, measured_peak
def record():
    found.append(measured_peak(lambda: torch.ones(1 << 20)))
found = []
thread = threading.Thread(target=record)
thread.start()
thread.join()
with measured._silence_profiler():
    os.write(2, b"USDT:a\\nof another\\n")
assert found == [4 << 20], found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "of another\n")
