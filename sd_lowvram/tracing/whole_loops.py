"""The allocations of a whole loop, of which a trace ran one pass of each kind.

A pass leaves tensors that the next pass frees: a variable that is reassigned, rows that are stored for the strip below.
So a repeated pass ends what the previous pass left, not what was left in the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Allocation = tuple[int, int]
"""A number and bytes for what is made, the number and -1 for its end."""


@dataclass
class _Pass:
    """A pass that was traced.

    Attributes:
        allocations: its own allocations and ends.
        before: what the pass before this one has handed on.
        handed: numbers of the allocations that the next pass ends, in order; None: unknown.
        stays: numbers of the allocations that outlive the next pass.
        again: the same without small ones, for passes that it represents.
    """

    allocations: Sequence[Allocation]
    again: Sequence[Allocation]
    before: list[int | None]
    handed: list[int | None]
    stays: list[int]


def whole_loop(
    traced: Sequence[Sequence[Allocation]], order: Sequence[int], new_number: Callable[[], int], small: int = 0
) -> tuple[list[Allocation], dict[int, list[int]]]:
    """Return the allocations of all passes of a loop.

    Allocations that outlive the loop and are equal end together.

    Args:
        traced: the allocations of the traced passes, in order.
        order: for each pass, the number of the traced pass that represents it.
        new_number: function that returns a new number.
        small: allocations up to this size are recorded as traced, because their place depends on no order.

    Returns:
        The allocations in order, and for each allocation that outlives the loop the numbers of its equals.
    """
    passes = _describe_passes(traced, small)
    last = {number: place for place, number in enumerate(order)}
    result: list[Allocation] = []
    equals: dict[int, list[int]] = {}
    left: list[int | None] = []
    for place, number in enumerate(order):
        current, first = passes[number], place == order.index(number)
        ended = dict(zip(current.before, left, strict=False))
        ended.pop(None, None)
        own: dict[int | None, int] = {}
        for old, nbytes in current.allocations if first else current.again:
            if nbytes >= 0:
                own[old] = old if place == last[number] or nbytes <= small else new_number()
            if old in own:
                result.append((own[old], nbytes))
            elif (now := ended.pop(old, None)) is not None:
                result.append((now, -1))
            elif first and old not in current.before:
                result += _ends((old, *equals.pop(old, ())))
        # End what is left of the pass before: the trace of this pass ran after a pass of another kind.
        result += _ends((*ended.values(), *left[len(current.before) :]))
        left = [own.get(old) for old in current.handed]
        for old in current.stays if place != last[number] else ():
            equals.setdefault(old, []).append(own[old])
    return result, equals


def _ends(numbers: Iterable[int | None]) -> list[Allocation]:
    return [(number, -1) for number in numbers if number is not None]


def _describe_passes(traced: Sequence[Sequence[Allocation]], small: int) -> list[_Pass]:
    passes: list[_Pass] = []
    for number, allocations in enumerate(traced):
        before = passes[-1].handed if passes else []
        lasting = _lasting_bytes(allocations, small)
        if number + 1 < len(traced):
            ended = {other for other, nbytes in traced[number + 1] if nbytes < 0}
            handed: list[int | None] = [other for other in lasting if other in ended]
        else:  # the last pass hands on allocations of the sizes that it was handed
            handed = _pair_equal(passes[-1], lasting) if passes else []
        stays = [other for other in lasting if other not in handed]
        minor = {other for other, nbytes in allocations if 0 <= nbytes <= small}
        again = [allocation for allocation in allocations if allocation[0] not in minor]
        passes.append(_Pass(allocations, again, before, handed, stays))
    return passes


def _lasting_bytes(allocations: Sequence[Allocation], small: int) -> dict[int, int]:
    """Bytes by number of allocations without an end, in order, without small ones."""
    left: dict[int, int] = {}
    for number, nbytes in allocations:
        if nbytes > small:
            left[number] = nbytes
        elif nbytes < 0:
            left.pop(number, None)
    return left


def _pair_equal(before: _Pass, lasting: dict[int, int]) -> list[int | None]:
    """Pair each allocation that the pass ``before`` handed on with one in ``lasting`` of equal size."""
    sizes = _lasting_bytes(before.allocations, -1)
    pairs: list[int | None] = []
    for size in (None if number is None else sizes[number] for number in before.handed):
        alike = (other for other, nbytes in lasting.items() if nbytes == size and other not in pairs)
        pairs.append(next(alike, None))
    return pairs
