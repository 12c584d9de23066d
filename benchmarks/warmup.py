"""Extra time of the first picture over the next ones, by part; each policy in its own process."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sd_lowvram import progress
from sd_lowvram.devices.pairs import timed

from .calls import timed_calls
from .pictures import chosen_policies, facts, loaded, picture, ways
from .tables import BUSY, Cell, Row, Sheet, trusted, written
from .trial import measure

PUBLISHED = {
    "compvis": 6.66,
    "basujindal-turbo": 6.61,
    "basujindal": 6.73,
    "consciencia-turbo": 4.33,
    "consciencia-modified": 7.52,
}
"""Seconds that the first picture took longer on an RTX 2070, loading not counted."""


def _seconds(name: str) -> Cell:
    def cell(row: Row) -> str:
        value = row.get(name)
        return "" if value is None else f"{value:.3f}" if trusted(row) else BUSY

    return cell


lines = Sheet(
    "The first picture beside the next ones",
    "{model}, {size}x{size}, {steps} steps, on {device}, each policy in a process of its own: the first picture less "
    "the median of {runs} more, and the same of the first step and the first decode. Published: on an RTX 2070, "
    "SD1.5.",
    (
        ("policy", "{policy}"),
        ("load s", _seconds("load_seconds")),
        ("prepare s", _seconds("prepare_seconds")),
        ("first s", _seconds("first_seconds")),
        ("median s", _seconds("median_seconds")),
        ("first beyond", _seconds("first_beyond")),
        ("step", _seconds("step_beyond")),
        ("decode", _seconds("decode_beyond")),
        ("published", lambda row: f"{PUBLISHED[row['policy']]:.2f}" if row["policy"] in PUBLISHED else ""),
    ),
).lines


def run(
    model: str | None, names: Sequence[str] = (), *, size: int = 128, steps: int = 8, runs: int = 5, out: Path | None
) -> dict[str, Any]:
    """Measure the policies ``names`` (empty: all that run here); writes ``out`` and JSON beside it."""
    names, left_out = chosen_policies(names)
    asked: dict[str, Any] = {"model": model, "size": size, "steps": steps, "runs": runs}
    rows = [{"policy": name, **measure(trial_run, name=name, **asked)} for name in progress.counted("policies", names)]
    report = facts(**asked, left_out=list(left_out), rows=rows)
    return written(report, lines, out)


def trial_run(model: str | None, name: str, size: int, steps: int, runs: int) -> dict[str, Any]:
    """Make a first picture and ``runs`` more, in a new process."""
    from sd_lowvram.devices.info import default_device
    from sd_lowvram.session import anatomy_of

    device, started = default_device(), time.perf_counter()
    pipe = loaded(model)
    load = time.perf_counter() - started
    way = ways([name], model, pipe, size, size, steps)[name]
    prepare = time.perf_counter() - started - load
    with way() as running:
        anatomy = anatomy_of(running)
        denoising, decoding = (timed_calls(running, device, part) for part in (anatomy.denoiser, anatomy.autoencoder))
        with denoising as denoised, decoding as decoded:
            drawn = functools.partial(picture, running, size, size, steps)
            times = [timed(drawn, device)[0] for _ in range(runs + 1)]
    seconds = [one.seconds for one in times]
    found = {"step": denoised.host_seconds, "decode": decoded.host_seconds}
    beyond = {f"{part}_beyond": each[0] - median(each[1:]) for part, each in found.items() if len(each) > 1}
    return {
        "load_seconds": load,
        "prepare_seconds": prepare,
        "first_seconds": seconds[0],
        "median_seconds": median(seconds[1:]),
        "first_beyond": seconds[0] - median(seconds[1:]),
        **beyond,
        "own": min(one.own for one in times),
    }
