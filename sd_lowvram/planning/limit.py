"""A budget that tells for which other budgets the same plan would have been made."""

from __future__ import annotations

import math
from typing import Any


class Limit(int):
    """Bytes of a budget that note what they are compared with.

    A budget decides a plan by comparisons: with what candidates need, and less something else, with what is left. All
    budgets between the nearest numbers on both sides are answered alike and lead to the same plan. Whatever else is
    computed with one is taken to decide by its very value. ``int(limit)`` notes nothing: it is for showing a budget.
    """

    _alike: list[float]
    _less: int

    def __new__(cls, size: int, alike: list[float] | None = None, less: int = 0) -> Limit:
        """
        Args:
            alike, less: of the budget that has ``less`` bytes more than these, and notes what these are compared with.
        """
        limit = super().__new__(cls, size)
        limit._alike, limit._less = [0, math.inf] if alike is None else alike, less
        return limit

    @property
    def alike(self) -> tuple[float, float]:
        """The least and the most bytes, both included, for which all that was asked would have been answered alike."""
        return self._alike[0], self._alike[1]

    def _reaches(self, number: float) -> bool:
        """Whether these bytes are ``number`` at least; noted."""
        answer = int(self) >= number
        if math.isfinite(number):
            if answer:
                self._note(math.ceil(number), math.inf)
            else:
                self._note(-math.inf, math.ceil(number) - 1)
        return answer

    def _note(self, least: float, most: float) -> None:
        self._alike[:] = max(self._alike[0], least + self._less), min(self._alike[1], most + self._less)

    def __ge__(self, other: float) -> bool:
        return self._reaches(other)

    def __lt__(self, other: float) -> bool:
        return not self._reaches(other)

    def __gt__(self, other: float) -> bool:
        return self._reaches(math.floor(other) + 1 if math.isfinite(other) else other)

    def __le__(self, other: float) -> bool:
        return not self > other

    def __sub__(self, other: int) -> Limit:
        return Limit(int(self) - other, self._alike, self._less + other)

    __hash__ = int.__hash__


def _by_value(name: str) -> Any:
    """What a plain number does, noted as one that depends on all of its bytes."""
    plain = getattr(int, name)

    def computed(self: Limit, *others: Any) -> Any:
        self._note(int(self), int(self))
        return plain(self, *others)

    return computed


for _name in ("eq", "ne", "add", "radd", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod"):
    setattr(Limit, f"__{_name}__", _by_value(f"__{_name}__"))
