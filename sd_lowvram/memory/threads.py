"""What threads share: whose turn it is to run a model, and what is exchanged in torch while somebody traces."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .accounts import tracing

_running = threading.RLock()


def one_at_a_time() -> contextlib.AbstractContextManager[Any]:
    """Inside, no other thread runs a model that carries hooks, nor changes what it carries.

    The room on the device, weights that are lent to a layer, and what a hook sets for the time of a call belong to the
    model and not to a thread: a preview that decodes while the UNet samples waits until the step is done. There is one
    lock for all models, which a thread may take again inside, so that no two can wait for each other. What a trace
    calls waits for nobody: it is a copy, or the trace itself has taken the lock.
    """
    return contextlib.nullcontext() if tracing() else _running


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
