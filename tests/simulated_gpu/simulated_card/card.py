"""The card: put in CUDA's place before torch is imported, and controlled through its runtime's own functions."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal

from .build import built

MIB = 1 << 20
CARD_BYTES = 4096 * MIB
CONTEXT_BYTES = 300 * MIB

Schedule = Literal["eager", "lazy", "random"]
_SCHEDULES: tuple[Schedule, ...] = ("eager", "lazy", "random")


class Entry(ctypes.Structure):
    """One line of the runtime's log, as ``cudart.cpp`` has it."""

    _fields_ = (
        ("happening", ctypes.c_int),
        ("stream", ctypes.c_int),
        ("event", ctypes.c_int),
        ("way", ctypes.c_int),
        ("source", ctypes.c_size_t),
        ("target", ctypes.c_size_t),
        ("bytes", ctypes.c_size_t),
    )


_RUN_CAPTURED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)

_LAUNCH_FAILED = 719


class Card:
    """The one device.

    Attributes:
        logging: whether accesses are written down.
    """

    def __init__(self, runtime: ctypes.CDLL) -> None:
        self._runtime = runtime
        self._on_replay: Any = None
        self.logging = False
        address, size, flag = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for name, arguments, result in (
            ("sim_card", [size, size], None),
            ("sim_schedule", [flag, ctypes.c_uint64], None),
            ("sim_log", [flag], None),
            ("sim_log_size", [], size),
            ("sim_log_read", [address], None),
            ("sim_used", [flag], size),
            ("sim_peak", [flag], size),
            ("sim_pinned", [], size),
            ("sim_pinned_peak", [], size),
            ("sim_pinnable", [size], None),
            ("sim_reset_peaks", [], None),
            ("sim_allocations", [], ctypes.c_long),
            ("sim_unsimulated", [], ctypes.c_long),
            ("sim_print_unsimulated", [], None),
            ("sim_kernel", [address], flag),
            ("sim_access", [address, size, size, flag], None),
            ("sim_host_access", [size, size, flag], None),
            ("sim_capturing", [address], flag),
            ("sim_capture_kernel", [address, flag], None),
            ("sim_on_replay", [_RUN_CAPTURED], None),
            ("sim_replays", [], ctypes.c_long),
        ):
            function = getattr(runtime, name)
            function.argtypes, function.restype = arguments, result

    # How it is

    @contextlib.contextmanager
    def of_size(self, size: int, context: int = CONTEXT_BYTES) -> Iterator[None]:
        """Inside, the card has ``size`` bytes, of which the context takes some.

        torch remembers a device's properties for as long as a process lives; what it reports of free memory, and where
        it runs out, is this.
        """
        self._runtime.sim_card(size, context)
        try:
            yield
        finally:
            self._runtime.sim_card(CARD_BYTES, CONTEXT_BYTES)

    @contextlib.contextmanager
    def scheduled(self, schedule: Schedule, seed: int = 0) -> Iterator[None]:
        """Inside, copies run at once, as late as events allow, or at any time between."""
        self._runtime.sim_schedule(_SCHEDULES.index(schedule), seed)
        try:
            yield
        finally:
            self._runtime.sim_schedule(0, 0)

    # What it holds

    @property
    def used(self) -> int:
        """Memory of the first device that is allocated, in bytes; the allocator's segments, not its blocks."""
        return int(self._runtime.sim_used(0))

    @property
    def peak(self) -> int:
        return int(self._runtime.sim_peak(0))

    @property
    def pinned(self) -> int:
        """Host memory that is page-locked, in bytes."""
        return int(self._runtime.sim_pinned())

    @property
    def pinned_peak(self) -> int:
        return int(self._runtime.sim_pinned_peak())

    @contextlib.contextmanager
    def pinning(self, most: int) -> Iterator[None]:
        """Inside, the driver locks no more than ``most`` bytes of pages that it is asked to."""
        self._runtime.sim_pinnable(most)
        try:
            yield
        finally:
            self._runtime.sim_pinnable(ctypes.c_size_t(-1).value)

    def reset_peaks(self) -> None:
        self._runtime.sim_reset_peaks()

    @property
    def allocations(self) -> int:
        """How often device memory has been asked of the runtime."""
        return int(self._runtime.sim_allocations())

    @property
    def replays(self) -> int:
        """How often a graph has been launched."""
        return int(self._runtime.sim_replays())

    @property
    def unsimulated(self) -> int:
        """Kernels of torch's own that were launched, and so were not run: 0, or results are wrong."""
        return int(self._runtime.sim_unsimulated())

    def print_unsimulated(self) -> None:
        self._runtime.sim_print_unsimulated()

    # Kernels

    def begin_kernel(self, stream: int) -> None:
        """A kernel runs now: all that its stream was asked before is done.

        Raises:
            RuntimeError: an earlier call has failed, and nobody asked for its error.
        """
        error = self._runtime.sim_kernel(stream)
        if error:
            raise RuntimeError(f"CUDA error: {error}, of an earlier call")

    def access(self, stream: int, address: int, size: int, writes: bool) -> None:
        self._runtime.sim_access(stream, address, size, writes)

    def host_access(self, address: int, size: int, writes: bool) -> None:
        self._runtime.sim_host_access(address, size, writes)

    # Graphs

    def capturing(self, stream: int) -> bool:
        return bool(self._runtime.sim_capturing(stream))

    def capture_kernel(self, stream: int, number: int) -> None:
        self._runtime.sim_capture_kernel(stream, number)

    def on_replay(self, call: Callable[[int, int], None]) -> None:
        """``call(number, stream)`` runs a captured kernel; an error of its own is one of the launch."""

        def run(number: int, stream: int | None) -> int:
            try:
                call(number, stream or 0)
            except Exception:
                traceback.print_exc()
                return _LAUNCH_FAILED
            return 0

        self._on_replay = _RUN_CAPTURED(run)
        self._runtime.sim_on_replay(self._on_replay)

    # The log

    @contextlib.contextmanager
    def logged(self) -> Iterator[list[Entry]]:
        """Inside, all that streams and host do is written down; the list is filled at the end."""
        entries: list[Entry] = []
        self._runtime.sim_log(1)
        self.logging = True
        try:
            yield entries
        finally:
            self.logging = False
            array = (Entry * self._runtime.sim_log_size())()
            self._runtime.sim_log_read(array)
            self._runtime.sim_log(0)
            entries.extend(array)


@functools.cache
def card() -> Card:
    """The card of this process, in its place from now on.

    Raises:
        RuntimeError: torch has been imported, and has its runtime.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the simulated card was in its place")
    runtime, *others = built()
    # The loader takes a library that is there already for every other that asks for the same name.
    for library in others:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return Card(ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL))
