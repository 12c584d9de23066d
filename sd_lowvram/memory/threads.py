"""Locks between threads that run models, and replacements of torch functions that act in one thread only."""

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
"""A resource of one thread at a time: a device, or the right to attach and detach hooks. A thread that needs several
acquires them in sorted order, so that no two threads wait for each other."""

_CHANGING: Place = (2, "what models carry")


def place_of(device: torch.device) -> Place:
    """The place that a thread acquires for ``device``."""
    if device.type == "cpu":
        return 1, "cpu"
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" and torch.cuda.is_initialized() else 0
    return 0, f"{device.type}:{index}"


def all_places() -> set[Place]:
    """All devices: for what sets a switch of the whole process while it runs."""
    cards = {place_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())}
    return {place_of(torch.device("cpu")), *cards}


class _DeviceLocks:
    """Reentrant locks: the thread that has each place."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._had: dict[Place, tuple[int, int]] = {}
        self._wanted: dict[int, Place] = {}

    def having(self, places: Iterable[Place]) -> _Holding:
        """Wait for ``places`` and hold them within the block."""
        return _Holding(self, sorted(places))

    def take(self, place: Place) -> None:
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

    def leave(self, place: Place) -> None:
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


class _Holding:
    """A block that holds places; a class, because every call of a model enters one."""

    def __init__(self, locks: _DeviceLocks, places: list[Place]) -> None:
        self._locks, self._places = locks, places
        self._taken: list[Place] = []

    def __enter__(self) -> None:
        try:
            for place in self._places:
                self._locks.take(place)
                self._taken.append(place)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        while self._taken:
            self._locks.leave(self._taken.pop())


_turns = _DeviceLocks()


def turn(places: Iterable[Place]) -> contextlib.AbstractContextManager[Any]:
    """Keep other threads from running hooked models on these devices, and from attaching or detaching, within the
    block.

    Device buffers, lent weights and what a hook sets during a call belong to the model, not to a thread: a preview that
    decodes while the UNet samples waits until the step is done. Models on other devices run meanwhile. A trace never
    waits: it runs a copy, or pauses its model by :func:`pause_models`.

    Args:
        places: from :func:`place_of` or :func:`all_places`.
    """
    return contextlib.nullcontext() if tracing() else _turns.having(places)


class Carrier(Protocol):
    """An attachment of hooks, and the modules that carry it."""

    def modules(self) -> Iterable[nn.Module]:
        """The models that carry them."""


_carriers: weakref.WeakKeyDictionary[Carrier, frozenset[Place]] = weakref.WeakKeyDictionary()


def carries(carrier: Carrier, places: Iterable[Place]) -> Callable[[], None]:
    """Register that the models of ``carrier`` run on ``places``; return the function that undoes this.

    Args:
        carrier: the attachment.
        places: devices on which its models run.
    """
    _carriers[carrier] = frozenset(places)

    def forget() -> None:
        _carriers.pop(carrier, None)

    return forget


@contextlib.contextmanager
def pause_models(models: Iterable[nn.Module], places: Iterable[Place] = ()) -> Iterator[None]:
    """Keep other threads from running ``models`` with hooks, and from attaching or detaching, within the block.

    Models that share no module with them run meanwhile.

    Args:
        models: the models to pause.
        places: devices on which no hooked model runs meanwhile.
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
    """Places of the modules of ``models``, and of modules that contain them."""
    modules = {id(module) for model in models for module in model.modules()}
    places = set[Place]()
    for reference in _carriers.keyrefs():
        carrier = reference()
        if carrier is not None and any(
            id(module) in modules for whole in carrier.modules() for module in whole.modules()
        ):
            places |= _carriers.get(carrier, frozenset())
    return places


class Switch:
    """A switch of the whole process: many threads read it at once, or one thread has it set."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0

    @contextlib.contextmanager
    def hold_unset(self) -> Iterator[None]:
        """Wait until no thread has the state set, and keep it unset within the block; keep the block short."""
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
        """Set ``state`` within the block, for this thread only."""
        with self._changed:
            self._changed.wait_for(lambda: not self._readers)
            with state:
                yield


class Shared:
    """A state of the whole process that lasts from the first thread that enters to the last one that leaves."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        """
        Args:
            make: makes the context manager of the state.
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
    """A function of torch that is replaced in the threads that request it, and in no other thread.

    The attribute is exchanged while any thread requests it. Other programs' replacements are called in the end, and
    those that are set meanwhile stay.
    """

    def __init__(self, owner: Any, name: str) -> None:
        """
        Args:
            owner: the module or class with the function.
            name: name of the function.
        """
        self._owner, self._name = owner, name
        self._exchanged = Shared(self._exchange)
        self._here = threading.local()

    @contextlib.contextmanager
    def to(self, answer: Callable[..., Any]) -> Iterator[None]:
        """Call ``answer`` in place of the function in this thread, within the block; inside ``answer`` the original is
        called.
        """
        with self._exchanged():
            answers = self._answers()
            answers.append(answer)
            try:
                yield
            finally:
                answers.remove(answer)

    def is_redirected(self) -> bool:
        """True if the function is replaced in this thread."""
        return bool(self._answers())

    def function(self) -> Any:
        """The original function: torch's own, or another program's replacement of it."""
        present = getattr(self._owner, self._name)
        return getattr(present, "behind", present)

    def _answers(self) -> list[Callable[..., Any]]:
        answers: list[Callable[..., Any]] = vars(self._here).setdefault("answers", [])
        return answers

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        before, behind = vars(self._owner).get(self._name, _ABSENT), getattr(self._owner, self._name)

        def route(*args: Any, **kwargs: Any) -> Any:
            answers = self._answers()
            if not answers:
                return behind(*args, **kwargs)
            answer = answers.pop()
            try:
                return answer(*args, **kwargs)
            finally:
                answers.append(answer)

        vars(route)["behind"] = behind
        setattr(self._owner, self._name, route)
        yield
        if vars(self._owner).get(self._name) is not route:
            return  # the foreign replacement stays, and calls ours
        if before is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, before)


_ABSENT = object()
