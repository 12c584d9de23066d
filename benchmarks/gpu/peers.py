"""Today's transformers and SDXL by us and by other programs, one after the other: a step, bytes on the GPU, page-locked
bytes, and bits."""

from __future__ import annotations

import copy
import importlib.util
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sd_lowvram import progress
from sd_lowvram.compat.private import free_pinned
from sd_lowvram.memory import measured_peak
from sd_lowvram.memory.pinned import pinned_bytes, unlock_ended
from sd_lowvram.units import GIB, MIB
from sd_lowvram.weights import all_tensors

from ..calls import timed_calls
from ..models import embeddings, random_denoiser, random_transformer
from ..peers_on_card import PLAIN, THEIRS, aircanvas, mmgp
from ..tables import Columns, mib, ms, rows_table, yes
from .peaks import held_on
from .record import Case, ResultRows, as_predicted, fallen, not_run, predicted_step
from .todays import TIMED, final_latents

MODELS = "flux1-dev", "z-image-turbo", "sdxl"
UNETS = ("sdxl",)
"""Those of the models that denoise with a UNet."""
SIDE = 1024
CAPS = (4, 6, 8)
"""GiB of the GPU for the programs to which a limit can be stated."""
OURS = {f"sd-lowvram, {size} GiB": size * GIB for size in CAPS}
"""Budgets in bytes. Those of the simulated card are shares of its narrower model's."""
_FOUR, *_MORE = OURS
_LEAVES, _BLOCKS = ("diffusers, groups by leaf, stream", "diffusers, groups by block, stream")
CAPPED = {
    **{f"mmgp 3.8.2, {size} GiB": mmgp(size << 10) for size in CAPS},
    **{f"AirCanvas 0.1.0, {size} GiB": aircanvas(f"{size * GIB / 1e9:.2f}GB") for size in CAPS},
}
"""Packages to which a limit is stated: of weights, for mmgp."""
ATTACH = {name: attach for name, attach in THEIRS.items() if not name.startswith(("mmgp", "AirCanvas"))} | CAPPED
"""Functions that let another program move a pipeline's weights, by name. Limits of the simulated card are left out."""
_OTHERS = [name for name in ATTACH if not name.startswith("diffusers,") and name != PLAIN]
"""Packages that are installed manually."""
_TRANSFORMERS_ONLY = "AirCanvas"
ROUNDS = (
    (PLAIN, _FOUR, _LEAVES, *_MORE, _BLOCKS),
    ("diffusers, model offload", f"{_LEAVES}, record_stream", "diffusers, sequential offload", *_OTHERS),
)
"""Names of each model's ways: the first round of all models comes before the second."""


def run(device: torch.device, record: ResultRows) -> None:
    """Add a row for each model and way, one at a time, and one for each package that is not installed."""
    record.rows[:] = [row for row in record.rows if "failed" not in row]
    missing = [name for name in _OTHERS if importlib.util.find_spec(_package(name)) is None]
    for names, model in progress.report_each("peers", [(names, model) for names in ROUNDS for model in MODELS]):
        cases = [{"model": model, "name": name} for name in names if name not in missing and _goes_with(name, model)]
        record.fill(cases, trial_peers, device=str(device))
    for name in missing:
        record.add({"model": "", "name": name}, {"failed": "not installed"})


def _goes_with(name: str, model: str) -> bool:
    return model not in UNETS or not name.startswith(_TRANSFORMERS_ONLY)


def _package(name: str) -> str:
    return re.split("[ ,]", name)[0].lower().replace("-", "_")


def trial_peers(device: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield for each of ``cases`` what a run is like, and whether its latents are those with all weights on the GPU.

    Ends after a package that is installed manually: it may have replaced functions of others.
    """
    where = torch.device(device)
    pipe, given = _loaded(cases[0]["model"], where)
    plain, wanted = _measured(PLAIN, pipe, given, where)
    for case in cases:
        row, made = (plain, wanted) if case["name"] == PLAIN else _measured(case["name"], pipe, given, where)
        yield row | {"same_bits": torch.equal(made, wanted)}
        if case["name"] in _OTHERS:
            return


def _loaded(model: str, where: torch.device) -> tuple[Any, dict[str, Any]]:
    """A pipeline whose weights are in host memory, and what it is called with."""
    if model not in UNETS:
        return random_transformer(model, where)
    pipe = random_denoiser(model, where)
    return pipe, dict(embeddings(pipe, where))


def _measured(name: str, pipe: Any, given: dict[str, Any], where: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Figures of a run by ``name``, and its latents in host memory; ``pipe`` stays as it is."""
    from sd_lowvram import optimize, restore

    on_gpu = where.type == "cuda"
    held_on(where)
    unlock_ended()
    free_pinned()
    row: dict[str, Any] = {}
    draw = own = _sharing(pipe)
    if name in ATTACH:
        draw = ATTACH[name](own) or own
    else:
        guided = given.get("guidance_scale") != 0
        plan = optimize(own, vram=f"{OURS[name]} b", width=SIDE, height=SIDE, guided=guided, device=where)
        row |= predicted_step(plan)
    before = torch.cuda.memory_allocated(where) if on_gpu else 0
    made: list[Any] = []
    with timed_calls(own, where, "unet" if hasattr(own, "unet") else "transformer") as calls:
        peak = measured_peak(lambda: made.extend(final_latents(draw, given, SIDE)))
    latents, step = made
    row |= {
        "step_seconds": step,
        "peak_bytes": before + peak,
        "reserved_bytes": torch.cuda.max_memory_reserved(where) if on_gpu else 0,
        "pinned_bytes": pinned_bytes() + _pinned_by_torch(),
    }
    if calls.host_seconds:  # else it has put another model in its place
        row |= calls.figures(statistics.median, first=-TIMED)
    restore(own)
    return row, latents


def _sharing(pipe: Any) -> Any:
    """A pipeline over the same weights and buffers, of which nothing else is shared."""
    models = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    shared = {
        id(one): nn.Parameter(one.data, requires_grad=False) if isinstance(one, nn.Parameter) else one.data
        for one in all_tensors(*models)
    }
    return copy.deepcopy(pipe, shared)


def _pinned_by_torch() -> int:
    count: Any = getattr(torch.cuda, "host_memory_stats", dict)  # newer than torch 2.1
    return int(count().get("allocated_bytes.current", 0))


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Summary for a reader."""
    for model in dict.fromkeys(row["model"] for row in rows if row["model"]):
        ran = [row for row in rows if row["model"] == model and "step_seconds" in row]
        steps = [f"{row['name']}: {1000 * row['step_seconds']:.0f} in {row['peak_bytes'] / MIB:.0f} MiB" for row in ran]
        other = "".join(f"; **other bits**: {row['name']}" for row in ran if not row["same_bits"])
        yield f"{model}, ms a step: {'; '.join(steps)}{other}"
        yield from fallen(claim for row in ran for claim in _claims(row))
    yield from not_run(rows, lambda row: row["name"])


def _claims(row: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Claims on a row of ours, each with True if it holds."""
    if "predicted_step_seconds" in row:
        name = f"{row['model']}, {row['name']}: a step"
        yield as_predicted(name, row["step_seconds"], row["predicted_step_seconds"])


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Other programs and ours"
    yield ""
    yield f"At {SIDE}x{SIDE} in bf16, SDXL in fp16, random weights, embeddings in a text encoder's place; medians of"
    yield f"{TIMED} steps, no decode. *Host*: until the denoiser's call returned. *Allocated*, *reserved*: the most"
    yield "bytes of torch's allocator in all steps. *Locked*: page-locked host memory. *Same bits*: latents, compared"
    yield f"with those of {PLAIN} with all weights on the GPU."
    yield ""
    yield from rows_table(_COLUMNS, ({"error": row.get("failed")} | row for row in part["rows"]), of=2)


_COLUMNS: Columns = (
    ("model", "{model}"),
    ("program", "{name}"),
    ("step ms", ms("step_seconds")),
    ("predicted ms", ms("predicted_step_seconds")),
    ("host ms", ms("host_seconds")),
    ("predicted host ms", ms("predicted_host_seconds")),
    ("allocated MiB", mib("peak_bytes")),
    ("reserved MiB", mib("reserved_bytes")),
    ("locked GiB", lambda row: f"{row['pinned_bytes'] / GIB:.1f}"),
    ("same bits", yes("same_bits")),
)
