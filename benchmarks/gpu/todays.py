"""Today's transformers whole, at full size, in a few GiB of the card: bits, bytes and seconds next to the plan's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sd_lowvram import progress
from sd_lowvram.units import GIB, MIB

from ..models import PLENTY, random_transformer
from ..tables import Columns, Row, mib, ms, rows_table, yes
from .peaks import byte_claims, difference, held_on, in_budget, peak_of
from .record import Case, ResultRows, as_predicted, fallen
from .streaming import denoise

MODELS = "z-image-turbo", "flux1-dev"
SIDE = 1024
VRAM = 4 * GIB
_STEPS, TIMED = 6, 4
"""Steps of a run, and how many of them are timed, at its end."""


def run(device: torch.device, record: ResultRows) -> None:
    """Add a row for each model, each in its own process: they have up to 24 GB of weights."""
    for model in progress.report_each("todays", MODELS):
        record.fill([{"model": model, "side": SIDE, "vram": VRAM}], trial_todays, device=str(device))


def trial_todays(device: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield for each of ``cases``: latents with all weights on the card, then by a plan, and a picture by the plan."""
    from sd_lowvram import Settings, optimize, restore

    where = torch.device(device)
    for case in cases:
        pipe, given = random_transformer(case["model"], where)
        guided = given.get("guidance_scale") != 0
        sizes: dict[str, Any] = {"width": case["side"], "height": case["side"], "guided": guided, "device": where}
        optimize(pipe, vram=PLENTY, settings=Settings(offload="none"), **sizes)
        wanted, resident = final_latents(pipe, given, case["side"])
        restore(pipe)
        held_on(where)
        row = peak_of(pipe, given, case["vram"], {**sizes, "steps": _STEPS}, _STEPS)
        found, step = final_latents(pipe, given, case["side"])
        yield row | {
            "same_bits": torch.equal(found, wanted),
            "off": float((found.double() - wanted.double()).norm() / wanted.double().norm()),
            "step_seconds": step,
            "resident_step_seconds": resident,
        }
        restore(pipe)


def final_latents(pipe: Any, given: dict[str, Any], side: int) -> tuple[Tensor, float]:
    """Final latents of a run, in host memory, and median seconds of a step, after a run that showed the order."""
    made: list[Tensor] = []
    denoise(pipe, given, side, 2)
    times = denoise(pipe, given, side, _STEPS, made)
    return made[-1].cpu(), statistics.median(times[-TIMED:])


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Summary for a reader."""
    for row in (row for row in rows if "step_seconds" in row):
        bits = "the bits of the resident run" if row["same_bits"] else f"latents {_off(row)}"
        yield (
            f"{row['model']} at {row['side']} in {row['vram'] / GIB:g} GiB: {bits}, allocated bytes off by "
            f"{difference(row)}, a step of {row['step_seconds']:.2f} s, predicted {row['predicted_step_seconds']:.2f}, "
            f"resident {row['resident_step_seconds']:.2f}"
        )
        yield from fallen(_claims(row))


def _claims(row: Row) -> Iterator[tuple[str, bool]]:
    """Claims on a row, each with True if it holds."""
    name = f"{row['model']} at {row['side']} in {row['vram'] / GIB:g} GiB"
    yield f"{name}: the bits of the resident run", row["same_bits"] is not False  # None: they were not compared
    yield as_predicted(f"{name}: a step", row["step_seconds"], row["predicted_step_seconds"])
    yield from byte_claims(row)


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Today's models whole"
    yield ""
    yield f"In bf16, {_STEPS} steps by the plan for the budget next to a run with all weights on the card; random"
    yield "weights, embeddings in a text encoder's place. *Measured*: as under Allocated bytes, decode and all."
    yield "*Off*: latents, relative to those of the resident run."
    yield ""
    yield from rows_table(_COLUMNS, part["rows"], of=2)


def _off(row: Row) -> str:
    return "not compared" if row["off"] is None else f"{row['off']:.1e}"


_COLUMNS: Columns = (
    ("model", "{model}"),
    ("picture", "{side}x{side}"),
    ("budget MiB", lambda row: f"{row['vram'] // MIB}"),
    ("offload", lambda row: row["settings"].get("offload", "none")),
    ("predicted MiB", mib("predicted_bytes")),
    ("measured MiB", lambda row: f"{(row['measured_bytes'] - row['library_bytes']) / MIB:.0f}"),
    ("difference", difference),
    ("reserved MiB", mib("reserved_bytes")),
    ("in budget", in_budget),
    ("same bits", lambda row: "" if row["same_bits"] is None else yes("same_bits")(row)),
    ("off", _off),
    ("step ms", ms("step_seconds")),
    ("predicted ms", ms("predicted_step_seconds")),
    ("resident ms", ms("resident_step_seconds")),
    ("plan s", lambda row: f"{row['plan_seconds']:.1f}"),
)
