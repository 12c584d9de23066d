"""The GPU suite where there is no GPU: every part runs on the CPU with a tiny model, and says what it found."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
import todays
import torch
from typer.testing import CliRunner

from benchmarks import gpu, models, peers_on_card, trial
from benchmarks.gpu import (
    attention,
    calibration,
    correctness,
    decodes,
    drawn,
    kernels,
    peaks,
    peers,
    replays,
    sizes,
    streaming,
    suite,
    workspaces,
)
from sd_lowvram.errors import BadInputError, OutputError
from sd_lowvram.kernels.attention.registry import BACKENDS
from sd_lowvram.units import MIB

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is measured is a narrow SD1.5, in small pictures."""
    monkeypatch.setattr(models, "architecture", lambda name: tiny.config("sd15"))
    monkeypatch.setattr(peaks, "SHAPES", [("tiny", 64)])
    monkeypatch.setattr(streaming, "TASKS", [("tiny", 64)])
    monkeypatch.setattr(decodes, "PICTURES", [("tiny", 64)])
    monkeypatch.setattr(drawn, "MODELS", ("tiny",))
    monkeypatch.setattr(drawn, "SIDES", (64, 72))
    monkeypatch.setattr(attention, "LATENTS", [8])
    monkeypatch.setattr(workspaces, "SHAPES", [(2, 8, 4, 16)])
    monkeypatch.setattr(workspaces, "FRAMES", [(8, 4, 16)])
    monkeypatch.setattr(correctness, "SIDE", 64)
    for name, value in {"_MODEL": "tiny", "_STEP": 64, "_LARGEST": 192, "CAPS": (24 * MIB,)}.items():
        monkeypatch.setattr(sizes, name, value)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials run in this process: starting one takes longer than all of them."""

    def stream(run: Callable[..., Any], *, seconds: float = 0, **arguments: Any) -> Iterator[dict[str, Any]]:
        try:
            for row in run(**json.loads(json.dumps(arguments))):
                yield json.loads(json.dumps(row))
        except Exception as error:
            yield {"error": f"{type(error).__name__}: {error}", "out_of_memory": False}

    monkeypatch.setattr(trial, "stream", stream)


def run(part: str, out: Path, **how: Any) -> tuple[list[dict[str, Any]], str]:
    written = gpu.run([part], out, device=CPU, **how)
    return json.loads((out / "cpu.json").read_text())[part]["rows"], written.read_text()


@pytest.mark.slow(6)
def test_peaks(at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "SHARES", (0.0, 1.0))
    rows, text = run("peaks", tmp_path)
    assert [row.get("error") for row in rows] == [None, None]
    assert all(row["within"] for row in rows)
    assert "reserved bytes, with the driver's share, stayed within the budget in 2 of 2" in text
    assert all(0 < row["host_seconds"] <= row["measured_seconds"] and row["plan_seconds"] > 0 for row in rows)
    least, most = rows
    assert least["vram"] < most["vram"]
    assert most["settings"]["offload"] == "none"
    assert text.count("| tiny | 64x64 |") == 2
    assert {stage["name"] for stage in most["stages"]} == {"text", "denoise", "decode"}


@pytest.mark.slow(18)
def test_streaming(at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_WARM", 1)
    monkeypatch.setattr(streaming, "_STEPS", 2)
    rows, text = run("streaming", tmp_path)
    ours = [row for row in rows if row["way"] == "ours"]
    assert [row["share"] for row in ours[:4]] == list(streaming.SHARES)
    assert all(row["step_seconds"] >= row["host_seconds"] > 0 for row in ours)
    assert next(row for row in rows if row["way"] == "resident")["step_seconds"] > 0
    # some ways of diffusers need an accelerator, and say so: a row shows it
    assert {row["way"] for row in rows if "error" in row} <= set(streaming.BASELINES) - {"resident"}
    simulated = {row["share"]: row["step_seconds"] for row in rows if row["way"] == "simulated"}
    assert set(simulated) == {50, 25, 10} and all(seconds > 0 for seconds in simulated.values())
    assert {claim["claim"][:4] for claim in streaming.claims(rows)} == {"100 ", "50 %", "25 %", "10 %", "ours"}
    assert all(row["same_bits"] and row["predicted_step_seconds"] > 0 for row in ours)
    assert "| ours | 25 % |" in text and "ms a step: 100 % " in text and " (predicted " in text


@pytest.mark.slow(4)
def test_decodes(at_once: None, tmp_path: Path) -> None:
    """The same settings as those that were measured on an H100, by the same names; fused kernels need a GPU."""
    rows, text = run("decodes", tmp_path)
    whole, fused, strips = rows
    assert "Triton" in fused.pop("failed") and fused.pop("way") == "all, fused kernels"
    assert "**not run here**: tiny at 64, all, fused kernels: " in text
    assert "aten::" in (tmp_path / strips["profile"]).read_text() and "profile" not in whole
    assert whole["same_bits"] and 0 < strips["most"] < 1e-4
    ran = whole, strips
    assert all(0 < row["host_seconds"] == row["second_seconds"] and row["predicted_seconds"] > 0 for row in ran)
    assert "| tiny | 64x64 | all, decode |" in text and "| tiny | 64x64 | decode in strips |" in text


@pytest.mark.slow(6)
def test_drawn_plans(at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cases in each call; a plan that passed its budget, or ran out of memory, is named."""
    monkeypatch.setattr(drawn, "NUMBER", 2)
    rows, text = run("drawn", tmp_path)
    assert [{key: row[key] for key in case} for case, row in zip(drawn.drawn(), rows, strict=True)] == drawn.drawn()
    assert all(row["same_bits"] and row["step_seconds"] > 0 < row["free_step_seconds"] for row in rows)
    assert "stayed within the budget in 2 of 2 drawn plans" in text and text.count("| tiny | ") == 2
    passed = rows[0] | {"reserved_bytes": 2 * rows[0]["vram"], "fallback_steps": 1}
    fell = [line.partition("MiB: ")[2] for line in drawn.summary([passed]) if line.startswith("**")]
    assert fell[0].startswith("reserved ") and fell[1] == "1 fallback steps"


@pytest.mark.slow(12)
def test_peers(at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and resident ways run on a CPU; a package that is not installed has one row, and runs once it is."""
    installed: set[str] = set()
    assert {f"{name}, {size} GiB" for name in ("sd-lowvram", "mmgp 3.8.2", "AirCanvas 0.1.0") for size in (4, 6, 8)} < {
        name for names in peers.ROUNDS for name in names
    }
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name in installed else None)
    monkeypatch.setattr(peers_on_card, "_CARD", CPU)
    short = (peers_on_card.PLAIN, *peers.OURS, "diffusers, groups by leaf, stream"), ("mmgp 3.8.2, 4 GiB",)
    small: dict[str, Any] = {"MODELS": ("tiny", "other", "unet"), "UNETS": ("unet",), "SIDE": 64, "ROUNDS": short}
    small["random_transformer"] = todays.with_embeddings
    for name, value in small.items():
        monkeypatch.setattr(peers, name, value)
    rows, text = run("peers", tmp_path)
    ran = [row for row in rows if "step_seconds" in row]
    assert [row["name"] for row in ran] == 3 * [peers_on_card.PLAIN, *peers.OURS]
    assert {row["model"] for row in ran} == {"tiny", "other", "unet"}
    assert all(row["same_bits"] and row["step_seconds"] >= row["host_seconds"] > 0 for row in ran)
    assert "streams" in next(row["error"] for row in rows if row["name"] == "diffusers, groups by leaf, stream")
    assert text.count("| mmgp 3.8.2, 4 GiB | not installed |") == 1
    assert "**not run here**: diffusers-dynamic-offloader 0.1.0rc2; mmgp 3.8.2, 4 GiB" in text
    monkeypatch.setitem(peers.ATTACH, "mmgp 3.8.2, 4 GiB", lambda pipe: None)
    installed.add("mmgp")
    rows, text = run("peers", tmp_path)
    assert [row["model"] for row in rows if row["name"].startswith("mmgp") and "step_seconds" in row] == [
        "tiny",
        "other",
        "unet",
    ]


def test_largest_pictures(at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a trial breaks off, or runs out of memory, the search goes on in another with what is known."""

    def trial_sizes(tried: list[tuple[int, bool]], **_: Any) -> Iterator[dict[str, Any]]:
        side = sizes.middle(dict(tried)) or 0
        if side > 128:
            raise MemoryError
        yield {"fits": True}

    monkeypatch.setattr(sizes, "trial_sizes", trial_sizes)
    rows, text = run("max-size", tmp_path)
    assert [(row["way"], row["side"], row.get("fits")) for row in rows] == [
        ("ours", 128, True),
        ("ours", 192, None),
        ("diffusers", 128, True),
        ("diffusers", 192, None),
    ]
    assert "| 128 | 128 | 1.0 |" in text


@pytest.mark.parametrize("way", sizes.WAYS)
def test_trials_of_sizes(way: str) -> None:
    asked: dict[str, Any] = {"device": "cpu", "model": "tiny", "way": way, "tried": [[192, False], [128, False]]}
    (small,) = sizes.trial_sizes(cap=256 * MIB, **asked)
    assert small["fits"] and small["finite"]
    (small,) = sizes.trial_sizes(cap=64 << 10, **asked)
    assert not small["fits"]


def test_attention(at_once: None, tmp_path: Path) -> None:
    rows, text = run("attention", tmp_path)
    found = {row["backend"]: row for row in rows}
    assert set(found) == {"torch's own choice", *BACKENDS}
    for backend in ("torch's own choice", "sdpa", "fused-softmax", "sliced"):
        assert found[backend]["error"] < 1e-5
        assert found[backend]["deterministic"] is True
        assert f"| 2x8x40, 64 x 64 | float32 | {backend}" in text
    assert "CUDA" in found["efficient"]["failed"]


def test_workspaces(at_once: None, tmp_path: Path) -> None:
    rows, text = run("workspaces", tmp_path)
    assert [row["format"] for row in rows] == ["channels last", "contiguous", "3 frames"]
    maps = [2 * (8 + 4), 2 * (8 + 4), 3 * 8 + 4]
    assert [row["map_bytes"] for row in rows] == [planes * 16 * 16 * 4 for planes in maps]
    assert all(row["workspace_bytes"] >= 0 for row in rows)
    assert "| 2 x 16x16 | 8 to 4 | contiguous |" in text


@pytest.mark.slow(5)
def test_correctness(at_once: None, tmp_path: Path) -> None:
    rows, text = run("correctness", tmp_path)
    assert [(row["same_bits"], row["finite"]) for row in rows] == [(True, True)] * 2
    assert text.count("| none | yes | yes |") == 2


@pytest.mark.slow(8)
def test_passes_of_a_unet(at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is; recorded and fused passes need a card, and say so."""
    monkeypatch.setattr(kernels, "PASSES", [("tiny", 64)])
    monkeypatch.setattr(kernels, "TYPES", ["float32"])
    ways = {name: settings for name, settings in kernels.WAYS.items() if name != "compiled"}
    monkeypatch.setattr(kernels, "WAYS", {**ways, "channels last": {"channels_last": True}})
    monkeypatch.setattr(replays, "TASK", {"model": "tiny", "side": 64})
    rows, text = run("kernels", tmp_path)
    passes = {row["pass"]: row for row in rows if "pass" in row}
    assert set(passes) == set(kernels.WAYS)
    assert passes["as it is"]["same_bits"] and passes["as it is"]["error"] == 0.0
    assert 0 <= passes["channels last"]["error"] < 1e-5 and passes["channels last"]["step_seconds"] > 0
    assert "NVIDIA" in passes["CUDA graphs"]["failed"] and "Triton" in passes["fused kernels"]["failed"]
    assert "| tiny, 64x64 | as it is | yes | 0.0e+00 |" in text
    plain, recorded = ([row for row in rows if row.get("recorded") is on] for on in (False, True))
    assert [row["scheduler"] for row in plain] == ["DDIM", "Euler"]
    assert all(row["same_bits"] and row["step_seconds"] > 0 < row["predicted_step_seconds"] for row in plain)
    assert all("NVIDIA" in row["failed"] for row in recorded) and "| tiny, 64x64 | Euler | no | yes |" in text
    assert all("riton" in row["failed"] for row in rows if "kernel" in row)


_INTERPRETED = """
import functools
from benchmarks.gpu import kernels
from sd_lowvram.kernels.triton import measure

kernels._RUNS = 1
measure._TOKENS, measure._STRIP = (2, 16, 64), (1, 8, 6, 10)
for name, drawn in measure.PAIRS.items():
    if name.startswith("group_norm"):
        measure.PAIRS[name] = functools.partial(measure._norm_inputs, (1, 32, 5, 7), drawn.args[1])

def off(device, dtype):
    kernel, reference, given = measure._geglu_inputs(device, dtype)
    return lambda product: kernel(product) * 1.01, reference, given

measure.PAIRS["a wrong geglu"] = off

def trial_interpreted(cases):
    yield from kernels.trial_kernels("cpu", cases)
"""


@pytest.mark.slow(30)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some, interpreted on the CPU, at small shapes; one that is off by a hundredth is seen."""
    (tmp_path / "interpreted.py").write_text(_INTERPRETED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def told() -> None:
        """Stands for the one in that process, where Triton interprets from its import on."""

    told.__module__, told.__name__ = "interpreted", "trial_interpreted"
    names = "group_norm, denoise, channels_last", "geglu"
    cases = [{"kernel": name, "dtype": "float16"} for name in (*names, "a wrong geglu")]
    measured = trial.measure_each(told, cases, seconds=lambda: 240.0)
    rows = [case | row for case, row in zip(cases, measured, strict=True)]
    assert not [row for row in rows if isinstance(row["error"], str)], rows
    assert [row["kernel"] for row in rows if not row["no_worse"]] == ["a wrong geglu"]
    assert all(row["same_bits"] and row["ratio"] > 0 for row in rows)
    text = "\n".join(kernels.lines({"rows": rows}))
    assert "| a wrong geglu | float16 |" in text and text.count("| **no** | yes |") == 1


MARK = "import pytest\npytestmark = pytest.mark.gpu\n"


def test_the_tests_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File by file, in processes that may end badly or late."""
    files = {
        "test_good.py": MARK + "def test_a(): pass\ndef test_b(): assert 1 == 2\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_c(n): pytest.skip('no such card')\n",
        "test_late.py": MARK + "def test_a(): __import__('time').sleep(60)\n",
        "test_other.py": "def test_a(): pass\n",
    }
    assert "tests/gpu/test_streaming.py" in suite.files() and "tests/benchmarks/test_bench_gpu.py" not in suite.files()
    (tmp_path / "tests").mkdir()
    for name, text in files.items():
        (tmp_path / "tests" / name).write_text(text)
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(trial, "LEAST", 1)
    assert suite.files() == ["tests/test_good.py", "tests/test_late.py"]
    assert suite.outcome("tests/test_late.py", 3)["timed_out"]
    monkeypatch.setattr(suite, "files", lambda: ["tests/test_good.py"])
    (good,), text = run("tests", tmp_path / "out", seconds=200)
    assert (good["passed"], good["failed"], good["skipped"]) == (1, 1, 2)
    assert "test_b: assert 1 == 2" in good["failures"][0]
    assert "| tests/test_good.py | 1 | **1** | 2 |" in text
    assert "- 1 passed, **1 failed**, 2 skipped\n  - **not run here**: test_c: no such card\n- calib" in text
    assert gpu.failures(gpu.results_in(tmp_path / "out" / "cpu.md")) == 1
    (tmp_path / "tests" / "test_good.py").write_text(MARK + "def test_a(): pass\n")
    (mended,), text = run("tests", tmp_path / "out", seconds=200)  # what failed is run again
    assert (mended["passed"], mended["failed"]) == (1, 0) and "- tests: 1 passed, none failed, 0 skipped\n" in text


def test_a_test_that_fails_is_told_of_and_no_fault_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.cli import app

    row = {"file": "a.py", "passed": 1, "failed": 2, "skipped": 0, "failures": [], "seconds": 1.0}
    written = {"tests": {"machine": {}, "spent_seconds": 0.0, "rows": [row]}}
    (tmp_path / "cpu.json").write_text(json.dumps(written))
    monkeypatch.setattr(gpu, "run", lambda *_, **__: tmp_path / "cpu.md")
    result = CliRunner().invoke(app, ["gpu"])
    assert result.exit_code == 1 and "- tests: 1 passed, **2 failed**" in result.output
    assert "2 tests failed" in result.output and "report it" not in result.output


def test_what_is_not_here_is_told_by_name_and_with_its_reason() -> None:
    """In the summary, which is what is read: each kernel, way, backend and measurement, not a number of rows."""
    no_triton = {"failed": "Triton is\nnot installed"}
    results = {
        "calibration": [{"what": "kernels", "measured": {"recorded passes": 1.4}, **no_triton}],
        "kernels": [
            *({"kernel": name, "dtype": dtype, **no_triton} for name in ("gelu", "geglu") for dtype in kernels.TYPES),
            {"model": "sd15", "side": 512, "pass": "compiled", **no_triton},
        ],
        "attention": [{"backend": "triton", "latents": 64, **no_triton}],
    }
    told = "\n".join(gpu.summary({part: {"rows": rows} for part, rows in results.items()}))
    for names in ("gains of kernels in Triton", "gelu; geglu", "sd15 at 512, compiled", "triton"):
        assert f"**not run here**: {names}: Triton is not installed" in told
    assert "rows failed" not in told


def test_a_calibration_is_taken_along(at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a machine that has the results and not the cache; what this one remembers stays."""
    from sd_lowvram.cache import remember
    from sd_lowvram.devices.this_machine import place_of_measurement, stored_measurement

    rates = {"half_flops": 1e12, "bandwidth": 1e11, "copy_bandwidth": 1e10, "launch_seconds": 1e-5}
    measured = {"rates": rates, "overhead": None, "kernels": {"geglu": 2.0}, "compile": {"gain": 1.5}}
    measured["host"] = {"layer_launches": 3.0}
    for what, value in measured.items():
        monkeypatch.setitem(calibration.MEASURED, what, lambda device, value=value: value)
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path / "cache"))
    rows, text = run("calibration", tmp_path)
    assert {row["what"]: row["measured"] for row in rows} == measured
    assert "| kernels | geglu | 2 |" in text and "| overhead | it is of a CUDA device |" in text
    remember(place_of_measurement("compile", CPU), {"gain": 3.0})
    run("attention", tmp_path, seconds=0)
    assert stored_measurement("kernels", CPU) == {"geglu": 2.0}
    assert stored_measurement("compile", CPU) == {"gain": 3.0}


def test_the_commands_of_the_guide_are_all_parts_in_nine_minutes() -> None:
    """In their order; so that each ends in time where a command is ended after ten minutes."""
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    commands = [found.split() for found in re.findall(r'^make gpu PART="?([\w -]+?)"? GPU_OUT', text, re.M)]
    assert [part for command in commands for part in command] == list(gpu.PARTS)
    assert all(sum(gpu.PARTS[part].seconds for part in command) <= 540 for command in commands)


def test_the_help_of_the_command_names_all_parts() -> None:
    from benchmarks.cli import app

    shown = CliRunner().invoke(app, ["gpu", "--help"], env={"COLUMNS": "400"}).output
    assert re.search(f"{', '.join([*gpu.PARTS][:-1])} or {[*gpu.PARTS][-1]};", " ".join(shown.split()))


def test_a_later_call_goes_on(at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are there stay, those without time are measured, and all of them for other libraries or when asked."""
    run("attention", tmp_path)
    place = tmp_path / "cpu.json"
    results = json.loads(place.read_text())
    rows = results["attention"]["rows"]
    rows[0] = {"backend": "sdpa", "latents": 8, "error": "no time was left", "timed_out": True}
    of(rows, "sliced")["seconds"] = 77.0
    place.write_text(json.dumps(results | {"peaks": results["attention"] | {"rows": []}}))
    assert gpu.unmeasured(gpu.results_in(place)) == 1
    rows, text = run("attention", tmp_path)
    assert gpu.unmeasured(gpu.results_in(place)) == 0
    assert 77.0 in {row.get("seconds") for row in rows} and len(rows) == 9
    assert of(rows, "sdpa")["seconds"] > 0
    assert "## Allocated bytes" in text and "## Attention" in text
    for change in ({"again": True}, {}):
        rows, _ = run("attention", tmp_path, **change)
        assert 77.0 not in {row.get("seconds") for row in rows} and len(rows) == 9
        of(rows, "sliced")["seconds"] = 77.0
        place.write_text(json.dumps({"attention": results["attention"] | {"rows": rows}}))
        monkeypatch.setattr(torch, "__version__", "1.0")


def of(rows: list[dict[str, Any]], backend: str) -> dict[str, Any]:
    return next(row for row in rows if row["backend"] == backend)


def test_rows_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends a part leaves the rows that were there, and the next call takes up where it ended."""
    asked: list[int] = []

    def trial_twice(device: str, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for case in cases:
            asked.append(case["share"])
            if len(asked) == 2:
                raise KeyboardInterrupt
            yield {"error": "as planned", "out_of_memory": case["share"] == 0.0}

    monkeypatch.setattr(trial, "stream", lambda run, *, seconds, **arguments: run(**arguments))
    monkeypatch.setattr(peaks, "trial_peaks", trial_twice)
    with pytest.raises(KeyboardInterrupt):
        gpu.run(["peaks"], tmp_path, device=CPU)
    assert [row["share"] for row in json.loads((tmp_path / "cpu.json").read_text())["peaks"]["rows"]] == [0.0]
    rows, _ = run("peaks", tmp_path)
    assert asked == [0.0, 0.1, 0.1, 0.5, 1.0]
    assert [row["share"] for row in rows] == list(peaks.SHARES)
    run("peaks", tmp_path)
    assert asked[5:] == [0.1, 0.5, 1.0]  # what failed, but for want of memory, is tried again


def test_rows_of_another_commit_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then they stay, and are named with their commit; rows of this commit stay."""
    asked: list[float] = []

    def trial_of_shares(device: str, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for case in cases[: len(cases) if enough else 2]:
            asked.append(case["share"])
            yield {"error": "as planned", "out_of_memory": True}
        yield from ({"error": "no time was left", "timed_out": True} for _ in cases[2:] if not enough)

    monkeypatch.setattr(trial, "stream", lambda run, *, seconds, **arguments: run(**arguments))
    monkeypatch.setattr(peaks, "trial_peaks", trial_of_shares)
    enough = True
    monkeypatch.setattr(gpu, "commit", lambda: "aaaaaaa")
    rows, text = run("peaks", tmp_path)
    assert {row["commit"] for row in rows} == {"aaaaaaa"} and "not anew yet" not in text
    place = tmp_path / "cpu.json"
    results = json.loads(place.read_text())
    for row in results["peaks"]["rows"][:1]:
        del row["commit"]  # as in older files
    results["peaks"]["rows"].append({"model": "gone", "side": 64, "share": 0.5, "commit": "aaaaaaa", "error": "old"})
    results["peaks"]["rows"][-1] |= {"out_of_memory": True}
    place.write_text(json.dumps(results))
    enough = False
    monkeypatch.setattr(gpu, "commit", lambda: "bbbbbbb")
    rows, text = run("peaks", tmp_path)
    assert [row["share"] for row in rows if row["commit"] == "bbbbbbb"] == [0.0, 0.1, 0.5, 1.0]
    assert [row["share"] for row in rows if row["commit"] == "aaaaaaa"] == [0.5, 1.0, 0.5]
    left = "measured by commit aaaaaaa, not anew yet: tiny, 64, 0.5; tiny, 64, 1.0; gone, 64, 0.5"
    assert f"- **{left}**" in text and f"\n- {left}\n" in text and "commit bbbbbbb; the part took" in text
    enough = True
    rows, text = run("peaks", tmp_path)
    assert asked == [*peaks.SHARES, *peaks.SHARES[:2], *peaks.SHARES[2:]]
    assert [(row["model"], row["share"], row["commit"]) for row in rows] == [
        ("tiny", share, "bbbbbbb") for share in peaks.SHARES
    ]
    assert "not anew yet" not in text


def test_no_time_is_left(tmp_path: Path) -> None:
    gpu.run(out=tmp_path, device=CPU, seconds=0)
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert list(results) == list(gpu.PARTS)
    assert all("".join(module.lines(results[part])) for part, (module, _) in gpu.PARTS.items())
    assert "no time" in (tmp_path / "cpu.md").read_text()
    assert gpu.unmeasured(results) > 50
    assert sum("no time was left" in line for line in gpu.summary(results)) == len(gpu.PARTS)


@pytest.mark.parametrize("largest", [0, 1, 2, 3])
def test_bracketing(largest: int) -> None:
    tried: dict[int, bool] = {}
    while (side := sizes.middle(tried)) is not None:
        assert side not in tried and 0 < side <= 192
        tried[side] = side <= largest * 64
    assert sizes.bounds(tried) == (largest * 64, None if largest == 3 else (largest + 1) * 64)
    assert sizes.known(tried) == ("192 or more" if largest == 3 else f"{largest * 64}")


def test_bracketing_stops_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_LARGEST", 1024)
    assert sizes.middle({512: True}) == 768
    assert sizes.known({512: True}) == "512 (no time for more)"
    assert sizes.known({512: True, 768: False}) == "512 (below 768; no time for more)"


_TRIAL_OF_MANY = """
import os

def trial_of_many(cases):
    for case in cases:
        if case == 3:
            raise ValueError("three")
        print("beside the rows")
        yield {"case": case, "process": os.getpid()}
        if case == 2:
            return
"""


def test_cases_share_a_process_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ends it, as one does that left something behind, and three fails."""
    (tmp_path / "many.py").write_text(_TRIAL_OF_MANY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    many = importlib.import_module("many")
    rows = list(trial.measure_each(many.trial_of_many, [0, 1, 2, 3, 4], seconds=lambda: 60.0))
    assert [row.get("case") for row in rows] == [0, 1, 2, None, 4]
    assert "ValueError: three" in rows[3]["error"]
    processes = [row["process"] for row in rows if "process" in row]
    assert processes[0] == processes[1] == processes[2] != processes[3]


def test_a_process_of_its_own_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"backend": "sdpa", "latents": 8}
    row = trial.measure(attention.trial_attention, device="nonsense", cases=[case])
    assert "nonsense" in row["error"]
    asked: dict[str, Any] = {"seconds": 1, "device": "cpu", "cases": [case]}
    assert trial.measure(attention.trial_attention, **asked)["error"] == "no time was left"
    monkeypatch.setattr(trial, "LEAST", 1)
    assert trial.measure(attention.trial_attention, **asked)["timed_out"] is True


_ASLEEP = """
import os, time

def trial_asleep(cases):
    yield {"process": os.getpid()}
    time.sleep(600)
"""
_DRIVER = """
import asleep
from benchmarks import trial

for row in trial.measure_each(asleep.trial_asleep, [0, 1], seconds=lambda: 600.0):
    print(row["process"], flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="of signals that end a process")
@pytest.mark.parametrize("ended", [signal.SIGTERM, signal.SIGKILL])
def test_a_trial_ends_with_what_started_it(tmp_path: Path, ended: signal.Signals) -> None:
    (tmp_path / "asleep.py").write_text(_ASLEEP)
    path = os.pathsep.join([str(tmp_path), str(Path(trial.__file__).parents[1])])
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    with driver:
        assert driver.stdout is not None
        process = psutil.Process(int(driver.stdout.readline()))
        driver.send_signal(ended)
    gone, alive = psutil.wait_procs([process], timeout=30)
    for one in alive:
        one.kill()
    assert gone and not alive


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.cli import app

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInputError, match="CUDA"):
        gpu.run(out=tmp_path)
    assert CliRunner().invoke(app, ["gpu", "--out", str(tmp_path)]).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="max-size"):
        gpu.run(["sizes"], tmp_path, device=CPU)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        gpu.run(["attention"], tmp_path / "file", device=CPU)
