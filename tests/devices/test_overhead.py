"""What a GPU holds besides tensors, by the allocator's rules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sd_lowvram.devices.overhead import Overhead, block_bytes, reserved_bytes, rounding_bytes
from sd_lowvram.units import MIB

SIZES = st.lists(st.integers(1, 64 * MIB), max_size=20)


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([], 0),
        ([1], 2 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB, MIB, 1], 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([9 * MIB, 9 * MIB], 20 * MIB),
        ([10 * MIB], 10 * MIB),
        ([11 * MIB + 1], 12 * MIB),
        ([1, 2 * MIB, 11 * MIB], 34 * MIB),
    ],
)
def test_segments(sizes, reserved):
    assert reserved_bytes(sizes) == reserved


@given(SIZES)
def test_rounding_is_never_negative_and_bounded(sizes):
    rounding = rounding_bytes(sizes)
    assert 0 <= rounding <= rounding_bytes([]) + 3 * MIB * len(sizes)
    assert rounding_bytes([]) == 22 * MIB


@given(SIZES, st.integers(1, 64 * MIB))
def test_more_tensors_never_reserve_less(sizes, more):
    assert reserved_bytes([*sizes, more]) >= reserved_bytes(sizes)


def test_blocks_and_total():
    assert [block_bytes(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert Overhead(context_bytes=100, matrix_bytes=10, convolution_bytes=1).total([11 * MIB + 1]) == 111 + MIB - 1
    assert 500 * MIB < Overhead().total() < 600 * MIB


@pytest.mark.gpu
def test_the_allocator_reserves_so():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    sizes = [700, MIB, 3 * MIB, 11 * MIB + 1]
    held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    assert torch.cuda.memory_allocated() - before[1] == sum(map(block_bytes, sizes))
    assert torch.cuda.memory_reserved() - before[0] == reserved_bytes(sizes)
    del held
