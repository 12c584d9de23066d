"""What convolutions of pictures and of frames hold on a CPU is predicted, by whichever kernel torch and oneDNN take.

CI runs these tests under several instruction sets: ``make test-instruction-sets``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from sd_lowvram.kernels.cpu_convolutions import convolve_like_whole, runs_onednn
from sd_lowvram.memory import kernels_of, measured_peak
from sd_lowvram.tracing import trace


class Kind(NamedTuple):
    image: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: Any = 1
    padding: int = 0
    groups: int = 1


FRAMES = {
    "unfolded": Kind((1, 8, 3, 40, 40), (8, 8, 3, 3, 3)),
    "unfolded, many channels": Kind((1, 64, 3, 66, 34), (32, 64, 3, 3, 3)),
    "by oneDNN": Kind((1, 128, 3, 66, 34), (64, 128, 3, 3, 3)),
    "of time, with stride": Kind((1, 64, 5, 40, 34), (64, 64, 3, 1, 1), (2, 1, 1)),
    "padded, two clips": Kind((2, 64, 3, 34, 34), (32, 64, 3, 3, 3), padding=1),
}
PICTURES = {
    "small": Kind((1, 8, 40, 40), (8, 8, 3, 3), padding=1),
    "large": Kind((1, 64, 64, 64), (64, 64, 3, 3), padding=1),
    "two": Kind((2, 64, 32, 32), (64, 64, 3, 3), padding=1),
    "to colours": Kind((1, 64, 96, 96), (3, 64, 3, 3), padding=1),
    "halved": Kind((2, 64, 40, 40), (64, 64, 3, 3), 2, 1),
    "in groups": Kind((2, 64, 40, 40), (64, 32, 3, 3), padding=1, groups=2),
}


def _check(kind: Kind, dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format) -> None:
    """Assert that the prediction is what torch holds, or a little more; where only a bound is known (of few channels,
    and of half types, which differ by processor), up to three times as much and three maps a thread."""
    x, weight = (torch.randn(shape).to(dtype, memory_format=layout) for shape in kind[:2])
    more = torch.zeros(len(weight), dtype=dtype), kind.stride, kind.padding, 1, kind.groups
    call = functools.partial((F.conv2d, F.conv3d)[x.dim() - 4], x, weight, *more)
    with kernels_of("cpu"):
        predicted = trace(call).allocated_peak_bytes
    measured = measured_peak(call)
    bounded = len(weight) % 8 != 0 or (dtype == torch.bfloat16 and runs_onednn(dtype))
    spare = 2 * measured + 3 * torch.get_num_threads() * x.nbytes if bounded else 0.02 * measured
    # Allocations are rounded up.
    assert -1024 <= predicted - measured <= spare + 256 * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FRAMES)
def test_conv3d_on_a_cpu(kind: str, dtype: torch.dtype) -> None:
    _check(FRAMES[kind], dtype)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", PICTURES)
def test_conv2d_on_a_cpu(kind: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    _check(PICTURES[kind], dtype, layout)


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
    strip = functools.partial(convolve_like_whole, x.shape, x[..., 8:13, :], weight)
    assert torch.equal(strip(), convolve(x, weight)[..., 8:11, :])
    with kernels_of("cpu"):
        traced = trace(strip)
    assert traced.flops == 2 * 16 * 3 * 18 * weight[0].numel()
    assert measured_peak(strip) <= traced.allocated_peak_bytes
