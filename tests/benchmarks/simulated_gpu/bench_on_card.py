"""``python -m benchmarks gpu`` whole, with models of full size, on the simulated card.

``python tests/benchmarks/simulated_gpu/bench_on_card.py PART ...``. Each part has an hour, or what ``--seconds`` before
the parts says: what is not measured then is told, and the same call goes on with it. Shapes only, but for the first
part, which is about bits: it is computed, with narrow models. Rows go to ``benchmarks/simulated/`` as they come; what
is there is not run again. Seconds of the host are the processor's for Python and torch, simulated kernels taken off;
all other seconds say nothing of any card.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
OUT = TESTS.parent / "benchmarks" / "simulated"
CARD_BYTES = 24 << 30
_TRIAL = "--trial"
_SECONDS = 3600.0
_HEAD = """# `python -m benchmarks gpu` on a simulated card

Full-size models, shapes only (`tests/benchmarks/simulated_gpu/bench_on_card.py` wrote this): that every part ends, what
is planned and held. Bytes and counts alone: times there say nothing of any card, and errors and bits of attention are
not computed.
"""
_TIMES = {
    "s", "ms", "sdpa, ms", "this, ms", "times as fast", "host ms", "device ms", "plan s", "host s", "device s",
    "step ms", "/ resident", "simulated ms",
}  # fmt: skip
_OF_TIMES = ("*Error*", "*Host*", "*Plan*", "*Simulated*", "Sizes may", "Not simulated")


def on_card() -> Any:
    """This process with the card; returns that and its kernels."""
    sys.path[:0] = [str(TESTS / "simulated_gpu"), str(TESTS / "support"), str(TESTS.parent)]
    from simulated_card.card import card

    card()
    import torch
    from on_card import Simulated

    from benchmarks import calls
    from benchmarks.gpu import attention
    from sd_lowvram.devices import this_machine
    from sd_lowvram.devices.performance import PROFILES

    torch.set_num_threads(1)
    simulated = Simulated()
    this_machine.calibrate = lambda device: PROFILES["rtx2070"]  # the rates of the host's processor mean nothing
    attention._RUNS = 1  # one of the largest has thousands of blocks, and each of their launches is Python's here
    # the processor's time for this thread, as others may be at work beside it
    calls.clock = lambda: time.thread_time() - simulated.kernels.seconds
    return simulated


def of_narrow_models() -> None:
    """Have what is measured computed in a moment."""
    import tiny

    from benchmarks import models
    from benchmarks.gpu import correctness
    from sd_lowvram.kernels.attention import determinism

    models.architecture = lambda name: tiny.config("sd15")
    correctness.MODEL, correctness.SIDE = "a narrow SD1.5", 64
    determinism.SHAPES = ((1, 2, 16, 16, 40),)


def measure(parts: Sequence[str], seconds: float) -> None:
    from benchmarks import gpu, trial

    for part in parts:
        trial.COMMAND = (sys.executable, __file__, _TRIAL, part)
        start = time.monotonic()
        written = gpu.run([part], OUT, seconds=seconds)
        results = json.loads(written.with_suffix(".json").read_text(encoding="utf-8"))
        written.write_text("\n".join(lines(results)) + "\n", encoding="utf-8")
        print(f"{part}: {time.monotonic() - start:.0f} s, {gpu.unmeasured(written)} rows lack", flush=True)


def lines(results: dict[str, Any]) -> Iterator[str]:
    """The results as Markdown, without what is a time or comes of one."""
    from benchmarks.gpu import lines

    yield _HEAD.rstrip("\n")
    for kind, some in itertools.groupby(itertools.islice(lines(results), 1, None), key=_kind):
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
    return {"|": "table", "-": "gap", "": "gap", "#": "head"}.get(line[:1], "text")


def _columns(rows: list[list[str]]) -> Iterator[str]:
    heads = [head.strip() for head in rows[0]]
    left_out = _TIMES | ({"error", "same bits"} if "error" in heads else set())
    for row in rows:
        yield "|" + "|".join(cell for head, cell in zip(heads, row, strict=True) if head not in left_out) + "|"


def main(*asked: str) -> None:
    simulated = on_card()
    from benchmarks import trial

    with simulated.card.of_size(CARD_BYTES):
        simulated.kernels.computes = "correctness" in asked
        if simulated.kernels.computes:
            of_narrow_models()
        if asked[:1] == (_TRIAL,):
            trial.main()
        elif asked[:1] == ("--seconds",):
            measure(asked[2:], float(asked[1]))
        else:
            measure(asked, _SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
