"""Other programs and ours on one checkpoint: seconds, peak memory by the same counters, and how far the picture is.

Each has a process of its own. Two counters see every one alike: what the process took at its peak beyond what it held
before the model was loaded (Linux alone reports this), and the peak that torch's allocator reported.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from sd_lowvram.api import plan
from sd_lowvram.devices.pairs import spread, time_call
from sd_lowvram.errors import BadInputError
from sd_lowvram.session import attached

from . import peers_on_card
from .models import demo_pipeline, least_budget
from .peers_on_card import PLAIN
from .tables import BUSY, Report, Row, Sheet, eight_bits, facts, figure, filled, mib, trusted
from .trial import measure

_RUNS = 3
_STATUS = Path("/proc/self/status")


def _slices(pipe: Any) -> None:
    pipe.enable_attention_slicing("max")


def _tiles(pipe: Any) -> None:
    pipe.vae.enable_slicing()
    pipe.vae.enable_tiling()


def _both(pipe: Any) -> None:
    _slices(pipe)
    _tiles(pipe)


THEIRS: dict[str, Callable[[Any], None]] = {
    PLAIN: lambda pipe: None,
    "diffusers, attention in slices": _slices,
    "diffusers, decoder in tiles": _tiles,
    "diffusers, both": _both,
}
"""Functions that turn on diffusers' own options, by name."""

AMPLE, LEAST = "sd-lowvram, all memory", "sd-lowvram, least memory"
OURS = {AMPLE: False, LEAST: True}
"""Our plans by name; True for the smallest budget that holds the picture."""

LEFT_OUT = {
    "diffusers, model, sequential and group offload": "they move weights to an accelerator",
    "mmgp": "it moves weights to a CUDA card, and to no other device",
    "stable-diffusion.cpp": "it has the published widths of SD1.x built in, which the demo model does not have",
}
"""Options that are not measured with the demo model on a CPU, with the reason."""


def run(*, size: int = 256, steps: int = 8, card: bool = False, out: Path | None) -> Report:
    """Measure all of them with the demo model on this CPU; writes ``out`` and JSON, and goes on with what lacks.

    Args:
        card: run :mod:`peers_on_card` in its place.
    """
    if card:
        return peers_on_card.run(out)
    asked = facts(None, size=size, steps=steps, left_out=LEFT_OUT)
    if asked["device"].split(",")[0] != "cpu":
        raise BadInputError(f"peers measures on a CPU, and this runs on {asked['device']}: hide the card")
    cases = [{"name": name} for name in (*THEIRS, *OURS)]
    return filled(asked, cases, functools.partial(measure, trial_run, size=size, steps=steps), lines, out, "peers")


def trial_run(name: str, size: int, steps: int) -> dict[str, Any]:
    """Pictures by one of them; the plain one is drawn at last, so that it is in none of the figures."""
    from sd_lowvram.planning.memory_profile import measured

    _picture(demo_pipeline(), 64, 1)  # libraries are imported, and kernels made
    gc.collect()
    empty, pipe = _resident(), demo_pipeline()
    with _running(name, pipe, size, steps):
        _forget_peak()
        times = []
        for _ in range(_RUNS):
            timing, drawn = time_call(functools.partial(_picture, pipe, size, steps), torch.device("cpu"))
            times.append(timing)
        highest = _resident("VmHWM")
        with measured(pipe) as run:
            _picture(pipe, size, steps)
    plain = _picture(demo_pipeline(), size, steps)
    apart = (eight_bits(drawn) - eight_bits(plain)).abs()
    seconds = [one.seconds for one in times]
    return {
        "seconds": median(seconds),
        "spread": spread(seconds),
        "own": min(one.own for one in times),
        "process_bytes": None if highest is None or empty is None else highest - empty,
        "allocator_bytes": run.peak_bytes,
        "most": int(apart.max()),
        "differing": float((apart.amax(dim=0) > 0).float().mean()),
    }


def _picture(pipe: Any, size: int, steps: int) -> Tensor:
    """A picture (3, size, size) in [0, 1], on the CPU."""
    noise = torch.Generator().manual_seed(1)
    given = {"width": size, "height": size, "num_inference_steps": steps, "output_type": "pt"}
    drawn: Tensor = pipe("a red apple", generator=noise, **given).images[0]
    return drawn.float().cpu()


@contextlib.contextmanager
def _running(name: str, pipe: Any, size: int, steps: int) -> Iterator[None]:
    if name in THEIRS:
        THEIRS[name](pipe)
        yield
        return
    asked: dict[str, Any] = {"width": size, "height": size, "steps": steps, "device": "cpu"}
    chosen = plan(pipe, vram=f"{least_budget(pipe, **asked)} b" if OURS[name] else None, **asked)
    with attached(pipe, chosen.settings, device="cpu", timing=chosen.timing):
        yield


def _forget_peak() -> None:
    """Reset ``VmHWM``, so that imports and planning do not count."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _resident(figure: str = "VmRSS") -> int | None:
    """Bytes that this process has in memory, or had at most (``VmHWM``); None if no file has them."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{figure}:"):
                return int(line.split()[1]) * 1024
    return None


def _seconds(row: Row) -> str:
    return figure(row["seconds"], row.get("spread"), "{:.2f}") if trusted(row, "spread") else BUSY


def lines(report: Report) -> Iterable[str]:
    """The report as Markdown."""
    return (peers_on_card.SHEET if report.get("card") else _SHEET).lines(report)


_SHEET = Sheet(
    "Other programs and ours on one checkpoint",
    "{model}, {size}x{size}, {steps} steps, on {device} with {threads} threads, each in a process of its own. "
    "*Process*: the most beyond what it held before the model was loaded. *Allocator*: the most of all tensors, "
    "weights and what waits in host memory included. *Differs*: from the picture of diffusers as it is, the largest "
    f"difference of 8-bit values and the share of pixels. Seconds: medians of {_RUNS} pictures.",
    (
        ("program", "{name}"),
        ("s", _seconds),
        ("process MiB", mib("process_bytes", "{:.1f}")),
        ("allocator MiB", mib("allocator_bytes", "{:.1f}")),
        ("differs", lambda row: f"{row['most']} ({row['differing']:.2%})" if row["most"] else "not at all"),
    ),
)
