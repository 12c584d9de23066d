"""Plans for full-size models are no worse than they were: a handful of those in ``baseline.json``."""

from __future__ import annotations

from typing import Any

import plan_baseline
import pytest

from sd_lowvram.units import MIB

SIMPLE = [row for row in plan_baseline.ROWS if row["asked"]["model"] == "sd15" and not row["asked"].get("knobs")]
CHOSEN = {
    "streamed": (512, 2048),
    "resident": (512, 4096),
    "refused": (1024, 600),
}


def row(size: int, vram_mib: int) -> dict[str, Any]:
    return next(one for one in SIMPLE if (one["asked"]["size"], one["asked"].get("vram_mib")) == (size, vram_mib))


@pytest.mark.parametrize("kind", CHOSEN)
def test_a_plan_is_no_worse_than_it_was(kind: str) -> None:
    known = row(*CHOSEN[kind])
    found = plan_baseline.planned(known["asked"])
    assert ("needed" in found) == (kind == "refused")
    assert not plan_baseline.worse(known["planned"], found)


@pytest.mark.slow(20)
def test_a_refusal_names_a_budget_that_then_fits() -> None:
    """Of SDXL's least plan parts tell 32 MiB too little, which a plan says is "about" the least; a refusal does not."""
    asked = {"model": "sdxl", "size": 1024, "vram_mib": 600}
    needed = plan_baseline.planned(asked)["needed"]
    assert "peak" in plan_baseline.planned({**asked, "vram_mib": -(-needed // MIB)})


def test_what_is_worse_is_seen() -> None:
    known = row(*CHOSEN["resident"])["planned"]
    assert plan_baseline.worse(known, {**known, "peak": known["peak"] * 1.02}).keys() == {"peak"}
    assert plan_baseline.worse(known, {**known, "peak": known["peak"] // 2}) == {}
    assert plan_baseline.worse(known, {"needed": 1, "stage": "denoise"})
