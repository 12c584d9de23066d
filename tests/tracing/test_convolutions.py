"""What convolutions of pictures and of frames hold on a CPU is foretold, by whichever kernel torch takes."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from sd_lowvram.kernels.cpu_convolutions import as_the_whole
from sd_lowvram.memory import kernels_of, measured_peak
from sd_lowvram.tracing import trace

FRAMES = {
    "unfolded": ((1, 8, 3, 40, 40), (8, 8, 3, 3, 3), 1),
    "unfolded, many channels": ((1, 64, 3, 66, 34), (32, 64, 3, 3, 3), 1),
    "by oneDNN": ((1, 128, 3, 66, 34), (64, 128, 3, 3, 3), 1),
    "of time, with stride": ((1, 64, 5, 40, 34), (64, 64, 3, 1, 1), (2, 1, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FRAMES)
def test_conv3d_on_a_cpu(kind: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("oneDNN has no bfloat16 here: torch unfolds all of it, which is not counted")
    shape, kernel, stride = FRAMES[kind]
    call = functools.partial(
        F.conv3d, torch.randn(shape).to(dtype), torch.randn(kernel).to(dtype), torch.zeros(kernel[0]).to(dtype), stride
    )
    with kernels_of("cpu"):
        foretold = trace(call).allocated_peak_bytes
    measured = measured_peak(call)
    # Allocations are rounded up.
    assert -1024 <= foretold - measured <= 0.02 * measured + 256 * 1024


def test_conv3d_of_single_pixels_unfolds_nothing() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    call = functools.partial(F.conv3d, torch.randn(1, 64, 3, 66, 34), torch.randn(64, 64, 1, 1, 1))
    try:
        with kernels_of("cpu"):
            assert trace(call).allocated_peak_bytes == measured_peak(call)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dims", [2, 3])
def test_a_strip_by_the_kernel_of_its_map_has_the_bits_of_the_map(dims: int) -> None:
    """Of a map that oneDNN takes, a strip is small enough to be unfolded; its channels fill oneDNN's blocks of 16."""
    torch.manual_seed(0)
    convolve = (F.conv2d, F.conv3d)[dims - 2]
    x, weight = torch.randn(1, 96, *(3,) * (dims - 2), 80, 20), torch.randn(16, 96, *(3,) * dims)
    strip = functools.partial(as_the_whole, x.shape, x[..., 8:13, :], weight)
    assert torch.equal(strip(), convolve(x, weight)[..., 8:11, :])
    with kernels_of("cpu"):
        traced = trace(strip)
    assert traced.flops == 2 * 16 * 3 * 18 * weight[0].numel()
    assert measured_peak(strip) <= traced.allocated_peak_bytes
