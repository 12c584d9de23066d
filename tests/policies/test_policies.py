"""Named policies: the same picture by each, refused where it cannot run, and what --policy does to a command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import sd_lowvram
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.cli import app
from sd_lowvram.errors import BadInputError, SettingsError
from sd_lowvram.planning.as_others import CALLS, attach_own, request_by
from sd_lowvram.planning.search import make_plan
from sd_lowvram.planning.wording import Kind, select_kinds
from sd_lowvram.policies import OURS, POLICIES, check_policy
from sd_lowvram.session import anatomy_of, attachments
from sd_lowvram.units import GIB

CPU = torch.device("cpu")


def demo_pipeline() -> Any:
    pipe: Any = load_pipeline(None, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def pipe() -> Any:
    return demo_pipeline()


def picture(pipe: Any) -> torch.Tensor:
    noise = torch.Generator().manual_seed(3)
    return pipe("a red apple", width=64, height=64, num_inference_steps=2, generator=noise, output_type="pt").images


@pytest.mark.slow(8)
@pytest.mark.parametrize("name", [name for name in POLICIES if name not in CALLS])
def test_the_picture_is_the_same_by_every_policy(pipe: Any, name: str) -> None:
    plain = picture(pipe)
    settings = sd_lowvram.Settings.policy(name)
    if POLICIES[name].needs_plan:
        settings = sd_lowvram.plan(pipe, vram="1GB", width=64, height=64).settings
    with sd_lowvram.attached(pipe, settings, device="cpu"):
        found = picture(pipe)
    assert not attachments(pipe)
    assert (found - plain).norm() < 1e-5 * plain.norm()


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "ours"])
def test_a_policy_leaves_nothing_to_the_plan(pipe: Any, name: str) -> None:
    """What the search would choose from is decided, so that a policy that does not fit is refused, not mended."""
    settings = sd_lowvram.Settings.policy(name)
    plan = sd_lowvram.plan(pipe, vram="1GB", width=64, height=64, device="cpu", settings=settings)
    decided = {key: value for key, value in settings.as_dict().items() if value is not None}
    assert {key: getattr(plan.settings, key) for key in decided} == decided
    with pytest.raises(sd_lowvram.errors.BudgetError):
        sd_lowvram.plan(pipe, vram="9MB", width=256, height=256, device="cpu", settings=settings)
    sd_lowvram.plan(pipe, vram="9MB", width=256, height=256, device="cpu")


def test_what_needs_an_accelerator_is_refused_on_a_cpu() -> None:
    own = [name for name, one in POLICIES.items() if one.own]
    assert own == ["diffusers-model-offload", "diffusers-sequential", "diffusers-group"] == list(CALLS)
    for name in own:
        check_policy(name, "cuda")
        with pytest.raises(BadInputError, match=f"--policy {name} "):
            check_policy(name, "cpu")


def test_diffusers_own_calls_are_made_and_the_plan_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, called = demo_pipeline(), []
    monkeypatch.setattr(pipe, "enable_sequential_cpu_offload", lambda *, device: called.append(device), raising=False)
    plan = sd_lowvram.plan(pipe, vram="1GB", width=64, height=64, device="cpu")
    attach_own(pipe, "diffusers-sequential", plan)
    assert called == [CPU] and attachments(pipe)[-1].plan is plan
    assert picture(pipe).isfinite().all()


@pytest.mark.parametrize("name", [name for name, one in POLICIES.items() if one.knobs and not one.own])
def test_the_policies_run_on_the_modules_of_compvis(name: str) -> None:
    pytest.importorskip("ldm", reason="pip install --no-deps stable-diffusion-sdkit")
    import compvis

    unet, (latents, steps, text) = compvis.unet(), compvis.inputs(32)
    with torch.no_grad():
        plain = unet(latents, steps, context=text)
        with sd_lowvram.attached(unet, sd_lowvram.Settings.policy(name), device="cpu"):
            found = unet(latents, steps, context=text)
    assert (found - plain).norm() < 1e-5 * plain.norm()


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(SettingsError, match="'fast'"):
        sd_lowvram.Settings.policy("fast")


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, words)


@pytest.mark.slow(6)
def test_generate_runs_by_a_policy_and_knobs_go_above_it(tmp_path: Path) -> None:
    asked = ["generate", "a red apple", "--width", "64", "--height", "64", "--steps", "1", "--json", "--seed", "1"]
    done = invoke(*asked, "--policy", "basujindal", "--attention", "sdpa", "--output", str(tmp_path / "a.png"))
    assert done.exit_code == 0, done.output
    settings = json.loads(done.stdout)["plan"]["settings"]
    assert (settings["offload"], settings["guidance_in_turn"], settings["attention"]) == ("halves", True, "sdpa")
    refused = invoke(*asked, "--policy", "diffusers-group", "--output", str(tmp_path / "b.png"))
    assert refused.exit_code == 2 and "needs an accelerator" in refused.output
    assert not (tmp_path / "b.png").exists()


def test_plan_foretells_a_policy_for_a_card() -> None:
    size = ("--width", "64", "--height", "64")
    told = invoke("plan", "--policy", "diffusers-sequential", "--gpu", "rtx2070", *size, "--json")
    plan = json.loads(told.stdout)
    assert plan["settings"]["offload"] == "layer" and "enable_sequential_cpu_offload" in plan["counted"]
    weightless = invoke("plan", "--model", "sd15", "--policy", "consciencia-turbo", "--gpu", "rtx2070", *size, "--json")
    assert json.loads(weightless.stdout)["settings"]["decoder_device"] == "cpu"
    unknown = invoke("plan", "--policy", "fast")
    assert unknown.exit_code == 2 and "--policy 'fast'" in " ".join(unknown.output.split())


@pytest.mark.parametrize("name", [name for name, one in POLICIES.items() if one.pace != OURS])
def test_what_was_fitted_to_a_program_is_said_of_no_other(name: str, pipe: Any) -> None:
    source = request_by(name, anatomy_of(pipe), gpu="rtx2070").rates.source
    assert ("fitted too" in source) == (name in ("basujindal-turbo", "consciencia-turbo", "consciencia-modified"))
    assert ("measured on an H100" in source) == (name in ("diffusers-sequential", "diffusers-group"))
    assert ("no time of this program" in source) == (name in ("compvis", "basujindal", "consciencia"))


@pytest.mark.slow(12)
@pytest.mark.parametrize(("name", "step"), [("diffusers-sequential", 0.519), ("diffusers-group", 0.161)])
def test_diffusers_own_ways_take_what_was_measured_of_them(name: str, step: float) -> None:
    anatomy = meta_anatomy("sd15", torch.float16, only=("unet",))
    request = request_by(name, anatomy, gpu="h100", ram=32 * GIB, width=1024, height=1024, steps=10)
    plan = make_plan(anatomy, request, sd_lowvram.Settings.policy(name), least=False)
    (denoise,) = (stage for stage in plan.stages if stage.name == "denoise")
    assert denoise.seconds / 10 == pytest.approx(step, rel=0.05)


@pytest.mark.parametrize(
    ("name", "gpu", "longer", "loading"),
    [
        ("compvis", "rtx2070", 6.66, 0.0),
        ("compvis", "h100", None, 0.0),
        (None, "rtx2070", None, 0.0),
        (None, "rtx3060", None, 2.5),
    ],
)
def test_a_plan_says_which_picture_its_seconds_are_of(
    pipe: Any, name: str | None, gpu: str, longer: Any, loading: float
) -> None:
    anatomy = anatomy_of(pipe)
    settings = sd_lowvram.Settings.policy(name or "ours")
    request = request_by(name, anatomy, gpu=gpu, width=64, height=64, ram=GIB)
    request = dataclasses.replace(request, rates=dataclasses.replace(request.rates, loading_seconds=loading))
    (told,) = select_kinds(make_plan(anatomy, request, settings, least=False).reasons, Kind.FIRST_PICTURE)
    assert told.values == {"more_seconds": longer, "loading_seconds": loading}
    assert ("RTX 2070" in told) == (longer is not None) and ("took 2.5 s here" in told) == bool(loading)
