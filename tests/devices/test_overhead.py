"""What a GPU holds besides tensors."""

from __future__ import annotations

from sd_lowvram.devices.overhead import Overhead
from sd_lowvram.units import MIB


def test_total():
    assert Overhead(context_bytes=100, matrix_bytes=10, convolution_bytes=1).total() == 111
    assert Overhead(convolution_bytes=MIB, convolution_share=0.5).more_for(6 * MIB) == 2 * MIB
    assert Overhead(convolution_bytes=MIB, convolution_share=0.5).more_for(MIB) == 0
    assert 480 * MIB < Overhead().total() < 600 * MIB
