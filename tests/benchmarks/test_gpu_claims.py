"""The summary of ``make gpu``: figures next to their predictions, and each claim that does not hold."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import peaks, replays, streaming
from sd_lowvram.units import GIB, MIB


@pytest.mark.parametrize(
    ("predicted", "measured", "good"),
    [(1000, 1000, True), (1050, 1000, True), (1051, 1000, False), (990, 1000, True), (989, 1000, False)],
)
def test_what_counts_as_predicted(predicted: int, measured: int, good: bool) -> None:
    assert peaks.within(predicted * 10 * MIB, measured * 10 * MIB) is good
    assert peaks.within(124 * MIB, 100 * MIB) and not peaks.within(125 * MIB, 100 * MIB)
    assert peaks.within(92 * MIB, 100 * MIB) and not peaks.within(91 * MIB, 100 * MIB)


def test_what_is_reserved_is_compared_with_the_budget() -> None:
    """The driver's share counts; both the summary and the table name a plan that passed its budget."""
    row: dict[str, Any] = {"model": "sd15", "side": 512, "share": 0.0, "vram": 700 * MIB}
    row |= {"settings": {}, "stage": "decode"}
    row |= {"predicted_bytes": 100 * MIB, "measured_bytes": 130 * MIB, "library_bytes": 0, "within": False}
    row |= {"overhead_bytes": 500 * MIB, "reserved_bytes": 201 * MIB, "predicted_reserved_bytes": 200 * MIB}
    row |= dict.fromkeys(("plan_seconds", "host_seconds", "device_seconds"), 1.0)
    sentences = list(peaks.summary([row, {**row, "vram": 701 * MIB, "within": True}]))
    assert "reserved bytes, with the driver's share, stayed within the budget in 1 of 2" in sentences
    assert sentences[-2:] == [
        "**does not hold**: sd15 at 512 in 700 MiB: allocated 130 MiB, predicted 100",
        "**does not hold**: sd15 at 512 in 700 MiB: reserved 701 MiB with the driver's share",
    ]
    assert "| 201 | **no** | (500) |" in "\n".join(peaks.lines({"rows": [row]}))


def test_comparisons_of_recorded_models_are_summed_up() -> None:
    row: dict[str, Any] = {"model": "sd15", "side": 512, "scheduler": "Euler", "same_bits": True}
    plain = row | {"recorded": False, "step_seconds": 0.02, "predicted_step_seconds": 0.02}
    recorded = row | {"recorded": True, "step_seconds": 0.03, "predicted_step_seconds": 0.01}
    recorded |= {"addresses_seconds": 0.001, "facts_seconds": 0.02}
    figures, *fell = replays.summary([plain, recorded])
    assert figures == (
        "sd15 at 512, Euler, recorded: 30.0 ms a step, 20.0 without; comparing addresses 1.00 ms, all modules 20.00 ms"
    )
    assert fell == [
        "**does not hold**: sd15 at 512, Euler, recorded: a step: 30.0 ms, predicted 10.0",
        "**does not hold**: sd15 at 512, Euler, recorded: a step is no longer than one that is not recorded",
    ]


def test_claims_are_judged() -> None:
    def row(way: str, seconds: float, peak: int, **more: Any) -> dict[str, Any]:
        return {"way": way, "step_seconds": seconds, "peak_bytes": peak, **more}

    rows = [
        row("ours", 1.0, 4 * GIB, share=50),
        row("sequential offload", 10.0, GIB),
        row("group offload, leaves", 2.0, GIB),
        row("ours", 4.0, GIB, instead_of="sequential offload"),
        row("ours", 3.0, GIB, instead_of="group offload, leaves"),
        row("simulated", 1.1, 0, share=50),
    ]
    sequential, group, simulated = streaming.claims(rows)
    assert (sequential["holds"], sequential["figure"]) == (True, 2.5)
    assert (group["holds"], group["figure"]) == (False, pytest.approx(2 / 3))
    assert simulated["holds"] is True
    rows[3]["peak_bytes"] = 2 * GIB
    assert next(streaming.claims(rows))["holds"] is False


def test_a_summary_names_each_claim_that_fell() -> None:
    task = {"model": "sd15", "side": 1024, "share": 50, "peak_bytes": GIB}
    rows = [
        task | {"way": "ours", "step_seconds": 0.07, "predicted_step_seconds": 0.05, "same_bits": True},
        task | {"way": streaming.RECORDED, "step_seconds": 0.08, "same_bits": False},
        task | {"way": streaming.RECORDED, "share": 25, "failed": "streamed_graphs: cannot be recorded"},
    ]
    judged, steps, *fell, not_here = streaming.summary(rows)
    assert "1 of 4 claims hold" in judged and judged.endswith("recorded over not recorded: 50 % 1.14")
    assert steps == "sd15 at 1024, ms a step: 50 % 70.0 (predicted 50.0)"
    assert fell == [
        "**does not hold**: sd15 at 1024, 50 % on the device: a step as long as predicted, to 25% (1.40)",
        "**does not hold**: sd15 at 1024, 50 % on the device: a recorded step is no longer than one that is not "
        "recorded (0.88)",
        "**does not hold**: sd15 at 1024, ours, recorded, 50 %: the bits of the resident run",
    ]
    assert not_here.endswith("sd15 at 1024, ours, recorded, 25 %: streamed_graphs: cannot be recorded")
