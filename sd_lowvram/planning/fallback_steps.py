"""Fallback steps of a run that ran out of memory although its plan fitted, in order.

The first step frees cached memory and repeats the call. Each further step opens some knobs to the search and fixes the
rest, so that no step changes more than it needs. Knobs declare what they are opened with. Number types are never
opened: a lossless run stays lossless.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..knob import Act
from ..settings import Settings, acts, knobs

AS_BEFORE = "cache emptied"

_DEVICE_IS_SHORT = {
    "smaller strips": "strips",
    "parked maps": "maps",
    "smaller ring": "weights",
    "decoder on the CPU": "decoder",
}
_HOST_IS_SHORT = {
    "weights from their file": None,
    "smaller strips": "strips",
    "fewer parked maps": "maps",
    "larger ring": "weights",
    "decoder on the GPU": "decoder",
}


def ladder(chosen: Settings, fixed: Settings, of_host: bool) -> Iterator[tuple[str, Settings]]:
    """Yield the fallback steps, each with its name and the knobs that stay fixed on it.

    Args:
        chosen: settings of the plan that ran out of memory.
        fixed: the knobs among them that a person has set.
        of_host: True if host memory is short, False if the device's is.
    """
    held = chosen.filled(**{name: knob.closed for name, knob in knobs().items()})
    for step, part in (_HOST_IS_SHORT if of_host else _DEVICE_IS_SHORT).items():
        opened = {name: getattr(fixed, name) for name, knob in knobs().items() if knob.opened_with == part}
        held = dataclasses.replace(held, **opened)
        yield step, held


def drop_closed(settings: Settings, before: Settings) -> Settings:
    """Drop knobs that were pinned only to freeze the search and still hold their default.

    Args:
        settings: settings of the new plan.
        before: settings before the search was frozen.
    """
    exact = Act.MAKES_STRIPS in acts(settings)
    said_nothing = [
        name
        for name, knob, value in settings.decided()
        if value == knob.closed and getattr(before, name) is None
        if knob.hook or not exact  # one without a hook is read by that of exact strips
    ]
    return dataclasses.replace(settings, **dict.fromkeys(said_nothing))
