"""Painters as Ray actors: one a graphics card of a cluster, each with the model and a plan for its own card.

Ray places them and starts them again where one dies. A job that was with it goes back to the queue, for any painter to
take: Ray's own retry would wait for that same actor, whose card may never come back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..commands.exit_codes import internal_error
from ..commands.inputs import Job
from ..commands.streams import note
from ..errors import BadInputError, LowVRAMError
from ..files import __version__
from ..units import MIB
from .crew import Lost, Outcome
from .journal import NAME
from .latents import JobLatents, batch_of
from .painter import Failed, Painter
from .processes import threads_of

_PORT = 10001
"""Port at which a cluster serves programs outside of it."""

_STORE = 128 * MIB
"""Object store of a cluster of our own: only finished pictures pass through it."""

_CHUNK = 64 * MIB
_GONE = "the Ray cluster has gone ({})"
_LOOK = 5
"""Seconds without an answer after which the head of a cluster of our own is checked."""

_PATIENCE = 30
"""Seconds without any worker after which a message is printed."""

_TOKENS = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}

_PAUSE = 0.2
"""Seconds before a worker that has ended is asked again whether it is there."""

_FILES = ("model", "init_image", "mask")

Sizes = dict[str, dict[str, int]]
"""Bytes of each file, by the path that a job names and the file's place below it."""


@dataclass(frozen=True)
class Lacks:
    """A worker's answer: the file or folder at this path is not where it runs."""

    path: str


class PainterActor:
    """An actor: a painter, and the files that were sent to it."""

    def __init__(self, share: int, threads: str | None) -> None:
        # Ray gives an actor as many threads as it claims of the cores, which are there to place it.
        os.environ["OMP_NUM_THREADS"] = threads or str(threads_of(share))
        self._painter = Painter(share)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._received: dict[str, Path] = {}

    def hello(self) -> str:
        """The version of sd-lowvram here."""
        return __version__

    def leave(self) -> None:
        """Leave nothing behind on this machine."""
        if self._folder is not None:
            self._folder.cleanup()

    def attempt(
        self, job: Job, place: JobLatents, pictures: int, sizes: Sizes, sent: dict[str, dict[str, list[Any]]]
    ) -> Outcome | Lacks:
        """Paint ``job``; return the pictures, or the reason why there are none.

        Args:
            place: place of its latents, used if the batch's folder is visible from here.
            pictures: number of pictures that its plan will make in all.
            sizes: sizes and digests of the files on the machine of the batch; equal files here are used.
            sent: contents of the other files, as references into the object store.
        """
        for name in _FILES:
            path = getattr(job, name)
            if path is None or str(path) not in sizes:
                continue
            here = self._local_path(str(path), sizes[str(path)], sent.get(str(path)))
            if here is None:
                return Lacks(str(path))
            job = dataclasses.replace(job, **{name: type(path)(here)})
        return self._painter.attempt(job, place if (batch_of(place) / NAME).is_file() else None, pictures)

    def _local_path(self, path: str, sizes: dict[str, int], parts: dict[str, list[Any]] | None) -> Path | None:
        if path in self._received:
            return self._received[path]
        if _sizes(Path(path)) == sizes:
            return Path(path)
        if parts is None:
            return None
        import ray

        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="sd-lowvram-")
        target = Path(self._folder.name) / str(len(self._received)) / Path(path).name
        for place, references in parts.items():
            file = target / place
            file.parent.mkdir(parents=True, exist_ok=True)
            with open(file, "wb") as writing:
                for reference in references:
                    writing.write(ray.get(reference))
        self._received[path] = target
        return target


def _sizes(path: Path) -> dict[str, int]:
    """Bytes of the files at ``path`` by their places below it; empty where nothing is."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {file.relative_to(path).as_posix(): file.stat().st_size for file in files}


class Actors:
    """Workers of a Ray cluster.

    Args:
        where: "ray" for a cluster on this machine alone, for as long as the batch lasts; "ray://HOST" for one that is
            there.
        wanted: how many; None: one a graphics card, and in a cluster without one a machine.

    Raises:
        BadInputError: Ray is not installed, or the cluster does not answer.
    """

    def __init__(self, where: str, wanted: int | None) -> None:
        self._own = where == "ray"
        self._stack = contextlib.ExitStack()
        # Ray writes to standard output when a worker dies; our own message reports that.
        self._stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        self._ray = _import_ray(self._own)
        self._connect(where, wanted or 1)
        self._head = self._own_head() if self._own else None
        cards, machines = self._cluster()
        self._size = wanted or cards or machines
        self._needs = {"num_gpus": 1} if cards else {"num_cpus": 1}
        self._share = min(self._size, -(-max(cards, self._size) // machines))
        self._actors = {f"ray-{number}": self._actor() for number in range(1, self._size + 1)}
        self._ready: set[str] = set()
        self._given: dict[str, tuple[Job, JobLatents, int]] = {}
        self._pending: dict[Any, str] = {}
        self._sizes: Sizes = {}
        self._sent: dict[str, dict[str, list[Any]]] = {}
        self._alone_since: float | None = time.monotonic()
        for name in self._actors:
            self._greet(name)

    @property
    def size(self) -> int:
        return self._size

    def idle(self) -> list[str]:
        return [name for name in self._actors if name in self._ready and name not in self._given]

    def give(self, worker: str, job: Job, place: JobLatents, pictures: int) -> None:
        with _report_loss():
            self._give(worker, job, place, pictures)

    def _give(self, worker: str, job: Job, place: JobLatents, pictures: int) -> None:
        self._given[worker] = job, place, pictures
        sizes = {} if self._own else self._files_of(job)
        sent = {path: parts for path, parts in self._sent.items() if path in sizes}
        self._pending[self._actors[worker].attempt.remote(job, place, pictures, sizes, sent)] = worker

    def wait(self) -> list[tuple[str, Outcome]]:
        with _report_loss():
            if self._head is not None:  # Ray itself ends this program a minute after its cluster's head has gone
                socket.create_connection(self._head, timeout=_PATIENCE).close()
            try:
                answered, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=_LOOK)
            except Exception as error:
                raise LowVRAMError(_GONE.format(error)) from error
            outcomes: list[tuple[str, Outcome]] = []
            for reference in answered:
                outcomes += self._answer(reference, self._pending.pop(reference))
        self._tell_if_alone()
        return outcomes

    def close(self) -> None:
        if self._ray.is_initialized():  # Ray starts a cluster here for a call after the connection has gone
            with contextlib.suppress(Exception):  # of workers that have gone
                self._ray.get([self._actors[name].leave.remote() for name in self.idle()], timeout=_PATIENCE)
            for actor in self._actors.values():
                with contextlib.suppress(Exception):  # of a cluster that has gone
                    self._ray.kill(actor)
        self._ray.shutdown()
        self._stack.close()

    def _connect(self, where: str, workers: int) -> None:
        quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if self._own:
            folder = self._stack.enter_context(
                tempfile.TemporaryDirectory(prefix="sd-lowvram-", ignore_cleanup_errors=True)
            )
            own = {"include_dashboard": False, "object_store_memory": _STORE, "num_cpus": workers, "_temp_dir": folder}
            self._ray.init(**own, **quiet)
            return
        host = where.removeprefix("ray://")
        try:
            self._ray.init(f"ray://{host}" if ":" in host else f"ray://{host}:{_PORT}", **quiet)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise BadInputError(
                f"--on {where}: no cluster answers there ({reason}); for one with a token, set RAY_AUTH_TOKEN"
            ) from error

    def _own_head(self) -> tuple[str, int]:
        """Address of the head of the cluster that this program started."""
        host, _, port = self._ray.get_runtime_context().gcs_address.rpartition(":")
        return host, int(port)

    def _cluster(self) -> tuple[int, int]:
        """Graphics cards and machines of the cluster."""
        machines = sum(node["Alive"] for node in self._ray.nodes())
        return int(self._ray.cluster_resources().get("GPU", 0)), max(1, machines)

    def _actor(self) -> Any:
        threads = os.environ.get("OMP_NUM_THREADS") if self._own else None
        remote = self._ray.remote(**self._needs, max_restarts=-1, scheduling_strategy="SPREAD")(PainterActor)
        return remote.remote(self._share, threads)

    def _greet(self, name: str) -> None:
        """Ask a worker whether it is there; it answers when it is."""
        self._ready.discard(name)
        self._pending[self._actors[name].hello.remote()] = name

    def _answer(self, reference: Any, name: str) -> list[tuple[str, Outcome]]:
        errors = self._ray.exceptions
        job = self._given.pop(name, None)
        try:
            answer = self._ray.get(reference)
        except errors.ActorDiedError as error:
            if job is None:  # for good
                return self._remove_actor(name, str(error))
            self._greet(name)
            return [(name, Lost(f"its worker {name} ended"))]
        except errors.RayTaskError as error:
            reason = internal_error(str(error)[-200:])
            return [(name, Failed(LowVRAMError.exit_code, reason))] if job else self._remove_actor(name, reason)
        except errors.RayError:
            time.sleep(_PAUSE)  # it is being started again
            self._greet(name)
            return [(name, Lost(f"its worker {name} ended"))] if job else []
        if job is None:
            _check_version(name, answer)
            self._ready.add(name)
            return []
        if isinstance(answer, Lacks):
            self._send(answer.path)
            self._give(name, *job)
            return []
        return [(name, answer)]

    def _remove_actor(self, name: str, why: str) -> list[tuple[str, Outcome]]:
        del self._actors[name]
        if not self._actors:
            raise LowVRAMError(f"no worker of the Ray cluster is left: {' '.join(why.split())[:300]}")
        return []

    def _files_of(self, job: Job) -> Sizes:
        """Files on this machine that ``job`` names; all other files are on the machines of the workers."""
        for name in _FILES:
            path = getattr(job, name)
            if path is not None and str(path) not in self._sizes:
                self._sizes[str(path)] = _sizes(Path(path))
        named = [str(getattr(job, name)) for name in _FILES if getattr(job, name) is not None]
        return {path: self._sizes[path] for path in named if self._sizes[path]}

    def _send(self, path: str) -> None:
        """Put the file or folder at ``path`` into the object store, where it stays for all workers."""
        if path not in self._sent:
            parts = {
                place: [self._ray.put(part) for part in _chunks(Path(path) / place)] for place in self._sizes[path]
            }
            self._sent[path] = parts

    def _tell_if_alone(self) -> None:
        """Print a message once if there has been no worker for long; Ray goes on looking for resources."""
        if self._ready:
            self._alone_since = time.monotonic()
        elif self._alone_since is not None and time.monotonic() - self._alone_since > _PATIENCE:
            note(f"no worker has started yet: the cluster has no free {self._needs}; waiting")
            self._alone_since = None


@contextlib.contextmanager
def _report_loss() -> Iterator[None]:
    """Turn the loss of the connection to the cluster within the block into LowVRAMError."""
    try:
        yield
    except (ConnectionError, TimeoutError) as error:
        raise LowVRAMError(_GONE.format(error)) from error


def _chunks(file: Path) -> Iterator[bytes]:
    with open(file, "rb") as reading:
        while part := reading.read(_CHUNK):
            yield part


def _check_version(name: str, version: str) -> None:
    if version != __version__:
        raise BadInputError(f"{name} has sd-lowvram {version}, and this machine {__version__}: install the same on all")


def _import_ray(own: bool) -> Any:
    """Import Ray with usage reports off and authentication on."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_AUTO_CONNECT": "0"}
    if own:  # at 127.0.0.1, and even there to nobody else: whoever can speak to a cluster can run any program on it
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    elif _TOKENS & set(os.environ) or Path("~/.ray/auth_token").expanduser().is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError:
        raise BadInputError('--on ray needs Ray: pip install "sd-lowvram[ray]"') from None
    return ray
