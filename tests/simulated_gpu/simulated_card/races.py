"""Races: two accesses to the same bytes, one of them a write, that nothing orders.

What orders them is what CUDA promises: a stream does one thing after the other, after all that the host had seen done
when it asked; an event that is waited for brings what its stream had done when it was recorded. Each timeline carries a
clock of what it knows of the rest. So a race is found however the schedule happened to run, also where the bits came
out right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from .card import Entry

_RECORD, _WAIT, _STREAM_SYNC, _EVENT_SYNC, _READ, _WRITE, _COPY = 1, 2, 4, 5, 10, 11, 12
_STAGED, _BLOCKING = 1, 2
_HOST = -1
_CELL = 14
"""Accesses are looked up by cells of this many bits of the address."""

_Clock = defaultdict[int, int]


@dataclass(frozen=True)
class Access:
    """By one timeline (a stream's number, or the host) of some bytes, at one line of the log."""

    timeline: int
    start: int
    end: int
    writes: bool
    time: int
    what: str
    line: int

    def __str__(self) -> str:
        who = "the host" if self.timeline == _HOST else f"stream {self.timeline}"
        return f"{self.what} {'writes' if self.writes else 'reads'} in {who}, line {self.line}"


@dataclass(frozen=True)
class Race:
    first: Access
    second: Access

    def __str__(self) -> str:
        shared = min(self.first.end, self.second.end) - max(self.first.start, self.second.start)
        return f"{self.first} | {self.second} | {shared} bytes"


def races(log: Iterable[Entry], most: int = 100) -> list[Race]:
    """The races in a log, by the line of the later access; no more are looked for when there are ``most``."""
    return _Replay().of(log, most)


class _Replay:
    def __init__(self) -> None:
        self._clocks: defaultdict[int, _Clock] = defaultdict(lambda: defaultdict(int))
        self._events: dict[int, dict[int, int]] = {}
        self._cells: defaultdict[int, list[Access]] = defaultdict(list)
        self._found: list[Race] = []
        self._line = 0

    def of(self, log: Iterable[Entry], most: int) -> list[Race]:
        for self._line, entry in enumerate(log):
            if len(self._found) >= most:
                break
            self._step(entry)
        return self._found

    def _step(self, entry: Entry) -> None:
        kind, stream = entry.happening, entry.stream
        if kind == _RECORD:
            self._learn(stream, self._clocks[_HOST])
            self._events[entry.event] = dict(self._clocks[stream])
        elif kind == _WAIT:
            self._learn(stream, self._clocks[_HOST])
            self._learn(stream, self._events.get(entry.event, {}))
        elif kind == _STREAM_SYNC:
            self._learn(_HOST, self._clocks[stream])
        elif kind == _EVENT_SYNC:
            self._learn(_HOST, self._events.get(entry.event, {}))
        elif kind in (_READ, _WRITE):
            self._begin(stream)
            self._touch(stream, entry.source, entry.bytes, kind == _WRITE, "code" if stream == _HOST else "a kernel")
        elif kind == _COPY:
            self._copy(entry)

    def _copy(self, entry: Entry) -> None:
        if entry.way == _STAGED:
            self._begin(_HOST)
            self._touch(_HOST, entry.source, entry.bytes, False, "a copy")
        self._begin(entry.stream)
        if entry.way != _STAGED:
            self._touch(entry.stream, entry.source, entry.bytes, False, "a copy")
        self._touch(entry.stream, entry.target, entry.bytes, True, "a copy")
        if entry.way == _BLOCKING:
            self._learn(_HOST, self._clocks[entry.stream])

    def _learn(self, timeline: int, clock: dict[int, int]) -> None:
        mine = self._clocks[timeline]
        for other, time in clock.items():
            mine[other] = max(mine[other], time)

    def _begin(self, timeline: int) -> None:
        """The next thing that a timeline does; a stream does it after what the host knew when it asked."""
        if timeline != _HOST:
            self._learn(timeline, self._clocks[_HOST])
        self._clocks[timeline][timeline] += 1

    def _touch(self, timeline: int, start: int, size: int, writes: bool, what: str) -> None:
        clock = self._clocks[timeline]
        access = Access(timeline, start, start + size, writes, clock[timeline], what, self._line)
        for cell in range(start >> _CELL, (start + size - 1 >> _CELL) + 1) if size else ():
            self._cells[cell] = [one for one in self._cells[cell] if self._stays(one, access, clock)]
            self._cells[cell].append(access)

    def _stays(self, earlier: Access, access: Access, clock: _Clock) -> bool:
        """Whether an earlier access can race with what comes after ``access`` too; notes their own race."""
        if self._clocks[_HOST][earlier.timeline] >= earlier.time:  # who is asked for anything now comes after it
            return False
        if earlier.end <= access.start or earlier.start >= access.end:
            return True
        if earlier.timeline != access.timeline and clock[earlier.timeline] < earlier.time:
            if earlier.writes or access.writes:
                self._found.append(Race(earlier, access))
            return True
        covered = access.start <= earlier.start and earlier.end <= access.end
        return not (covered and (access.writes or not earlier.writes))
