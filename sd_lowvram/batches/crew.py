"""Crews: the painter of this process, or several workers elsewhere, with one interface to give jobs and wait."""

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
    """Named workers, each with one job at a time."""

    def idle(self) -> list[str]:
        """Names of the workers that can take a job now."""

    def give(self, worker: str, job: Job, place: JobLatents, pictures: int) -> None:
        """Start a job on an idle worker.

        Args:
            worker: name of the worker.
            job: the job.
            place: place of its latents.
            pictures: number of pictures of its plan.
        """

    def wait(self) -> list[tuple[str, Outcome]]:
        """Return the outcomes of finished jobs; an empty result means that more workers may be idle.

        Raises:
            LowVRAMError: no worker is left, or none could be started.
        """

    def close(self) -> None:
        """End the workers, whatever they do."""

    @property
    def size(self) -> int:
        """Number of workers when all are present."""


class Alone:
    """A single painter in this process."""

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
        job, self._given = self._given, None
        return [("here", self._painter.attempt(*job))]

    def close(self) -> None:
        pass
