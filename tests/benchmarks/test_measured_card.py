"""What pages, named profiles and policies say of the GPU that was measured is what its file says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.h100_steps import FITTED, WITHIN
from benchmarks.h100_steps import MEASURED as MEASURED_STEPS
from sd_lowvram.devices.compiling import compiling_of
from sd_lowvram.devices.performance import MEASURED_GAINS, PROFILES, profile
from sd_lowvram.units import MIB

CUDA = torch.device("cuda")
ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "benchmarks/measured/nvidia-h100-80gb-hbm3.json").read_text(encoding="utf-8"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIGURE = re.compile(r"\b\d+(?:\.\d+)?(?= (?:ms|MiB|TFLOP|GB/s|times as)\b)")
"""Figures of a kind that the file has. Budgets are in GiB, seconds are of plans."""


def row(part: str, **of: Any) -> dict[str, Any]:
    (found,) = (one for one in MEASURED[part]["rows"] if of.items() <= one.items())
    return found


def ms(part: str, name: str = "step_seconds", **of: Any) -> float:
    return 1000 * row(part, **of)[name]


STEP, WIDE = {"model": "sd15", "side": 512}, {"model": "sd15", "side": 1024}
PLAIN, FUSED, GRAPHS = (ms("kernels", **STEP, **{"pass": way}) for way in ("as it is", "fused kernels", "CUDA graphs"))
SHARES = [ms("streaming", **WIDE, way="ours", share=share) for share in (50, 25, 10)]
RECORDED = ms("streaming", **WIDE, way="ours", share=100)
RESIDENT = sorted(ms("streaming", **WIDE, way=way) for way in ("resident", "model offload"))
GROUPS = [1000 * one["step_seconds"] for one in MEASURED["streaming"]["rows"] if one["way"].startswith("group")]
SEQUENTIAL = ms("streaming", **WIDE, way="sequential offload")
TODAYS = [row("todays", model=model) for model in ("z-image-turbo", "flux1-dev")]
PEAKS = MEASURED["peaks"]["rows"]
GAINS = row("calibration", what="kernels")["measured"]
COMPILE = row("calibration", what="compile")["measured"]
DECODER = max(one["ratio"] for one in MEASURED["kernels"]["rows"] if one.get("dtype") == "float16")


def mib(one: dict[str, Any]) -> tuple[float, float]:
    """Predicted and measured, of a row."""
    return one["predicted_bytes"] / MIB, (one["measured_bytes"] - one["library_bytes"]) / MIB


SINCE = (ROOT / "benchmarks/measured/steps-on-h100.md").read_text(encoding="utf-8")


def since(*begin: str) -> list[str]:
    """Cells of the row that begins so, behind these."""
    (line,) = (line for line in SINCE.splitlines() if line.startswith(f"| {' | '.join(begin)} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][len(begin) :]


PLAIN_SINCE, GRAPHS_SINCE = (
    [float(since(f"{side}x{side}", way)[2]) for side in (512, 1024)]
    for way in ("all, as it is", "all, CUDA graphs, DDIM")
)
BEFORE = [since(f"{side}x{side}", "all, CUDA graphs, DDIM")[0] for side in (512, 1024)]
SLOWER = [since("1024x1024", f"{share} %") for share in (50, 25, 10)]
FLUX_SINCE, Z_IMAGE_SINCE = (
    [since(name, "sd-lowvram", str(budget)) for budget in (4, 6, 8)] for name in ("FLUX.1-dev", "Z-Image")
)
LEAVES = since("FLUX.1-dev", "diffusers, group offload of leaves, streams", "any")
WHOLE, LARGE = since("SDXL 1024x1024, all on the GPU"), since("SD1.5 2048x2048, all on the GPU")
IN_STRIPS, LARGE_IN_STRIPS = (since("in strips, torch's operators", first) for first in ("1364", "5304"))
DECODES = [(IN_STRIPS, WHOLE), (LARGE_IN_STRIPS, LARGE)]


def whole(cells: list[list[str]], number: int) -> list[str]:
    return [f"{math.floor(float(row[number]) + 0.5)}" for row in cells]


BESIDE = json.loads((ROOT / "benchmarks/h100_steps.json").read_text(encoding="utf-8"))["rows"]
STEPS = {(one["model"], one["side"], one["way"]): one["predicted"] for one in BESIDE}
LEAST = mib(row("peaks", **WIDE, share=0.0))
PEAK = [f"{held:.0f}{{}}{foretold:.0f})" for foretold, held in map(mib, TODAYS)]
STREAMED, TIMED, ALONE = (
    [1000 * one[f"{name}step_seconds"] for one in TODAYS] for name in ("", "predicted_", "resident_")
)
LONGER = [taken / RESIDENT[1] for taken in SHARES]

AS_PREDICTED = f"as predicted in {sum(one['within'] for one in PEAKS)} of {len(PEAKS)} plans"
OVER = sum(one["reserved_bytes"] + one["overhead_bytes"] > one["vram"] for one in PEAKS)
RESERVED = max(one["reserved_bytes"] / one["predicted_reserved_bytes"] for one in PEAKS)

SAID = {
    "README.md": [
        AS_PREDICTED,
        f"In {OVER} of them torch reserved more than the budget",
        f"A step took {STREAMED[1]:.0f} ms there, and {ALONE[1]:.0f} ms with all weights on the GPU",
    ],
    "docs/gpu.md": [
        AS_PREDICTED,
        f"reserved up to {RESERVED:.1f} times as much as a plan needs, in {OVER} of {len(PEAKS)} runs more than",
        "at most 8 MiB or 1 % more, 24 MiB or 5 % less",  # what benchmarks/gpu/peaks.py allows
        f"held {LEAST[1] - LEAST[0]:.0f} MiB of {LEAST[0]:.0f} more than predicted",
        "cuDNN used 15 MiB",  # in a run that is not in the file
        f"At most {PEAK[0].format(' MiB were allocated (predicted ')} and {PEAK[1].format(' (')}.",
        f"A step took {STREAMED[0]:.0f} and {STREAMED[1]:.0f} ms; with all weights on the GPU {ALONE[0]:.0f} and "
        f"{ALONE[1]:.0f}. The predictions of {TIMED[0]:.0f} and {TIMED[1]:.0f} ms were too high",
        f"took {RESIDENT[0]:.0f} to {RESIDENT[1]:.0f} ms with all weights on the GPU. With 50, 25 and 10 % of them it "
        f"took {SHARES[0]:.0f}, {SHARES[1]:.0f} and {SHARES[2]:.0f} ms, {min(LONGER):.1f} to {max(LONGER):.1f} times "
        f"as long. diffusers' group offload took {min(GROUPS):.0f} to {max(GROUPS):.0f} ms, its sequential offload "
        f"{SEQUENTIAL:.0f}",
        f"up to {DECODER:.1f} times as fast as torch's operators in a decoder",
        f"took {FUSED:.0f} ms a step with them, {PLAIN:.0f} ms without",
        f"were {COMPILE['gain']:.2f} times as fast",
        f"took {GRAPHS:.0f} ms a step at 512x512. At 1024x1024 a recorded step took {RECORDED:.0f} ms, longer than",
        f"SD1.5 at 512x512 took {GRAPHS_SINCE[0]} ms a step, before {BEFORE[0]}, without recording {PLAIN_SINCE[0]}. "
        f"At 1024x1024 it took {GRAPHS_SINCE[1]} ms, before {BEFORE[1]}, without {PLAIN_SINCE[1]}.",
        "took {}, {} and {} ms, before {}, {} and {}.".format(*whole(SLOWER, 2), *whole(SLOWER, 0)),
        "took {} ms a step within 4 GiB, {} within 6, {} within 8 (predicted {}, {}, {}).".format(
            *whole(FLUX_SINCE, 0), *whole(FLUX_SINCE, 1)
        ),
        f"took {float(LEAVES[0]):.0f} ms and pinned {LEAVES[4]} GiB of RAM, where we pin {FLUX_SINCE[0][4]}.",
        "took {}, {} and {} ms (predicted {}, {}, {}).".format(*whole(Z_IMAGE_SINCE, 0), *whole(Z_IMAGE_SINCE, 1)),
        f"SDXL at 1024x1024 {float(IN_STRIPS[0]) / 1000:.2f} s within {IN_STRIPS[1]} MiB, and "
        f"{float(WHOLE[1]) / 1000:.2f} s within {WHOLE[2]}.",
        "take {:.0f} to {:.0f} times as long".format(*sorted(float(a[0]) / float(b[1]) for a, b in DECODES)),
        "held 1 to 8 MiB more than predicted",  # in benchmarks/measured/plans-on-h100.md
    ],
    "docs/sources.md": [
        f"{PLAIN / FUSED:.2f} times as fast in a step, a decoder's norms {DECODER:.1f} times",
        f"a step at 512x512 is {PLAIN_SINCE[0] / GRAPHS_SINCE[0]:.1f} times as fast, at 1024x1024 "
        f"{PLAIN_SINCE[1] / GRAPHS_SINCE[1]:.1f} times",
    ],
    "docs/measurements.md": [
        f"predicted at {STEPS['sd15', 512, 'all']:.1f} ms a step, measured {PLAIN:.1f}, and recorded as CUDA graphs at "
        f"{STEPS['sd15', 512, 'all, CUDA graphs']:.1f}, "
        f"[measured](../benchmarks/measured/steps-on-h100.md) 10.5 to {GRAPHS_SINCE[0]:.1f}.",
        "18.3 and 9.6 ms of another H100",
        "28.1 ms launched kernel by kernel",
    ],
}
"""Sentences of the pages, with the file's figures in them."""


@pytest.mark.parametrize("page", SAID)
def test_pages_quote_the_file(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert [said for said in SAID[page] if said not in text] == []


def test_no_other_figure_of_the_card_is_on_a_page() -> None:
    left = {}
    for file in PAGES:
        page = file.relative_to(ROOT).as_posix()
        text = file.read_text(encoding="utf-8")
        blocks = re.split(r"\n\n|\n(?=- |\| )", text.partition("## What an H100 has shown")[0])
        blocks = [block for block in blocks if "H100" in block]
        for section in ("## What an H100 has shown", "## A day later, on another H100"):
            blocks.append(text.partition(section)[2].partition("\n## ")[0])
        told = " ".join(" ".join(blocks).split())
        for said in SAID.get(page, []):
            told = told.replace(said, "")
        if figures := FIGURE.findall(told):
            left[page] = figures
    assert left == {}


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_named_cards_of_its_generation_have_its_gains(card: str) -> None:
    assert MEASURED_GAINS[card] == {name: pytest.approx(GAINS[name], rel=5e-3) for name in MEASURED_GAINS[card]}
    assert vars(compiling_of(profile(card), CUDA)) == {name: pytest.approx(COMPILE[name], rel=5e-3) for name in COMPILE}


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_named_cards_of_its_generation_have_its_rates(card: str) -> None:
    rates, measured = profile(card), row("calibration", what="rates")["measured"]
    for name in ("half_flops", "float_flops", "copy_bandwidth"):
        assert getattr(rates, name) == pytest.approx(measured[name], rel=1e-3)
    assert profile("h100").bandwidth == pytest.approx(measured["bandwidth"], rel=1e-3)
    norm = row("kernels", kernel="group_norm, decode, contiguous_format", dtype="float16")
    elements = math.prod(norm["shape"])
    groups, bytes_ = elements / 32 * rates.group_seconds, 4 * elements / profile("h100").bandwidth
    assert groups + bytes_ == pytest.approx(norm["plain_seconds"], rel=5e-3)


def test_measured_steps_are_those_of_the_files() -> None:
    tables = SINCE + (ROOT / "benchmarks/measured/nvidia-h100-80gb-hbm3.md").read_text(encoding="utf-8")
    decodes = {ms for (_, _, way), rows in MEASURED_STEPS.items() if "decode" in way for ms in rows}
    assert decodes == {float(row[0]) for row in (WHOLE[1:], LARGE[1:], IN_STRIPS, LARGE_IN_STRIPS)}
    figures = {f"{float(found):.1f}" for found in re.findall(r"\d+\.\d+", tables)}
    assert {f"{ms:.1f}" for way, rows in MEASURED_STEPS.items() if "decode" not in way[2] for ms in rows} <= figures


def test_predicted_steps_and_decodes_are_near_the_measured_ones() -> None:
    far = {(one["model"], one["side"], one["way"]) for one in BESIDE if abs(one["ratio"] - 1) > WITHIN}
    assert far <= {("sd15", 1024, "25 %")}  # three equal rows but for the share took 70, 71 and 92 ms
    page = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    assert f"{len(FITTED)} of these {len(BESIDE)} figures" in page
    assert ("No step and no decode is off by more than a quarter" in page) == (not far)


def test_no_other_named_card_gains_by_what_was_not_measured_on_one() -> None:
    assert set(MEASURED_GAINS) == {"h100", "h200"} == {name for name in PROFILES if compiling_of(profile(name), CUDA)}
