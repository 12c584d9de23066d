"""Who paints: the painter of this process, or several elsewhere. All are given jobs and waited for in the same way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..commands.inputs import Job
from .latents import JobLatents
from .painter import Failed, Painted, Painter


@dataclass(frozen=True)
class Lost:
    """A job whose worker ended before it answered; another one may take it."""

    why: str


Outcome = Painted | Failed | Lost


class Crew(Protocol):
    """Workers by name, each with one job at a time."""

    def idle(self) -> list[str]:
        """Those that can take a job now."""

    def give(self, worker: str, job: Job, place: JobLatents, pictures: int) -> None:
        """Let an idle worker begin a job, whose latents are kept at ``place``, by a plan for so many ``pictures``."""

    def wait(self) -> list[tuple[str, Outcome]]:
        """What came of jobs that have ended by now. Comes back empty-handed when there may be more idle workers.

        Raises:
            LowVRAMError: no worker is left, or none came to be.
        """

    def close(self) -> None:
        """End the workers, whatever they do."""

    @property
    def size(self) -> int:
        """How many there are, when all are there."""


class Alone:
    """One painter, in this process."""

    size = 1

    def __init__(self) -> None:
        self._painter = Painter()
        self._given: tuple[Job, JobLatents, int] | None = None

    def idle(self) -> list[str]:
        return ["here"] if self._given is None else []

    def give(self, worker: str, job: Job, place: JobLatents, pictures: int) -> None:
        self._given = job, place, pictures

    def wait(self) -> list[tuple[str, Outcome]]:
        assert self._given is not None
        given, self._given = self._given, None
        return [("here", self._painter.attempt(*given))]

    def close(self) -> None:
        pass
