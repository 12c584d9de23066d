"""Comparison of the pictures of all policies, each made twice: bits, and differences of 8-bit values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_lowvram import progress
from sd_lowvram.files.tables import table

from .pictures import PROMPT, chosen_policies, facts, loaded, picture, ways
from .tables import eight_bits, left_out, written

PLAIN = "untouched"
"""The pipeline as it was loaded, with nothing attached."""
PROMPTS = (PROMPT, "a blue car")


def run(
    model: str | None, names: Sequence[str] = (), *, size: int = 128, steps: int = 8, out: Path | None
) -> dict[str, Any]:
    """Draw ``PROMPTS`` twice by each policy (empty: all that run here), and compare all; writes ``out`` and JSON."""
    names, left_out = chosen_policies(names)
    pipe = loaded(model)
    prepared = ways(names, model, pipe, size, size, steps)

    def drawn(running: Any) -> Tensor:
        return torch.stack([picture(running, size, size, steps, prompt=one, seed=1) for one in PROMPTS])

    first, second = {PLAIN: drawn(pipe)}, {PLAIN: drawn(pipe)}
    for name in progress.counted("policies", names):
        with prepared[name]() as running:
            first[name], second[name] = drawn(running), drawn(running)
    pairs = [_compared(one, first[one], other, first[other]) for one, other in itertools.combinations(first, 2)]
    again = [_compared(name, first[name], name, second[name]) for name in first]
    shared = {"size": size, "steps": steps, "prompts": list(PROMPTS), "left_out": list(left_out)}
    return written(facts(model, **shared, policies=list(first), pairs=pairs, again=again), lines, out)


def _compared(one: str, ours: Tensor, other: str, theirs: Tensor) -> dict[str, Any]:
    apart = (eight_bits(ours) - eight_bits(theirs)).abs()
    differing = apart.amax(dim=1) > 0  # of a pixel's three colours
    return {
        "of": [one, other],
        "bits": bool(torch.equal(ours, theirs)),
        "most": int(apart.max()),
        "pixels": float(differing.float().mean()),
        "relative": float((ours - theirs).norm() / theirs.norm()),
    }


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The comparison as Markdown."""
    names = report["policies"]
    found = {tuple(pair["of"]): pair for pair in [*report["pairs"], *report["again"]]}
    yield "# Is it the same picture?"
    yield ""
    yield (
        f"{report['model']}, {report['size']}x{report['size']}, {report['steps']} steps, {len(report['prompts'])} "
        f"prompts, on {report['device']}. *bits*: every bit is the same; a number: the largest difference of 8-bit "
        "values, of 255, with the share of pixels that differ; on the diagonal a policy with itself, drawn twice."
    )
    yield ""
    rows = ([one, *(_cell(found.get((one, other)) or found[other, one]) for other in names)] for one in names)
    yield from table(("", *names), rows)
    yield from left_out(report["left_out"])


def _cell(pair: dict[str, Any]) -> str:
    if pair["bits"]:
        return "bits"
    return f"{pair['most']} ({pair['pixels']:.2%})" if pair["most"] else f"0 ({pair['relative']:.0e} before rounding)"
