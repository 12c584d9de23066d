"""``sd-lowvram plan``: built-in names and files, tables and JSON, and the smallest budget when nothing fits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import families
import pytest
import tiny
import todays
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import narrow, save_single_file
from typer.testing import CliRunner

from sd_lowvram.checkpoints.architectures import build_components, write_folder
from sd_lowvram.checkpoints.inspection import DEMO
from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.cli import app
from sd_lowvram.commands import early, plan_cache
from sd_lowvram.errors import CheckpointError
from sd_lowvram.planning import search
from sd_lowvram.planning.request import Budget
from sd_lowvram.planning.wording import Kind, Reason
from sd_lowvram.tracing.fake_model import fingerprint
from sd_lowvram.units import GIB, MIB


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", *words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_folder(families.config("sd15"), "StableDiffusionPipeline", path)
    return path


def test_a_table_for_people(folder: Path) -> None:
    result = run("--model", str(folder), "--vram", "500MB", "--ram", "2GB", "--gpu", "RTX 2070", "--vram", "1GB")
    assert result.exit_code == 0, result.output
    for word in ("text", "denoise", "decode", "smallest budget", "allocated", "RTX 2070"):
        assert word in result.output
    assert re.match(r"fits: \d+ MiB of 1 GiB, [\d.]+ s\n", result.stdout)


def test_stages_that_two_encoders_run_are_told_apart(tmp_path: Path) -> None:
    write_folder(families.config("sdxl"), "StableDiffusionXLPipeline", tmp_path)
    asked = "--model", str(tmp_path), "--vram", "1GB", "--ram", "2GB", "--gpu", "rtx2070"
    shown = run(*asked).stdout
    assert [shown.count(f" {name} \N{BOX DRAWINGS LIGHT VERTICAL}") for name in ("text   ", "text 2 ")] == [1, 1], shown
    stages = json.loads(run(*asked, "--json").stdout)["stages"]
    assert [stage["name"] for stage in stages].count("text") == 2


def test_json_for_machines(folder: Path) -> None:
    result = run("--model", str(folder), "--vram", "1GB", "--json", "--width", "128", "--attention", "sliced")
    plan = json.loads(result.stdout)
    assert plan["fits"] and plan["request"]["width"] == 128
    assert plan["settings"]["attention"] == "sliced"
    assert plan["minimum_peak_bytes"] <= plan["predicted"]["peak_bytes"]
    assert {stage["name"] for stage in plan["stages"]} == {"text", "denoise", "decode"}


def test_an_impossible_budget_names_the_smallest_that_works(folder: Path) -> None:
    result = run("--model", str(folder), "--vram", "0.5MB", "--json")
    assert result.exit_code == 3
    assert "needs at least" in result.output and not result.stdout
    result = run("--model", str(folder), "--vram", "0.5MB")
    assert (result.exit_code, result.stdout) == (3, "") and result.stderr.startswith("sd-lowvram: does not fit: ")


@pytest.mark.slow(12)
def test_components_that_wait_in_their_file_need_little_memory() -> None:
    """Convolutions' weights of SD1.5's 2.0 GiB come into memory, channels last; of the rest what there is
    no memory for stays in the file, and is read when it is copied."""
    asked = "--model", "sd15", "--vram", "4GB", "--gpu", "rtx2070", "--policy", "diffusers-default", "--json"
    placed = "--offload", "component", "--channels-last"
    mapped, pinned = (run(*asked, *placed, "--ram", ram) for ram in ("1.5GB", "3GB"))
    assert mapped.exit_code == 0, mapped.output
    plans = [json.loads(told.stdout) for told in (mapped, pinned)]
    assert [plan["predicted"]["host_bytes"] > 1.5 * GIB for plan in plans] == [False, True]
    assert plans[0]["minimum_ram_bytes"] == plans[1]["minimum_ram_bytes"] < 1.5 * GIB
    assert plans[0]["predicted"]["seconds"] > plans[1]["predicted"]["seconds"]


@pytest.mark.slow(10)
def test_any_pipeline_of_diffusers_is_planned_from_its_folder(tmp_path: Path) -> None:
    sizes = {"sample_size": 32, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
    sizes |= {"cross_attention_dim": 32, "caption_channels": 64, "out_channels": 8, "in_channels": 4}
    parts = {"transformer": diffusers.PixArtTransformer2DModel(**sizes), "scheduler": diffusers.DDIMScheduler()}
    pipe = diffusers.PixArtSigmaPipeline(**parts, vae=todays.vae(4), text_encoder=todays.t5(), tokenizer=None)
    todays.save(pipe, tmp_path / "whole")
    asked = ("--width", "256", "--height", "256", "--steps", "4", "--vram", "1GB", "--ram", "2GB", "--gpu", "rtx2070")
    named = "--pipeline", "PixArtSigmaPipeline", "--model", str(tmp_path / "whole")
    result = run(*named, *asked, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    stages = {stage["name"]: stage for stage in answer["stages"]}
    assert stages.keys() == {"text", "denoise", "decode"} and not answer["at_first_call"]
    assert all(stage["activation_bytes"] > 0 for stage in stages.values())
    todays.lumina2().save_pretrained(tmp_path / "part")
    shown = run("--pipeline", "Lumina2Pipeline", "--model", str(tmp_path / "part"), *asked).stdout
    assert shown.startswith("planned at first call, within 1 GiB") and "argument call" in shown.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--pipeline", "LTXPipeline", "--model", "sd15"), "LTXPipeline needs a diffusers folder"),
        (("--pipeline", "NoPipeline", "--model", str(DEMO)), "NoPipeline is known neither"),
        (("--pipeline", "FluxPipeline", "--model", str(DEMO)), "give a folder of that pipeline"),
        (("--model", "sd99"), "sd99"),
        (("--gpu", "voodoo"), "rtx2070"),
        (("--model", "sd15", "--width", "100"), "--width 100 .*8: 96 and 104"),
        (("--vram", "banana"), "banana"),
        (("--gpu", "8GB,20TFLOPS"), "8GB,20TFLOPS,448GB/s"),
    ],
)
def test_bad_input(words: tuple[str, ...], says: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert re.search(says, result.output)


@pytest.mark.parametrize("words", [("plan",), ("unet", "analyse")])
def test_an_unknown_card_is_refused_before_torch_is_imported(words: tuple[str, ...]) -> None:
    if words[0] == "unet" and not Path("sd_lowvram/unets").exists():
        pytest.skip("smaller UNets are not here")
    code = "import sys; from sd_lowvram.cli import app\ntry: app(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, *words, "--gpu", "rtx3075"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (2, "False\n")
    assert "rtx3070" in told.stderr and "8GB,20TFLOPS,448GB/s" in told.stderr


def test_built_in_names_need_no_weights() -> None:
    anatomy = meta_anatomy("sdxl", torch.float16)
    assert len([site for site in anatomy.attentions if site.name.startswith("unet")]) == tiny.ATTENTIONS["sdxl"]
    assert all(tensor.is_meta for tensor in anatomy.components["unet"].parameters())


def test_a_checkpoint_is_planned_from_its_header(tmp_path: Path) -> None:
    save_single_file(build_components(narrow("sd15", vocabulary=600), torch.float16), tmp_path / "model.safetensors")
    unet = meta_anatomy(str(tmp_path / "model.safetensors"), torch.float16).components["unet"]
    full = build_components("sd15", dtype=torch.float16, device="meta", only=("unet",))["unet"]
    assert sum(p.numel() for p in unet.parameters()) == sum(p.numel() for p in full.parameters()) > 800 * MIB
    (tmp_path / "model.ckpt").touch()
    with pytest.raises(CheckpointError, match="pickle"):
        meta_anatomy(str(tmp_path / "model.ckpt"), torch.float16)
    with pytest.raises(CheckpointError, match="not a diffusers folder"):
        meta_anatomy(str(tmp_path), torch.float16)


@pytest.fixture
def free(tmp_path: Path, monkeypatch: Any) -> Any:
    """Sets how many bytes are free on a machine without a GPU, which remembers nothing yet."""
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(early.sys, "platform", "linux")
    monkeypatch.setattr(early, "_GPUS", ())
    return lambda size: monkeypatch.setattr("sd_lowvram.devices.info.available_ram", lambda: size)


def planned(folder: Path, *words: str) -> dict[str, Any]:
    result = run("--model", str(folder), "--json", *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_plan_is_told_again_while_as_much_is_free_as_it_needs(folder: Path, free: Any, monkeypatch: Any) -> None:
    free(9 * GIB + 17)
    first = planned(folder)
    monkeypatch.setattr("sd_lowvram.planning.search.make_plan", lambda *_: pytest.fail("planned again"))
    for size in (9 * GIB, 5 * GIB, 40 * GIB + 1):
        free(size)
        again = planned(folder)
        told = size // (GIB // 2) * (GIB // 2)
        assert again["request"]["vram"] == again["request"]["ram"] == told
        assert again["reasons"][0].endswith(f"of {told / GIB:g} GiB, most of it in {first['predicted']['stage']}")
        assert again["reason_values"][0]["values"]["vram"] == told
        but = {"request": 0, "reasons": 0, "reason_values": 0}
        assert again | but == first | but
    with pytest.raises(pytest.fail.Exception):
        planned(folder, "--width", "128")


def test_every_reason_of_a_cached_plan_has_the_budget_of_now(free: Any) -> None:
    asked = {"model": None, "vram": None, "ram": "8GB", "gpu": None}
    budgets = {"vram": 4 * GIB, "ram": 8 * GIB}
    reason = Reason(Kind.RECORDED, needed_bytes=GIB, vram=4 * GIB)
    answer = {"request": budgets, "reasons": [str(reason)], "reason_values": [reason.as_dict()]}
    alike = {"vram": (GIB, 99 * GIB), "ram": (GIB, 99 * GIB)}
    for size, left in ((4, "3 GiB left"), (6, "5 GiB left")):
        free(size * GIB)
        (told,) = plan_cache.cached_answer(asked, lambda _: (answer, alike))["reasons"]
        assert told.startswith(left)


@pytest.mark.slow(10)
def test_what_is_told_again_is_what_would_be_planned(folder: Path, free: Any, monkeypatch: Any) -> None:
    """Budgets from the least to plenty, each with and without what is remembered of those before."""
    monkeypatch.setattr(plan_cache, "_STEP", 1)
    free(9 * GIB)
    plenty = planned(folder)
    least, most = plenty["minimum_vram_bytes"], 2 * plenty["predicted"]["peak_bytes"]
    budgets = [least + (most - least) * part // 12 for part in (12, 1, 6, 2, 5)]
    made: list[int] = []
    make = search.make_plan
    monkeypatch.setattr(search, "make_plan", lambda *given: (made.append(1), make(*given))[1])
    for size in budgets:
        free(size)
        kept = planned(folder, "--ram", "1GB")
        with monkeypatch.context() as forgetful:
            forgetful.setattr(plan_cache, "_place", lambda _: None)
            assert planned(folder, "--ram", "1GB") == kept
    assert len(budgets) < len(made) < 2 * len(budgets)


@pytest.mark.slow(10)
def test_a_plan_is_made_anew_when_its_model_or_its_machine_is_another(
    folder: Path, free: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    free(9 * GIB)
    made: list[int] = []
    make = search.make_plan
    monkeypatch.setattr(search, "make_plan", lambda *given: (made.append(1), make(*given))[1])
    changes = (
        lambda: None,
        lambda: os.utime(folder / "unet" / "config.json"),
        (tmp_path / "cache" / "a-measurement.json").touch,
        lambda: monkeypatch.setenv("OMP_NUM_THREADS", "3"),
    )
    for number, change in enumerate(changes, 1):
        change()
        for _ in range(2):
            planned(folder, "--policy", "diffusers-default")
        assert len(made) == number


def test_plans_for_a_gpu_ask_what_is_free_there(folder: Path, free: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """torch alone reports it; where it has no GPU after all, what the host has free counts."""
    monkeypatch.setattr(early, "_GPUS", (str(tmp_path),))
    free(9 * GIB)
    first = planned(folder)
    free(1 * MIB)
    assert run("--model", str(folder)).exit_code == 3
    free(8 * GIB)
    monkeypatch.setattr("sd_lowvram.planning.search.make_plan", lambda *_: pytest.fail("planned again"))
    assert planned(folder)["settings"] == first["settings"]


@given(st.integers(1, 60), st.lists(st.integers(0, 80)))
def test_a_budget_tells_which_others_are_answered_alike(size: int, asked: list[int]) -> None:
    def answers(budget: Budget) -> list[bool]:
        return [budget.holds(needed) for needed in asked]

    budget = Budget(size)
    known = answers(budget)
    least, most = budget.alike
    assert least <= size <= most
    alike = [other for other in range(90) if answers(Budget(other)) == known]
    assert alike == [other for other in range(90) if least <= other <= most]


@pytest.mark.slow(8)
def test_traces_are_known_to_other_processes() -> None:
    """What is remembered must not hang on an order that chance gives to a process."""
    code = (
        "import torch; from sd_lowvram.checkpoints.architectures import build_components;"
        "from sd_lowvram.tracing.fake_model import fingerprint;"
        "print(*[fingerprint(part) for part in build_components('sd15', torch.float16, 'meta').values()])"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    here = [fingerprint(part) for part in build_components("sd15", torch.float16, "meta").values()]
    assert told.stdout.split() == here and len(here) == 3
