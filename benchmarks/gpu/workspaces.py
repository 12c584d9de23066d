"""Workspaces of cuDNN by shape: bytes of convolutions in addition to their maps, which no tensor shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sd_lowvram.devices.info import dtype_on
from sd_lowvram.devices.this_machine import overhead_of
from sd_lowvram.memory import measured_peak
from sd_lowvram.units import MIB
from sd_lowvram.weights import weight_bytes

from ..calls import timed_runs
from ..tables import Columns, mib, ms, rows_table
from .peaks import held_on
from .record import Case, ResultRows

SHAPES = (
    (2, 320, 320, 64), (2, 640, 640, 32), (2, 1280, 1280, 16), (2, 320, 320, 128), (2, 320, 320, 256),
    (1, 512, 512, 64), (1, 512, 512, 128), (1, 512, 512, 256), (1, 512, 256, 256), (1, 256, 256, 512),
    (1, 256, 128, 512), (1, 128, 128, 512), (1, 128, 3, 512),
    (1, 512, 512, 512), (1, 512, 256, 512), (1, 256, 256, 1024), (1, 256, 128, 1024), (1, 128, 128, 1024),
    (1, 512, 512, 1024),
)  # fmt: skip
"""(pictures, channels, channels of the output, side of the map): UNets in guided batches, decoders up to 1024x1024,
and the widest map of one of 2048x2048."""
FRAMES = ((384, 384, 256), (384, 384, 512), (192, 192, 512), (192, 192, 1024), (96, 96, 1024))
"""(channels, channels of the output, side) of maps that Qwen-Image's and Wan's autoencoders convolve whole, three
frames at a time, up to 1024x1024, and in the midst of a picture of 2048x2048."""
_RUNS = 5
FORMATS = {"channels last": torch.channels_last, "contiguous": torch.contiguous_format}
_THREE = "3 frames"


def run(device: torch.device, record: ResultRows) -> None:
    """Add a row for each shape and memory format."""
    names = ("pictures", "channels", "out_channels", "side")
    shapes = [dict(zip(names, shape, strict=True)) for shape in SHAPES]
    cases = [shape | {"format": name} for shape in shapes for name in FORMATS]
    cases += [dict(zip(names, (1, *shape), strict=True)) | {"format": _THREE} for shape in FRAMES]
    record.fill(cases, trial_workspaces, device=str(device))


def trial_workspaces(device: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield for each of ``cases``, a convolution, the peak without its maps and weights, and the reserved bytes."""
    for case in cases:
        yield _row(torch.device(device), case)


@torch.inference_mode()
def _row(device: torch.device, case: Case) -> dict[str, Any]:
    held_on(device)
    place: Any = {"device": device, "dtype": dtype_on(device)}
    channels = case["channels"], case["out_channels"], 3
    convolution: torch.nn.Module
    if case["format"] == _THREE:
        convolution = torch.nn.Conv3d(*channels, padding=(0, 1, 1), **place)
        maps = torch.randn(case["pictures"], case["channels"], 3, case["side"], case["side"], **place)
    else:
        convolution = torch.nn.Conv2d(*channels, padding=1, **place)
        memory_format = FORMATS[case["format"]]
        torch.nn.Module.to(convolution, memory_format=memory_format)  # type: ignore[call-overload]
        maps = torch.randn(case["pictures"], case["channels"], case["side"], case["side"], **place)
        maps = maps.to(memory_format=memory_format)
    output = convolution(maps)  # kernels are loaded, and algorithms chosen, at the first call
    output_bytes = output.numel() * output.element_size()
    del output
    peak = measured_peak(lambda: convolution(maps))
    on_gpu = device.type == "cuda"
    map_bytes = maps.numel() * maps.element_size() + output_bytes
    return {
        "map_bytes": map_bytes,
        "workspace_bytes": peak - output_bytes,
        "counted_bytes": overhead_of(device).workspace(map_bytes + weight_bytes(convolution)) if on_gpu else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else 0,
        **timed_runs(lambda: convolution(maps), _RUNS, device),
    }


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Summary for a reader."""
    ran = [row for row in rows if row["format"] == "channels last" and "counted_bytes" in row]
    if ran:
        enough = sum(row["workspace_bytes"] <= row["counted_bytes"] for row in ran)
        yield f"channels last at most {max(row['workspace_bytes'] for row in ran) / MIB:.1f} MiB more than the maps"
        yield f"plans count enough for {enough} of {len(ran)}"
    frames = [row["workspace_bytes"] for row in rows if row["format"] == _THREE and "workspace_bytes" in row]
    if frames:
        yield f"convolutions of frames at most {max(frames) / MIB:.1f} MiB more than theirs"


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Workspaces of convolutions"
    yield ""
    yield "Convolutions in fp16, of 3x3, or of 3x3x3 where they take three frames, as autoencoders of frames have them."
    yield "*Workspace*: the most that was allocated in addition to input, weights and output,"
    yield "copies in another memory format among it. *Counted*: what a plan adds for it, whose maps are channels last."
    yield "*Reserved*: all that the allocator had of the card. *Host*: until the call returned; *device*: between the"
    yield f"events around it; medians of {_RUNS} calls."
    yield ""
    yield from rows_table(_COLUMNS, part["rows"], of=3)


_COLUMNS: Columns = (
    ("map", "{pictures} x {side}x{side}"),
    ("channels", "{channels} to {out_channels}"),
    ("format", "{format}"),
    ("input and output MiB", mib("map_bytes", "{:.1f}", "?")),
    ("workspace MiB", mib("workspace_bytes", "{:.1f}", "?")),
    ("counted MiB", mib("counted_bytes", "{:.1f}", "?")),
    ("reserved MiB", mib("reserved_bytes", "{:.1f}", "?")),
    ("host ms", ms("host_seconds")),
    ("device ms", ms("device_seconds")),
)
