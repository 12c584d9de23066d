"""Whole runs of the demo model against their plans: in processes of their own, by the allocator."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import end_to_end
from benchmarks.end_to_end import device_bytes, verdict
from sd_lowvram.units import MIB

TASK = {"model": "demo", "size": 128, "steps": 2, "apart": False}


@pytest.mark.slow(11)
@pytest.mark.parametrize("budget", [30 * MIB, 1 << 40], ids=["tight", "plenty"])
def test_the_allocator_sees_what_was_planned(budget: int, tmp_path: Any) -> None:
    answer = end_to_end._apart({**TASK, "budget": budget}, str(tmp_path))
    planned, measured = answer["planned"], answer["measured"]
    assert measured["held_bytes"] == pytest.approx(planned["held_bytes"], rel=0.05)
    assert planned["peak_bytes"] <= budget
    assert device_bytes(planned, measured) <= 1.05 * planned["peak_bytes"]
    assert [stage["name"] for stage in measured["stages"]] == ["text", "denoise", "denoise", "decode"]
    assert (answer["rival"] is None) == (budget > 1 << 30), "everything resident has no faster rival"


def stages(peak: int, held: int) -> list[dict[str, Any]]:
    return [{"name": "decode", "component": "vae", "peak_bytes": peak, "held_bytes": held}]


@pytest.mark.parametrize(
    ("peak", "seconds", "says"),
    [(150, 1.0, "exceeds the budget"), (90, 5.0, "slower"), (90, 1.0, "MISS")],
)
def test_a_rival_is_judged(peak: int, seconds: float, says: str) -> None:
    rival = {
        "stages": stages(120, 320),  # 200 of them in host memory
        "measured": {"seconds": seconds, "stages": stages(peak + 200, 0)},
    }
    row = {"budget": 100, "rival": rival, "measured": {"seconds": 2.0}}
    assert verdict(row).startswith(says)
    assert verdict({**row, "rival": None}) == ""


def test_the_table_marks_misses(tmp_path: Any, monkeypatch: Any) -> None:
    def answer(task: Any, cache: str) -> dict[str, Any]:
        if task.get("survey"):
            facts = {"threads": 1, "torch": "2"}
            return {"minimum_peak_bytes": 10 * MIB, "planned": {"peak_bytes": 40 * MIB}, **facts}
        planned = {"settings": {"offload": "layer"}, "peak_bytes": 50 * MIB, "held_bytes": 50 * MIB, "seconds": 1.0}
        planned["stages"] = stages(50 * MIB, 50 * MIB)
        measured = {"held_bytes": 60 * MIB, "seconds": 2.0, "stages": stages(60 * MIB, 0)}
        return {"planned": planned, "rival": None if "settings" in task else dict(planned), "measured": measured}

    monkeypatch.setattr(end_to_end, "_apart", answer)
    end_to_end.run(["demo"], budgets=3, out=tmp_path / "end_to_end.md")
    text = (tmp_path / "end_to_end.md").read_text(encoding="utf-8")
    assert "| 10.0 | offload=layer | 50.0 | 60.0 | +20.0% MISS | 1.00 | 2.00 | x 2.00 MISS |" in text
    assert "| 20.0 |" in text and "| 40.0 |" in text, "budgets by equal factors"
    assert text.count("exceeds the budget") == 3
    assert "held_bytes" in (tmp_path / "end_to_end.json").read_text()
