"""The line that says whether a picture fits, for what the page shows just now.

The page asks at every change; only the last question of a tab is answered. Planning runs the model's modules on fake
tensors, which does not mix with a generation: while one is under way the line says so at once, and the page asks a
second time. That question waits for its turn in the host's queue, and gives up as soon as somebody asks anew. Answers
are remembered.
"""

from __future__ import annotations

import html
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from sd_lowvram.errors import BudgetError, LowVRAMError
from sd_lowvram.planning.search import Plan
from sd_lowvram.planning.wording import BRIEFLY, Kind, Reason, select_kinds
from sd_lowvram.units import format_size

from .arguments import NAME, TITLE

_SETTLE_SECONDS = 0.3
_KEPT = 256

HOST = "the WebUI"
FETCHED = Reason(Kind.HOST_FETCHES, host=HOST)
DECODE_ONLY = Reason(Kind.DECODE_ONLY, host=HOST)
STEPS_PLAIN = Reason(Kind.STEPS_PLAIN, host=HOST)
BESIDE = Reason(Kind.TILES_UNUSED, other="Tiled VAE")
DECODES_BESIDE = Reason(Kind.TILES_DECODE, other="Tiled VAE")

_VERDICTS = ("unknown", "fits", "over budget", "does not fit", "unusable")
"""Verdicts from the best to the worst."""


@dataclass(frozen=True)
class Told:
    """Texts of the panel on a picture.

    Attributes:
        verdict: one of ``_VERDICTS``.
        head: HTML of a few words, for the panel's head, which is visible while the panel is folded.
        line: HTML of the whole text.
    """

    verdict: str = "unknown"
    head: str = ""
    line: str = ""


_known: OrderedDict[Hashable, Told] = OrderedDict()
_asked: dict[str, int] = {}
_lock = threading.Lock()


def answer(tab: str, key: Hashable, turn: Any, compute: Callable[[], Told], patient: bool = False) -> Told | None:
    """The texts for ``key``; None if the tab requested something else meanwhile.

    Args:
        turn: the host's queue, a lock whose ``acquire(False)`` does not wait.
        compute: called once for a new key, with the lock held.
        patient: True to wait for the lock; False to say that a picture is in progress.
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
                result = compute()
            finally:
                turn.release()
            with _lock:
                _known[key] = result
                while len(_known) > _KEPT:
                    _known.popitem(last=False)
            return result
        if not patient:
            return WAITS
        time.sleep(_SETTLE_SECONDS)
    return None


def sentence(make: Callable[[], Plan], size: str) -> Told:
    """Sentence on the plan that ``make`` returns, or on its refusal."""
    try:
        plan = make()
    except BudgetError as error:
        return _estimate_text("does not fit", "does not fit", f"{size} does not fit: {error}")
    except LowVRAMError as error:
        if error.plainly:  # the log has what the page leaves out
            print(f"[{NAME}] {error.args[0]}")
        return complaint(f"{size}: {error}")
    predicted, steps, decides = plan.predicted, plan.request.steps, decision_in(plan)
    budget = format_size(plan.request.vram)
    whole = not select_kinds(plan.reasons, Kind.DECODE_ONLY)
    about = f"about {_time(predicted.seconds)} for "
    about += f"{steps} step{'s' if steps != 1 else ''}" if whole else "the decode"
    if decides and decides.values["over_budget"]:
        more = f"takes more than {budget}"
        return _estimate_text("over budget", more, "; ".join([f"{size} {more}, {about}", *_unusual_choices(plan)]))
    total = format_size(predicted.reserved_bytes + predicted.overhead_bytes)
    fits = f"{size} fits into {budget}" if decides else f"{size} fits: {total} of {budget}"
    head = f"fits into {budget}" if decides else f"fits, {_share_text(total, budget)}"
    return _estimate_text("fits", head, "; ".join([f"{fits}, {about}", *_unusual_choices(plan)]))


def join_texts(texts: Sequence[Told]) -> Told:
    """Texts of a generation's passes: all lines, under the head of the worst.

    Among equals it is the head of the last pass, which is the larger picture."""
    worst = max(reversed(texts), key=lambda part: _VERDICTS.index(part.verdict))
    return Told(worst.verdict, worst.head, "".join(part.line for part in texts))


def _share_text(part: str, whole: str) -> str:
    """ "3.3 of 4 GiB", or with both units where they differ."""
    number, unit = part.split()
    return f"{number if whole.endswith(unit) else part} of {whole}"


def decision_in(plan: Plan) -> Reason | None:
    """The reason of a plan for a host that decides itself what stays on the card; None for another."""
    return next(iter(select_kinds(plan.reasons, Kind.HOST_DECIDES)), None)


def _unusual_choices(plan: Plan) -> list[str]:
    """Sentences on the unusual choices of a plan. Its own reasons name budgets without the text encoders' share."""
    settings, decided = plan.settings, select_kinds(plan.reasons, Kind.HOST_DECIDES, Kind.HOST_FETCHES)[:1]
    briefly = {name: words.get(getattr(settings, name)) for name, words in BRIEFLY.items()}
    offload = briefly.pop("offload")  # the host's decision takes its place
    weights = decided or filter(None, [offload])
    return [
        *weights,
        *plain_reasons(plan),
        *filter(None, briefly.values()),
        *tile_reasons(plan),
    ]


def plain_reasons(plan: Plan) -> list[Reason]:
    """Reason on steps that run as the host runs them; empty if hooks act in them."""
    return select_kinds(plan.reasons, Kind.DECODE_ONLY, Kind.STEPS_PLAIN)


def tile_reasons(plan: Plan) -> list[Reason]:
    """Reason on another extension's Tiled VAE; empty if none is on."""
    return select_kinds(plan.reasons, Kind.TILES_UNUSED, Kind.TILES_DECODE)


def complaint(text: str) -> Told:
    """Texts for unusable values."""
    return _estimate_text("unusable", "cannot be planned", text)


def note(text: str) -> Told:
    """Texts if nothing can be predicted yet."""
    return _estimate_text("unknown", "", text)


_RED = "var(--error-icon-color, #c00)"
"""Of the page's theme: #c00 can hardly be read on a dark one."""


def _estimate_text(verdict: str, head: str, text: str) -> Told:
    marked = f'data-verdict="{verdict}" style="color: {"inherit" if verdict in ("fits", "unknown") else _RED}'
    line = f'<p {marked}; padding: 0.5em">{html.escape(text)}</p>'
    return Told(verdict, f'<span {marked}">{html.escape(head)}</span>' if head else "", line)


WAITS = _estimate_text("unknown", "waits for the running picture", f"{TITLE}: waits for the running picture")
"""Texts while a generation has the host's queue."""


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
