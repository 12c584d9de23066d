"""What a GPU holds besides tensors."""

from __future__ import annotations

import pytest
import torch

from sd_lowvram.devices.overhead import ROUNDING_BYTES, Overhead
from sd_lowvram.units import MIB


def test_total():
    assert Overhead(context_bytes=100, matrix_bytes=10, convolution_bytes=1).total() == 111 + ROUNDING_BYTES
    assert 500 * MIB < Overhead().total() < 600 * MIB


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[700], [MIB, MIB, 1], [700, MIB, 3 * MIB], [9 * MIB, 9 * MIB, 1], [10 * MIB]])
def test_the_allocator_leaves_no_more_unused(sizes):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    allocated, reserved = torch.cuda.memory_allocated() - before[1], torch.cuda.memory_reserved() - before[0]
    assert allocated <= reserved <= allocated + ROUNDING_BYTES
    del held
