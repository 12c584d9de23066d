"""The largest square picture, predicted for a GPU next to published ones."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.errors import BudgetError
from sd_lowvram.files import table
from sd_lowvram.planning.as_others import request_by
from sd_lowvram.planning.max_size import largest_plans
from sd_lowvram.planning.search import make_plan
from sd_lowvram.policies import POLICIES
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB, format_time

from .tables import filled

PUBLISHED = {
    "compvis": (440, 4.6),
    "basujindal-turbo": (1152, 81.5),
    "basujindal": (1280, 227.4),
    "consciencia-turbo": (1984, 1061.4),
    "consciencia-modified": (1408, 40.8),
}
"""Side and seconds of the largest square of SD1.5 in 8 GB of an RTX 2070, 20 samples; of
consciencia no larger was tried."""


def run(card: str = "rtx2070", names: Sequence[str] = tuple(POLICIES), *, out: Path | None) -> dict[str, Any]:
    """Predict the largest squares of SD1.5 for ``card``, in fp16; write ``out`` and JSON, row by row.

    Policies that the JSON has are not repeated.
    """
    asked = {"model": "sd15", "card": card, "steps": 20, "how": "predicted"}
    cases = [{"policy": name} for name in names]
    return filled(asked, cases, functools.partial(_predicted, card), lines, out, "policies")


def _predicted(card: str, policy: str) -> dict[str, Any]:
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


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The table as Markdown."""
    yield f"# The largest square pictures that were reached on an RTX 2070, and ours on {report['card']}, predicted"
    yield ""
    yield (
        f"{report['model']} in fp16, {report['steps']} steps with guidance. *Reached*: what was published of an "
        "RTX 2070 with 8 GB (of consciencia no larger was tried), by programs and torch of 2022; next to it what "
        "plans predict of that policy and of ours at that size. Nothing ran on a card. *Its knobs in our program*:"
        " the largest that a plan predicts with what the policy decides; no word about the program itself, as "
        "our kernels, norms and decoder hold less than its own did."
    )
    yield ""
    there = ("reached", "s", "predicted there", "ours there, predicted")
    heads = ("policy", *there, "its knobs in our program, predicted", "s", "s a megapixel")
    rows = sorted(report["rows"], key=lambda row: row["policy"] not in PUBLISHED)
    yield from table(heads, map(_predicted_cells, rows))


def _predicted_cells(row: dict[str, Any]) -> list[str]:
    reached, seconds, _ = _timed(*PUBLISHED.get(row["policy"], (None, None)))
    there = ["" if row[name] is None else format_time(row[name]) for name in ("there", "ours_there")]
    return [row["policy"], reached, seconds, *there, *_timed(row["side"], row.get("seconds"))]


def _timed(side: int | None, seconds: float | None) -> list[str]:
    if side is None or seconds is None:
        return ["", "", ""]
    return [f"{side}x{side}", format_time(seconds), f"{seconds / (side * side / 1e6):.1f}"]
