"""The GPU suite where there is no GPU: every part runs on the CPU with a tiny model, and says what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from typer.testing import CliRunner

from sd_lowvram.bench import gpu, models, trial
from sd_lowvram.bench.gpu import attention, peaks, sizes, streaming
from sd_lowvram.errors import BadInputError, OutputError
from sd_lowvram.units import GIB, MIB

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is measured is a narrow SD1.5, in small pictures."""
    monkeypatch.setattr(models, "architecture", lambda name: tiny.config("sd15"))
    monkeypatch.setattr(peaks, "SHAPES", [("tiny", 64)])
    monkeypatch.setattr(streaming, "TASKS", [("tiny", 64)])
    monkeypatch.setattr(attention, "LATENTS", [8])
    for name, value in {"_MODEL": "tiny", "_STEP": 64, "_LARGEST": 192, "CAPS": (24 * MIB,)}.items():
        monkeypatch.setattr(sizes, name, value)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials run in this process: starting one takes longer than all of them."""

    def measure(run: Callable[..., Any], *, seconds: float = 0, **arguments: Any) -> dict[str, Any]:
        try:
            return json.loads(json.dumps(run(**json.loads(json.dumps(arguments)))))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "out_of_memory": False}

    for module in (peaks, streaming, sizes, attention):
        monkeypatch.setattr(module, "measure", measure)


def run(part: str, out: Path) -> tuple[dict[str, Any], str]:
    written = gpu.run([part], out, device=CPU)
    return json.loads((out / "cpu.json").read_text())[part], written.read_text()


@pytest.mark.slow(6)
def test_peaks(at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "SHARES", (0.0, 1.0))
    part, text = run("peaks", tmp_path)
    assert [row.get("error") for row in part["rows"]] == [None, None]
    assert all(row["within"] for row in part["rows"])
    least, most = part["rows"]
    assert least["vram"] < most["vram"]
    assert most["settings"]["offload"] == "none"
    assert text.count("| tiny | 64x64 |") == 2
    assert {stage["name"] for stage in most["stages"]} == {"text", "denoise", "decode"}


@pytest.mark.slow(18)
def test_streaming(at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_WARM", 1)
    monkeypatch.setattr(streaming, "_STEPS", 2)
    part, text = run("streaming", tmp_path)
    (table,) = part["tables"]
    ours = [row for row in table["rows"] if row["way"] == "ours"]
    assert [row["share"] for row in ours[:4]] == list(streaming.SHARES)
    assert all(row["step_seconds"] > 0 for row in ours)
    assert next(row for row in table["rows"] if row["way"] == "resident")["step_seconds"] > 0
    # some ways of diffusers need an accelerator, and say so: a row tells it
    assert {row["way"] for row in table["rows"] if "error" in row} <= set(streaming.BASELINES) - {"resident"}
    assert set(table["simulated"]["step_seconds"]) == {"50", "25", "10"}
    assert all(seconds > 0 for seconds in table["simulated"]["step_seconds"].values())
    assert {claim["claim"][:4] for claim in table["claims"]} == {"50 %", "25 %", "10 %"}
    assert "| ours | 25 % |" in text


def test_largest_pictures(at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "trial_size", lambda side, cap, way, **_: {"fits": side <= 128})
    part, text = run("max-size", tmp_path)
    assert [(row["way"], row["largest"], row["too_large"]) for row in part["rows"]] == [
        ("ours", 128, 192),
        ("diffusers", 128, 192),
    ]
    assert "| 128 | 128 | 1.0 |" in text


@pytest.mark.parametrize("way", sizes.WAYS)
def test_a_trial_of_a_size(way: str) -> None:
    small = sizes.trial_size("cpu", "tiny", 64, 256 * MIB, way, steps=1)
    assert small["fits"] and small["finite"]
    assert not sizes.trial_size("cpu", "tiny", 64, 64 << 10, way, steps=1)["fits"]


def test_attention(at_once: None, tmp_path: Path) -> None:
    part, text = run("attention", tmp_path)
    found = {row["backend"]: row for row in part["rows"]}
    assert set(found) == {"sdpa", "flash", "efficient", "xformers", "fused-softmax", "sliced"}
    for backend in ("sdpa", "fused-softmax", "sliced"):
        assert found[backend]["error"] < 1e-5
        assert found[backend]["deterministic"] is True
        assert f"| 2x8x40, 64 x 64 | float32 | {backend}" in text
    assert "CUDA" in found["efficient"]["failed"]


@pytest.mark.slow(5)
def test_parts_are_added_to_what_is_there(at_once: None, tmp_path: Path) -> None:
    run("attention", tmp_path)
    results = json.loads((tmp_path / "cpu.json").read_text())
    (tmp_path / "cpu.json").write_text(json.dumps(results | {"peaks": {**results["attention"], "rows": []}}))
    _, text = run("attention", tmp_path)
    assert "## Peaks" in text and "## Attention" in text


def test_no_time_is_left(tmp_path: Path) -> None:
    for part, module in gpu.PARTS.items():
        gpu.run([part], tmp_path, device=CPU, seconds=0)
        found = json.loads((tmp_path / "cpu.json").read_text())[part]
        assert "\n".join(module.lines(found))
    assert "no time" in (tmp_path / "cpu.md").read_text()


@pytest.mark.parametrize("largest", [0, 1, 7, 15, 16])
def test_bracketing(largest: int) -> None:
    asked: list[int] = []

    def fits(side: int) -> bool:
        asked.append(side)
        return side <= largest * 64

    assert sizes.bracket(fits, 64, 16 * 64) == (largest * 64, None if largest == 16 else (largest + 1) * 64)
    assert len(asked) <= 5
    assert all(0 < side <= 16 * 64 for side in asked)


def test_bracketing_stops_when_time_is_up() -> None:
    answers = iter([True, None])
    assert sizes.bracket(lambda side: next(answers), 64, 1024) == (512, None)
    row = {"largest": 512, "too_large": 1024, "step": 64}
    assert "no time" in sizes._side(row)


@pytest.mark.parametrize(
    ("predicted", "measured", "good"),
    [(1000, 1000, True), (1050, 1000, True), (1051, 1000, False), (990, 1000, True), (989, 1000, False)],
)
def test_what_counts_as_foretold(predicted: int, measured: int, good: bool) -> None:
    assert peaks.within(predicted * 10 * MIB, measured * 10 * MIB) is good
    assert peaks.within(124 * MIB, 100 * MIB) and not peaks.within(125 * MIB, 100 * MIB)
    assert peaks.within(92 * MIB, 100 * MIB) and not peaks.within(91 * MIB, 100 * MIB)


def test_claims_are_judged() -> None:
    def row(way: str, seconds: float, peak: int, **more: Any) -> dict[str, Any]:
        return {"way": way, "settings": {}, "step_seconds": seconds, "peak_bytes": peak, **more}

    table = {
        "rows": [
            row("ours", 1.0, 4 * GIB, share=50),
            row("sequential offload", 10.0, GIB),
            row("group offload, leaves", 2.0, GIB),
            row("ours", 4.0, GIB, instead_of="sequential offload"),
            row("ours", 3.0, GIB, instead_of="group offload, leaves"),
        ],
        "simulated": {"step_seconds": {"50": 1.1}},
    }
    sequential, group, simulated = streaming._claims(table)
    assert (sequential["holds"], sequential["figure"]) == (True, 2.5)
    assert (group["holds"], group["figure"]) == (False, pytest.approx(2 / 3))
    assert simulated["holds"] is True
    table["rows"][3]["peak_bytes"] = 2 * GIB
    assert next(streaming._claims(table))["holds"] is False


def test_a_process_of_its_own_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    row = trial.measure(attention.trial_attention, device="nonsense", backend="sdpa", latents=[8])
    assert "nonsense" in row["error"]
    asked: dict[str, Any] = {"seconds": 1, "device": "cpu", "backend": "sdpa", "latents": [8]}
    assert trial.measure(attention.trial_attention, **asked)["error"] == "no time was left"
    monkeypatch.setattr(trial, "_LEAST", 1)
    assert trial.measure(attention.trial_attention, **asked)["timed_out"] is True


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sd_lowvram.commands.bench import bench

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInputError, match="CUDA"):
        gpu.run(out=tmp_path)
    assert CliRunner().invoke(bench, ["gpu", "--out", str(tmp_path)]).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="max-size"):
        gpu.run(["sizes"], tmp_path, device=CPU)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        gpu.run(["attention"], tmp_path / "file", device=CPU)
