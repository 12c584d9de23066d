"""Two decodes in a row by an autoencoder alone: all on the GPU, with torch's operators and with fused kernels, and in
exact strips of 4 MiB with parked maps, of which one more decode is profiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_lowvram import progress
from sd_lowvram.devices.info import dtype_on
from sd_lowvram.kernels.triton.support import why_not
from sd_lowvram.settings import Settings
from sd_lowvram.units import MIB

from ..calls import timed_calls
from ..h100_steps import MEASURED, knobs
from ..models import PLENTY, random_vae
from ..tables import Columns, mib, ms, rows_table
from .peaks import held_on
from .record import Case, ResultRows, as_predicted, fallen, not_run

PICTURES = (("sdxl", 1024), ("sd15", 2048))
FUSED = "all, fused kernels"
"""As with all on the GPU, with Triton's kernels in the whole decode: plans for an H100 turn them on."""
_WHOLE, *_STRIPS = dict.fromkeys(way for *_, way in MEASURED if "decode" in way)
WAYS = (_WHOLE, FUSED, *_STRIPS)
"""The others are names of rows of ``h100_steps.py``, which have the settings of each."""
_OPERATORS = 25
"""Lines of each table of a profile."""


def run(device: torch.device, record: ResultRows) -> None:
    """Add a row for each autoencoder and way, one at a time."""
    for model, side in progress.report_each("decodes", PICTURES):
        cases = [{"model": model, "side": side, "way": way} for way in WAYS]
        record.fill(cases, trial_decodes, device=str(device), folder=str(record.folder.absolute()))


def trial_decodes(device: str, cases: Sequence[Case], folder: str) -> Iterator[dict[str, Any]]:
    """Yield for each of ``cases``: seconds and bytes of two decodes, and how far they are from a decode of all.

    The profile of one more decode in strips of the first picture is written to ``folder``.
    """
    where = torch.device(device)
    for case in cases:
        model, side = case["model"], case["side"] // 8
        if case["way"] == FUSED and (why := why_not(where)) is not None:
            yield {"failed": why}
            continue
        vae = random_vae(model, dtype_on(where), device)
        latents = torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(0)).to(where, vae.dtype)
        profiled = case["way"] in _STRIPS and (model, case["side"]) == tuple(PICTURES[0])
        row, made = _decoded(vae, latents, model, case["way"], Path(folder) if profiled else None)
        _, whole = _decoded(vae, latents, model, _WHOLE)
        yield row | {"same_bits": torch.equal(made, whole), "most": float((made - whole).abs().max())}


def _decoded(
    vae: Any, latents: Tensor, model: str, way: str, folder: Path | None = None
) -> tuple[dict[str, Any], Tensor]:
    """Figures of two decodes, and the pixels of the second in host memory; a profile of a third one in ``folder``."""
    from sd_lowvram import measured, optimize, restore

    where, side = latents.device, 8 * latents.shape[-1]
    plan = optimize(vae, vram=PLENTY, width=side, height=side, device=where, settings=_settings(model, way))
    held_on(where)
    with timed_calls(vae, where) as calls, measured(vae) as run, torch.inference_mode():
        made = [vae.decode(latents, return_dict=False)[0].cpu().float() for _ in range(2)]
    first, second = calls.device_seconds or calls.host_seconds
    stage = next(stage for stage in plan.stages if stage.name == "decode")
    row: dict[str, Any] = {
        "first_seconds": first,
        "second_seconds": second,
        "host_seconds": calls.host_seconds[1],
        "predicted_seconds": stage.seconds,
        "predicted_host_seconds": stage.host_seconds,
        "measured_bytes": run.peak_bytes,
        "reserved_bytes": run.reserved_bytes,
    }
    if folder is not None:
        row["profile"] = f"decode-{model}-{side}.txt"
        text = _profile(vae, latents)
        folder.joinpath(row["profile"]).write_text(text, encoding="utf-8")
    restore(vae)
    return row, made[1]


def _settings(model: str, way: str) -> Settings:
    return dataclasses.replace(knobs(model, _WHOLE), vae_fused_kernels=True) if way == FUSED else knobs(model, way)


@torch.inference_mode()
def _profile(vae: Any, latents: Tensor) -> str:
    """Operators of a decode by their time on the host and on the device, or the reason why there is no profile."""
    try:
        with torch.profiler.profile() as seen:
            vae.decode(latents, return_dict=False)[0].cpu()
        operators = seen.key_averages()
    except RuntimeError as error:  # of a machine whose profiler needs other rights
        return f"{error}\n"
    orders = ["self_cpu_time_total"]
    if latents.device.type == "cuda":
        newer = hasattr(operators[0], "self_device_time_total")  # torch 2.4
        orders.append("self_device_time_total" if newer else "self_cuda_time_total")
    return "\n".join(
        f"by {order}\n{operators.table(order, row_limit=_OPERATORS, max_name_column_width=50)}" for order in orders
    )


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Summary for a reader."""
    ran = [row for row in rows if "second_seconds" in row]
    for row in ran:
        off = "the same bits" if row["same_bits"] else f"pixels at most {row['most']:.1e} off"
        yield (
            f"{row['model']} at {row['side']}, {row['way']}: {row['second_seconds']:.2f} s, predicted "
            f"{row['predicted_seconds']:.2f}, {row['measured_bytes'] / MIB:.0f} MiB, {off}"
        )
    for row in ran:
        name = f"{row['model']} at {row['side']}, {row['way']}: a second decode"
        yield from fallen([as_predicted(name, row["second_seconds"], row["predicted_seconds"])])
    yield from not_run(rows, lambda row: f"{row['model']} at {row['side']}, {row['way']}")


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Decodes"
    yield ""
    yield "Two decodes in a row by an autoencoder alone, in fp16, with random weights. *First*, *second*: between the"
    yield "events around the call; *host*: until the second call returned. *Allocated*, *reserved*: the most bytes"
    yield "of torch's allocator. *Bits*: compared with a decode with all on the GPU; else the largest difference."
    yield ""
    yield from rows_table(_COLUMNS, ({"error": row.get("failed")} | row for row in part["rows"]), of=3)
    for row in part["rows"]:
        if "profile" in row:
            yield ""
            yield f"Operators of one more decode of {row['model']}, {row['way']}: `{row['profile']}` in this folder."


_COLUMNS: Columns = (
    ("model", "{model}"),
    ("picture", "{side}x{side}"),
    ("way", "{way}"),
    ("first ms", ms("first_seconds")),
    ("second ms", ms("second_seconds")),
    ("predicted ms", ms("predicted_seconds")),
    ("host ms", ms("host_seconds")),
    ("predicted host ms", ms("predicted_host_seconds")),
    ("allocated MiB", mib("measured_bytes")),
    ("reserved MiB", mib("reserved_bytes")),
    ("bits", lambda row: "same" if row["same_bits"] else f"{row['most']:.1e}"),
)
