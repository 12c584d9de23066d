"""Two decodes in a row by an autoencoder alone: all on the GPU, and in exact strips of 4 MiB with parked maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sd_lowvram import progress
from sd_lowvram.devices.info import dtype_on
from sd_lowvram.units import MIB

from ..calls import timed_calls
from ..h100_steps import MEASURED, knobs
from ..models import PLENTY, random_vae
from ..tables import Columns, mib, ms, rows_table
from .peaks import held_on
from .record import Case, ResultRows

PICTURES = (("sdxl", 1024), ("sd15", 2048))
WAYS = tuple(dict.fromkeys(way for *_, way in MEASURED if "decode" in way))
"""Names of rows of ``h100_steps.py``, which have the settings of each."""


def run(device: torch.device, record: ResultRows) -> None:
    """Add a row for each autoencoder and way, one at a time."""
    for model, side in progress.report_each("decodes", PICTURES):
        record.fill([{"model": model, "side": side, "way": way} for way in WAYS], trial_decodes, device=str(device))


def trial_decodes(device: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield for each of ``cases``: seconds and bytes of two decodes, and how far they are from a decode of all."""
    where = torch.device(device)
    for case in cases:
        vae = random_vae(case["model"], dtype_on(where), device)
        side = case["side"] // 8
        latents = torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(0)).to(where, vae.dtype)
        row, made = _decoded(vae, latents, case["model"], case["way"])
        _, whole = _decoded(vae, latents, case["model"], WAYS[0])
        yield row | {"same_bits": torch.equal(made, whole), "most": float((made - whole).abs().max())}


def _decoded(vae: Any, latents: Tensor, model: str, way: str) -> tuple[dict[str, Any], Tensor]:
    """Figures of two decodes, and the pixels of the second in host memory."""
    from sd_lowvram import measured, optimize, restore

    where, side = latents.device, 8 * latents.shape[-1]
    plan = optimize(vae, vram=PLENTY, width=side, height=side, device=where, settings=knobs(model, way))
    held_on(where)
    with timed_calls(vae, where) as calls, measured(vae) as run, torch.inference_mode():
        made = [vae.decode(latents, return_dict=False)[0].cpu().float() for _ in range(2)]
    restore(vae)
    first, second = calls.device_seconds or calls.host_seconds
    return {
        "first_seconds": first,
        "second_seconds": second,
        "host_seconds": calls.host_seconds[1],
        "predicted_seconds": next(stage.seconds for stage in plan.stages if stage.name == "decode"),
        "measured_bytes": run.peak_bytes,
        "reserved_bytes": run.reserved_bytes,
    }, made[1]


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Summary for a reader."""
    for row in (row for row in rows if "second_seconds" in row):
        off = "the same bits" if row["same_bits"] else f"pixels at most {row['most']:.1e} off"
        yield (
            f"{row['model']} at {row['side']}, {row['way']}: {row['second_seconds']:.2f} s, predicted "
            f"{row['predicted_seconds']:.2f}, {row['measured_bytes'] / MIB:.0f} MiB, {off}"
        )


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Decodes"
    yield ""
    yield "Two decodes in a row by an autoencoder alone, in fp16, with random weights. *First*, *second*: between the"
    yield "events around the call; *host*: until the second call returned. *Allocated*, *reserved*: the most bytes"
    yield "of torch's allocator. *Bits*: compared with a decode with all on the GPU; else the largest difference."
    yield ""
    yield from rows_table(_COLUMNS, part["rows"], of=3)


_COLUMNS: Columns = (
    ("model", "{model}"),
    ("picture", "{side}x{side}"),
    ("way", "{way}"),
    ("first ms", ms("first_seconds")),
    ("second ms", ms("second_seconds")),
    ("host ms", ms("host_seconds")),
    ("predicted ms", ms("predicted_seconds")),
    ("allocated MiB", mib("measured_bytes")),
    ("reserved MiB", mib("reserved_bytes")),
    ("bits", lambda row: "same" if row["same_bits"] else f"{row['most']:.1e}"),
)
