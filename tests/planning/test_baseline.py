"""Plans of full-size models are those of ``baseline.json``: here the rows that are planned fast, ``make plans`` all."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from plan_baseline import ROWS, differences, plan_of, with_remedy

from sd_lowvram.units import GIB, MIB

FAST = [
    row
    for row in ROWS
    if (row["asked"]["model"], row["asked"]["size"]) == ("sd15", 512) and row["asked"].get("card") != "gtx1650"
    if "batch" not in row["asked"] and row["asked"].get("ram_gib", 64) > 2 and row["asked"].get("vram_mib") != 2048
]
"""Without those that read weights from disk, which take longer where the system cannot read past its cache, and without
one between the budget that streams and the one that holds all."""


@pytest.mark.slow(40)
def test_plans_are_those_of_the_file_and_refusals_name_what_fits() -> None:
    moved = [(row["asked"], differences(row["planned"], plan_of(row["asked"]))) for row in FAST]
    assert not [(asked, figures) for asked, figures in moved if figures], "make plans PLANS=write stores those of now"
    refused = [row for row in FAST if "needed" in row["planned"]]
    assert all("peak" in plan_of(with_remedy(row["asked"], row["planned"])) for row in refused)


@pytest.mark.slow(5)
def test_a_stated_budget_is_filled_though_all_copies_are_hidden() -> None:
    """Though 307 MiB of SDXL's denoiser are as fast as all of it, and 820 of SD1.5's a little faster than 896."""
    large, small = {"model": "sdxl", "size": 1024}, {"model": "sd15", "size": 512, "card": "gtx1650"}
    assert plan_of(large | {"vram_mib": 8192})["peak"] > 4.8 * GIB
    assert plan_of(small | {"vram_mib": 1536})["peak"] > (1536 - 512 - 64) * MIB


def test_plans_of_the_file_keep_their_budgets_and_more_memory_is_no_slower() -> None:
    """Of the rows that were planned since settings are stored."""
    rows = [row for row in ROWS if {"peak", "settings"} <= row["planned"].keys()]
    for (asked, plan), (other, faster) in itertools.product([(row["asked"], row["planned"]) for row in rows], repeat=2):
        assert plan["least_peak"] <= plan["peak"] <= asked["vram_mib"] * MIB and plan["host"] <= asked["ram_gib"] * GIB
        more = other["vram_mib"] >= asked["vram_mib"] and other["ram_gib"] >= asked["ram_gib"]
        if more and asked | {"vram_mib": 0, "ram_gib": 0} == other | {"vram_mib": 0, "ram_gib": 0}:
            assert faster["seconds"] <= 1.001 * plan["seconds"], (asked, other)


def test_what_moves_is_seen() -> None:
    known: dict[str, Any] = next(row["planned"] for row in FAST if "peak" in row["planned"])
    assert differences(known, {**known, "peak": known["peak"] - 1}).keys() == {"peak"}
    assert differences(known, {**known, "seconds": known["seconds"] * (1 - 1e-5)}).keys() == {"seconds"}
    assert not differences(known, {**known, "seconds": known["seconds"] * (1 + 1e-8)})
    assert differences(known, {**known, "settings": known["settings"] | {"offload": "mars"}}).keys() == {"offload"}
    assert {"needed", "stage"} <= differences(known, {"needed": 1, "stage": "denoise"}).keys()
