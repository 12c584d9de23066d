"""The largest square picture under a cap of the allocator, for us and for diffusers' most frugal combination."""

from __future__ import annotations

import contextvars
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ... import progress
from ...units import GIB
from ..models import random_pipeline
from ..report import table
from ..trial import measure

CAPS = tuple(cap * GIB for cap in (2, 4, 6, 8))
WAYS = ("ours", "diffusers")
_MODEL, _STEP, _LARGEST = "sd15", 128, 4096
_BESIDE = 3 * GIB
"""What a trial needs outside of its cap: the context, and for a moment the weights while they are drawn."""


def run(device: torch.device, seconds: Callable[[], float]) -> Any:
    """One row for each cap and way: ``largest`` side that ran, ``too_large`` the smallest that did not."""
    chains = [(way, cap) for cap in CAPS for way in WAYS]
    done = 0

    def chain(way: str, cap: int) -> dict[str, Any]:
        nonlocal done
        tried: list[dict[str, Any]] = []

        def fits(side: int) -> bool | None:
            row = measure(trial_size, seconds=seconds(), device=str(device), model=_MODEL, side=side, cap=cap, way=way)
            tried.append({"side": side} | row)
            return None if row.get("timed_out") else bool(row.get("fits"))

        largest, too_large = bracket(fits, _STEP, _LARGEST)
        done += 1
        progress.report("max-size", done, len(chains))
        return {"way": way, "cap": cap, "largest": largest, "too_large": too_large, "step": _STEP, "tried": tried}

    with ThreadPoolExecutor(_at_once(device)) as pool:
        # each in a copy of this context, which knows who listens for progress
        waiting = [pool.submit(contextvars.copy_context().run, chain, way, cap) for way, cap in chains]
        rows = [one.result() for one in waiting]
    return {"model": _MODEL, "rows": rows}


def bracket(fits: Callable[[int], bool | None], step: int, limit: int) -> tuple[int, int | None]:
    """The largest multiple of ``step`` up to ``limit`` that fits, and the smallest that does not (None: all do).

    Bisects, so ``fits`` must hold for all sizes below one for which it holds. Where it says None there is no time
    left, and the two are as near as they have come.
    """
    low, high = 0, limit // step + 1
    while high - low > 1:
        middle = (low + high) // 2
        answer = fits(middle * step)
        if answer is None:
            break
        low, high = (middle, high) if answer else (low, middle)
    return low * step, high * step if high * step <= limit else None


def _at_once(device: torch.device) -> int:
    """Trials that the device can hold side by side: their times are not compared, so they may disturb each other."""
    if device.type != "cuda":
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(8, math.floor(free / (max(CAPS) + _BESIDE))))


def trial_size(device: str, model: str, side: int, cap: int, way: str, steps: int = 2) -> dict[str, Any]:
    """Whether a picture of ``side`` comes out with at most ``cap`` bytes reserved by torch's allocator."""
    from ... import optimize
    from ...devices.overhead import Overhead
    from ...errors import BudgetError
    from ...memory import measured_peak

    where = torch.device(device)
    on_cpu = where.type == "cpu"
    pipe = random_pipeline(model, where)
    if not on_cpu:
        total = torch.cuda.get_device_properties(where).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), where)
    if way == "ours":
        # the cap is the allocator's: what the driver takes comes on top, for both
        vram = cap + (0 if on_cpu else Overhead().context_bytes)
        try:
            optimize(pipe, vram=f"{vram} b", width=side, height=side, device=where)
        except BudgetError as error:
            return {"fits": False, "why": str(error)}
    else:
        _most_frugal(pipe, where)
    pictures: list[Any] = []

    def paint() -> None:
        images = pipe("a red apple", width=side, height=side, num_inference_steps=steps, output_type="pt").images
        pictures.append(bool(images.isfinite().all()))

    start = time.perf_counter()
    peak = measured_peak(paint)
    return {
        "fits": peak <= cap,
        "finite": all(pictures),
        "peak_bytes": peak,
        "reserved_bytes": 0 if on_cpu else torch.cuda.max_memory_reserved(where),
        "seconds": time.perf_counter() - start,
    }


def _most_frugal(pipe: Any, device: torch.device) -> None:
    """Of what diffusers offers, what needs the least: single layers on the device, tiles, torch's attention."""
    pipe.vae.enable_tiling()
    pipe.vae.enable_slicing()
    if device.type == "cuda":
        pipe.enable_sequential_cpu_offload(device=device)


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Largest square picture"
    yield ""
    yield f"{part['model']} in fp16, two steps and the decode, under a cap of `set_per_process_memory_fraction`; each"
    yield "trial in a process of its own. diffusers: sequential offload, VAE tiling and slicing. Its tiles change the"
    yield "picture; ours do not."
    yield ""
    rows = {(row["cap"], row["way"]): row for row in part["rows"]}
    caps = sorted({cap for cap, _ in rows})
    yield from table(_HEADS, (_cells(cap, *(rows[cap, way] for way in WAYS)) for cap in caps))
    for row in part["rows"]:
        for trial in row["tried"]:
            if "error" in trial and not trial["out_of_memory"]:
                yield ""
                yield f"{row['way']}, {row['cap'] / GIB:g} GiB, {trial['side']}: {trial['error']}"


_HEADS = ("cap GiB", "ours", "diffusers", "pixels, ours / diffusers")


def _cells(cap: int, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    ratio = f"{(ours['largest'] / theirs['largest']) ** 2:.1f}" if theirs["largest"] else ""
    return [f"{cap / GIB:g}", _side(ours), _side(theirs), ratio]


def _side(row: dict[str, Any]) -> str:
    """The side as it is known: up to the limit, to the step, or only between two."""
    largest, too_large = row["largest"], row["too_large"]
    if too_large is None:
        return f"{largest} or more"
    open_end = too_large - largest > row["step"]
    return f"{largest} (below {too_large}; no time for more)" if open_end else f"{largest}"
