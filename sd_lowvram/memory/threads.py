"""What threads share: whose turn it is to run a model, and what is exchanged in torch while somebody traces."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import LowVRAMError
from .accounts import tracing

Place = tuple[int, str]
"""What one thread has at a time: a device, or the right to change what models carry. All threads that need several take
them in their order, so that no two wait for each other."""

_CHANGING: Place = (2, "what models carry")


def place_of(device: torch.device) -> Place:
    """What a thread takes for ``device``."""
    if device.type == "cpu":
        return 1, "cpu"
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" and torch.cuda.is_initialized() else 0
    return 0, f"{device.type}:{index}"


def every_place() -> set[Place]:
    """All devices: for what sets a switch of the whole process while it runs."""
    cards = {place_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())}
    return {place_of(torch.device("cpu")), *cards}


class _DeviceLocks:
    """Which thread has which places. A thread may take again what it has."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._had: dict[Place, tuple[int, int]] = {}
        self._wanted: dict[int, Place] = {}

    @contextlib.contextmanager
    def having(self, places: Iterable[Place]) -> Iterator[None]:
        """Inside, this thread has ``places``, and waits for them before."""
        with contextlib.ExitStack() as leaving:
            for place in sorted(places):
                self._take(place)
                leaving.callback(self._leave, place)
            yield

    def _take(self, place: Place) -> None:
        here = threading.get_ident()
        with self._changed:
            while self._had.get(place, (here, 0))[0] != here:
                self._wanted[here] = place
                try:
                    self._refuse_a_circle(here)
                    self._changed.wait()
                finally:
                    del self._wanted[here]
            self._had[place] = here, self._had.get(place, (here, 0))[1] + 1

    def _leave(self, place: Place) -> None:
        with self._changed:
            thread, times = self._had.pop(place)
            if times > 1:
                self._had[place] = thread, times - 1
            else:
                self._changed.notify_all()

    def _refuse_a_circle(self, here: int) -> None:
        """Only calls within calls of models on other devices can come to this: their order is their callers'."""
        thread = here
        while thread in self._wanted:
            place = self._wanted[thread]
            if place not in self._had:
                return
            thread = self._had[place][0]
            if thread == here:
                raise LowVRAMError(
                    f"a call in the midst of another model's call waits for {self._wanted[here][1]}, and the thread "
                    f"that has it waits for what this one has: call one model after the other, not one inside the other"
                )


_turns = _DeviceLocks()


def turn(places: Iterable[Place]) -> contextlib.AbstractContextManager[Any]:
    """Inside, no other thread runs a model that carries hooks on these devices, nor changes what such a model carries.

    The room on the device, weights that are lent to a layer, and what a hook sets for the time of a call belong to the
    model and not to a thread: a preview that decodes while the UNet samples waits until the step is done. Models on
    other devices run meanwhile. What a trace calls waits for nobody: it is a copy, or the trace has its model at rest.
    """
    return contextlib.nullcontext() if tracing() else _turns.having(places)


class Carrier(Protocol):
    """What hooks were attached as, and to which modules."""

    def modules(self) -> Iterable[nn.Module]:
        """The models that carry them."""


_carriers: weakref.WeakKeyDictionary[Carrier, frozenset[Place]] = weakref.WeakKeyDictionary()


def carries(carrier: Carrier, places: Iterable[Place]) -> Callable[[], None]:
    """From now on the models of ``carrier`` run on ``places``; returns the undoing."""
    _carriers[carrier] = frozenset(places)

    def forget() -> None:
        _carriers.pop(carrier, None)

    return forget


@contextlib.contextmanager
def at_rest(models: Iterable[nn.Module], places: Iterable[Place] = ()) -> Iterator[None]:
    """Inside, no other thread runs ``models`` with hooks, nor attaches or detaches anything; models that have
    nothing in common with them run meanwhile.

    Args:
        places: of devices on which nothing of ours runs meanwhile either.
    """
    if tracing():
        yield
        return
    models, wanted = list(models), {*places, _CHANGING}
    while True:  # hooks may be attached or taken off while this thread waits for its turn
        wanted |= _places_of(models)
        with _turns.having(wanted):
            if _places_of(models) <= wanted:
                yield
                return


def _places_of(models: Iterable[nn.Module]) -> set[Place]:
    """Where modules of ``models`` run, or modules of which they are parts."""
    known = {id(module) for model in models for module in model.modules()}
    found = set[Place]()
    for reference in _carriers.keyrefs():
        carrier = reference()
        if carrier is not None and any(id(one) in known for whole in carrier.modules() for one in whole.modules()):
            found |= _carriers.get(carrier, frozenset())
    return found


class Switch:
    """A switch of the whole process: many threads read it at once, or one has it set to what it needs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """Inside, no thread has it set; short, as those that need it wait."""
        with self._changed:
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def set_by(self, state: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        """Inside ``state`` holds, for this thread alone of those that ask here."""
        with self._changed:
            self._changed.wait_for(lambda: not self._readers)
            with state:
                yield


class Shared:
    """A state of the whole process that holds while anybody is inside, whatever the order in which threads leave."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        """
        Args:
            make: the state, entered by whom comes first and left by whom leaves last.
        """
        self._make = make
        self._lock = threading.Lock()
        self._inside = 0
        self._state = contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._state.enter_context(self._make())
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._state.close()


class Redirected:
    """A function of torch's for which another answers, in the threads that ask for that and in no other.

    The attribute is exchanged while any thread asks. Whatever somebody else has put there is called in the end, and one
    that somebody puts on top stays there.
    """

    def __init__(self, owner: Any, name: str) -> None:
        """
        Args:
            owner: the module or class that holds it.
        """
        self._owner, self._name = owner, name
        self._exchanged = Shared(self._exchange)
        self._here = threading.local()

    @contextlib.contextmanager
    def to(self, answer: Callable[..., Any]) -> Iterator[None]:
        """Inside, ``answer`` is called in this thread, and in it again what would be called outside."""
        with self._exchanged():
            answers = self._answers()
            answers.append(answer)
            try:
                yield
            finally:
                answers.remove(answer)

    def answered(self) -> bool:
        """Whether another function answers in this thread."""
        return bool(self._answers())

    def function(self) -> Any:
        """What is called in the end: torch's own, or what somebody else has put in its place."""
        present = getattr(self._owner, self._name)
        return getattr(present, "behind", present)

    def _answers(self) -> list[Callable[..., Any]]:
        answers: list[Callable[..., Any]] = vars(self._here).setdefault("answers", [])
        return answers

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        before, behind = vars(self._owner).get(self._name, _ABSENT), getattr(self._owner, self._name)

        def routed(*args: Any, **kwargs: Any) -> Any:
            answers = self._answers()
            if not answers:
                return behind(*args, **kwargs)
            answer = answers.pop()
            try:
                return answer(*args, **kwargs)
            finally:
                answers.append(answer)

        vars(routed)["behind"] = behind
        setattr(self._owner, self._name, routed)
        yield
        if vars(self._owner).get(self._name) is not routed:
            return  # theirs stays on top, and calls through
        if before is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, before)


_ABSENT = object()
