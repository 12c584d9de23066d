"""A Python whose card is the simulated one: ``make gpu`` runs with it as on a machine with a card.

    make gpu GPU_PYTHON=".venv-gpu/bin/python tests/benchmarks/simulated_gpu/bench_on_card.py" \\
        GPU_OUT=benchmarks/simulated GPU_SECONDS=3600

Models have their full size, of which only shapes are computed, but for ``correctness``, which is about bits: it is
computed, with narrow models. With ``SIMULATED_MODELS=narrow`` all models are: the whole hour is rehearsed in some
minutes. Seconds of the host are the processor's for Python and torch, simulated kernels taken off;
all other seconds say nothing of any card. Tests that only a real card can pass are skipped, with their reason.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
CARD_BYTES = 24 << 30
NARROW = os.environ.get("SIMULATED_MODELS") == "narrow"
_HEAD = """# `python -m benchmarks gpu` on a simulated card

Full-size models, shapes only (`tests/benchmarks/simulated_gpu/bench_on_card.py` wrote this): that every part ends, what
is planned and held. Bytes and counts alone: times there say nothing of any card, and errors and bits of attention are
not computed.
"""
_TIMES = {
    "s", "ms", "sdpa, ms", "torch's, ms", "this, ms", "times as fast", "host ms", "device ms", "plan s", "host s",
    "device s", "step ms", "/ resident", "simulated ms", "first ms", "second ms", "predicted ms", "resident ms",
    "addresses ms", "modules ms", "free step ms", "predicted host ms", "predicted device ms",
}  # fmt: skip
_OF_TIMES = (
    "*Addresses*", "*Bits*: of", "*Error*", "*Host*", "*Predicted*: by", "*Plan*", "*Simulated*",
    "Sizes may", "Not simulated",
)  # fmt: skip


def on_card() -> Any:
    """This process with the card and its kernels."""
    sys.path[:0] = [str(TESTS / "simulated_gpu"), str(TESTS / "support"), str(TESTS.parent)]
    from simulated_card.card import card

    card()
    import plans_on_card
    import torch
    from on_card import Simulated, rates_here

    from benchmarks import calls, gpu, peers_on_card, trial
    from benchmarks.gpu import correctness, decodes, drawn, kernels, peaks, peers, replays, streaming, todays
    from sd_lowvram.devices import this_machine

    torch.set_num_threads(1)
    simulated = peers_on_card.simulated = Simulated()
    peers_on_card.shapes_only = functools.partial(plans_on_card.shapes_only, simulated)
    trial.PYTHON = (sys.executable, __file__)
    gpu.lines = lines
    make_narrow(NARROW)
    simulated.kernels.computes = False
    trials = {correctness: "trial_correctness"}
    if NARROW:
        trials |= {peaks: "trial_peaks", kernels: "trial_passes", streaming: "trial_steps"}
        trials |= {
            replays: "trial_replays",
            drawn: "trial_drawn",
            decodes: "trial_decodes",
            peers: "trial_peers",
            todays: "trial_todays",
        }
    for module, name in trials.items():
        setattr(module, name, with_contents(getattr(module, name), simulated))
    this_machine.calibrate = rates_here
    # the processor's time for this thread, as other threads may run meanwhile
    calls.clock = lambda: time.thread_time() - simulated.kernels.seconds
    return simulated


def make_narrow(everything: bool) -> None:
    """Have models computed in a moment: those of ``correctness``, or all of them and their pictures."""
    import tiny
    import todays

    from benchmarks import models
    from benchmarks.gpu import (
        attention,
        correctness,
        decodes,
        drawn,
        kernels,
        peaks,
        peers,
        replays,
        sizes,
        streaming,
        workspaces,
    )
    from benchmarks.gpu import todays as todays_part
    from sd_lowvram.kernels.attention import determinism

    def narrow(name: str) -> dict[str, Any]:
        return tiny.config("sd15") if everything or name.startswith("narrow") else architecture(name)

    architecture, models.architecture = models.architecture, narrow
    correctness.MODEL, correctness.SIDE = "narrow SD1.5", 64
    determinism.SHAPES = ((1, 2, 16, 16, 40),)
    attention._RUNS = 1  # one of the largest has thousands of blocks, and each of their launches is Python's here
    if everything:
        peaks.SHAPES = streaming.TASKS = kernels.PASSES = decodes.PICTURES = (("narrow SD1.5", 64),)
        drawn.MODELS, drawn.SIDES, drawn.NUMBER = ("narrow SD1.5",), (64, 96), 4
        replays.TASK = {"model": "narrow SD1.5", "side": 64}
        attention.LATENTS, workspaces.SHAPES, workspaces.FRAMES = (8,), ((2, 8, 4, 16),), ((8, 4, 16),)
        for part in (todays_part, peers):
            part.MODELS, part.SIDE, part.random_transformer = ("narrow FLUX.1",), 64, todays.with_embeddings
        peers.MODELS, peers.UNETS = ("narrow FLUX.1", "narrow SD1.5"), ("narrow SD1.5",)
        sizes._MODEL, sizes._STEP, sizes._LARGEST, sizes.CAPS = "narrow SD1.5", 64, 192, (64 << 20,)


def with_contents(trial: Callable[..., Iterator[Any]], simulated: Any) -> Callable[..., Iterator[Any]]:
    """``trial`` with all tensors computed."""

    @functools.wraps(trial)
    def run(*args: Any, **kwargs: Any) -> Iterator[Any]:
        simulated.kernels.computes = True
        yield from trial(*args, **kwargs)

    return run


def lines(results: dict[str, Any]) -> Iterator[str]:
    """The results as Markdown, without what is a time or comes of one."""
    from benchmarks.gpu import tables

    yield _HEAD
    for kind, some in itertools.groupby(tables(results), key=_kind):
        if kind == "table":
            yield from _columns([line.strip("|").split("|") for line in some])
        elif kind == "text":
            told = re.split(r"(?<=\.) (?=\*?[A-Z])", " ".join(some))
            kept = " ".join(one for one in told if not one.startswith(_OF_TIMES)).partition("; the part took")
            yield kept[0] + ("." if kept[1] else "")
        elif kind == "head":
            yield from some
        elif kind == "gap":
            yield ""


def _kind(line: str) -> str:
    """Claims, and what is between them, are a gap."""
    return {"|": "table", "-": "gap", "": "gap", "#": "head"}.get(line.lstrip()[:1], "text")


def _columns(rows: list[list[str]]) -> Iterator[str]:
    heads = [head.strip() for head in rows[0]]
    left_out = _TIMES | ({"error", "same bits"} if {"error", "/ resident", "free step ms"} & {*heads} else set())
    for row in rows:
        yield "|" + "|".join(cell for head, cell in zip(heads, row, strict=True) if head not in left_out) + "|"


_FULL_SIZE = "the contents of a full-size model are not computed on a simulated card"
_NOT_HERE = {
    "test_gpu_memory": "a simulated card has no driver whose version could be asked for",
    "test_compiled_for_the_card_that_is_here": None,
    "test_the_same_bits_as_resident": _FULL_SIZE,
    "test_eight_bits_stream_too": _FULL_SIZE,
    "test_copies_do_not_wait_for_the_compute": "a simulated card has no speeds",
}
"""Tests that only a real card can pass, and why; None: what is said of Triton's kernels."""


class OfRealCards:
    """A plugin of pytest that skips, with a reason, what only a real card can show, and computes what is small."""

    def __init__(self, simulated: Any) -> None:
        self.kernels = simulated.kernels

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        import pytest
        from on_card import TRITON

        for item in items:
            name = item.name.partition("[")[0]
            if name in _NOT_HERE:
                item.add_marker(pytest.mark.skip(reason=_NOT_HERE[name] or TRITON))

    def pytest_runtest_setup(self, item: Any) -> None:
        self.kernels.computes = item.name.startswith("test_masters_arrive_whole")


def main(switch: str, module: str, *arguments: str) -> None:
    if switch != "-m":
        sys.exit("of Python's own switches -m alone is understood")
    if module == "pip":
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
    simulated = on_card()
    with simulated.card.of_size(CARD_BYTES):
        if module == "pytest":
            import pytest

            sys.exit(pytest.main([*arguments], plugins=[OfRealCards(simulated)]))
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
