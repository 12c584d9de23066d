"""``python -m benchmarks finite``: what it costs to look whether decoded values are numbers, by strips and at the end.

Decodes with the looks and without them, in pairs within one process, each of a pair first in turn.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_lowvram.checkpoints.architectures import autoencoder, build_components
from sd_lowvram.checkpoints.load_autoencoder import load_autoencoder
from sd_lowvram.demo import MODEL_PATH
from sd_lowvram.devices.pairs import figures, in_turn
from sd_lowvram.hooks import overflow, vae_exact, vae_whole
from sd_lowvram.session import attached
from sd_lowvram.settings import Settings

from .tables import Sheet, pair_columns, written

SIDES = {"demo": 512, "sd15": 128}
"""Sides of the pictures in pixels: the demo model's autoencoder, and a full-size one with random weights."""

_LOOKED_AT = {"plain": "off", "exact strips": "exact"}


def run(out: Path | None = None, pairs: int = 9) -> dict[str, Any]:
    """Measure, also into ``out`` as Markdown and JSON beside it; on a GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = {
        "device": str(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "pairs": pairs,
        "rows": [row for model, side in SIDES.items() for row in _rows(model, side, pairs, device)],
    }
    return written(report, lines, out)


lines = Sheet(
    "What looking for values that are no numbers costs",
    "Decodes in float32 on {device}, {threads} threads, torch {torch}: medians of {pairs} pairs, with the looks and "
    "without.",
    (
        ("autoencoder", "{model}"),
        ("side", "{side}"),
        ("decode", "{way}"),
        ("looks", "{looks}"),
        *pair_columns("without, s", "with, s")[:2],
        ("times as fast with", pair_columns("without, s", "with, s")[2][1]),
    ),
).lines


def _rows(model: str, side: int, pairs: int, device: torch.device) -> Iterator[dict[str, Any]]:
    vae = _built(model).to(device).eval().requires_grad_(False)
    noise = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 4, side // 8, side // 8, generator=noise).to(device)
    for way, tiles in _LOOKED_AT.items():
        with attached(vae, Settings(vae_tiles=tiles), device=device), torch.inference_mode():
            looks = _looks(vae, latents)
            decode = functools.partial(vae.decode, latents)
            (without, seconds), own = in_turn((functools.partial(_unseen, decode), decode), pairs, device)
        yield {"model": model, "side": side, "way": way, "looks": looks, **figures(without, seconds, own)}


def _unseen(decode: Callable[[], Any]) -> None:
    with _seen_by(lambda values: True):
        decode()


@contextlib.contextmanager
def _seen_by(look: Callable[[Tensor], bool]) -> Iterator[None]:
    """Use ``look`` for the check for NaN within the block."""
    before = overflow.is_finite
    modules: tuple[Any, ...] = (overflow, vae_exact, vae_whole)
    for module in modules:
        module.is_finite = look
    try:
        yield
    finally:
        for module in modules:
            module.is_finite = before


def _looks(vae: Any, latents: Tensor) -> int:
    """Number of checks in a decode."""
    count = 0

    def seen(_: Tensor) -> bool:
        nonlocal count
        count += 1
        return True

    with _seen_by(seen):
        vae.decode(latents)
    return count


def _built(model: str) -> Any:
    if model == "demo":
        return load_autoencoder(MODEL_PATH, torch.float32)
    return build_components({"vae": autoencoder(model)}, torch.float32, "cpu", only=("vae",))["vae"]
