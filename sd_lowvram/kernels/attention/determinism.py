"""Test of determinism: a backend is run several times on this machine before it is called deterministic.

Parallel kernels that add in the order in which blocks finish differ from run to run; only running them shows it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import SettingsError
from ...weights import same_bits
from .backend import AttentionBackend, AttentionFunction
from .registry import attend, available_backends, backends
from .torch_kernels import call_in_clean_thread

RUNS = 20

SHAPES = ((2, 8, 4096, 4096, 40), (2, 8, 4096, 77, 40), (2, 8, 64, 64, 160), (1, 1, 4096, 4096, 512))
"""(batch, heads, queries, keys, width) of SD1.5 at 512x512: self and cross attention, the middle, the VAE."""

_CPU_SHRINK = 16  # of self attention's tokens, so that the probe ends within seconds


@dataclass(frozen=True)
class Proof:
    """Result of the test.

    Attributes:
        backend: name of the backend.
        deterministic: True if every run of every shape gave the bits of the first; None if it never ran.
        runs: number of runs of each shape.
        reason: the reason why it is not deterministic, or never ran; else "".
    """

    backend: str
    deterministic: bool | None
    runs: int
    reason: str = ""


def probe(device: torch.device) -> dict[str, Proof]:
    """Run each backend ``RUNS`` times on SD1.5's shapes on ``device`` and compare the bits; the results are cached."""
    return {name: _proof(name, torch.device(device)) for name in backends()}


def repeats(backend: str, device: torch.device) -> bool:
    """True if ``backend`` was deterministic on ``device``; tested at the first call."""
    return bool(_proof(backend, torch.device(device)).deterministic)


def _proof(name: str, device: torch.device) -> Proof:
    return _examine(name, backends()[name], device)


@functools.cache
def _examine(name: str, backend: AttentionBackend, device: torch.device) -> Proof:
    why = available_backends(device)[name]
    return Proof(name, None, 0, why) if why else examine(name, functools.partial(attend, name), device)


def examine(name: str, function: AttentionFunction, device: torch.device, runs: int = RUNS) -> Proof:
    """Test ``function`` with ``runs`` runs of each shape.

    Args:
        name: name of the backend.
        function: its function.
        device: device that computes.
        runs: runs of each shape.
    """
    ran = 0
    for shape, dtype in _problems(device):
        try:
            differing = call_in_clean_thread(functools.partial(_differing_run, function, shape, dtype, device, runs))
        except SettingsError:
            continue  # a forced kernel that this shape does not suit
        ran += 1
        if differing is not None:
            batch, heads, queries, keys, width = shape
            where = f"{batch}x{heads} heads of width {width}, {queries} queries, {keys} keys"
            return Proof(name, False, runs, f"run {differing} of {where} gave other bits than the first")
    return Proof(name, True, runs) if ran else Proof(name, None, 0, "no shape of SD1.5 suits it")


def _problems(device: torch.device) -> Iterable[tuple[tuple[int, ...], torch.dtype]]:
    if device.type == "cpu":
        few = 4096 // _CPU_SHRINK
        for batch, heads, queries, keys, width in SHAPES:
            yield (batch, heads, min(queries, few), min(keys, few), width), torch.float32
        return
    for shape in SHAPES:
        yield shape, torch.float16
    yield SHAPES[-1], torch.float32  # SDXL's VAE


def _differing_run(
    function: AttentionFunction, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, runs: int
) -> int | None:
    """The first run whose bits are not those of run 1, counted from 1; None when all are."""
    batch, heads, queries, keys, width = shape
    noise = torch.Generator().manual_seed(0)

    def tokens(count: int) -> Tensor:
        return torch.randn(batch, count, heads, width, generator=noise).to(device, dtype).transpose(1, 2)

    q, k, v = tokens(queries), tokens(keys), tokens(keys)
    # Small blocks, so that a backend which works in blocks shows how it puts them together.
    first = function(q, k, v, score_bytes=1 << 20)
    for run in range(2, runs + 1):
        if not same_bits(function(q, k, v, score_bytes=1 << 20), first):
            return run
    return None
