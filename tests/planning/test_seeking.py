"""Of several searches the one that promises most goes on first, and what cannot be better is not looked at."""

from __future__ import annotations

import math

import pytest

from sd_lowvram.planning.seeking import Seeking, Steps


def climbing(costs: list[float], result: float | None, asked: list[float]) -> Steps[float | None]:
    """Tells each of ``costs`` before a step that takes long, then gives ``result``."""
    for cost in costs:
        while not (yield cost):
            pass
        asked.append(cost)
    return result


def test_it_stops_before_each_step_and_goes_on_when_asked() -> None:
    asked: list[float] = []
    seeking = Seeking(climbing([1.0, 2.0], 3.0, asked), lambda cost: cost)
    assert seeking.is_open and seeking.least == 1.0 and not asked
    seeking.go_on(far=False)
    assert seeking.least == 1.0 and not asked
    seeking.go_on()
    assert seeking.least == 2.0 and asked == [1.0]
    seeking.go_on()
    assert not seeking.is_open and seeking.found == seeking.least == 3.0
    seeking.go_on()
    assert seeking.found == 3.0 and asked == [1.0, 2.0]


@pytest.mark.parametrize("costs", [[], [1.0]])
def test_nothing_found_costs_infinitely_much(costs: list[float]) -> None:
    seeking = Seeking(climbing(costs, None, []), lambda cost: cost)
    for _ in costs:
        seeking.go_on()
    assert not seeking.is_open and seeking.found is None and seeking.least == math.inf


def test_an_error_reaches_whoever_goes_on() -> None:
    def failing() -> Steps[float | None]:
        yield 1.0
        raise ValueError("broken")

    seeking = Seeking(failing(), lambda cost: cost)
    with pytest.raises(ValueError, match="broken"):
        seeking.go_on()
