"""The line that says whether a picture fits, for what the page shows just now.

The page asks at every change; only the last question of a tab is answered. Planning runs the model's modules on fake
tensors, which does not mix with a generation, so it waits for its turn in the host's queue, and gives up as soon as
somebody asks anew. Answers are remembered.
"""

from __future__ import annotations

import html
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from sd_lowvram.errors import BudgetError, LowVRAMError
from sd_lowvram.planning.search import Plan
from sd_lowvram.units import format_size

_SETTLE_SECONDS = 0.3
_KEPT = 256
_WEIGHTS = {
    "component": "one part of the model on the card at a time",
    "halves": "half of the model on the card at a time",
    "blocks": "part of the model stays on the card, the rest comes when needed",
    "layer": "one layer of the model on the card at a time, the slowest way",
}

FETCHED = "the WebUI fetches layers of the model as it needs them"
"""A plan's reason where a host that moves weights itself does not keep them whole."""

DECIDES = "the WebUI itself decides what stays on the card"
"""How a plan's reason begins where the host keeps what it has room for, whatever the budget."""

BREAKS = "more than this budget"
"""How such a reason ends where what is kept breaks the budget."""

_known: OrderedDict[Hashable, str] = OrderedDict()
_asked: dict[str, int] = {}
_lock = threading.Lock()


def answer(tab: str, key: Hashable, turn: Any, compute: Callable[[], str]) -> str | None:
    """The line for ``key``; None when the tab asked for something else meanwhile.

    Args:
        turn: the host's queue, a lock whose ``acquire(False)`` does not wait.
        compute: called once for a new key, in turn.
    """
    with _lock:
        number = _asked[tab] = _asked.get(tab, 0) + 1
    if key in _known:
        return _known[key]
    time.sleep(_SETTLE_SECONDS)
    while _asked[tab] == number:
        if key in _known:
            return _known[key]
        if turn.acquire(False):
            try:
                text = compute()
            finally:
                turn.release()
            with _lock:
                _known[key] = text
                while len(_known) > _KEPT:
                    _known.popitem(last=False)
            return text
        time.sleep(_SETTLE_SECONDS)
    return None


def sentence(make: Callable[[], Plan], size: str) -> str:
    """What ``make`` plans, or why it refuses, for people."""
    try:
        plan = make()
    except BudgetError as error:
        return _line("does not fit", f"{size} does not fit: {error}")
    except LowVRAMError as error:
        return complaint(f"{size}: {error}")
    predicted, steps, decides = plan.predicted, plan.request.steps, decision_in(plan)
    budget = format_size(plan.request.vram)
    about = f"about {_time(predicted.seconds)} for {steps} step{'s' if steps != 1 else ''}"
    if decides.endswith(BREAKS):
        return _line("not kept", "; ".join([f"{size} takes more than {budget}, {about}", *_chosen(plan)]))
    total = format_size(predicted.reserved_bytes + predicted.overhead_bytes)
    fits = f"{size} fits into {budget}" if decides else f"{size} fits: {total} of {budget}"
    return _line("fits", "; ".join([f"{fits}, {about}", *_chosen(plan)]))


def decision_in(plan: Plan) -> str:
    """The reason of a plan for a host that decides itself what stays on the card; "" for another."""
    return next((reason for reason in plan.reasons if reason.startswith(DECIDES)), "")


def _chosen(plan: Plan) -> list[str]:
    """What is out of the ordinary in a plan. Its own reasons name budgets without the text encoders' share."""
    settings = plan.settings
    told = [] if settings.offload in (None, "none") else [_WEIGHTS.get(settings.offload, settings.offload)]
    told = [decides] if (decides := decision_in(plan)) else [FETCHED] if FETCHED in plan.reasons else told
    if settings.vae_tiles == "exact":
        told.append("decoded in exact strips")
    if settings.decoder_device == "cpu":
        told.append("decoded on the processor")
    return told


def complaint(text: str) -> str:
    """The line for values that cannot be used."""
    return _line("unusable", text)


def note(text: str) -> str:
    """The line when there is nothing to foretell yet."""
    return _line("unknown", text)


def _line(verdict: str, text: str) -> str:
    colour = {"fits": "inherit", "unknown": "inherit"}.get(verdict, "#c00")
    return f'<p data-verdict="{verdict}" style="color: {colour}; padding: 0.5em">{html.escape(text)}</p>'


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
