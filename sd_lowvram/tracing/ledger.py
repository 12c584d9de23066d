"""A ledger of bytes: every storage is booked when it is made and removed when it is freed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..compat.private import storage_key
from ..memory.accounts import Account
from ..memory.caching_allocator import SMALL
from ..memory.storage_refs import Deaths
from .whole_loops import whole_loop


class Allocation(NamedTuple):
    """An allocation. Bytes are those alive right after it."""

    device_bytes: int
    host_bytes: int
    path: str
    operator: str


class Timeline(list[Allocation]):
    """The allocations of a run in their order."""

    def top(self) -> Allocation:
        """The moment at which the device held most.

        Raises:
            ValueError: nothing was allocated.
        """
        return max(self, key=lambda event: event.device_bytes)


class Mark(NamedTuple):
    """The beginning of a stretch.

    Attributes:
        peaks: peaks of the trace up to here.
        now: bytes alive, in the order of the peaks.
        live: bytes alive in each account, then those that were born.
        place: number of recorded allocations.
    """

    peaks: Sequence[int]
    now: tuple[int, int, int, int]
    live: tuple[int, ...]
    place: int


class Stretch(NamedTuple):
    """Changes of the bytes between two moments of a trace.

    Attributes:
        above: peaks, less the bytes at the start.
        changes: bytes alive in each account, then those that were born: the end less the start.
        allocations: what was allocated and freed, by number.
    """

    above: tuple[int, ...]
    changes: tuple[int, ...]
    allocations: Sequence[tuple[int, int]]

    def followed_by(self, other: Stretch) -> Stretch:
        """Return this stretch and the next one as one, without allocations."""
        device, weights, host, *born = self.changes
        start = device + weights, host, born[0], sum(born), 0
        above = tuple(max(peak, at + more) for peak, at, more in zip(self.above, start, other.above, strict=True))
        changes = tuple(map(operator.add, self.changes, other.changes))
        return Stretch(above, changes, ())


@dataclass
class _Booked:
    """Entry of a storage. ``born``: made after the ledger was opened; ``number``: unique id."""

    account: Account
    born: bool
    number: int
    nbytes: int = 0


_UNTIL_SETTLED = 3
"""Passes of one kind after which tensors of the next kind are placed as they will be from then on."""


def _shorten(order: Sequence[int]) -> list[int]:
    """``order`` with no more passes of each kind than change where tensors lie."""
    passes: Counter[int] = Counter()
    return [number for number in order if passes.update((number,)) or passes[number] <= _UNTIL_SETTLED]


class Ledger:
    """Bytes alive in each account now, and their peaks.

    Attributes:
        peak: most bytes on the device, weights included, at one moment.
        host_peak: most bytes in host memory.
        activation_peak: most bytes on the device of storages that were born here and are not weights.
        born_peak: most bytes of storages that were born here, in all accounts together.
        largest: the largest single allocation on the device.
        met: bytes on the device that existed from the start and were found on the way.
        allocations: inputs, activations and streamed weights on the device, in order: (number, bytes) for each
            allocation, (number, -1) for its end. Temporaries of kernels and libraries' workspaces are included.
        repeats_calls: True if :meth:`run_once` may leave out equal calls.
    """

    def __init__(self, equals: bool = False) -> None:
        """
        Args:
            equals: True if equal calls may be run once: spans of work are then fewer, the sums of work the same.
        """
        self.timeline = Timeline()
        self.live = {"device": 0, "weights": 0, "host": 0}
        self.born = {"device": 0, "weights": 0, "host": 0}
        self.peak = self.host_peak = self.activation_peak = self.born_peak = self.largest = self.met = 0
        self.path = self.operator = ""
        self.allocations: list[tuple[int, int]] = []
        self._new_number = functools.partial(next, itertools.count())
        self._equals: dict[int, list[int]] = {}
        self._booked: dict[int, _Booked] = {}
        self.repeats_calls = equals
        self._calls: dict[Hashable, list[tuple[int, int]]] = {}
        self._deaths = Deaths(self._strike)

    def book(self, tensor: Tensor, account: Account, *, born: bool = True) -> None:
        """Count the storage of ``tensor``; if it is counted already, note its new size.

        Args:
            tensor: a fake tensor.
            account: "device", "weights" or "host".
            born: False for a tensor that existed before the run.
        """
        storage = tensor.untyped_storage()
        booked = self._booked.get(storage_key(storage))
        if booked is None:
            self._deaths.look()
            booked = self._booked[self._deaths.watch(storage)] = _Booked(account, born, self._new_number())
        nbytes = storage.nbytes()
        if nbytes != booked.nbytes:
            self._change(booked, nbytes - booked.nbytes)

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        """Note the new size of a storage, if it is followed."""
        booked = self._booked.get(storage_key(storage))
        if booked is not None:
            self._change(booked, storage.nbytes() - booked.nbytes)

    def number_of(self, tensor: Tensor) -> int:
        """Number of the tensor's storage in ``allocations``."""
        return self._booked[storage_key(tensor)].number

    def place(self) -> int:
        """Number of records so far, including ends."""
        self._deaths.look()
        return len(self.allocations)

    def fill_in(self, places: Sequence[int], order: Sequence[int]) -> None:
        """Record the passes of a loop that were not run, as :class:`sd_lowvram.memory.repeats.Follower` describes.

        Only a few passes of each kind are recorded: after these, tensors are placed the same way in every pass.

        Args:
            places: numbers of records at the start and end of each pass that ran.
            order: for each pass of the whole loop, the number of the pass that represents it.
        """
        traced = [self.allocations[start:stop] for start, stop in itertools.pairwise(places)]
        self.allocations[places[0] :], equals = whole_loop(traced, _shorten(order), self._new_number, SMALL)
        for number, others in equals.items():
            self._equals.setdefault(number, []).extend(others)

    def run_once(self, kind: Hashable, run: Callable[[], object]) -> None:
        """Call ``run``, or record its allocations again, as :class:`sd_lowvram.memory.repeats.Follower` describes.

        Calls are equal only if equal bytes are alive: then the peaks are equal too. A call is recorded if it frees all
        that it made and nothing else.
        """
        if not self.repeats_calls:
            run()
            return
        live = self.live_now()
        key = kind, *live.values()
        if key in self._calls:
            self._record_again(self._calls[key], {})
            return
        place = self.place()
        run()
        made = self.allocations[place : self.place()]
        both = Counter({number: 2 for number, nbytes in made if nbytes >= 0})
        if self.live_now() == live and Counter(number for number, _ in made) == both:
            self._calls[key] = made

    def account_of(self, tensor: Tensor) -> Account:
        """The account of the storage of ``tensor``; the device if it is not booked."""
        booked = self._booked.get(storage_key(tensor))
        return "device" if booked is None else booked.account

    @contextlib.contextmanager
    def holding(self, hidden: int) -> Iterator[None]:
        """Book the results of a kernel within the block, while it holds ``hidden`` bytes that no tensor shows."""
        if not hidden:
            yield
            return
        number = self._new_number()
        self.allocations.append((number, hidden))
        yield
        self.look(hidden)
        self.allocations.append((number, -1))

    def passing(self, workspace: int) -> None:
        """Record ``workspace`` bytes that a library allocates and frees at once; they are in no peak of tensors."""
        if workspace:
            number = self._new_number()
            self.allocations += (number, workspace), (number, -1)

    def look(self, hidden: int = 0) -> None:
        """Update the peaks by what is alive now, and by ``hidden`` bytes that no tensor shows."""
        device, weights, host = self.live.values()
        self.peak = max(self.peak, device + weights + hidden)
        self.host_peak = max(self.host_peak, host)
        born_device, born_weights, born_host = self.born.values()
        self.activation_peak = max(self.activation_peak, born_device + hidden)
        self.born_peak = max(self.born_peak, born_device + born_weights + born_host + hidden)
        self.timeline.append(Allocation(device + weights + hidden - self.met, host, self.path, self.operator))

    def mark(self) -> Mark:
        """Begin a stretch, whose peaks are recorded separately until :meth:`since`."""
        now, peaks = self._now(), self._peaks()
        self.peak, self.host_peak, self.activation_peak, self.born_peak = now
        self.largest = 0
        return Mark(peaks, now, (*self.live.values(), *self.born.values()), len(self.allocations))

    def since(self, mark: Mark) -> Stretch:
        """End the stretch that began with ``mark``."""
        self._deaths.look()
        above = tuple(peak - at for peak, at in zip(self._peaks(), (*mark.now, 0), strict=True))
        changes = tuple(map(operator.sub, (*self.live.values(), *self.born.values()), mark.live))
        self._raise(mark.peaks)
        return Stretch(above, changes, self.allocations[mark.place :])

    def repeat(self, stretch: Stretch, numbers: dict[int, int]) -> None:
        """Record an equal stretch again.

        Args:
            stretch: the record.
            numbers: new numbers of its allocations by the old ones, to which this stretch's are added. Ends of other
                allocations, which are older, are not recorded.
        """
        self._raise([at + more for at, more in zip((*self._now(), 0), stretch.above, strict=True)])
        names = [(bytes_, name) for bytes_ in (self.live, self.born) for name in bytes_]
        for (bytes_, name), change in zip(names, stretch.changes, strict=True):
            bytes_[name] += change
        self._record_again(stretch.allocations, numbers)

    def adopt(self, tensor: Tensor, number: int) -> None:
        """Follow a result of repeated stretches, whose allocation on the device was recorded there."""
        storage = tensor.untyped_storage()
        self._booked[self._deaths.watch(storage)] = _Booked("device", True, number, storage.nbytes())

    def _record_again(self, allocations: Sequence[tuple[int, int]], numbers: dict[int, int]) -> None:
        for number, nbytes in allocations:
            if nbytes >= 0:
                numbers[number] = new = self._new_number()
                self.allocations.append((new, nbytes))
            elif number in numbers:
                self._end(numbers[number])

    def _end(self, number: int) -> None:
        """Record the end of an allocation, and of its equals in passes of a loop that were not run."""
        self.allocations.append((number, -1))
        if number in self._equals:
            self.allocations += ((ended, -1) for ended in self._equals.pop(number))

    def _now(self) -> tuple[int, int, int, int]:
        device, weights, host = self.live_now().values()
        born = tuple(self.born.values())
        return device + weights, host, born[0], sum(born)

    def _peaks(self) -> list[int]:
        return [self.peak, self.host_peak, self.activation_peak, self.born_peak, self.largest]

    def _raise(self, peaks: Sequence[int]) -> None:
        highest = [max(pair) for pair in zip(self._peaks(), peaks, strict=True)]
        self.peak, self.host_peak, self.activation_peak, self.born_peak, self.largest = highest

    def book_existing(self, tensor: Tensor, account: Account) -> None:
        """Count a tensor that existed before the run and is found only now."""
        nbytes = tensor.untyped_storage().nbytes()
        if account == "host":
            self.host_peak += nbytes
        else:
            self.peak += nbytes
            self.met += nbytes
        self.book(tensor, account, born=False)

    def live_now(self) -> dict[str, int]:
        """Return the bytes alive in each account, after removing storages that were freed."""
        self._deaths.look()
        return dict(self.live)

    def close(self) -> None:
        """Stop counting; the sums stay. Tensors that were found on the way are added to every event, because they
        existed before.
        """
        self.timeline[:] = [event._replace(device_bytes=event.device_bytes + self.met) for event in self.timeline]
        self._deaths.forget()
        self._booked.clear()

    def _change(self, booked: _Booked, change: int) -> None:
        booked.nbytes += change
        self.live[booked.account] += change
        if booked.born:
            self.born[booked.account] += change
            if booked.account != "host":
                self.largest = max(self.largest, change)
        if booked.account == "device" or (booked.account == "weights" and booked.born):
            if change < booked.nbytes:  # resized: the allocation of the old size ends
                self._end(booked.number)
                booked.number = self._new_number()
            if booked.nbytes:
                self.allocations.append((booked.number, booked.nbytes))
        if change > 0:
            self.look()

    def _strike(self, key: int) -> None:
        booked = self._booked.pop(key)
        self._change(booked, -booked.nbytes)
