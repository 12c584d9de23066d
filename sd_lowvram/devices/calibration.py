"""Measured speed of this machine for the work of Stable Diffusion, and overhead of its GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..compat import restrict_kernel
from ..compat.private import TorchDispatchMode, free_matrix_workspaces, take_matrix_workspaces
from ..weights import draw_weights
from .info import context_memory
from .overhead import Overhead
from .performance import AMPERE, THIS, Rates

_ROUNDS, _QUEUED = 3, 8
_DISTURBED = 0.15
"""Share of all processors used by other programs from which on it is reported: an idle desktop uses some percent."""
_KERNELS = (512, 3, 3)
_READ_BYTES = math.prod(_KERNELS) * 2 << 13
_DOUBLED = 2
"""Pictures: guidance doubles one."""
_MAPS = (
    *((320, 64, 64, 2), (640, 32, 32, 2), (1280, 16, 16, 2), (512, 64, 64, 2)),
    *((640, 24, 70, 4), (640, 41, 78, 2), (512, 252, 136, 1)),
)
"""(channels, height, width, pictures) of SD1.5 at 512x512, and of sizes for which an H100 takes more."""
_ATTENTIONS = ((2, 8, 4096, 4096, 40), (2, 8, 4096, 77, 40), (2, 10, 4096, 4096, 64), (1, 24, 4608, 4608, 128))
"""(batch, heads, queries, keys, width) of SD1.5, SDXL and FLUX.1 at their own sizes."""


def calibrate(device: torch.device) -> Rates:
    """Measure the rates of ``device``, in about two seconds.

    Matrix rates are those of convolutions, linear layers and attention at SD1.5's shapes, mixed as in its UNet. On a
    GPU those of wide products come from linear layers and attention at FLUX.1's shapes. A CPU's reordering of weights
    is measured by layers of the deepest level, whose maps are small. The time that an operator costs in addition comes
    from a narrow UNet of diffusers if diffusers is loaded, else from a chain of plain layers.

    Args:
        device: a GPU or the CPU. On a busy machine the rates are too low, and their source says so.

    Returns:
        The rates, for plans.
    """
    from .info import device_memory

    on_cpu = device.type == "cpu"
    shared = _share_of_others()
    is_first = device.type == "cuda" and not torch.cuda.memory_reserved(device)
    loading: list[float] = []
    with torch.inference_mode():
        reading, reordering = reading_rates(device)
    with torch.inference_mode(), _loading_noted(loading):
        single = _matrix_rate(device, torch.float32, small=False)
        bandwidth = _addition_rate(device)
        rates = Rates(
            name=THIS,
            title="this CPU" if on_cpu else _title(device),
            half_flops=_matrix_rate(device, torch.bfloat16 if on_cpu else torch.float16, small=on_cpu),
            float_flops=single,
            bandwidth=bandwidth,
            copy_bandwidth=copy_rate(device),
            launch_seconds=_operator_seconds(device, single),
            packing=_packing_rate(device, single) if on_cpu else 0.0,
            vram_bytes=device_memory(device).total,
            source="measured here",
            queued=not on_cpu,
            wide_flops=0.0 if on_cpu else _wide_rate(device),
            reading=reading,
            reordering=reordering,
            bf16=device.type != "cuda" or torch.cuda.get_device_capability(device) >= AMPERE,
            group_seconds=0.0 if on_cpu else _group_seconds(device, bandwidth),
        )
    return dataclasses.replace(rates, source=_source(shared()), loading_seconds=sum(loading) if is_first else 0.0)


def _share_of_others() -> Callable[[], float]:
    """Return a function for the share of all processors (0 to 1) that other programs have used since this call."""
    try:
        import psutil
    except ImportError:
        return lambda: 0.0

    def busy_seconds() -> tuple[float, float]:
        times = psutil.cpu_times()
        own = psutil.Process().cpu_times()
        taken = times.user + times.system + getattr(times, "nice", 0.0)
        return taken - own.user - own.system, time.perf_counter()

    before = busy_seconds()

    def share() -> float:
        taken, passed = (now - then for now, then in zip(busy_seconds(), before, strict=True))
        return min(1.0, max(0.0, taken / passed / (os.cpu_count() or 1)))

    return share


def _source(others: float) -> str:
    """Source of rates that were measured while other programs used this share of the processors."""
    if others < _DISTURBED:
        return "measured here"
    return (
        f"measured here while other programs took {others:.0%} of the processors, so perhaps too slow: "
        "sd-lowvram doctor --calibrate measures again"
    )


def _title(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type.upper()}"


def fastest_seconds(run: Callable[[], object], device: torch.device, rounds: int = _ROUNDS) -> float:
    """The fastest of several runs of ``run``, warmed up; on a card each is the mean of some that follow each other.

    A single one measures the time to launch work on a fast GPU: 203 TFLOP/s and 30 GB/s of copies were found on an
    H100, whose runs were faster than these rates allow.
    """
    calls = 1 if device.type == "cpu" else _QUEUED
    # What a computation of one thread took does not depend on who else computes; of several, only the wall knows.
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock, best, first = time.process_time if alone else time.perf_counter, float("inf"), 0.0
    for turn in range(rounds + 1):
        _wait(device)
        start = clock()
        for _ in range(calls):
            run()
        _wait(device)
        took = clock() - start
        first, best = (first, min(best, took / calls)) if turn else (took, best)
    if (noted := _loading.get()) is not None:
        noted.append(max(0.0, first - calls * best))
    return max(best, 1e-9)


_loading: ContextVar[list[float] | None] = ContextVar("loading", default=None)


@contextlib.contextmanager
def _loading_noted(noted: list[float]) -> Iterator[None]:
    """Append to ``noted``, for each measurement within the block, by how many seconds its first run was longer."""
    before = _loading.set(noted)
    try:
        yield
    finally:
        _loading.reset(before)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def _matrix_rate(device: torch.device, dtype: torch.dtype, small: bool) -> float:
    """Operations a second over a mix of layers: 7 parts convolutions, 2 linear layers, 1 attention.

    ``small``: only a small convolution, for a type that the device may have to imitate at a hundredth of the speed.
    """
    if small:
        return _rate(*_convolution(64, 16, device, dtype), device)
    side = 32 if device.type == "cpu" else 64
    deep = _rate(*_convolution(320, side, device, dtype), device)
    wide = _rate(*_convolution(128, 4 * side, device, dtype, pictures=1), device)
    linear = _rate(*_linear(_DOUBLED * side * side, 320, 2560, device, dtype), device)
    attention = _rate(*_attention(side * side, device, dtype), device)
    return 1 / (0.35 / deep + 0.35 / wide + 0.2 / linear + 0.1 / attention)


def _wide_rate(device: torch.device) -> float:
    """Operations a second, in 16 bits, over a mix as FLUX.1 has it: 4 parts linear layers, 1 attention."""
    linear = _rate(*_linear(2048, 3072, 12288, device, torch.float16), device)
    attention = _rate(*_attention(4096, device, torch.float16, width=128), device)
    return 1 / (0.8 / linear + 0.2 / attention)


def _rate(run: Callable[[], object], flops: int, _weight: int, device: torch.device) -> float:
    return flops / fastest_seconds(run, device)


_Layer = tuple[Callable[[], object], int, int]
"""A call, its operations, and the bytes of its weight."""


def _convolution(
    channels: int,
    side: int,
    device: torch.device,
    dtype: torch.dtype,
    pictures: int = _DOUBLED,
    layout: torch.memory_format = torch.contiguous_format,
    width: int = 0,
) -> _Layer:
    """A convolution of a square map, or of one that is ``side`` high and ``width`` wide."""
    image = _filled_tensor(pictures, channels, side, width or side, device=device).to(dtype, memory_format=layout)
    kernel = _filled_tensor(channels, channels, 3, 3, device=device).to(dtype, memory_format=layout)
    flops = 2 * image.numel() * channels * 9
    return lambda: functional.conv2d(image, kernel, padding=1), flops, kernel.nbytes


def _linear(tokens: int, inside: int, outside: int, device: torch.device, dtype: torch.dtype) -> _Layer:
    rows = _filled_tensor(tokens, inside, device=device).to(dtype)
    weight = _filled_tensor(outside, inside, device=device).to(dtype)
    return lambda: functional.linear(rows, weight), 2 * rows.numel() * outside, weight.nbytes


def _attention(tokens: int, device: torch.device, dtype: torch.dtype, width: int = 40) -> _Layer:
    query = _filled_tensor(_DOUBLED, 8, tokens, width, device=device).to(dtype)
    attend = functional.scaled_dot_product_attention
    return lambda: attend(query, query, query), 4 * query.numel() * tokens, 0


def _filled_tensor(*shape: int, device: torch.device) -> Tensor:
    """Numbers to compute with. A CPU takes as long for any, and longer to draw them than to use them; a GPU's clock
    follows the power that they take, and ones take little."""
    if device.type == "cpu":
        return torch.ones(shape)
    return torch.randn(shape, device=device, generator=torch.Generator(device))


def _packing_rate(device: torch.device, flops_a_second: float) -> float:
    """Bytes of weights a second that a CPU brings into its kernels' order, beyond the time of the arithmetic."""
    layers = (
        _convolution(1280, 4, device, torch.float32),
        _linear(128, 1280, 10240, device, torch.float32),
    )
    seconds = sum(max(0.0, fastest_seconds(run, device, 2) - flops / flops_a_second) for run, flops, _ in layers)
    weights = sum(weight for _, _, weight in layers)
    return weights / max(seconds, weights / 1e12)


def _addition_rate(device: torch.device) -> float:
    data = torch.zeros(1 << 24, device=device)
    return 2 * data.nbytes / fastest_seconds(lambda: data.add_(1.0), device)


def _group_seconds(device: torch.device, bandwidth: float) -> float:
    """Seconds in which torch's GroupNorm reads an element of a group, beyond the time of its bytes.

    Source: the map of a decoder that :mod:`sd_lowvram.kernels.triton.measure` compares kernels on.
    """
    groups = 32
    data = torch.zeros(1, 128, 512, 512, device=device, dtype=torch.float16)
    seconds = fastest_seconds(lambda: functional.group_norm(data, groups), device)
    return max(0.0, seconds - 2 * data.nbytes / bandwidth) / (data.numel() // groups)


def copy_rate(device: torch.device) -> float:
    """Bytes a second from pinned host memory."""
    host = torch.zeros(1 << 24, pin_memory=device.type == "cuda")
    target = torch.empty(1 << 24, device=device)
    return host.nbytes / fastest_seconds(lambda: target.copy_(host, non_blocking=True), device)


def reading_rates(device: torch.device) -> tuple[float, float]:
    """Bytes a second from a mapped file that the page cache has into memory as the streaming engine's ring has it, as
    they lie there and brought in another order; the defaults where no file can be written."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"\1" * _READ_BYTES)
            file.flush()
            mapped = mmap.mmap(file.fileno(), _READ_BYTES, access=mmap.ACCESS_COPY)
    except OSError:
        return Rates.reading, Rates.reordering
    kernels = torch.frombuffer(mapped, dtype=torch.float16).view(-1, *_KERNELS)
    return _copy_rate(kernels, device), _copy_rate(kernels.permute(0, 2, 3, 1), device)


def _copy_rate(kernels: Tensor, device: torch.device) -> float:
    """Bytes a second of ``kernels`` into a chunk that is as contiguous as the ring, piece by piece."""
    pieces = kernels.chunk(8)
    chunk = torch.empty_like(pieces[0], memory_format=torch.contiguous_format, pin_memory=device.type == "cuda")
    return kernels.nbytes / fastest_seconds(lambda: [chunk.copy_(piece) for piece in pieces], device)


def _operator_seconds(device: torch.device, flops_a_second: float) -> float:
    """Seconds that an operator costs in addition to its work, in this program."""
    from torch.utils.flop_counter import FlopCounterMode  # which imports triton, where that is installed

    model, inputs = narrow_unet(device) if "diffusers" in sys.modules else _plain_layers(device)
    seconds = fastest_seconds(lambda: model(*inputs), device)
    with torch.inference_mode(False), torch.no_grad(), Operators() as counted, FlopCounterMode(display=False) as work:
        model(*inputs)
    flops: int = work.get_total_flops()
    return float(max(0.0, seconds - flops / flops_a_second) / counted.number)


class Operators(TorchDispatchMode):
    """Counts the operators that run inside and are no views, as a trace does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = [result.alias_info for result in func._schema.returns]
        view = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
        self.number += not (view or func is torch.ops.aten._unsafe_view.default)
        return func(*args, **(kwargs or {}))


def narrow_unet(device: torch.device) -> tuple[nn.Module, tuple[Any, ...]]:
    """A UNet of SD1.5's levels whose layers are too narrow to take time, and inputs for two rows."""
    from diffusers import UNet2DConditionModel

    with torch.inference_mode(False):
        with torch.device("meta"):
            empty = UNet2DConditionModel(
                block_out_channels=(32, 64, 64, 64), attention_head_dim=4, cross_attention_dim=32, norm_num_groups=8
            )
        unet = draw_weights(empty, device).requires_grad_(False)
    inputs = torch.zeros(_DOUBLED, 4, 8, 8), torch.zeros(1, dtype=torch.long), torch.zeros(_DOUBLED, 77, 32)
    return unet, tuple(tensor.to(device) for tensor in inputs)


def _plain_layers(device: torch.device) -> tuple[nn.Module, tuple[Any, ...]]:
    with torch.inference_mode(False):
        with torch.device("meta"):
            block = nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1), nn.LayerNorm(8), nn.Linear(8, 8)
        layers = draw_weights(nn.Sequential(*block * 8), device).requires_grad_(False)
    return layers, (torch.zeros(_DOUBLED, 32, 8, 8, device=device),)


def measured_overhead(device: torch.device) -> Overhead:
    """Overhead of this GPU after layers of SD1.5 have run in fp16 at 512x512.

    torch allocates the libraries' workspaces itself, so they are its peak less the tensors. Probes are convolutions at
    the levels of SD1.5's denoiser and, as a share, of its decoder, with the widest map of a picture of 2048x2048 if it
    fits, channels last as in plans; and cuDNN's attention, if it runs. The context is the memory that the driver counts
    for this process outside of torch's allocator. If the driver does not separate processes, all memory in use counts,
    up to the default.
    """
    matrix = _matrix_workspace(device)
    sides = ((512, 256), (256, 512), (128, 512), (512, 1024))
    with torch.inference_mode():
        small = max(_workspace(*shape, device)[0] for shape in _MAPS)
        large = [
            _workspace(channels, side, side, 1, device) for channels, side in sides if _has_room(channels, side, device)
        ]
        attention = _attention_share(device)
    share = max((space / moved for space, moved in large if space > small), default=0.0)
    torch.cuda.empty_cache()
    return Overhead(context_memory(device, Overhead().context_bytes), matrix, small, share, attention)


def _matrix_workspace(device: torch.device) -> int:
    """Bytes that matrix products keep from the first of them on, of which there may have been some in this process."""
    torch.cuda.synchronize(device)
    free_matrix_workspaces()
    before = torch.cuda.memory_allocated(device)
    take_matrix_workspaces(device)
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.memory_allocated(device) - before)


def _has_room(channels: int, side: int, device: torch.device) -> bool:
    """True if the GPU can hold the probe of such a map: while it is drawn, and with its output."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] >= 4 * 2 * channels * side * side


def _workspace(channels: int, height: int, width: int, pictures: int, device: torch.device) -> tuple[int, int]:
    """Bytes that a convolution asks torch for beyond its own tensors, and bytes that it reads and writes."""
    run, _, weight_bytes = _convolution(channels, height, device, torch.float16, pictures, torch.channels_last, width)
    space, own = _extra_bytes(run, device)
    return space, 2 * own + weight_bytes


def _attention_share(device: torch.device) -> float | None:
    """Peak allocation of cuDNN's attention, relative to the bytes of its own tensors; None if it does not run."""
    shares = []
    for batch, heads, queries, keys, width in _ATTENTIONS:
        with contextlib.suppress(RuntimeError):
            q, k = (
                torch.zeros(batch, tokens, heads, width, device=device, dtype=torch.float16).transpose(1, 2)
                for tokens in (queries, keys)
            )
            with restrict_kernel("cudnn"):
                space, own = _extra_bytes(functools.partial(functional.scaled_dot_product_attention, q, k, k), device)
            shares.append(space / (q.nbytes + 2 * k.nbytes + own))
    return max(shares, default=None)


def _extra_bytes(run: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Bytes that ``run`` asks torch for beyond its output, and bytes of that."""
    run()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    output = run()
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    asked = "requested_bytes.all" if stats.get("requested_bytes.all.peak") else "allocated_bytes.all"  # of whole blocks
    own = output.nbytes if isinstance(output, Tensor) else 0
    return stats[f"{asked}.peak"] - stats[f"{asked}.current"], own
