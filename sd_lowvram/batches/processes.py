"""Worker processes, one per GPU of this machine, each with a painter that plans for its own GPU."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as ready
from typing import Any

from ..commands.inputs import Job
from ..commands.streams import note
from ..errors import BadInputError, LowVRAMError
from .crew import Lost, Outcome
from .latents import JobLatents
from .painter import Painter

_READY = "ready"
_MOST_STARTS = 3
"""Starts of a worker, one after the other, that may fail before the others continue without it."""


class Processes:
    """Workers of one machine. A worker that dies loses its job, which another may take, and is started again.

    Args:
        places: environment of each worker by name: the visible GPU and the number of threads.
    """

    def __init__(self, places: dict[str, dict[str, str]]) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._places = places
        self._workers: dict[str, _Worker] = {}
        self._failed: Counter[str] = Counter()
        for name in places:
            self._start(name)

    @property
    def size(self) -> int:
        return len(self._places)

    def idle(self) -> list[str]:
        return [name for name, worker in self._workers.items() if worker.ready and not worker.busy]

    def give(self, worker: str, job: Job, place: JobLatents, pictures: int) -> None:
        self._workers[worker].busy = True
        with contextlib.suppress(OSError):  # it is dead, and wait() sees that
            self._workers[worker].line.send((job, place, pictures))

    def wait(self) -> list[tuple[str, Outcome]]:
        outcomes: list[tuple[str, Outcome]] = []
        lines = {worker.line: name for name, worker in self._workers.items()}
        for line in ready(list(lines)):
            assert isinstance(line, Connection)
            name = lines[line]
            try:
                answer = line.recv()
            except (EOFError, OSError):
                outcomes += self._restart_worker(name)
                continue
            if answer == _READY:
                self._workers[name].ready = True
            else:
                self._workers[name].busy = False
                outcomes.append((name, answer))
        return outcomes

    def close(self) -> None:
        for worker in self._workers.values():
            worker.line.close()  # one that is idle leaves by itself
        for worker in self._workers.values():
            if worker.busy or not worker.ready:
                worker.process.kill()  # nothing is in its hands but the steps since its latents were written
            worker.process.join()

    def _start(self, name: str) -> None:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._places[name], self.size)
        process = self._context.Process(target=_serve, args=arguments, name=name, daemon=True)
        process.start()
        theirs.close()  # so that its end is seen here
        self._workers[name] = _Worker(process, ours)

    def _restart_worker(self, name: str) -> list[tuple[str, Outcome]]:
        """Restart a worker that died; return the outcome of its job."""
        worker = self._workers.pop(name)
        worker.process.join()
        code = worker.process.exitcode or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        if not worker.ready:
            self._failed[name] += 1
            if self._failed[name] == _MOST_STARTS:
                if not self._workers:
                    raise LowVRAMError(
                        f"the worker {name} ended {how} while it started: sd-lowvram doctor may show why"
                    )
                note(f"the worker {name} ended {how} while it started, {_MOST_STARTS} times: it is left out")
                return []
            note(f"the worker {name} ended {how} while it started, and is started again")
        else:
            self._failed[name] = 0
        self._start(name)
        return [(name, Lost(f"its worker {name} ended {how}"))] if worker.busy else []


class _Worker:
    """A process and the line to it."""

    def __init__(self, process: Any, line: Connection) -> None:
        self.process = process
        self.line = line
        self.ready = False
        self.busy = False


def _serve(line: Connection, environment: dict[str, str], share: int) -> None:
    """Main loop of a worker: jobs in, outcomes out, until the other end closes."""
    os.environ.update(environment)
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # by itself it takes one of the system's, which stays behind where this is killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that has the journal
    threading.Thread(target=_end_with_parent, daemon=True).start()
    painter = Painter(share)
    with contextlib.suppress(EOFError, OSError):
        line.send(_READY)
        while True:
            line.send(painter.attempt(*line.recv()))


def _end_with_parent() -> None:
    """A picture that nobody takes any more would only keep the card from those who run the batch again."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def places(wanted: int | None) -> dict[str, dict[str, str]]:
    """A place for each card, or on a machine without one for each of the workers that are wanted, one at the least.

    Raises:
        BadInputError: more workers than cards.
    """
    cards = _cards()
    if not cards:
        count = wanted or 1
        threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads_of(count))}
        return {f"cpu-{number}": threads for number in range(1, count + 1)}
    if wanted is not None and wanted > len(cards):
        raise BadInputError(f"--workers {wanted} is more than the GPUs of this machine, {len(cards)}")
    return {f"gpu-{card}": {"CUDA_VISIBLE_DEVICES": card} for card in cards[:wanted]}


def threads_of(workers: int) -> int:
    """Threads for each of so many workers of this machine."""
    return max(1, (os.cpu_count() or 1) // workers)


def _cards() -> list[str]:
    """The CUDA (or ROCm) devices of this machine as CUDA_VISIBLE_DEVICES names them."""
    from ..commands.early import has_no_gpu

    if has_no_gpu():
        return []
    import torch

    seen = [card.strip() for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if card.strip()]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (seen or [str(number) for number in range(count)])[:count]
