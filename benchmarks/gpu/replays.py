"""Recorded steps under two schedulers, and the host's time of comparing the model with its recording.

Before a replay the addresses of all tensors are compared; modules and their settings are compared while it runs.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sd_lowvram.hooks.replay.cuda_graphs import Recordings

from .. import calls
from ..models import PLENTY, embeddings, random_denoiser
from ..tables import Columns, Row, ms, rows_table, yes
from .peaks import held_on
from .record import Case, ResultRows, as_predicted, fallen, not_run, predicted_step
from .streaming import COMPARED, denoise, measured_steps

TASK: Case = {"model": "sd15", "side": 512}
SCHEDULERS = {"DDIM": "DDIMScheduler", "Euler": "EulerDiscreteScheduler"}
_CHECKS = {"addresses": "reads_valid_memory", "facts": "_is_the_same_model"}
"""Methods that compare a model with its recording, by the name of their seconds."""


def run(device: torch.device, record: ResultRows) -> None:
    """Add a row for each scheduler, without recording and with it."""
    cases = [TASK | {"scheduler": name, "recorded": on} for name in SCHEDULERS for on in (False, True)]
    record.fill(cases, trial_replays, device=str(device))


def trial_replays(device: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield for each of ``cases`` the seconds of a step, predicted and measured, and those of the comparisons."""
    import diffusers

    from sd_lowvram import restore
    from sd_lowvram.errors import SettingsError

    where, side = torch.device(device), cases[0]["side"]
    pipe = random_denoiser(cases[0]["model"], where)
    for case in cases:
        scheduler = getattr(diffusers, SCHEDULERS[case["scheduler"]])
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
        plain, _ = _steps(pipe, where, side, False, timed=False)
        restore(pipe)
        try:
            made, row = _steps(pipe, where, side, case["recorded"])
        except SettingsError as refused:
            yield {"failed": str(refused)}
            continue
        yield row | {"same_bits": torch.equal(made, plain)}
        restore(pipe)
        if held_on(where):
            return


def _steps(
    pipe: Any, where: torch.device, side: int, recorded: bool, timed: bool = True
) -> tuple[Tensor, dict[str, Any]]:
    """Latents of a short run in host memory, and figures of longer ones; the plan stays on.

    Raises:
        SettingsError: steps cannot be recorded.
    """
    from sd_lowvram import Settings, optimize
    from sd_lowvram.errors import SettingsError
    from sd_lowvram.progress import capture_events

    given, made, messages = embeddings(pipe, where), list[Tensor](), list[str]()
    settings = Settings(offload="none", cuda_graphs=recorded)
    plan = optimize(pipe, vram=PLENTY, width=side, height=side, device=where, settings=settings)
    with capture_events(messages.append), timed_checks() as checks:
        denoise(pipe, given, side, COMPARED, made)
        row = measured_steps(pipe, where, given, side) if timed else {}
    if refused := [sentence for sentence in messages if sentence.startswith("cuda_graphs: ")]:
        raise SettingsError(refused[0])
    row |= predicted_step(plan)
    row |= {f"{name}_seconds": statistics.median(found) for name, found in checks.items() if found}
    return made[0].cpu(), row


@contextlib.contextmanager
def timed_checks() -> Iterator[dict[str, list[float]]]:
    """Seconds of the host in each comparison of a model with its recording within the block."""
    seconds: dict[str, list[float]] = {name: [] for name in _CHECKS}

    def timed(compare: Callable[[Recordings], bool], found: list[float]) -> Callable[[Recordings], bool]:
        def run(recordings: Recordings) -> bool:
            start = calls.clock()
            same = compare(recordings)
            found.append(calls.clock() - start)
            return same

        return run

    with contextlib.ExitStack() as stack:
        for name, method in _CHECKS.items():
            around = timed(getattr(Recordings, method), seconds[name])
            stack.enter_context(mock.patch.object(Recordings, method, around))
        yield seconds


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Summary for a reader."""
    for row in rows:
        if row["recorded"] and "step_seconds" in row:
            sentence = f"{_name(row)}, recorded: {1000 * row['step_seconds']:.1f} ms a step"
            if (plain := _plain_step(row, rows)) is not None:
                sentence += f", {1000 * plain:.1f} without"
            yield f"{sentence}; comparing addresses {_ms(row, 'addresses')}, all modules {_ms(row, 'facts')}"
    yield from fallen(claim for row in rows if "step_seconds" in row for claim in _claims(row, rows))
    yield from not_run(rows, lambda row: f"{_name(row)}, recorded")


def _name(row: Row) -> str:
    return f"{row['model']} at {row['side']}, {row['scheduler']}"


def _ms(row: Row, name: str) -> str:
    return f"{1000 * row[f'{name}_seconds']:.2f} ms" if f"{name}_seconds" in row else "not seen"


def _plain_step(row: Row, rows: Sequence[Row]) -> float | None:
    plain = (one for one in rows if _name(one) == _name(row) and not one["recorded"])
    return next((one["step_seconds"] for one in plain if "step_seconds" in one), None)


def _claims(row: Row, rows: Sequence[Row]) -> Iterator[tuple[str, bool]]:
    """Claims on a row, each with True if it holds."""
    name, plain = _name(row) + ", recorded" * row["recorded"], _plain_step(row, rows)
    yield as_predicted(f"{name}: a step", row["step_seconds"], row["predicted_step_seconds"])
    yield f"{name}: the bits of steps that are not recorded", row["same_bits"]
    if row["recorded"] and plain is not None:
        yield f"{name}: a step is no longer than one that is not recorded", row["step_seconds"] <= plain


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows as Markdown."""
    yield "Steps by two schedulers, all weights on the device, with passes recorded as CUDA graphs and without."
    yield "*Addresses*: the host's time before a replay, in which the addresses of all tensors are compared; *modules*:"
    yield "its time while the replay runs, in which modules and settings are compared; medians. *Same bits*: of the"
    yield "latents, compared with those without recording."
    yield ""
    yield from rows_table(_COLUMNS, ({"error": row.get("failed")} | row for row in rows), of=3)


_COLUMNS: Columns = (
    ("model", "{model}, {side}x{side}"),
    ("scheduler", "{scheduler}"),
    ("recorded", lambda row: "yes" if row["recorded"] else "no"),
    ("same bits", yes("same_bits")),
    ("step ms", ms("step_seconds")),
    ("predicted ms", ms("predicted_step_seconds")),
    ("host ms", ms("host_seconds")),
    ("predicted host ms", ms("predicted_host_seconds")),
    ("device ms", ms("device_seconds")),
    ("predicted device ms", ms("predicted_device_seconds")),
    ("addresses ms", ms("addresses_seconds")),
    ("modules ms", ms("facts_seconds")),
)
