"""A loop of which one pass of each kind was traced is written down whole: as if every pass had been."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sd_lowvram.memory import repeats
from sd_lowvram.memory.repeats import representative_pieces, representatives, standing_for
from sd_lowvram.memory.reserved import Reserved
from sd_lowvram.tracing import ledger, tracer
from sd_lowvram.tracing.whole_loops import whole_loop
from sd_lowvram.units import MIB

PIECES = 7


def sizes(allocations: list[tuple[int, int]]) -> list[tuple[bool, int]]:
    """Whether each is an end, and of how many bytes; numbers may differ."""
    made: dict[int, int] = {}
    for number, nbytes in allocations:
        if nbytes >= 0:
            assert number not in made
            made[number] = nbytes
    return [(nbytes < 0, made[number]) for number, nbytes in allocations if made[number] > MIB]


def noted(run: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch, whole: bool) -> list[tuple[bool, int]]:
    """What was allocated in a trace of ``run``, with all passes of its loops or one of each kind."""
    found: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(tracer, "count_reserved", lambda made, *_, **__: found.append(sizes(made)) or Reserved(0, 0))
        patch.setattr(ledger, "_UNTIL_SETTLED", PIECES)  # none is left out
        if whole:
            patch.setattr(repeats, "FakeTensor", type(None))
        tracer.trace(run, torch.empty(4 * MIB))
    return found[0]


def rows(x: Tensor, count: int) -> list[Tensor]:
    """Pieces of a map, of several MiB each, of which the last is smaller."""
    return [x[: len(x) // 2 - 100 * MIB // 4096 * (number == count - 1)] for number in range(count)]


def ends_at_once(x: Tensor) -> Tensor:
    for piece in representative_pieces(rows(x, PIECES), x):
        (piece + 1) * 2
    return x + 1


def handed_on(x: Tensor) -> Tensor:
    before = None
    for piece in representative_pieces(rows(x, PIECES), x):
        before = piece + 1 if before is None else before[:1] + piece
    return x + 1


def gathered(x: Tensor) -> Tensor:
    found = [piece + 1 for piece in representative_pieces(rows(x, PIECES), x)]
    x = x + 1
    found.clear()
    return x * 2


def within_another(x: Tensor) -> Tensor:
    room = None
    for piece in representative_pieces(rows(x, PIECES), x):
        for part in representative_pieces(rows(piece, PIECES), x):
            halo = part.clone()
        room = torch.empty_like(x) if room is None else room
        kept = halo
    del kept
    return x + 1


@pytest.mark.parametrize("run", [ends_at_once, handed_on, gathered, within_another])
def test_a_loop_is_written_down_as_all_its_passes_would_be(
    run: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert noted(run, monkeypatch, whole=False) == noted(run, monkeypatch, whole=True)


def test_passes_of_two_kinds_in_turn() -> None:
    """Each ends what the one before has left, of whichever kind that was."""
    numbers = itertools.count(100)
    traced = [[(0, 9), (1, 5)], [(1, -1), (2, 6)], [(2, -1), (3, 7)], [(3, -1)]]
    found, equals = whole_loop(traced, [0, 1, 2, 1, 2, 3], lambda: next(numbers))
    assert [size for _, size in found] == [9, 5, -1, 6, -1, 7, -1, 6, -1, 7, -1]
    made = [number for number, size in found if size >= 0]
    assert [number for number, size in found if size < 0] == made[1:] and made[0] == 0
    assert equals == {}


def test_what_several_passes_leave_for_longer_ends_together() -> None:
    numbers = itertools.count(100)
    found, equals = whole_loop([[(0, 9)], [(1, 9)], [(2, 9)]], [0, 1, 1, 1, 2], lambda: next(numbers))
    assert [number for number, _ in found] == [0, 100, 101, 1, 2]
    assert equals == {1: [100, 101]}


def test_who_follows_hears_of_the_order() -> None:
    heard: list[Any] = []

    class Listening:
        def place(self) -> int:
            return len(heard)

        def fill_in(self, places: Any, order: Any) -> None:
            heard.append((list(places), list(order)))

    run, order = representatives("abbaba")
    with repeats.notify_follower(Listening()):
        for _ in standing_for(run, order):
            heard.append("pass")
    assert heard[-1] == ([0, 1, 2, 3, 4], [0, 1, 1, 2, 1, 3])
