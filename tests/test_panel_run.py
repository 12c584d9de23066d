"""One generation in a stand-in for the WebUI, with CompVis' real modules: on, off, refused, failed, another model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import webui_ext
from sd_lowvram import Settings
from sd_lowvram.devices.performance import PROFILES
from sd_lowvram.errors import BudgetError
from sd_lowvram.planning.plan import Predicted, Request
from webui_ext.arguments import arguments

compvis = pytest.importorskip("compvis")
pytest.importorskip("ldm", reason="pip install --no-deps stable-diffusion-sdkit")

SETTINGS = Settings(attention="sliced", attention_mib=1, residual_strips=2, vae_tiles="exact", offload="none")
OURS = ("webui_ext.script", "webui_ext.line", "webui_ext.blueprint", "webui_ext.run", "webui_ext.host")
OURS += ("webui_ext.controls", "webui_ext.options", "webui_ext.grid", "webui_ext.picture", "webui_ext.loading")
OURS += ("webui_ext.switching", "webui_ext.refusal", "webui_ext.aloud")


class HTTPException(Exception):
    def __init__(self, status_code: int, detail: str) -> None:
        self.status_code, self.detail = status_code, detail


def _forget_ours() -> None:
    """They hold on to the host that they were imported in, and the package to them."""
    for name in OURS:
        sys.modules.pop(name, None)
        vars(webui_ext).pop(name.rpartition(".")[2], None)


def module(name: str, **held: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(held)
    return made


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
    monkeypatch.setattr(importlib.import_module("webui_ext.run"), "foretell", foretold)
    made = importlib.import_module("webui_ext.script").LowVRAMScript()
    made.is_img2img = False
    return made


def foretold(model: Any, chosen: Any, picture: Any) -> Any:
    if chosen["vram"] == "1MB":
        raise BudgetError("1 MiB cannot hold it", needed_bytes=1 << 30, stage="denoise")
    request = Request(
        picture.width, picture.height, picture.batch, 1 << 33, 1 << 33, torch.device("cpu"), PROFILES["rtx2070"]
    )
    stages = (SimpleNamespace(name="denoise", activation_bytes=5), SimpleNamespace(name="decode", activation_bytes=7))
    predicted = Predicted(1 << 30, 0, 1 << 29, 1 << 29, 0, 1 << 20, 3.0, "denoise")
    return SimpleNamespace(settings=SETTINGS, request=request, stages=stages, predicted=predicted, timing=None)


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
    assert "attention 34" in capsys.readouterr().out
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


@pytest.mark.parametrize(("wrong", "says"), [({"vrom": 1}, "'vram'"), ({"vram": "1MB"}, "cannot hold")])
def test_refused_before_the_first_step(host: Any, script: Any, wrong: dict[str, Any], says: str) -> None:
    before, p = state(host.sd_model), generation()
    script.process(p, {"enabled": True, **wrong})
    with pytest.raises(HTTPException) as refused:
        p.init()
    assert refused.value.status_code == 422 and says in str(refused.value)
    assert state(host.sd_model) == before


def test_a_hypernetwork_is_refused(host: Any, script: Any) -> None:
    p = generation()
    script.process(p, {"enabled": True})
    host.loaded_hypernetworks.append("one")
    script.process_batch(p)
    with pytest.raises(HTTPException) as refused:
        p.sample()
    assert "hypernetwork" in str(refused.value)
    script.postprocess(p, None)


def test_another_model_in_between_is_followed(host: Any, script: Any) -> None:
    first, p = host.sd_model, generation()
    before = state(first)
    script.process(p, {"enabled": True})
    host.sd_model = compvis.LatentDiffusion()
    script.process_before_every_sampling(p, x=torch.zeros(1, 4, 8, 8))
    assert state(first) == before
    assert any("forward" in held for held in state(host.sd_model))
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
    assert p.told and "moves the weights itself" in p.told[0]
    script.postprocess(p, None)
    assert base.memory_required((1, 4, 8, 8)) == 1e9
