"""``python -m benchmarks gpu`` from end to end with tiny models: every part ends, and no row of it is empty."""

from __future__ import annotations

import functools
import gc
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import patient
import plans_on_card
import pytest
import tiny
import todays
import torch
from on_card import rates_here

from benchmarks import gpu as bench
from benchmarks import ladder, models, peers, peers_on_card, trial
from benchmarks.gpu import attention, decodes, drawn, kernels, peaks, replays, sizes, streaming, workspaces
from benchmarks.gpu import peers as peers_part
from benchmarks.gpu import todays as todays_part
from sd_lowvram.checkpoints.architectures import architecture
from sd_lowvram.devices import this_machine

MIB = 1 << 20


@pytest.fixture
def tiny_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Narrow models and small pictures, in this process, which is left without a cap."""
    small = {"SIDE": 64, "random_transformer": todays.with_embeddings}
    for module, values in {
        models: {"architecture": lambda name: tiny.config("sd15")},
        this_machine: {"calibrate": rates_here},  # measuring takes minutes here
        peaks: {"SHAPES": [("tiny", 64)]},
        streaming: {"TASKS": [("tiny", 64)], "_WARM": 1, "_STEPS": 2},
        kernels: {"PASSES": [("tiny", 64)]},
        replays: {"TASK": {"model": "tiny", "side": 64}},
        attention: {"LATENTS": [8], "_RUNS": 2},
        workspaces: {"SHAPES": [(2, 8, 4, 16)], "FRAMES": [(8, 4, 16)]},
        todays_part: {"MODELS": ("tiny",), **small},
        peers_part: {
            "MODELS": ("tiny", "unet"),
            "UNETS": ("unet",),
            "SIDE": 64,
            "random_transformer": todays.with_embeddings,
        },
        decodes: {"PICTURES": [("tiny", 64)]},
        drawn: {"MODELS": ("tiny",), "SIDES": (64, 96), "NUMBER": 2},
        sizes: {"_MODEL": "tiny", "_STEP": 64, "_LARGEST": 192, "CAPS": (64 * MIB,)},
    }.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)

    def stream(run: Callable[..., Any], *, seconds: float = 0, **arguments: Any) -> Iterator[dict[str, Any]]:
        try:
            for row in run(**json.loads(json.dumps(arguments))):
                yield json.loads(json.dumps(row))
        except UserWarning as error:  # a way of a pass that this card has not
            yield trial.failed(str(error))

    monkeypatch.setattr(trial, "stream", stream)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def leave_in_a_cycle(tensor: torch.Tensor) -> None:
    """Drop a tensor that only a rare, full collection frees, as earlier tests do."""
    cycle: list[object] = [tensor]
    cycle.append(cycle)
    gc.collect()


def told(row: dict[str, Any]) -> bool:
    """Whether all figures of a row are there; a spread is none of so few runs."""
    figures = [value for name, value in row.items() if not name.endswith("spread")]
    return all(value is not None and not (isinstance(value, float) and math.isnan(value)) for value in figures)


@pytest.mark.parametrize("source", ["B", "E"])
def test_the_ladder_has_rows_for_a_card(gpu: Any, source: str) -> None:
    """Of the demo model; what needs Triton is left out, by name, as there is no compiler for this card."""
    replays = gpu.card.replays
    report = ladder.run(source, model="demo", size=64, pairs=1)
    rows = {row["name"]: row for row in report["rows"]}
    assert {"half precision", "fused QKV products", "recorded as CUDA graphs"} <= rows.keys()
    assert ("traced" in rows) == (source == "B")
    assert gpu.card.replays >= replays + 2
    assert all(told({**row, "published": 0}) and row["seconds"] > 0 for row in rows.values())
    assert {"fused kernels", "compile", "packed weights"} <= report["left_out"].keys()
    assert not any(name.startswith(("compiled", "fused kernels")) for name in rows)


@pytest.mark.parametrize("part", [part for part in bench.PARTS if part not in ("tests", "correctness")])
def test_every_part_ends_and_no_row_is_empty(
    gpu: Any, tiny_bench: None, tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.kernels, "computes", part != "calibration")  # it measures maps of a full size
    if part == "peaks":
        leave_in_a_cycle(torch.empty(40 * MIB, dtype=torch.uint8, device="cuda"))
    written = bench.run([part], tmp_path)
    rows = json.loads(written.with_suffix(".json").read_text())[part]["rows"]
    assert rows
    for row in rows:
        if "failed" in row:
            assert row["failed"]
        else:
            known_holes = {"attention": {"score_bytes"}, "calibration": {"measured"}}.get(part, set())
            assert told({key: value for key, value in row.items() if key not in known_holes}), row
        if "device_seconds" in row:
            assert row["host_seconds"] > 0 and row["device_seconds"] > 0
    if part == "peaks":
        assert len(rows) == len(peaks.SHARES)
        assert len({row["overhead_measured"] for row in rows}) == 1  # as a test before this one may have measured it
        assert not [row for row in rows if not row["within"] or not row["reserved_bytes"] >= row["measured_bytes"] > 0]
    if part == "streaming":
        assert not [row for row in rows if "error" in row]
        own = "ours", streaming.LIMITED, streaming.RECORDED
        assert {row["way"] for row in rows} == {*own, "simulated", *streaming.BASELINES}
        assert all(row["same_bits"] for row in rows if row["way"] in own)
        assert [row["share"] for row in rows if row["way"] == streaming.RECORDED] == [50, 25, 10]
        assert "limited to its bytes over not limited: 100 %" in written.read_text()
        assert len([row for row in rows if "instead_of" in row]) == len(streaming.BASELINES) - 2
    if part == "decodes":
        whole, fused, strips = rows
        assert "Triton" in fused["failed"] and "aten::" in (tmp_path / strips["profile"]).read_text()
        assert whole["same_bits"] and strips["most"] < 0.05 and strips["measured_bytes"] < whole["measured_bytes"]
    if part == "drawn":
        assert "stayed within the budget in 2 of 2 drawn plans" in written.read_text()
        assert all(row["same_bits"] and row["reserved_bytes"] > 0 and not row["fallback_steps"] for row in rows)
    if part == "peers":
        assert {row["name"] for row in rows} == {name for names in peers_part.ROUNDS for name in names}
        assert {row["model"] for row in rows if "failed" not in row} == {"tiny", "unet"}
        # Ours have convolutions channels last, which have other bits on some processors.
        convolves = [row for row in rows if row["model"] == "unet" and row["name"] in peers_part.OURS]
        assert all(row["same_bits"] for row in rows if "failed" not in row and row not in convolves)
        ran = {row["name"]: row for row in rows if row["model"] == "tiny"}
        assert ran["diffusers"]["pinned_bytes"] == 0
        assert ran["diffusers, groups by leaf, stream"]["pinned_bytes"] > 0
    if part == "calibration":
        assert [row["what"] for row in rows if row.get("measured")] == ["rates", "overhead", "host", "kernels"]
    if part == "kernels":
        passes = {row["pass"]: row for row in rows if "pass" in row}
        assert passes["CUDA graphs"]["same_bits"] and passes["CUDA graphs"]["step_seconds"] > 0
        assert "Triton" in passes["fused kernels"]["failed"]
        recorded = [row for row in rows if row.get("recorded")]
        assert [row["scheduler"] for row in recorded] == ["DDIM", "Euler"]
        assert all(row["same_bits"] and row["facts_seconds"] > row["addresses_seconds"] > 0 for row in recorded)
    assert gpu.card.unsimulated == 0 or part == "attention"


@pytest.mark.slow(20)
def test_peers_and_ours_are_counted_alike(gpu: Any, tiny_bench: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes too of the narrow model; the table has a line for each, and says what differs."""
    monkeypatch.setattr(gpu.kernels, "computes", True)
    monkeypatch.setattr(models, "architecture", architecture)
    monkeypatch.setattr(peers_on_card, "simulated", gpu)
    monkeypatch.setattr(peers_on_card, "shapes_only", functools.partial(plans_on_card.shapes_only, gpu))
    narrow = peers_on_card.MODELS["FLUX.1 at half width"][2]
    monkeypatch.setattr(peers_on_card, "MODELS", {"narrow": (64, narrow, narrow)})
    names = "diffusers", "diffusers, groups by leaf, stream", "sd-lowvram, least budget"
    rows = [{"model": "narrow", "name": name, **peers_on_card.trial_run("narrow", name)} for name in names]
    plain, leaf, least = rows
    assert plain["copied_bytes"] == plain["pinned_bytes"] == 0 < leaf["copied_bytes"]
    assert leaf["pinned_bytes"] > 0 and plain["same_bits"] and leaf["same_bits"] and least["most"] < 8  # bf16
    assert least["denoise_bytes"] < plain["denoise_bytes"]
    report = {"card": True, "device": "here", "rows": rows, "left_out": {"one": "it does not run"}}
    table = "\n".join(peers.lines(report))
    assert all(f"| narrow | {name} | " in table for name in names) and table.endswith("Left out: one: it does not run.")


@pytest.mark.slow(20)
@pytest.mark.parametrize(("way", "fault"), [("streamed", "nothing waits for copies"), ("smallest", "")])
def test_the_sanitizer_finds_what_is_planted_and_nothing_else(gpu: Any, way: str, fault: str) -> None:
    script = Path(__file__).with_name("sanitized_on_card.py")
    run = patient.run([sys.executable, script, way, fault])
    assert run.returncode == 0, run.stderr[-2000:]
    row = json.loads(run.stdout.splitlines()[-1])
    assert row["unsimulated"] == 0
    if fault:
        assert row["races"] and "reading from" in row["report"]
    else:
        assert row["races"] == 0 and row["same_bits"] and row["finite"], row
