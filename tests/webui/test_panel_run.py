"""One generation in a stand-in for the WebUI, with CompVis' real modules: on, off, refused, failed, another model."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import json
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import ImageFont
from small import narrow, save_single_file

import webui_ext
from sd_lowvram import Settings
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.devices.performance import PROFILES
from sd_lowvram.errors import BudgetError, speak_plainly
from sd_lowvram.patches import set_patch
from sd_lowvram.planning.plan import Plan, Predicted, StagePlan
from sd_lowvram.planning.request import Request
from sd_lowvram.saved_latents.file import read_saved
from sd_lowvram.saved_latents.hosted import read_hosted
from sd_lowvram.settings import Fidelity
from sd_lowvram.weights import weight_bytes
from webui_ext.arguments import arguments

compvis = pytest.importorskip("compvis")
pytest.importorskip("ldm", reason="pip install --no-deps stable-diffusion-sdkit")

SETTINGS = Settings(attention="sliced", attention_mib=1, residual_strips=2, vae_tiles="exact", offload="none")
HOSTLESS = ("webui_ext.arguments", "webui_ext.estimate", "webui_ext.infotext")


class HTTPException(Exception):
    def __init__(self, status_code: int, detail: str) -> None:
        super().__init__(detail)
        self.status_code, self.detail = status_code, detail


def _forget_ours() -> None:
    """They hold on to the host that they were imported in, and the package to them."""
    for name in [name for name in sys.modules if name.startswith("webui_ext.") and name not in HOSTLESS]:
        del sys.modules[name]
        vars(webui_ext).pop(name.rpartition(".")[2], None)


def module(name: str, **held: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(held)
    return made


def processing() -> ModuleType:
    """The host's, as far as it calls scripts, one after the other; what a callback raises is only logged."""

    def process_images(p: Any) -> Any:
        p.scripts.before_process(p)
        return made.process_images_inner(p)

    def process_images_inner(p: Any) -> Any:
        p.scripts.process(p)
        p.init()
        p.sample()
        p.scripts.postprocess_image(p)
        p.scripts.postprocess(p, None)
        return "pictures"

    told = lambda p, *_, index, **__: f"{p.prompts[index]}, told"  # noqa: E731
    made = module("modules.processing", create_infotext=told, process_images=process_images)
    made.process_images_inner = process_images_inner  # type: ignore[attr-defined]
    return made


class Scripts:
    """The host's runner of always-on scripts."""

    def __init__(self, *scripts: Any) -> None:
        self.scripts, self.failed = scripts, []

    def __getattr__(self, callback: str) -> Any:
        def call(p: Any, *given: Any) -> None:
            for one in self.scripts:
                arguments = p.script_args if one.__class__.__name__ == "LowVRAMScript" else ()
                try:
                    getattr(one, callback, lambda *_: None)(p, *given, *arguments)
                except Exception as error:
                    self.failed.append(error)

        return call


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The parts of the WebUI that a generation touches; its model is a narrow SD1.5."""
    opts = SimpleNamespace(data={}, upcast_attn=False)
    shared = module("modules.shared", opts=opts, sd_model=compvis.LatentDiffusion(), loaded_hypernetworks=[])
    scripts = module("modules.scripts", Script=type("Script", (), {}), AlwaysVisible=object(), scripts_data=[])
    parts = {
        "shared": shared,
        "scripts": scripts,
        "devices": module("modules.devices", device=torch.device("cpu")),
        "ui_components": module("modules.ui_components", InputAccordion=None),
        "sd_models": module("modules.sd_models", model_data=SimpleNamespace(sd_model=None)),
        "processing": processing(),
    }
    monkeypatch.setitem(sys.modules, "modules", module("modules", **parts))
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, f"modules.{name}", part)
    monkeypatch.setitem(sys.modules, "gradio", module("gradio"))
    monkeypatch.setitem(sys.modules, "fastapi", module("fastapi", HTTPException=HTTPException))
    _forget_ours()
    yield shared
    _forget_ours()


@pytest.fixture
def script(host: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our script; its plans are always ``SETTINGS``."""
    monkeypatch.setattr(importlib.import_module("webui_ext.run"), "plan_for", foretold)
    made = importlib.import_module("webui_ext.script").LowVRAMScript()
    made.is_img2img = False
    return made


def foretold(model: Any, chosen: Any, picture: Any) -> Any:
    if chosen["vram"] == "1MB":
        raise BudgetError("1 MiB cannot hold it", needed_bytes=1 << 30, stage="denoise")
    request = Request(
        picture.width, picture.height, picture.batch, 1 << 33, 1 << 33, torch.device("cpu"), PROFILES["rtx2070"]
    )
    sizes = {"peak_bytes": 1 << 30, "reserved_bytes": 1 << 30, "weights_bytes": 1 << 29, "largest_bytes": 1 << 20}
    sizes |= {"host_bytes": 0, "held_bytes": 1 << 30}
    parts = (("denoise", "unet", 5), ("decode", "vae", 7))
    stages = tuple(
        StagePlan(name, component, activation_bytes=activations, seconds=1.5, choice={}, **sizes)
        for name, component, activations in parts
    )
    predicted = Predicted(1 << 30, 1 << 30, 0, 1 << 29, 1 << 29, 0, 1 << 20, 3.0, "denoise")
    return Plan(SETTINGS, request, True, predicted, stages, 0, 0, 0, Fidelity.ROUNDING, ())


def generation(**more: Any) -> Any:
    told: list[str] = []
    asked = {"width": 64, "height": 64, "batch_size": 1, "steps": 2, "cfg_scale": 5.0, **more}
    asked |= {"extra_generation_params": {}, "sampler": SimpleNamespace()}
    return SimpleNamespace(init=lambda: "begun", comment=told.append, told=told, **asked)


def state(model: Any) -> list[dict[str, Any]]:
    return [dict(vars(one)) for one in model.modules()]


def denoised(model: Any) -> torch.Tensor:
    latents, timesteps, text = compvis.inputs(32, (8, 8))
    with torch.no_grad():
        return model.model.diffusion_model(latents, timesteps, context=text)


def test_on_for_one_generation_and_off_without_a_trace(host: Any, script: Any, capsys: Any) -> None:
    before, plain = state(host.sd_model), denoised(host.sd_model)
    p = generation()
    script.process(p, {"enabled": True, "vram": "4GB"})
    assert "attention 10" in capsys.readouterr().out
    assert p.extra_generation_params == {"Low VRAM": "vram 4GB"} and p.init() == "begun"
    during = denoised(host.sd_model)
    assert not torch.equal(during, plain) and torch.allclose(during, plain, rtol=1e-3, atol=1e-5)
    script.postprocess(p, None)
    assert state(host.sd_model) == before and torch.equal(denoised(host.sd_model), plain)


def test_disabled_touches_nothing(host: Any, script: Any) -> None:
    before, p = state(host.sd_model), generation()
    script.before_process(p, False)
    script.process(p, *(one.default for one in arguments()))
    assert state(host.sd_model) == before and not p.extra_generation_params


def test_what_a_failed_generation_left_goes_before_the_next(host: Any, script: Any) -> None:
    before = state(host.sd_model)
    script.process(generation(), {"enabled": True})  # the host never calls postprocess after an error
    assert state(host.sd_model) != before
    script.before_process(generation(), False)
    assert state(host.sd_model) == before


WRONG: list[tuple[Any, str]] = [
    ({"enabled": True, "vrom": 1}, "'vram'"),
    ({"enabled": True, "vram": "1MB"}, "cannot hold"),
    ([True], "one flat list"),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG)
def test_refused_before_the_first_step(host: Any, script: Any, wrong: Any, says: str) -> None:
    before, p = state(host.sd_model), generation()
    script.process(p, wrong)
    with pytest.raises(HTTPException) as refused:
        p.init()
    assert refused.value.status_code == 422 and says in str(refused.value)
    assert state(host.sd_model) == before


def test_a_fault_of_ours_ends_the_generation(host: Any, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host only logs what a callback raises, and would make the picture without us."""
    monkeypatch.setattr(importlib.import_module("webui_ext.run"), "plan_for", lambda *given: 1 / 0)
    before, p = state(host.sd_model), generation()
    script.process(p, {"enabled": True})
    with pytest.raises(ZeroDivisionError):
        p.init()
    assert state(host.sd_model) == before


def test_a_hypernetwork_is_refused(host: Any, script: Any) -> None:
    p = generation()
    script.process(p, {"enabled": True})
    host.loaded_hypernetworks.append("one")
    with pytest.raises(HTTPException, match="a hypernetwork changes what attention sees"):
        denoised(host.sd_model)
    assert "a hypernetwork in this generation was refused" in p.told[0]
    script.postprocess(p, None)


def drawing(host: Any, script: Any, *others: Any, **asked: Any) -> Any:
    """A generation that really encodes, where it starts from a picture, denoises and decodes."""
    p = generation(**{"scripts": Scripts(*others, script), "iteration": 0, **asked})
    model, events = host.sd_model, asked.get("events", [])
    size = p.height // 8, p.width // 8
    noise = torch.Generator().manual_seed(1)

    def init() -> None:
        if hasattr(p, "init_images"):
            with torch.no_grad():
                model.first_stage_model.encode(torch.randn(1, 3, p.height, p.width, generator=noise))

    def sample() -> None:
        latents, timesteps, text = compvis.inputs(32, size)
        p.scripts.process_before_every_sampling(p)
        with torch.no_grad():
            model.model.diffusion_model(latents, timesteps, context=text)
            model.first_stage_model.decode(torch.randn(1, 4, *size, generator=noise))
        events.append(f"{p.width} drawn")

    p.init, p.sample = init, sample
    p.script_args = asked.get("script_args", ({"enabled": True, "vram": "4GB"},))
    return p


class Detailer:
    """Draws within a generation, in the order of the extension that is used most for it."""

    def __init__(self, host: Any, events: list[Any], width: int, **inner: Any) -> None:
        self.host, self.events, self.width, self.inner = host, events, width, inner

    def postprocess_image(self, p: Any) -> None:
        processing = sys.modules["modules.processing"]
        p.scripts.postprocess(copy.copy(p), None)
        inside = {"width": self.width, "height": self.width, "events": self.events, "init_images": [None], **self.inner}
        self.events.append("inside")
        processing.process_images(drawing(self.host, None, **{"scripts": Scripts(), **inside}))
        self.events.append("outside")
        p.scripts.before_process(copy.copy(p))
        p.scripts.process(copy.copy(p))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, host: Any) -> list[Any]:
    """What is planned, and drawn, in its order; plans of a size that ``refused`` has are refused."""
    events: list[Any] = []

    def plan_for(model: Any, chosen: Any, picture: Any) -> Any:
        events.append((picture.width, picture.encodes))
        return foretold(
            model, {"vram": "1MB"} if (picture.width, picture.encodes) in REFUSED_INSIDE else chosen, picture
        )

    monkeypatch.setattr(importlib.import_module("webui_ext.run"), "plan_for", plan_for)
    return events


REFUSED_INSIDE: list[tuple[int, bool]] = []


@pytest.mark.parametrize("filtered", [True, False], ids=["filtered scripts", "all scripts"])
@pytest.mark.parametrize("width", [64, 128])
def test_what_another_extension_draws_within_a_generation_has_its_hooks_and_budget(
    host: Any, script: Any, planned: list[Any], width: int, filtered: bool
) -> None:
    """It is planned before its first layer, of its own size; the next batch of the generation is as it was planned."""
    before, layers = state(host.sd_model), []
    hook = host.sd_model.first_stage_model.encoder.conv_in.register_forward_hook(lambda *_: layers.append(planned[-1]))
    inner = {} if filtered else {"scripts": Scripts(script), "script_args": ({"enabled": True, "vram": "4GB"},)}
    p = drawing(host, script, Detailer(host, planned, width, **inner), events=planned)
    processing = sys.modules["modules.processing"]
    plain = processing.process_images_inner  # type: ignore[attr-defined]
    assert processing.process_images(p) == "pictures" and not p.scripts.failed  # type: ignore[attr-defined]
    assert planned == [(64, False), "64 drawn", "inside", (width, True), f"{width} drawn", "outside"]
    assert layers and set(layers) == {(width, True)}
    hook.remove()
    assert state(host.sd_model) == before and processing.process_images_inner is plain  # type: ignore[attr-defined]


def test_what_does_not_fit_within_a_generation_is_left_out_and_told(
    host: Any, script: Any, planned: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The generation's own picture comes, its latents are there until then, and a second batch is within the budget."""
    monkeypatch.setattr(sys.modules[__name__], "REFUSED_INSIDE", [(128, True)])
    host.sd_model.sd_checkpoint_info, host.sd_model.scale_factor = SimpleNamespace(filename="/models/a"), 0.18215
    before, kept = state(host.sd_model), []

    class Watch:
        def postprocess_image(self, p: Any) -> None:
            kept.append([*tmp_path.iterdir()])
            script.process_before_every_sampling(p, x=torch.zeros(1, 4, 8, 8))
            kept.append(state(host.sd_model) != before)

    asked = {
        "outpath_samples": str(tmp_path),
        "prompts": ["a"],
        "negative_prompts": [""],
        "seeds": [1],
        "subseeds": [1],
    }
    p = drawing(host, script, Detailer(host, planned, 128), Watch(), events=planned, **asked)
    p.script_args = ({"enabled": True, "vram": "4GB", "save_latents": "until decoded"},)
    drawn = p.sample
    p.sample = lambda: (drawn(), script.post_sample(p, SimpleNamespace(samples=torch.zeros(1, 4, 8, 8))))
    assert sys.modules["modules.processing"].process_images(p) == "pictures"  # type: ignore[attr-defined]
    [refused] = p.scripts.failed
    assert refused.status_code == 422 and "1 MiB" in str(refused)
    (told,) = p.told
    assert told.startswith("sd-lowvram: 128x128 ") and told.endswith(str(refused))
    assert p.extra_generation_params["Low VRAM refused"] == "128x128"
    assert "128 drawn" not in planned and len(kept[0]) == 1 and kept[1]
    assert not [*tmp_path.iterdir()] and state(host.sd_model) == before


@pytest.mark.parametrize("fails", ["sample", "init"])
def test_a_run_of_the_host_that_raises_leaves_nothing_on_the_model(host: Any, script: Any, fails: str) -> None:
    before, processing = state(host.sd_model), sys.modules["modules.processing"]
    plain = processing.process_images_inner  # type: ignore[attr-defined]
    p = drawing(host, script)
    setattr(p, fails, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        processing.process_images(p)  # type: ignore[attr-defined]
    assert state(host.sd_model) == before and processing.process_images_inner is plain  # type: ignore[attr-defined]


def test_another_model_in_between_is_followed(host: Any, script: Any) -> None:
    first, p = host.sd_model, generation()
    before = state(first)
    script.process(p, {"enabled": True})
    host.sd_model = compvis.LatentDiffusion()
    script.process_before_every_sampling(p, x=torch.zeros(1, 4, 8, 8))
    assert state(first) == before
    assert any("forward" in held for held in state(host.sd_model))
    script.postprocess(p, None)


def test_a_second_pass_has_steps_of_its_own(host: Any, script: Any) -> None:
    """Also where its size was planned before, when the host encoded the enlarged picture."""
    run, p = importlib.import_module("webui_ext.run"), generation(steps=4)
    script.process(p, {"enabled": True})
    run.follow(p, host.sd_model, (1, 4, 16, 16), 2)
    assert (run._running[-1].picture.width, run._running[-1].picture.steps) == (128, 4)
    p.is_hr_pass, p.hr_second_pass_steps = True, 3
    script.process_before_every_sampling(p, x=torch.zeros(1, 4, 16, 16))
    assert run._running[-1].picture.steps == 3
    script.postprocess(p, None)


def test_grid_values_come_above_the_panels(host: Any, script: Any, capsys: Any) -> None:
    p = generation(sd_lowvram_axes={"enabled": True, "attention": "sliced"})
    script.process(p, False)
    assert p.extra_generation_params == {"Low VRAM": "attention sliced"}
    script.postprocess(p, None)


def test_forge_is_asked_for_less_and_keeps_its_weights(host: Any, script: Any) -> None:
    shell = compvis.LatentDiffusion()
    base = SimpleNamespace(diffusion_model=shell.model.diffusion_model, memory_required=lambda shape: 1e9)
    vae = SimpleNamespace(first_stage_model=shell.first_stage_model, memory_used_decode=lambda shape, dtype: 3)
    host.sd_model = SimpleNamespace(forge_objects=SimpleNamespace(unet=SimpleNamespace(model=base), vae=vae))
    p = generation()
    script.process(p, {"enabled": True, "weights_mib": 100})
    assert (base.memory_required((1, 4, 8, 8)), vae.memory_used_decode((1,), None)) == (5, 3)
    assert p.told and "moves the model itself" in p.told[0]
    script.postprocess(p, None)
    assert base.memory_required((1, 4, 8, 8)) == 1e9


@pytest.mark.parametrize(
    ("host_kind", "scale", "prompts", "options", "rows"),
    [
        ("a1111", 5.0, ["a cube"], {}, 2),
        ("a1111", 1.0, ["a cube"], {}, 2),
        ("a1111", 1.0, ["a cube", "a cube AND a BAND"], {}, 3),
        ("a1111", 5.0, ["a cube AND a ball"], {"batch_cond_uncond": False}, 1),
        ("a1111", 5.0, ["a cube"], {"skip_early_cond": 1.0}, 1),
        ("forge", 1.0, ["a cube"], {}, 1),
        ("forge", 1.0, ["a cube AND a ball"], {}, 2),
        ("forge", 5.0, ["a cube"], {}, 2),
    ],
)
def test_rows_of_the_denoiser_are_those_that_the_host_runs(
    host: Any, host_kind: str, scale: float, prompts: list[str], options: dict[str, Any], rows: int
) -> None:
    vars(host.opts).update(options)
    model = compvis.LatentDiffusion() if host_kind == "a1111" else SimpleNamespace(forge_objects=SimpleNamespace())
    passes = importlib.import_module("webui_ext.picture").passes_of
    assert passes(generation(cfg_scale=scale, all_prompts=prompts), model) == rows


@pytest.mark.parametrize(("strength", "steps"), [(0.75, 16), (1.0, 20), (0.0, 1), (0.1, 3)])
def test_steps_are_those_that_run(host: Any, strength: float, steps: int) -> None:
    picture, model = importlib.import_module("webui_ext.picture"), compvis.LatentDiffusion()
    p = generation(steps=20, denoising_strength=strength)
    assert picture.requested_picture(p, model).steps == 20
    p.init_images = [None]
    assert picture.requested_picture(p, model).steps == steps
    host.opts.img2img_fix_steps = True
    assert picture.requested_picture(p, model).steps == 20


def test_the_line_counts_the_steps_of_both_passes(host: Any) -> None:
    line, model = importlib.import_module("webui_ext.line"), compvis.LatentDiffusion()
    asked = {"width": 64, "height": 64, "batch_size": 1, "steps": 20, "cfg_scale": 5, "denoising_strength": 0.75}
    assert [one.steps for one in line._pictures(asked, model, True)] == [16]
    hires = {"hr": True, "hr_scale": 2, "hr_resize_x": 0, "hr_resize_y": 0, "hires_steps": 7}
    assert [one.steps for one in line._pictures(asked | hires, model, False)] == [20, 7]
    assert [one.steps for one in line._pictures(asked | hires | {"hires_steps": 0}, model, False)] == [20, 20]


def test_a_knob_says_which_of_its_values_change_the_picture() -> None:
    told = {one.name: one.help for one in arguments()}
    assert "; all but fp32: another picture" in told["precision"]
    assert "fp8, int8" in told["weight_storage"] and "another picture" not in told["attention"]


@pytest.mark.parametrize("served", [False, True])
def test_a_webui_without_a_call_before_sampling_is_refused_in_a_sentence(
    host: Any, monkeypatch: Any, capsys: Any, served: bool
) -> None:
    """SD.Next has none; nothing of ours is registered there."""
    registered: list[bool] = []
    monkeypatch.setattr(importlib.import_module("webui_ext"), "register", lambda: registered.append(True))
    kind = sys.modules["modules.scripts"].Script  # type: ignore[attr-defined]
    if served:
        monkeypatch.setattr(kind, "process_before_every_sampling", None, raising=False)
    found = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "sd_lowvram_webui.py"))
    assert ("LowVRAMScript" in found) == bool(registered) == served
    assert ("the panel is not added" in capsys.readouterr().out) != served


@pytest.mark.parametrize("forge", [False, True])
@pytest.mark.parametrize("flag", ["", "medvram", "lowvram"])
def test_knobs_of_weights_are_left_out_where_the_host_moves_them(
    host: Any, monkeypatch: Any, forge: bool, flag: str
) -> None:
    ours = importlib.import_module("webui_ext.host")
    host.cmd_opts = SimpleNamespace(**({flag: True} if flag else {}))
    if forge:
        monkeypatch.setitem(sys.modules, "modules_forge", module("modules_forge"))
    assert bool(ours.without_effect()) == (forge or bool(flag))
    assert ours.without_effect() <= {one.name for one in arguments()}


def test_frames_are_planned_as_they_come(host: Any, script: Any, monkeypatch: Any) -> None:
    """Latents of Wan and Qwen-Image in Forge Neo have five dimensions."""
    planned: list[Any] = []
    run = importlib.import_module("webui_ext.run")
    monkeypatch.setattr(run, "plan_for", lambda *asked: (planned.append(asked[-1]), foretold(*asked))[1])
    p = generation()
    script.before_process(p, {"enabled": True, "vram": "16GB"})
    script.process(p, {"enabled": True, "vram": "16GB"})
    script.process_before_every_sampling(p, {"enabled": True, "vram": "16GB"}, x=torch.zeros(1, 4, 3, 8, 8))
    assert [(one.width, one.height, one.batch, one.frames) for one in planned] == [(64, 64, 1, 1), (64, 64, 1, 3)]


def test_a_model_that_edits_pictures_guides_three_ways(host: Any) -> None:
    passes, model = importlib.import_module("webui_ext.picture").passes_of, compvis.LatentDiffusion()
    model.cond_stage_key = "edit"
    assert [passes(generation(image_cfg_scale=scale), model) for scale in (1.5, 1.0, None)] == [3, 2, 2]


def test_sides_are_planned_as_the_host_makes_them(host: Any, script: Any, capsys: Any) -> None:
    script.process(generation(width=70, height=63), {"enabled": True})
    assert "64x56, batch 1" in capsys.readouterr().out  # its latents are 8 by 7
    script.process(generation(width=70, height=63, init_images=[None]), {"enabled": True})
    assert "72x64, batch 1" in capsys.readouterr().out  # the picture is encoded as it is
    script.postprocess(generation(), None)


def test_more_rows_than_planned_are_planned_anew_and_told(host: Any, script: Any, capsys: Any) -> None:
    p = generation()
    script.process(p, {"enabled": True})
    latents, timesteps, text = compvis.inputs(32, (8, 8))
    rows = [torch.cat([one] * 2)[:3] for one in (latents, timesteps, text)]
    with torch.no_grad():
        host.sd_model.model.diffusion_model(rows[0], rows[1], context=rows[2])
    assert capsys.readouterr().out.count("[sd-lowvram]") == 2
    script.postprocess(p, None)


def test_a_card_that_is_full_after_all_gets_a_leaner_plan(
    host: Any, script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked: list[dict[str, Any]] = []

    def planned(model: Any, chosen: Any, picture: Any) -> Any:
        asked.append(dict(chosen))
        plan, less = foretold(model, chosen, picture), len(asked) - 1
        predicted = dataclasses.replace(plan.predicted, reserved_bytes=plan.predicted.reserved_bytes - less)
        return dataclasses.replace(plan, predicted=predicted)

    times = iter(range(2))

    def full(*_: Any) -> None:
        if next(times, None) is not None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(importlib.import_module("webui_ext.run"), "plan_for", planned)
    before, p = state(host.sd_model), generation()
    script.process(p, {"enabled": True, "vram": "4GB", "attention": "sliced"})
    wanted = denoised(host.sd_model)
    hook = host.sd_model.model.diffusion_model.middle_block.register_forward_pre_hook(full)
    assert torch.equal(denoised(host.sd_model), wanted)
    hook.remove()
    assert {one["vram"] for one in asked[1:]} == {f"{(1 << 30) - 1} b"}
    assert {one["attention"] for one in asked} == {"sliced"}  # and what the plan had chosen besides
    assert [one["park_skips"] for one in asked[:3]] == ["auto", "off", "auto"]
    told = capsys.readouterr().out
    assert len(re.findall(r"\[sd-lowvram\] unet .* 1 GiB", told)) >= 2
    script.postprocess_batch(p, None, batch_number=0)
    assert p.extra_generation_params["Low VRAM ran out"] == "cache emptied + smaller strips"
    script.postprocess(p, None)
    assert state(host.sd_model) == before


def checkpoint(name: str) -> Any:
    return SimpleNamespace(filename=f"{name}.safetensors", title=name)


@pytest.fixture
def switched(host: Any) -> Any:
    """The host's own loading of another checkpoint in the midst of a generation, as a refiner asks for it."""
    states: list[Any] = []

    def reload_model_weights(sd_model: Any = None, info: Any = None) -> None:
        if info.filename != host.sd_model.sd_checkpoint_info.filename:
            states.append(state(host.sd_model))
            host.sd_model = compvis.LatentDiffusion()
            host.sd_model.sd_checkpoint_info = info

    host.sd_model.sd_checkpoint_info = checkpoint("base")
    models = sys.modules["modules.sd_models"]
    models.reload_model_weights = reload_model_weights  # type: ignore[attr-defined]
    return SimpleNamespace(models=models, states=states, reload=reload_model_weights)


def test_a_refiner_is_planned_and_attached_at_the_switch(host: Any, script: Any, switched: Any, capsys: Any) -> None:
    base, before, p = host.sd_model, state(host.sd_model), generation()
    script.process(p, {"enabled": True})
    switched.models.reload_model_weights(info=checkpoint("base"))
    assert state(base) != before
    switched.models.reload_model_weights(info=checkpoint("refiner"))
    assert switched.states == [before]  # nothing of ours is on a model that the host throws away
    assert capsys.readouterr().out.count("sites: attention 10") == 2
    assert vars(host.sd_model.model.diffusion_model)["forward"] and vars(host.sd_model.first_stage_model)["decode"]
    script.postprocess(p, None)
    assert switched.models.reload_model_weights is switched.reload


def test_a_refiner_that_does_not_fit_ends_the_generation(host: Any, script: Any, switched: Any) -> None:
    p = generation()
    script.process(p, {"enabled": True})
    run = importlib.import_module("webui_ext.run")
    run.plan_for = lambda model, chosen, picture: foretold(model, {"vram": "1MB"}, picture)
    with pytest.raises(HTTPException, match="cannot hold"):
        switched.models.reload_model_weights(info=checkpoint("refiner"))
    assert run.current() is None


def test_a_refiner_is_refused_by_name_before_the_first_step(host: Any, script: Any, monkeypatch: Any) -> None:
    preview = importlib.import_module("webui_ext.checkpoint_preview")
    monkeypatch.setattr(preview, "preview_model", lambda checkpoint: checkpoint and SimpleNamespace(other_bytes=0))

    def plan_for(model: Any, chosen: Any, picture: Any) -> Any:
        return foretold(model, {"vram": "1MB"} if hasattr(model, "other_bytes") else chosen, picture)

    monkeypatch.setattr(importlib.import_module("webui_ext.run"), "plan_for", plan_for)
    p = generation(refiner_checkpoint_info=checkpoint("refiner"))
    script.process(p, {"enabled": True, "vram": "4GB"})
    with pytest.raises(HTTPException, match="1 MiB"):
        p.init()


def test_forge_is_foretold_before_it_has_loaded_a_model(host: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """The module in which other hosts look for a checkpoint's configuration is there, and empty."""
    empty = module("modules.sd_models_config")
    monkeypatch.setitem(sys.modules, empty.__name__, empty)
    monkeypatch.setattr(sys.modules["modules"], "sd_models_config", empty, raising=False)
    components = build_components(narrow("sd15"), torch.float16, "cpu")
    file = save_single_file(components, tmp_path / "model.safetensors")
    previewed = importlib.import_module("webui_ext.checkpoint_preview").preview_model(
        SimpleNamespace(filename=str(file))
    )
    assert previewed.kind == "forge" and previewed.anatomy.denoiser_module is not None


class StandIn:
    """What Forge Neo has for a model before the first load."""

    first_stage_model = property(lambda self: None)
    cond_stage_model = property(lambda self: None)


@pytest.mark.parametrize("chosen", [None, "model.safetensors"])
def test_before_forge_neo_has_loaded_a_model_the_line_is_of_the_chosen_checkpoint(
    page: Any, host: Any, monkeypatch: Any, tmp_path: Path, chosen: str | None
) -> None:
    """It has no module of checkpoints' configurations."""
    monkeypatch.setattr(importlib.import_module("webui_ext.estimate"), "_SETTLE_SECONDS", 0.0)
    monkeypatch.setitem(sys.modules, "modules.call_queue", module("modules.call_queue", queue_lock=threading.Lock()))
    sys.modules["modules"].call_queue = sys.modules["modules.call_queue"]  # type: ignore[attr-defined]
    checkpoint = None
    if chosen:
        file = save_single_file(build_components(narrow("sd15"), torch.float16, "cpu"), tmp_path / chosen)
        checkpoint = SimpleNamespace(filename=str(file))
    models = sys.modules["modules.sd_models"]
    host.cmd_opts = SimpleNamespace()
    vars(models).update(model_data=SimpleNamespace(sd_model=StandIn()), select_checkpoint=lambda: checkpoint)
    line, head = page.second["vram"]["fn"](*shown(page))
    assert ("64x64 fits into 8 GiB" if chosen else "load a checkpoint to see what it needs") in line
    assert "#c00" not in line + head and "StandIn" not in line


@pytest.fixture
def plainly() -> Iterator[None]:
    """As our door to the host has errors speak."""
    speak_plainly()
    yield
    speak_plainly(False)


def test_a_model_that_is_not_planned_is_told_without_python(host: Any, plainly: None) -> None:
    """By the line, and by the answer over HTTP."""
    estimate, run = (importlib.import_module(f"webui_ext.{name}") for name in ("estimate", "run"))
    model = SimpleNamespace(forge_objects=SimpleNamespace(unet=None, vae=SimpleNamespace(first_stage_model=StandIn())))
    chosen = {one.name: one.default for one in arguments()}
    picture = importlib.import_module("webui_ext.picture").Generation(64, 64, 1, 2)
    line = estimate.sentence(lambda: run.plan_for(model, chosen, picture), "64x64").line
    assert "64x64" in line
    host.sd_model, p = model, generation()
    script = importlib.import_module("webui_ext.script").LowVRAMScript()
    script.process(p, {"enabled": True, "vram": "4GB", "precision": "tf32"})
    with pytest.raises(HTTPException, match="this model is of another kind, which sd-lowvram does not plan"):
        p.init()


def test_no_model_is_taken_for_one_that_is_gone(host: Any) -> None:
    preview = importlib.import_module("webui_ext.checkpoint_preview")
    gone = [preview.identity(torch.nn.Identity()) for _ in range(5)]  # each where the last one was
    assert len(set(gone)) == 5
    assert preview.identity(host.sd_model) == preview.identity(host.sd_model)


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"largest_mib": 1}, "largest_mib 1: "),
        ({"weights_mib": 1}, "weights_mib 1: "),
        ({"vram": "1MB"}, "1 MiB .*decode .* text encoders"),
    ],
)
def test_a_refusal_names_the_limit_in_question(host: Any, knobs: dict[str, Any], says: str) -> None:
    host.sd_model.cond_stage_model = torch.nn.Linear(2000, 2000)
    if "weights_mib" in knobs:  # a narrow model has no layer that is larger than this
        host.sd_model.model.diffusion_model = compvis.full_unet()
    plan_for = importlib.import_module("webui_ext.run").plan_for
    picture = importlib.import_module("webui_ext.picture").Generation(256, 256, 1, 2)
    chosen = {one.name: one.default for one in arguments()} | {"vram": "16GB", **knobs}
    with pytest.raises(BudgetError, match=says) as refused:
        plan_for(host.sd_model, chosen, picture)
    assert "16 GiB" not in str(refused.value)


def moved(flags: dict[str, bool]) -> Any:
    """A host that moves weights itself: AUTOMATIC1111 with ``flags``, or Forge where there are none."""
    shell = compvis.LatentDiffusion(shallow=False)
    shell.lowvram = True
    base = SimpleNamespace(diffusion_model=shell.model.diffusion_model)
    held = SimpleNamespace(unet=SimpleNamespace(model=base), vae=shell)
    return shell if flags else SimpleNamespace(forge_objects=held)


@pytest.mark.parametrize("flags", [{"lowvram": True}, {}], ids=["lowvram", "forge"])
def test_weights_are_planned_as_the_host_leaves_them(host: Any, flags: dict[str, bool]) -> None:
    model, run = moved(flags), importlib.import_module("webui_ext.run")
    picture = importlib.import_module("webui_ext.picture").Generation(64, 64, 1, 2)
    host.cmd_opts = SimpleNamespace(**flags)
    chosen = {one.name: one.default for one in arguments()}
    weights = {name: weight_bytes(part) for name, part in run.host.anatomy(model).components.items()}
    budget = f"{max(weights['vae'] + (4 << 20), weights['unet'] // 2) >> 20}MB"
    plan = run.plan_for(model, chosen | {"vram": budget}, picture)
    assert plan.predicted.peak_bytes < weights["unet"] and (run.FETCHED in plan.reasons) == bool(flags)
    whole = run.plan_for(model, chosen | {"vram": "16GB"}, picture)
    assert (run.FETCHED in whole.reasons) == bool(flags)
    host.cmd_opts = SimpleNamespace(medvram=True)
    if flags:
        with pytest.raises(BudgetError):
            run.plan_for(model, chosen | {"vram": budget}, picture)


@pytest.mark.parametrize("texts", [1 << 10, 8 << 20])
def test_what_forge_keeps_loaded_on_a_cpu_is_of_the_budget(host: Any, texts: int) -> None:
    """The decode goes in strips where all weights and a whole decode are too much, though one part and it are not."""
    model, run = moved({}), importlib.import_module("webui_ext.run")
    model.forge_objects.clip = SimpleNamespace(cond_stage_model=torch.nn.Linear(texts // 4, 1, bias=False))
    picture = importlib.import_module("webui_ext.picture").Generation(256, 256, 1, 2)
    chosen = {one.name: one.default for one in arguments()}
    whole = run.plan_for(model, chosen | {"vram": "16GB"}, picture)
    weights = texts + sum(weight_bytes(part) for part in run.host.anatomy(model).components.values())
    most = max(stage.activation_bytes for stage in whole.stages)
    budget = weights + most - (1 << 20) + whole.predicted.overhead_bytes
    plan = run.plan_for(model, chosen | {"vram": f"{budget} b"}, picture)
    decided = run.decision_in(plan).values
    assert plan.request.vram == budget and not decided["over_budget"]
    least = run.plan_for(model, chosen | {"vram": f"{decided['needed_bytes'] + (1 << 20)} b"}, picture)
    assert not run.decision_in(least).values["over_budget"]
    assert max(stage.activation_bytes for stage in plan.stages) < most - (1 << 20)
    assert run._attachable(model, plan.settings).offload is None


KEPT = [
    # MiB that are free on the card, and those of the model that stay there: the UNet has 12.3 of 18.9, the text 4 more
    (1100, 22.9, "keeps all 22.9 MiB of the model"),
    (1024 + 14, 12.3, "keeps one part of the model at a time"),
    (1024 + 4, 4, "keeps some layers and loads the rest"),
]


@pytest.mark.parametrize(("free", "kept", "says"), KEPT)
def test_what_forge_decides_is_told_and_held_against_the_budget(
    host: Any, monkeypatch: pytest.MonkeyPatch, free: int, kept: float, says: str
) -> None:
    loading, estimate = (importlib.import_module(f"webui_ext.{name}") for name in ("loading", "estimate"))
    model = moved({})
    model.forge_objects.clip = SimpleNamespace(cond_stage_model=torch.nn.Linear(1 << 10, 1 << 10, bias=False))
    monkeypatch.setattr(loading, "free_vram", lambda where: free << 20)
    monkeypatch.setattr(loading.host, "device", lambda: torch.device("cuda"))
    chosen, picture = {"vram": "4GB"}, importlib.import_module("webui_ext.picture").Generation(64, 64, 1, 2)
    plan = foretold(model, chosen, picture)  # of 1 GiB, half of it weights
    takes = (1 << 29) + int(kept * (1 << 20))
    for vram, verdict in ((takes + (1 << 20), "fits"), (takes - (1 << 20), "over budget")):
        asked = dataclasses.replace(plan, request=dataclasses.replace(plan.request, vram=vram))
        decision = loading.decision(model, loading.host.anatomy(model), asked)
        asked = dataclasses.replace(asked, reasons=(decision,))
        told = estimate.sentence(lambda asked=asked: asked, "64x64").line
        assert says in told and f'data-verdict="{verdict}"' in told and "one part of the model in VRAM" not in told


class FluxTransformer(torch.nn.Module):
    """Of a kind that our hooks do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.double_blocks = torch.nn.ModuleList([torch.nn.Linear(512, 1024)])


@pytest.mark.parametrize("preset", ["exact", "smallest"])
def test_of_forges_flux_the_decode_is_planned_and_said_to_be(host: Any, capsys: Any, preset: str) -> None:
    estimate, run = (importlib.import_module(f"webui_ext.{name}") for name in ("estimate", "run"))
    model = moved({})
    model.forge_objects.unet.model.diffusion_model = FluxTransformer()
    script = importlib.import_module("webui_ext.script").LowVRAMScript()
    script.is_img2img, host.sd_model, host.cmd_opts = False, model, SimpleNamespace()
    vae = model.forge_objects.vae.first_stage_model
    latents = torch.randn(1, 4, 19, 13, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = vae.decode(latents)
    before = state(vae)
    p = generation(width=256, height=256)
    script.process(p, {"enabled": True, "vram": "16GB", "preset": preset, "vae_tiles": "exact"})
    assert p.init() == "begun" and not p.told
    told = capsys.readouterr().out
    assert estimate.DECODE_ONLY in told and "vae_exact 2" in told
    assert f" {(weight_bytes(vae) + 4 * 513 * 1024) / (1 << 20):.1f} MiB " in told
    with torch.no_grad():
        assert torch.allclose(vae.decode(latents), plain, rtol=1e-4, atol=1e-5)
    script.postprocess(p, None)
    assert state(vae) == before
    chosen = {one.name: one.default for one in arguments()} | {"preset": preset, "vram": "16GB"}
    picture = importlib.import_module("webui_ext.picture").Generation(256, 256, 1, 20)
    line = estimate.sentence(lambda: run.plan_for(model, chosen, picture), "256x256").line
    assert "for the decode" in line and "20 steps" not in line and estimate.DECODE_ONLY in line


class Transformer(torch.nn.Module):
    """A transformer with the arguments of Forge's own."""

    def __init__(self, takes: str) -> None:
        super().__init__()
        self.x_in, self.vector_in = torch.nn.Linear(4, 32), torch.nn.Linear(16, 32)
        self.takes, self.out = torch.nn.ModuleDict({takes: torch.nn.Linear(24, 32)}), torch.nn.Linear(32, 4)

    def forward(self, x: Any, timestep: Any, context: Any, y: Any = None, guidance: Any = None, **more: Any) -> Any:
        [takes] = self.takes.values()
        tokens = self.x_in(x.flatten(2).transpose(1, 2))
        text = takes(context) + self.vector_in(y)[:, None] * (timestep + guidance)[:, None, None]
        mixed = torch.softmax(tokens @ text.transpose(1, 2), -1) @ text
        return self.out(tokens + mixed).transpose(1, 2).unflatten(2, x.shape[2:])


@pytest.fixture
def hosted(host: Any) -> Iterator[Any]:
    """The family of transformers, registered as in a WebUI."""
    module = importlib.import_module("webui_ext.hosted")
    unregister = module.register()
    yield module
    unregister()


@pytest.mark.parametrize(("takes", "traced"), [("txt_in", True), ("words", False)])
def test_of_forges_transformers_the_steps_are_counted_where_they_can_be_traced(
    host: Any, hosted: Any, capsys: Any, takes: str, traced: bool
) -> None:
    """A layer of another name hides the width of the text."""
    estimate, run = (importlib.import_module(f"webui_ext.{name}") for name in ("estimate", "run"))
    model, transformer = moved({}), Transformer(takes)
    model.forge_objects.unet.model.diffusion_model = transformer
    script = importlib.import_module("webui_ext.script").LowVRAMScript()
    script.is_img2img, host.sd_model, host.cmd_opts = False, model, SimpleNamespace()
    before = state(transformer)
    p = generation(width=256, height=256, batch_size=2)
    script.process(p, {"enabled": True, "vram": "16GB", "preset": "smallest"})
    assert p.init() == "begun" and not p.told
    told = capsys.readouterr().out
    assert (estimate.STEPS_PLAIN if traced else estimate.DECODE_ONLY) in told
    assert ("the steps are not predicted" in told) != traced
    plan = run.current().plan
    assert [stage.name for stage in plan.stages] == (["denoise", "decode"] if traced else ["decode"])
    if traced:
        rows, pixels = 4, 32 * 32
        scores = rows * pixels * 256 * 4
        assert 2 * scores < plan.stages[0].activation_bytes < 4 * scores
        assert "for 2 steps" in estimate.sentence(lambda: plan, "256x256").line
        latents = torch.zeros(4, 4, 40, 32)
        with torch.no_grad():
            text, pooled = torch.zeros(4, 256, 24), torch.zeros(4, 16)
            transformer(latents, torch.ones(4), context=text, y=pooled, guidance=torch.ones(4))
        assert "[sd-lowvram] 256x320, batch 2" in capsys.readouterr().out
        schedule = SimpleNamespace(cond={"crossattn": torch.zeros(512, 24)})
        longer = SimpleNamespace(batch=[[SimpleNamespace(schedules=[schedule])]])
        for conditions, plans in ((text[0], 0), (longer, 1), (longer, 0)):
            script.process_before_every_sampling(p, x=torch.zeros(2, 4, 32, 32), c=conditions, uc=text)
            assert capsys.readouterr().out.count("[sd-lowvram]") == plans
        assert run.current().plan.stages[0].activation_bytes > 1.5 * plan.stages[0].activation_bytes
    script.postprocess(p, None)
    assert state(transformer) == before


@pytest.mark.parametrize(("budget", "kept"), [("1GB", None), ("", None), ("200MB", 200), ("60MB", 60)])
def test_a_stated_budget_limits_the_weights_that_forge_loads(
    host: Any, monkeypatch: pytest.MonkeyPatch, budget: str, kept: int | None
) -> None:
    """By what it keeps free for the steps, in each of the two names that it asks."""
    memory, loading = (importlib.import_module(f"webui_ext.{name}") for name in ("memory_estimate", "loading"))
    asked = {"minimum_inference_memory": lambda: 1 << 20, "extra_reserved_memory": lambda: 1 << 20}
    managing = module("backend.memory_management", **asked)
    monkeypatch.setitem(sys.modules, managing.__name__, managing)
    monkeypatch.setattr(loading, "free_vram", lambda where: 1000 << 20)
    monkeypatch.setattr(loading.host, "device", lambda: torch.device("cuda"))
    model, picture = moved({}), importlib.import_module("webui_ext.picture").Generation(64, 64, 1, 2)
    plan = foretold(model, {"vram": budget}, picture)
    vram = (kept or 1 << 20) << 20
    stages = tuple(
        dataclasses.replace(stage, reserved_bytes=(1 << 29) + (50 << 20), activation_bytes=50 << 20)
        for stage in plan.stages
    )
    request = dataclasses.replace(plan.request, vram=vram, fills=bool(budget))
    plan = dataclasses.replace(plan, stages=stages, request=request)
    unloaded: list[str] = []
    managing.unload_all_models = lambda: unloaded.append("all")  # type: ignore[attr-defined]
    assert not memory.unload_excess(model, plan)
    managing.current_inference_memory = 1 << 30  # type: ignore[attr-defined] # in Forge, which leaves loaded what is
    assert memory.unload_excess(model, plan) == (kept == 60)
    with monkeypatch.context() as loaded:
        loaded.setattr(loading, "model_bytes", lambda model: (19 << 20, 19 << 20))
        assert memory.unload_excess(model, plan) == (kept == 60) and len(unloaded) == (kept == 60)
    undo = [set_patch(patch) for patch in memory.limit_weights(model, plan)]
    free = [managing.minimum_inference_memory() >> 20, managing.extra_reserved_memory() >> 20]
    assert free == ([1000 - (kept - 50), 1000 - (kept - 50) - 25] if kept else [1, 1])
    decision = loading.decision(model, loading.host.anatomy(model), plan)
    assert ("within this budget it keeps some layers" in decision) == (kept == 60)  # of 18.9 MiB
    for one in reversed(undo):
        one()
    assert all(getattr(managing, name) is function for name, function in asked.items())


def test_a_budget_that_forge_does_not_keep_is_told_with_the_pictures(host: Any, capsys: Any) -> None:
    """It keeps the whole model if that fits, next to a plan for layers that are fetched."""
    script = importlib.import_module("webui_ext.script").LowVRAMScript()
    script.is_img2img, host.sd_model, host.cmd_opts = False, moved({}), SimpleNamespace()
    for budget, kept in (("12MB", False), ("16GB", True)):
        p = generation()
        script.process(p, {"enabled": True, "vram": budget})
        assert p.init() == "begun"
        told = "\n".join([*p.told, capsys.readouterr().out])
        assert "18.9 MiB" in told and "peak" not in told
        assert ("more than this budget" in told) != kept and bool(p.told) != kept
        assert ("Low VRAM budget" in p.extra_generation_params) != kept
        script.postprocess(p, None)


@pytest.fixture
def page(host: Any) -> Any:
    """The page's controls as the line connects them: what each asks for when it changes, by its id."""

    class Control:
        def __init__(self, elem_id: str) -> None:
            self.elem_id = elem_id

        def change(self, **event: Any) -> Any:
            page.asks[self.elem_id] = event
            return SimpleNamespace(then=functools.partial(page.second.__setitem__, self.elem_id))

    class Seconds(dict[str, Any]):
        def __setitem__(self, elem_id: str, event: Any = None, **more: Any) -> None:
            super().__setitem__(elem_id, event or more)

    page = SimpleNamespace(asks={}, second=Seconds(), Control=Control)
    root = SimpleNamespace(load=lambda **event: Control.change(SimpleNamespace(elem_id="load"), **event))
    vars(sys.modules["gradio"]).update(
        context=SimpleNamespace(Context=SimpleNamespace(root_block=root)), __version__="3.41.2"
    )
    page.line = line = importlib.import_module("webui_ext.line").Line("txt2img")
    tiles = type("Checkbox", (Control,), {"label": "Enable Tiled VAE"})("MD-t2i-enable")
    line.offer(tiles, tiles.elem_id)
    line.place([Control(one.name) for one in arguments()], Control("line"), Control("head"))
    for name in line.names:
        line.offer(Control(f"txt2img_{name}"), f"txt2img_{name}")
    return page


def test_while_the_panel_is_off_no_control_of_the_page_asks_anything(page: Any) -> None:
    """Gradio runs the script with the values of inputs and outputs, and asks with what its promise gives."""
    asks = dict(page.asks)
    assert "opacity" in asks["load"]["_js"]  # of the verdict, until the answer is there
    assert "_js" not in asks.pop("enabled") and {"txt2img_width", "txt2img_steps", "vram", "load"} <= set(asks)
    assert {event["_js"] for event in asks.values()} == {asks["load"]["_js"]}
    inputs = [one.elem_id for one in asks["load"]["inputs"]]
    if not shutil.which("node"):
        pytest.skip("no node to run the page's script")
    for enabled in (True, False):
        values = [enabled if name == "enabled" else place for place, name in enumerate(inputs)]
        asked = f"Promise.resolve(({asks['load']['_js']})(...{json.dumps([*values, 'the line', 'the head'])}))"
        asked += ".then(given => console.log(JSON.stringify(given)))"
        ran = subprocess.run(["node", "-e", asked], check=True, capture_output=True, text=True, timeout=60)
        assert ran.stdout == (f"{json.dumps(values, separators=(',', ':'))}\n" if enabled else "")


def test_the_page_is_told_at_once_that_a_picture_is_under_way_and_then_the_verdict(
    page: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each control asks a second time, when the first answer is there."""
    assert set(page.second) == set(page.asks)
    first, second = page.asks["txt2img_width"], page.second["txt2img_width"]
    assert first["inputs"] == second["inputs"]
    assert first["show_progress"] == second["show_progress"] == "hidden"  # gradio's timer would cover the head
    estimate, turn = importlib.import_module("webui_ext.estimate"), threading.Lock()
    monkeypatch.setattr(estimate, "_SETTLE_SECONDS", 0.01)
    monkeypatch.setitem(sys.modules, "modules.call_queue", module("modules.call_queue", queue_lock=turn))
    sys.modules["modules"].call_queue = sys.modules["modules.call_queue"]  # type: ignore[attr-defined]
    monkeypatch.setattr(importlib.import_module("webui_ext.run"), "plan_for", foretold)
    sys.modules["modules.sd_models"].model_data.sd_model = host.sd_model  # type: ignore[attr-defined]
    with turn:
        line, head = first["fn"](*shown(page))
    assert "waits for the running picture" in line and "waits for the running picture" in head
    line, head = second["fn"](*shown(page))
    assert re.search("64x64.*1 GiB.*8 GiB", line) and "fits, 1 of 8 GiB" in head


def shown(page: Any, tiled: bool = False, **values: Any) -> list[Any]:
    """The values of the page's controls, the panel on."""
    sizes = {"width": 64, "height": 64, "batch_size": 1, "steps": 2, "cfg_scale": 5, "denoising_strength": 0.5}
    chosen = {one.name: one.default for one in arguments()} | {"enabled": True, "vram": "8GB", **values}
    return [*(sizes.get(name, 0) for name in page.line.names), *chosen.values(), tiled]


@pytest.mark.parametrize(
    ("chosen", "says"), [("auto", "has nothing to do: the decode is already exact"), ("off", "turn it off")]
)
def test_another_extensions_tiled_vae_beside_ours_is_told(
    page: Any, host: Any, monkeypatch: pytest.MonkeyPatch, chosen: str, says: str
) -> None:
    monkeypatch.setattr(importlib.import_module("webui_ext.estimate"), "_SETTLE_SECONDS", 0.0)
    monkeypatch.setitem(sys.modules, "modules.call_queue", module("modules.call_queue", queue_lock=threading.Lock()))
    sys.modules["modules"].call_queue = sys.modules["modules.call_queue"]  # type: ignore[attr-defined]
    sys.modules["modules.sd_models"].model_data.sd_model = host.sd_model  # type: ignore[attr-defined]
    ask = page.second["vram"]["fn"]
    assert says in ask(*shown(page, tiled=True, vae_tiles=chosen))[0]
    assert "Tiled VAE" not in ask(*shown(page, vae_tiles=chosen))[0]


@pytest.mark.parametrize("after", [False, True], ids=["before ours", "over ours"])
def test_where_tiled_vae_is_on_ours_decodes_and_says_so(host: Any, capsys: Any, after: bool) -> None:
    """It puts a forward of its own on the decoder, before our callback or after it."""
    decoder = host.sd_model.first_stage_model.decoder
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = host.sd_model.first_stage_model.decode(latents)

    class Tiles:
        def process(self, p: Any) -> None:
            decoder.forward = lambda z: torch.zeros_like(plain)

        def postprocess(self, p: Any, processed: Any) -> None:
            vars(decoder).pop("forward", None)

    script, drawn = importlib.import_module("webui_ext.script").LowVRAMScript(), []
    p = drawing(host, script)
    p.scripts = Scripts(script, Tiles()) if after else Scripts(Tiles(), script)

    def sample() -> None:
        script.process_before_every_sampling(p, x=torch.zeros(1, 4, 8, 8))
        with torch.no_grad():
            drawn.append(host.sd_model.first_stage_model.decode(latents))

    p.sample = sample
    host.cmd_opts = SimpleNamespace()
    sys.modules["modules.processing"].process_images(p)  # type: ignore[attr-defined]
    assert not p.scripts.failed and torch.allclose(drawn[0], plain, rtol=1e-4, atol=1e-5)
    told = "Tiled VAE, which is on too, has nothing to do: the decode is already exact and within the budget"
    assert told in capsys.readouterr().out and set(p.told) == {f"sd-lowvram: {told}"}


@pytest.mark.parametrize(("attends", "tiles"), [(False, None), (True, None), (False, False), (True, True)])
def test_prompt_and_negative_prompt_stay_together_where_another_extension_attends(
    host: Any, attends: bool, tiles: bool | None
) -> None:
    """It looks for both in one call, as NegPiP does. A Hypertile that was left behind, switched off, does not."""
    run = importlib.import_module("webui_ext.run")
    attention = host.sd_model.model.diffusion_model.middle_block[1].transformer_blocks[0].attn2
    script, rows, plans = importlib.import_module("webui_ext.script").LowVRAMScript(), [], []

    class Attends:
        def process(self, p: Any) -> None:
            forward = attention.forward
            attention.forward = lambda x, *args, **kwargs: (rows.append(len(x)), forward(x, *args, **kwargs))[1]
            if tiles is not None:
                setattr(attention, "__webui_hypertile_params", SimpleNamespace(enabled=tiles))

        def postprocess(self, p: Any, processed: Any) -> None:
            vars(attention).pop("forward", None)
            vars(attention).pop("__webui_hypertile_params", None)

    asked = {"enabled": True, "vram": "4GB", "preset": "smallest", "guidance_in_turn": "on"}
    p = drawing(host, script, script_args=(asked,))
    p.scripts = Scripts(script, *([Attends()] if attends or tiles is not None else []))

    def sample() -> None:
        script.process_before_every_sampling(p, x=torch.zeros(1, 4, 8, 8))
        plans.append(run.current().plan)
        latents, timesteps, text = compvis.inputs(32, (8, 8))
        with torch.no_grad():
            host.sd_model.model.diffusion_model(latents, timesteps, context=text)

    p.sample, host.cmd_opts = sample, SimpleNamespace()
    sys.modules["modules.processing"].process_images(p)  # type: ignore[attr-defined]
    assert not p.scripts.failed and bool(plans[-1].settings.guidance_in_turn) != attends
    assert rows == ([2] if attends else [] if tiles is None else [1, 1])


def test_a_picture_of_a_grid_over_the_budget_says_why_in_its_place(
    host: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host leaves a picture blank whose generation fails, and goes on with the next."""

    def process_images(p: Any) -> Any:
        script.process(p, False)
        if getattr(p, "broken", False):
            raise ValueError("none of ours")
        return p.init()

    def processed(p: Any, pictures: list[Any], seed: int, info: str, infotexts: list[str]) -> Any:
        return SimpleNamespace(images=pictures, seed=seed, info=info, infotexts=infotexts)

    def option(label: str, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(label=label)

    theirs = SimpleNamespace(process_images=process_images, Processed=processed, axis_options=[], AxisOption=option)
    owner = type("Script", (), {"__module__": "xyz_grid.py"})
    sys.modules["modules.scripts"].scripts_data.append(SimpleNamespace(script_class=owner, module=theirs))  # type: ignore[attr-defined]
    fonts = module("modules.images", get_font=lambda size: ImageFont.load_default())
    monkeypatch.setitem(sys.modules, "modules.images", fonts)
    grid = importlib.import_module("webui_ext.grid")
    grid.add_axes()
    grid.add_axes()
    cells = [generation(seed=7, **{grid.OVERRIDES: {"enabled": True, "vram": vram}}) for vram in ("4GB", "1MB")]
    made, refused = map(theirs.process_images, cells)
    assert made == "begun" and "1 MiB" in refused.info and refused.infotexts == [refused.info]
    [picture] = refused.images
    assert picture.size == (64, 64) and len(picture.getcolors()) > 1 and refused.seed == 7
    with pytest.raises(ValueError, match="none of ours"):
        theirs.process_images(generation(broken=True))
    script.postprocess(cells[0], None)


def test_weights_of_8_bits_are_widened_in_the_denoiser_alone(
    host: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, picture = importlib.import_module("webui_ext.run"), importlib.import_module("webui_ext.picture")
    chosen = {one.name: one.default for one in arguments()} | {"vram": "4GB"}

    def activations(fp8: bool) -> dict[str, int]:
        sys.modules["modules.devices"].fp8 = fp8  # type: ignore[attr-defined]
        monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path / str(fp8)))  # nothing known of the other
        plan = run.plan_for(host.sd_model, chosen, picture.Generation(128, 128, 1, 2))
        return {stage.name: stage.activation_bytes for stage in plan.stages}

    for module in host.sd_model.model.diffusion_model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            module.to(torch.float8_e4m3fn)
    narrow = activations(fp8=True)
    host.sd_model.float()
    wide = activations(fp8=False)
    assert narrow["denoise"] < 0.8 * wide["denoise"]
    assert narrow["decode"] == pytest.approx(wide["decode"], rel=0.01)  # but for the embeddings that are held meanwhile


@pytest.mark.parametrize("choice", ["off", "until decoded", "keep"])
def test_latents_are_saved_from_the_sampling_to_the_pictures(
    host: Any, script: Any, tmp_path: Path, choice: str
) -> None:
    """Each batch has its file; a second pass writes it anew, and so does what the host has painted over."""
    sampled = torch.randn(2, 4, 8, 8)
    host.sd_model.sd_checkpoint_info = SimpleNamespace(filename="/models/a.safetensors")
    host.sd_model.scale_factor = 0.18215
    p = generation(batch_size=2, outpath_samples=str(tmp_path), iteration=0, subseeds=[0, 0], seeds=[1, 2])
    p.prompts, p.negative_prompts = ["a cat", "a dog"], ["", ""]
    script.process(p, {"enabled": True, "vram": "4GB", "save_latents": choice})
    for batch, latents in ((0, sampled), (0, 2 * sampled), (1, 3 * sampled)):
        p.iteration, p.sampler = batch, SimpleNamespace(sample=lambda latents=latents: latents)
        script.process_before_every_sampling(p, x=latents)
        assert torch.equal(p.sampler.sample(), latents)
    files = sorted(tmp_path.iterdir())
    assert len(files) == (0 if choice == "off" else 2)
    for file, latents in zip(files, (2 * sampled, 3 * sampled), strict=False):
        hosted = read_hosted(file, read_saved(file))
        assert torch.equal(hosted.latents, latents / host.sd_model.scale_factor)
        assert hosted.autoencoder == "/models/a.safetensors"
        assert [one["parameters"] for one in hosted.texts] == ["a cat, told", "a dog, told"]
    script.post_sample(p, SimpleNamespace(samples=4 * sampled))
    for file in files[1:]:
        assert torch.equal(read_saved(file).tensors["latents"], 4 * sampled / host.sd_model.scale_factor)
    script.postprocess(p, None)
    assert len([*tmp_path.iterdir()]) == (2 if choice == "keep" else 0)
