"""``first-steps``: those of a process with a traced UNet, by what earlier processes left in the cache folder."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sd_lowvram import progress
from sd_lowvram.devices.pairs import spread

from .ladder import inputs, step
from .models import demo_pipeline
from .tables import Columns, figure, rows_table, written
from .trial import measure

_STEPS = 3
"""The second is traced; from the third on all are alike."""
_NOTHING, _OTHER, _OWN = "nothing", "a trace of another size", "its trace"
_KINDS = (_NOTHING, _OTHER, _OWN)
_SIZES = {"demo": 128, "sd15": 64}
"""Side of the picture by model: the cost of tracing hangs on the layers, not on the size."""


def run(models: Sequence[str] = tuple(_SIZES), rounds: int = 3, *, out: Path | None = None) -> dict[str, Any]:
    """Measure processor seconds with one thread, each run in a process that has computed nothing, the kinds in turn.

    Args:
        models: "sd15", with random weights, "demo".
        rounds: processes of each kind.
    """
    rows: list[dict[str, Any]] = []
    for model in progress.counted("models", list(models)):
        asked: dict[str, Any] = {"model": model, "size": _SIZES[model]}
        found = measure(trial_rounds, seconds=None, environment={"OMP_NUM_THREADS": "1"}, **asked, rounds=rounds)
        kinds: dict[str, Any] = found.get("kinds", {})
        rows += [{**asked, "kept": kind, **_summary(runs)} for kind, runs in kinds.items()] or [{**asked, **found}]
    return written({"rounds": rounds, "rows": rows}, lines, out)


def trial_rounds(model: str, size: int, rounds: int) -> dict[str, Any]:
    """Processor seconds of the first steps of each process, by kind; processes are forked, to make the model once."""
    unet, found = _unet(model), {kind: list[list[float]]() for kind in _KINDS}
    with tempfile.TemporaryDirectory(prefix="sd-lowvram-first-") as top:
        made = {_OTHER: Path(top) / "other", _OWN: Path(top) / "own"}
        _forked(unet, 2 * size, made[_OTHER])
        _forked(unet, size, made[_OWN])
        for number, kind in itertools.product(range(rounds), _KINDS):
            folder = Path(top) / f"{number} {kind}"
            if kind in made:
                shutil.copytree(made[kind], folder)
            found[kind].append(_forked(unet, size, folder))
    return {"kinds": found}


def _unet(model: str) -> Any:
    from sd_lowvram.checkpoints.architectures import architecture, build_components

    if model == "demo":
        return demo_pipeline().unet.float().eval()
    return build_components(architecture(model), torch.float32, "cpu", only=("unet",))["unet"].eval()


def _forked(unet: Any, size: int, folder: Path) -> list[float]:
    """Seconds of the first steps of a process whose cache is ``folder``."""
    os.environ["SD_LOWVRAM_CACHE"] = str(folder)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_send, args=(there, unet, size))
    process.start()
    there.close()
    seconds: list[float] = here.recv()
    process.join()
    return seconds


def _send(place: Any, unet: Any, size: int) -> None:
    from sd_lowvram.session import attached
    from sd_lowvram.settings import Settings

    cpu = torch.device("cpu")
    given, seconds = inputs(unet, size, cpu), []
    with attached(unet, Settings(traced=True), device=cpu), torch.inference_mode():
        for _ in range(_STEPS):
            start = time.process_time()
            step(unet, given)
            seconds.append(time.process_time() - start)
    place.send(seconds)


def _summary(runs: Sequence[Sequence[float]]) -> dict[str, Any]:
    columns = [*zip(*runs, strict=True), [sum(run) for run in runs]]
    return {"seconds": [median(each) for each in columns], "spreads": [spread(each) for each in columns]}


def _cell(number: int, row: dict[str, Any]) -> str:
    return figure(row["seconds"][number], row["spreads"][number], "{:.2f}")


_HEADS = ("first", "second", "third", "the three")
_COLUMNS: Columns = (
    ("UNet", "{model}, {size}x{size}"),
    ("kept by earlier processes", "{kept}"),
    *((f"{head}, s", functools.partial(_cell, number)) for number, head in enumerate(_HEADS)),
)


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Result of :func:`run` as Markdown."""
    yield "# First steps of a process with a traced UNet"
    yield ""
    yield (
        "Guided steps in float32 on a CPU: seconds of the processor with one thread, which other programs hardly "
        f"lengthen; medians of {report['rounds']} processes, the kinds in turn. With nothing kept the second step is "
        "traced. A trace is for one size, so one of another size saves nothing; with its own the first step loads it."
    )
    yield ""
    yield from rows_table(_COLUMNS, report["rows"], of=2)
