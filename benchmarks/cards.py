"""Predicted seconds and peaks of SD1.5 or SDXL by GPU and size: ours and plain diffusers'."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import BudgetError
from sd_lowvram.files import table
from sd_lowvram.planning.as_others import request_by
from sd_lowvram.planning.search import make_plan
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB, MIB, format_time

from .tables import filled, mib

CARDS = ("gtx1650", "rtx2060", "rtx2070", "rtx3060", "rtx4090")
SIDES = {"sd15": (512, 1024, 2048), "sdxl": (1024, 2048)}
_TITLES = {"sd15": "SD1.5", "sdxl": "SDXL"}
POLICIES = ("diffusers-default", "ours")
_STEPS = 20
_RAM = 32 * GIB


def run(cards: Sequence[str] = CARDS, model: str = "sd15", *, out: Path | None) -> dict[str, Any]:
    """Predict the pictures in fp16; writes ``out`` and JSON, card by card, and continues with what is missing."""
    asked = {"model": model, "steps": _STEPS, "how": "predicted"}
    cases = [{"card": card} for card in cards]
    return filled(asked, cases, functools.partial(_of_card, model), lines, out, "cards")


def _of_card(model: str, card: str) -> dict[str, Any]:
    rates, asked = profile(card), [(side, name) for side in SIDES[model] for name in POLICIES]
    cells = [{"side": side, "policy": name, **_cell(model, card, side, name)} for side, name in asked]
    return {"title": rates.title, "vram_bytes": rates.vram_bytes, "cells": cells}


def _cell(model: str, card: str, side: int, name: str) -> dict[str, Any]:
    anatomy = meta_anatomy(model, torch.float16)
    request = request_by(name, anatomy, gpu=card, ram=_RAM, width=side, height=side, steps=_STEPS)
    try:
        predicted = make_plan(anatomy, request, Settings.policy(name)).predicted
    except BudgetError as error:
        return {"needed_bytes": error.needed_bytes}
    return {"seconds": predicted.seconds, "peak_bytes": predicted.peak_bytes, "host_bytes": predicted.host_bytes}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The table as Markdown."""
    yield f"# {_TITLES[report['model']]} on cards, predicted"
    yield ""
    yield (
        f"Squares in fp16, {report['steps']} steps with guidance: time and memory as plans predict them for all of a "
        f"card's memory, and the RAM in which weights and activations wait, of {_RAM / GIB:.0f} GiB (none if it is "
        "not listed). The time is that of a picture after the first, which takes longer. Nothing ran on a card."
    )
    pairs = (pair for row in report["rows"] for pair in zip(row["cells"][::2], row["cells"][1::2], strict=True))
    both = [pair for pair in pairs if all("seconds" in cell for cell in pair)]
    if both:
        times = [ours["seconds"] / plain["seconds"] for plain, ours in both]
        more = [(ours["peak_bytes"] - plain["peak_bytes"]) / MIB for plain, ours in both]
        yield ""
        yield (
            f"Where plain diffusers fits, ours takes {min(times):.2f} to {max(times):.2f} of its time and "
            f"{min(more):+.0f} to {max(more):+.0f} MiB: what ours is for are the pictures that do not fit."
        )
    yield ""
    heads = [f"{cell['side']}x{cell['side']}, {cell['policy']}" for cell in report["rows"][0]["cells"]]
    yield from table(("card", "memory", *heads), map(_row, report["rows"]))


def _row(row: dict[str, Any]) -> list[str]:
    return [row["title"], f"{row['vram_bytes'] / GIB:.0f} GiB", *map(_told, row["cells"])]


def _told(cell: dict[str, Any]) -> str:
    if "seconds" not in cell:
        return mib("needed_bytes", "needs {:.0f} MiB")(cell)
    waits = f", RAM {cell['host_bytes'] / GIB:.1f} GiB" if cell["host_bytes"] else ""
    return f"{format_time(cell['seconds'])}, {mib('peak_bytes')(cell)} MiB{waits}"
