"""Plans of drawn sizes with budgets below the GPU's memory: reserved bytes and steps with the limit and without it."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sd_lowvram import progress
from sd_lowvram.units import MIB

from ..models import PLENTY, least_budget, random_pipeline
from ..tables import Columns, mib, ms, rows_table, yes
from .peaks import held_on, in_budget, is_in_budget
from .record import Case, ResultRows, as_predicted, fallen, predicted_step
from .streaming import moment, seconds_between

MODELS = "sd15", "sd15", "sdxl"
"""One of them is drawn for each case."""
SIDES = (512, 640, 768, 896, 1024)
NUMBER, _SEED = 8, 47
_STEPS, _TIMED = 5, 3
"""Steps of a run, and how many of them are timed, at its end."""
_SHARE_OF_CARD = 0.75
"""Part of the GPU's memory that no budget exceeds."""


def run(device: torch.device, record: ResultRows) -> None:
    """Add a row for each drawn case; those of a model share a process."""
    cases = drawn()
    for model in progress.report_each("drawn", dict.fromkeys(case["model"] for case in cases)):
        own = [case for case in cases if case["model"] == model]
        record.fill(own, trial_drawn, device=str(device))


def drawn() -> list[Case]:
    """The cases; ``share`` is of the way from the least budget to that of the plain model."""
    choice, cases = random.Random(_SEED), list[Case]()
    while len(cases) < NUMBER:
        case: Case = {"model": choice.choice(MODELS), "width": choice.choice(SIDES), "height": choice.choice(SIDES)}
        case |= {"batch": choice.choice((1, 1, 2)), "share": choice.choice((0.0, round(choice.random(), 2)))}
        if case not in cases:
            cases.append(case)
    return cases


def trial_drawn(device: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield for each of ``cases`` the bytes and seconds of two runs by one plan: not limited, then limited.

    The trial ends early if a run leaves something on the device.
    """
    from sd_lowvram import optimize, restore
    from sd_lowvram.session import attachments

    where = torch.device(device)
    held_on(where)
    for model, own in itertools.groupby(cases, lambda case: case["model"]):
        pipe = random_pipeline(model, where)
        for case in own:
            sizes: dict[str, Any] = {key: case[key] for key in ("width", "height", "batch")} | {"device": where}
            vram = _budget(pipe, case["share"], sizes)
            chosen = optimize(pipe, vram=f"{vram} b", **sizes)
            last = attachments(pipe)[-1]
            bound, last.bound = last.bound, None
            free, wanted = _drawn(pipe, case, where)
            last.bound = bound
            limited, made = _drawn(pipe, case, where)
            yield {
                "vram": vram,
                "overhead_bytes": chosen.predicted.overhead_bytes,
                **predicted_step(chosen),
                **limited,
                **{f"free_{name}": value for name, value in free.items()},
                "fallback_steps": len(attachments(pipe)[-1].plan.fallback_steps),
                "same_bits": torch.equal(made, wanted),
            }
            restore(pipe)
            if held_on(where):
                return


def _budget(pipe: Any, share: float, sizes: dict[str, Any]) -> int:
    from sd_lowvram import plan

    least = least_budget(pipe, **sizes)
    plain = plan(pipe, vram=PLENTY, **sizes).predicted
    most = plain.reserved_bytes + plain.overhead_bytes
    if sizes["device"].type == "cuda":
        total = torch.cuda.get_device_properties(sizes["device"]).total_memory
        most = min(most, int(_SHARE_OF_CARD * total))
    return least + int(share * max(0, most - least)) + MIB


def _drawn(pipe: Any, case: Case, where: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Most reserved bytes and the seconds of a step, and the pictures in host memory."""
    held_on(where)
    on_gpu = where.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(where)
    moments: list[Any] = []

    def mark(*_: Any) -> dict[str, Any]:
        moments.append(moment(where))
        return {}

    made = pipe(
        case["batch"] * ["a red apple"], width=case["width"], height=case["height"], num_inference_steps=_STEPS,
        generator=torch.Generator().manual_seed(0), output_type="pt", callback_on_step_end=mark,
    ).images.cpu()  # fmt: skip
    seconds = [seconds_between(start, end) for start, end in itertools.pairwise(moments)]
    reserved = torch.cuda.max_memory_reserved(where) if on_gpu else 0
    return {"reserved_bytes": reserved, "step_seconds": statistics.median(seconds[-_TIMED:])}, made


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Summary for a reader."""
    ran = [row for row in rows if "step_seconds" in row]
    if ran:
        kept, repeated = sum(map(is_in_budget, ran)), sum(bool(row["fallback_steps"]) for row in ran)
        yield f"reserved bytes, with the driver's share, stayed within the budget in {kept} of {len(ran)} drawn plans"
        yield f"{repeated} ran out of memory and continued with fallback steps"
        ratios = [row["step_seconds"] / row["free_step_seconds"] for row in ran]
        yield f"a step with the limit over one without it: {min(ratios):.2f} to {max(ratios):.2f}"
    yield from fallen(claim for row in ran for claim in _claims(row))


def _claims(row: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Claims on a row, each with True if it holds."""
    name = f"{row['model']} at {_size(row)} in {row['vram'] / MIB:.0f} MiB"
    reserved = (row["reserved_bytes"] + row["overhead_bytes"]) / MIB
    yield f"{name}: reserved {reserved:.0f} MiB with the driver's share", is_in_budget(row)
    yield f"{name}: {row['fallback_steps']} fallback steps", not row["fallback_steps"]
    yield f"{name}: the same bits with the limit and without it", row["same_bits"]
    yield as_predicted(f"{name}: a step", row["step_seconds"], row["predicted_step_seconds"])


def _size(row: dict[str, Any]) -> str:
    batch = f", {row['batch']} pictures" if row["batch"] > 1 else ""
    return f"{row['width']}x{row['height']}{batch}"


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Drawn plans"
    yield ""
    yield f"Sizes and budgets drawn by a seed, {_STEPS} steps and a decode, whole models with random weights. *From*:"
    yield "share of the way from the least budget to that of the plain model. *Reserved*: the most bytes of torch's"
    yield "allocator, with the driver's share; *free*: by the same plan without the limit. Medians of steps."
    yield ""
    yield from rows_table(_COLUMNS, part["rows"], of=3)


def _reserved(prefix: str) -> Any:
    return lambda row: f"{(row[f'{prefix}reserved_bytes'] + row['overhead_bytes']) / MIB:.0f}"


_COLUMNS: Columns = (
    ("model", "{model}"),
    ("picture", _size),
    ("from", "{share}"),
    ("budget MiB", mib("vram")),
    ("reserved MiB", _reserved("")),
    ("in budget", in_budget),
    ("free reserved MiB", _reserved("free_")),
    ("fallback steps", "{fallback_steps}"),
    ("same bits", yes("same_bits")),
    ("step ms", ms("step_seconds")),
    ("free step ms", ms("free_step_seconds")),
    ("predicted ms", ms("predicted_step_seconds")),
)
