"""The ways to run the stages that share knobs, as a search looks at them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..settings import Settings
from .ladders import detours, ladder
from .plan import StagePlan
from .seeking import Steps
from .stages import Stage

if TYPE_CHECKING:
    from .search import Search

Option = tuple[StagePlan, ...]
"""One way to run the stages that share knobs (decode and encode do)."""

Test = Callable[[Option], bool]

GROUPS = {"encode": "vae", "decode": "vae"}
"""Stages that share knobs, by a name for both."""


class Rungs:
    """The ways to run stages that share knobs, with the weights placed in one way; each traced when it is looked at.

    The first ``height`` of them are a ladder, each slower than the one before and smaller on the device; the others
    are detours, slower than the first rung.
    """

    def __init__(self, search: Search, base: Settings, group: list[Stage]) -> None:
        self._search, self._base, self._group = search, base, group
        name = group[0].name
        self.decodes = name in GROUPS
        rungs = self._open(ladder(name, search.tiled))
        self.height = len(rungs)
        aside = self._open(detours(name, search.tiled, search.decoder_on_cpu))
        self._choices = [*rungs, *(one for one in aside if one not in rungs)]

    def _open(self, choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What the user has left open of ``choices``, each once."""
        taken = [{k: value for k, value in one.items() if getattr(self._base, k) is None} for one in choices]
        return [one for number, one in enumerate(taken) if one not in taken[:number]]

    def __len__(self) -> int:
        return len(self._choices)

    def __getitem__(self, number: int) -> Option:
        return self._search.option(self._base, self._group, self._choices[number])

    def all(self, start: int = 0) -> Iterator[Option]:
        """All from ``start`` on, the fastest first."""
        return (self[number] for number in range(start, len(self._choices)))

    def fastest(self, held: Test, fits: Test) -> Steps[Option | None]:
        """The fastest one that fits.

        Args:
            held: whether the device holds it; of the ladder, all rungs after one that is held are.
            fits: whether that is all right with the host too.
        """
        first = yield from self._asked(0, 0.0)
        number, least = 0, seconds_of(first)
        if not held(first):
            number, least = yield from self._held_from(held, least)
        found = None
        while found is None and number < len(self):
            option = yield from self._asked(number, least)
            found = option if fits(option) else None
            number += 1
            least = seconds_of(option if number < self.height else first)
        if found is None or not any(stage.parked_bytes for stage in found):
            return found
        ways = [found]
        for detour in range(self.height, len(self)):
            option = yield from self._asked(detour, seconds_of(first))
            ways += [option] if fits(option) else []
        return min(ways, key=seconds_of)

    def _held_from(self, held: Test, least: float) -> Steps[tuple[int, float]]:
        """The first rung of the ladder after the fastest that the device holds (the last, if none does), and seconds
        that it is not below.

        The rungs are halved towards the faster ones, which are traced sooner.
        """
        low, high = min(1, self.height - 1), self.height - 1
        while low < high:
            middle = (low + high - 1) // 2
            option = yield from self._asked(middle, least)
            if held(option):
                high = middle
            else:
                low, least = middle + 1, seconds_of(option)
        return low, least

    def _asked(self, number: int, least: float) -> Steps[Option]:
        while not self.is_traced(number):
            if (yield least):
                break
        return self[number]

    def traced(self) -> list[Option]:
        """Those that take no new trace."""
        return [self[number] for number in range(len(self)) if self.is_traced(number)]

    def is_traced(self, number: int) -> bool:
        return self._search.is_traced(self._base, self._group, self._choices[number])

    def known(self) -> list[Option]:
        """Those that were looked at before."""
        found = (self._search.known(self._base, self._group, choice) for choice in self._choices)
        return [option for option in found if option is not None]


def seconds_of(option: Option) -> float:
    return sum(stage.seconds for stage in option)


def host_of(option: Option) -> int:
    return max(stage.host_bytes for stage in option)


def largest_of(option: Option) -> int:
    return max(stage.largest_bytes for stage in option)
