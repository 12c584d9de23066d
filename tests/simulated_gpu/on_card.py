"""Running something on the simulated card under watch: its bits, its races, and what it leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from simulated_card.card import MIB, Card, Schedule, card
from simulated_card.kernels import HostWatch, Kernels
from simulated_card.races import Race, races

from sd_lowvram.devices.performance import PROFILES, THIS, Rates
from sd_lowvram.memory.pinned import unlock_ended
from sd_lowvram.streaming.mapped_files import PastCache

GPU = torch.device("cuda", 0)

TRITON = "Triton's kernels are compiled for a real card, and this one is simulated"
"""Why none of them runs here."""

LARGE = pytest.mark.xdist_group("large")
"""Of tests that take 8 GB of memory: one at a time, where tests run in several processes."""

SCHEDULES: dict[str, tuple[Schedule, int]] = {
    "eager": ("eager", 0),
    "lazy": ("lazy", 0),
    "random": ("random", int(os.environ.get("SIMULATED_GPU_SEED", "1"))),
}
"""When copies run. ``SIMULATED_GPU_SEED`` takes another random order."""


def rates_here(_device: torch.device) -> Rates:
    """In place of this machine's, as measuring takes minutes here and measures the host's processor: an RTX 2070's."""
    return dataclasses.replace(PROFILES["rtx2070"], name=THIS)


@dataclass(repr=False)
class Seen:
    """What was seen of a run.

    Attributes:
        races: all of them.
        device_bytes: of tensors that it left on the device; ``pinned_bytes`` of memory that it left locked.
        unsimulated: kernels of torch's own that were launched, and not run.
    """

    races: list[Race] = field(default_factory=list)
    device_bytes: int = 0
    pinned_bytes: int = 0
    unsimulated: int = 0

    @property
    def clean(self) -> bool:
        return not (self.races or self.device_bytes or self.pinned_bytes or self.unsimulated)

    def __str__(self) -> str:
        told = [f"{len(self.races)} races, first {'; '.join(map(str, self.races[:3]))}"] if self.races else []
        told += [f"{self.device_bytes} bytes left on the device"] if self.device_bytes else []
        told += [f"{self.pinned_bytes} bytes left pinned"] if self.pinned_bytes else []
        told += [f"{self.unsimulated} kernels not simulated"] if self.unsimulated else []
        return ", ".join(told) or "clean"

    __repr__ = __str__


class Simulated:
    """The card and its kernels.

    Attributes:
        card, kernels: see there.
    """

    def __init__(self) -> None:
        from sd_lowvram.kernels.triton import support

        support._failure = lambda card: TRITON  # type: ignore[assignment]
        self.card = card()
        self.kernels = Kernels(self.card)
        gc.collect()
        gc.freeze()  # what has been imported is not looked through again after every run

    @contextlib.contextmanager
    def watched(self, schedule: str = "eager") -> Iterator[Seen]:
        """What happens inside, in one of ``SCHEDULES``; reported when it has ended."""
        device, pinned = self.held()
        unsimulated = self.card.unsimulated
        seen = Seen()
        with self.card.scheduled(*SCHEDULES[schedule]):
            try:
                with self.card.logged() as log, HostWatch(self.card), _unseen_watched(self.card):
                    yield seen
            finally:
                seen.races = races(log)
                held = self.held()
                seen.device_bytes, seen.pinned_bytes = held[0] - device, held[1] - pinned
                seen.unsimulated = self.card.unsimulated - unsimulated

    def held(self) -> tuple[int, int]:
        """Bytes of tensors on the device, and of pinned memory that somebody holds."""
        gc.collect()
        torch.cuda.synchronize()
        unlock_ended()
        torch._C._host_emptyCache()
        return torch.cuda.memory_allocated(), self.card.pinned


def rest_taken() -> list[torch.Tensor]:
    """All space of this stream in segments that earlier tests of the process have left something in, as tables that
    diffusers caches: while these tensors are there, a test has the card's own memory only."""
    gc.collect()
    torch.cuda.empty_cache()
    here = torch.cuda.current_stream().cuda_stream, (0, 0)
    segments = [one for one in torch.cuda.memory_snapshot() if (one["stream"], one["segment_pool_id"]) == here]
    taken: list[torch.Tensor] = []
    for one in segments:
        most, least = (MIB, 1) if one["segment_type"] == "small" else (one["total_size"], MIB + 1)
        for room in (block["size"] for block in one["blocks"] if block["state"] == "inactive"):
            sizes = [most] * (room // most) + [room % most]
            taken += [torch.empty(size, dtype=torch.uint8, device=GPU) for size in sizes if size >= least]
    return taken


@contextlib.contextmanager
def _unseen_watched(card: Card) -> Iterator[None]:
    """What threads that are started inside do to pinned memory is written down too, and what is read into it from a
    file, which is no operator's work."""
    run, read = threading.Thread.run, PastCache.read

    def watched(thread: threading.Thread) -> None:
        with HostWatch(card):
            run(thread)

    def reads(past: PastCache, source: torch.Tensor, into: torch.Tensor) -> bool:
        card.host_access(into.data_ptr(), into.nbytes, True)
        return read(past, source, into)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "run", watched)
        patch.setattr(PastCache, "read", reads)
        yield
