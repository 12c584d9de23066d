"""The largest square picture: predicted for a GPU next to published ones, and on this machine found by runs.

Every run has a process of its own and a cap of bytes. A CPU has no such cap, so there the bytes that the allocator
told of are held against it, less what the plan says waits in host memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sd_lowvram.files.tables import table
from sd_lowvram.policies.named import POLICIES
from sd_lowvram.units import GIB, MIB, format_size, format_time

from .end_to_end import device_bytes
from .pictures import chosen_policies, facts
from .tables import BUSY, filled, left_out, trusted
from .trial import measure

PUBLISHED = {
    "compvis": (440, 4.6),
    "basujindal-turbo": (1152, 81.5),
    "basujindal": (1280, 227.4),
    "consciencia-turbo": (1984, 1061.4),
    "consciencia-modified": (1408, 40.8),
}
"""Side and seconds of the largest square of SD1.5 in 8 GB of an RTX 2070, 20 samples; of
consciencia no larger was tried."""

_STEP = 64
_LARGEST = 2048
"""No larger side is run here: it would take minutes."""


def run(
    model: str | None,
    names: Sequence[str] = (),
    *,
    card: str | None = None,
    cap: int = 96 * MIB,
    steps: int = 1,
    out: Path | None = None,
) -> dict[str, Any]:
    """:func:`foretold` for ``card``, or :func:`measured` where it is None."""
    if card is None:
        return measured(model, names, cap=cap, steps=steps, out=out)
    return foretold(card, names or tuple(POLICIES), out=out)


def foretold(card: str = "rtx2070", names: Sequence[str] = tuple(POLICIES), *, out: Path | None) -> dict[str, Any]:
    """Predict the largest squares of SD1.5 for ``card``, in fp16; write ``out`` and JSON, row by row.

    Policies that the JSON has are not repeated.
    """
    asked = {"model": "sd15", "card": card, "steps": 20, "how": "foretold"}
    cases = [{"policy": name} for name in names]
    return filled(asked, cases, functools.partial(_foretold, card), lines, out, "policies")


def _foretold(card: str, policy: str) -> dict[str, Any]:
    import torch

    from sd_lowvram.checkpoints.meta_model import meta_anatomy
    from sd_lowvram.errors import BudgetError
    from sd_lowvram.planning.as_others import request_by
    from sd_lowvram.planning.max_size import largest_plans
    from sd_lowvram.planning.search import make_plan
    from sd_lowvram.settings import Settings

    anatomy = meta_anatomy("sd15", torch.float16)

    def request(name: str, **size: Any) -> Any:
        return request_by(name, anatomy, gpu=card, ram=32 * GIB, steps=20, **size)

    def at(name: str, side: int) -> float | None:
        try:
            asked = request(name, width=side, height=side)
            return make_plan(anatomy, asked, Settings.policy(name)).predicted.seconds
        except BudgetError:
            return None

    side, _ = PUBLISHED.get(policy, (None, None))
    found: dict[str, Any] = {"there": side and at(policy, side), "ours_there": side and at("ours", side)}
    plan = largest_plans(anatomy, request(policy), Settings.policy(policy))["square"]
    if plan is None:
        return found | {"side": None}
    return found | {
        "side": plan.request.width,
        "seconds": plan.predicted.seconds,
        "peak_bytes": plan.predicted.peak_bytes,
        "settings": dict(plan.as_dict()["settings"]),
    }


def measured(
    model: str | None, names: Sequence[str] = (), *, cap: int = 96 * MIB, steps: int = 1, out: Path | None
) -> dict[str, Any]:
    """The largest squares within ``cap`` bytes here, each confirmed by a run that passes and a larger one that fails.

    Args:
        names: policies; empty: all that run here.
    """
    names, left_out = chosen_policies(names)
    asked = {**facts(model, steps=steps, cap=cap), "left_out": list(left_out), "how": "measured"}

    def row_of(policy: str) -> dict[str, Any]:
        task: dict[str, Any] = {"model": model, "name": policy, "cap": cap, "steps": steps}
        found = measure(guess, **task)
        return found if "error" in found else _confirmed(task, found["side"])

    return filled(asked, [{"policy": name} for name in names], row_of, lines, out, "policies")


def _confirmed(task: dict[str, Any], side: int) -> dict[str, Any]:
    """Runs from ``side`` on, up or down, until one passes and the next larger one fails."""
    tried: dict[int, dict[str, Any]] = {}
    while 0 < side <= _LARGEST:
        tried[side] = measure(trial_run, side=side, seconds=600.0, **task)
        if "error" in tried[side]:
            return {"error": f"{side}: {tried[side]['error']}", "trials": list(tried.values())}
        side += _STEP if tried[side]["fits"] else -_STEP
        if side in tried:
            break
    passed = [trial for trial in tried.values() if trial["fits"]]
    best = max(passed, key=lambda trial: trial["side"], default=None)
    more = any(not trial["fits"] for trial in tried.values())
    return {
        "side": best and best["side"],
        "seconds": best and best["seconds"],
        "one_more_fails": more,
        "trials": sorted(tried.values(), key=lambda trial: trial["side"]),
    }


def guess(model: str | None, name: str, cap: int, steps: int) -> dict[str, Any]:
    """First side to try, from a plan."""
    from sd_lowvram.api import max_size
    from sd_lowvram.settings import Settings

    from .pictures import loaded

    plan = max_size(loaded(model), vram=f"{cap} b", settings=Settings.policy(name))["square"]
    return {"side": min(plan.request.width, _LARGEST) if plan else _STEP}


def trial_run(model: str | None, name: str, cap: int, steps: int, side: int) -> dict[str, Any]:
    """Make a picture, and compare its bytes on the device with ``cap``.

    Where our plan refuses the size, the least that it says is needed is given, and counted all the same.
    """
    from sd_lowvram.api import plan
    from sd_lowvram.devices.info import default_device
    from sd_lowvram.devices.pairs import timed
    from sd_lowvram.errors import BudgetError
    from sd_lowvram.planning.memory_profile import measured as watched
    from sd_lowvram.session import attached
    from sd_lowvram.settings import Settings

    from .pictures import loaded, picture

    pipe, settings = loaded(model), Settings.policy(name)
    size: dict[str, Any] = {"width": side, "height": side, "steps": steps, "settings": settings}
    try:
        chosen = plan(pipe, vram=f"{cap if POLICIES[name].needs_plan else 1 << 50} b", ram=f"{1 << 50} b", **size)
        refused = False
    except BudgetError as error:
        chosen = plan(pipe, vram=f"{error.needed_bytes} b", ram=f"{1 << 50} b", **size)
        refused = True
    with attached(pipe, chosen.settings, device=chosen.request.device, timing=chosen.timing), watched(pipe) as run:
        timing, _ = timed(functools.partial(picture, pipe, side, side, steps), default_device())
    planned, counted = ({"stages": [dataclasses.asdict(stage) for stage in one.stages]} for one in (chosen, run))
    held = device_bytes(planned, counted)
    fits = held <= cap
    return {
        "side": side,
        "fits": fits,
        "refused": refused,
        "device_bytes": held,
        "seconds": timing.seconds,
        "own": timing.own,
    }


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The table as Markdown."""
    if report["how"] == "foretold":
        yield f"# The largest square pictures that were reached on an RTX 2070, and ours on {report['card']}, foretold"
        yield ""
        yield (
            f"{report['model']} in fp16, {report['steps']} steps with guidance. *Reached*: what was published of an "
            "RTX 2070 with 8 GB (of consciencia no larger was tried), by programs and torch of 2022; beside it what "
            "plans foretell of that policy and of ours at that size. Nothing ran on a card. *Its knobs in our program*:"
            " the largest that a plan foretells with what the policy decides; no word about the program itself, as "
            "our kernels, norms and decoder hold less than its own did."
        )
        yield ""
        there = ("reached", "s", "foretold there", "ours there, foretold")
        heads = ("policy", *there, "its knobs in our program, foretold", "s", "s a megapixel")
        rows = sorted(report["rows"], key=lambda row: row["policy"] not in PUBLISHED)
        yield from table(heads, map(_foretold_cells, rows))
        return
    yield f"# The largest square picture within {format_size(report['cap'])}, measured"
    yield ""
    yield (
        f"{report['model']} on {report['device']}, {report['steps']} step and the decode, every run in a process of "
        "its own. *Held*: bytes that the allocator told of, weights included, less what waits in host memory by the "
        "plan; one size more, by 64 pixels, was run too and held more than the cap."
    )
    yield ""
    yield from table(("policy", "largest", "held MiB", "s", "one more held MiB"), map(_measured_cells, report["rows"]))
    yield from left_out(report["left_out"])


def _foretold_cells(row: dict[str, Any]) -> list[str]:
    reached, seconds, _ = _timed(*PUBLISHED.get(row["policy"], (None, None)))
    there = ["" if row[name] is None else format_time(row[name]) for name in ("there", "ours_there")]
    return [row["policy"], reached, seconds, *there, *_timed(row["side"], row.get("seconds"))]


def _timed(side: int | None, seconds: float | None) -> list[str]:
    if side is None or seconds is None:
        return ["", "", ""]
    return [f"{side}x{side}", format_time(seconds), f"{seconds / (side * side / 1e6):.1f}"]


def _measured_cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["policy"], row["error"], "", "", ""]
    best = next((trial for trial in row["trials"] if trial["side"] == row["side"]), None)
    if best is None:
        return [row["policy"], "none", "", "", f"{row['trials'][0]['device_bytes'] / MIB:.1f}"]
    beyond = [trial for trial in row["trials"] if not trial["fits"]]
    told = f"{beyond[0]['device_bytes'] / MIB:.1f}" if beyond else "no larger was run"
    side = f"{row['side']}x{row['side']}"
    return [
        row["policy"],
        side,
        f"{best['device_bytes'] / MIB:.1f}",
        f"{best['seconds']:.2f}" if trusted(best) else BUSY,
        told,
    ]
