"""UNet Schedule: two MODELs take turns in one sampling; what is not theirs to share is refused by name."""

from __future__ import annotations

import copy
import itertools
import sys
import types
from typing import Any

import comfy_host
import pytest
import tiny
import torch
from comfy_host import ROOT, Executor, Model, Patcher, import_pack
from torch import Tensor

SIGMAS = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5, 0.0])
NOISE = torch.zeros(1, 4, 8, 8)


class Scheduled(Patcher):
    """A MODEL whose own model tells when it is called, loaded, begun and ended."""

    def __init__(self, name: str, unet: Any, log: list[str], **config: Any) -> None:
        super().__init__(Model(unet))
        self.name, self.log = name, log
        unet_config = {"in_channels": 4, "out_channels": 4, "context_dim": 768, **config}
        self.model.model_config = types.SimpleNamespace(unet_config=unet_config)
        self.model.apply_model = self.call

    def clone(self) -> Any:
        made = copy.copy(self)
        made.wrappers = {door: {key: [*some] for key, some in keys.items()} for door, keys in self.wrappers.items()}
        made.model_options = copy.deepcopy(self.model_options)
        return made

    def call(self, x: Tensor, t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.log.append(f"{self.name} {float(t.max()):g}")
        return x

    def pre_run(self) -> None:
        self.log.append(f"{self.name} begins")

    def cleanup(self) -> None:
        self.log.append(f"{self.name} ends")


@pytest.fixture
def pack(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    modules = comfy_host.host_modules()
    helpers, patcher = types.ModuleType("comfy.sampler_helpers"), types.ModuleType("comfy.model_patcher")

    def load(model: Any, shape: Any, conds: Any, options: Any) -> tuple[Any, Any, list[Any]]:
        model.log.append(f"load {model.name} for {tuple(shape)}")
        return model.model, conds, []

    vars(helpers).update(prepare_model_patcher=lambda model, conds, options: None, prepare_sampling=load)
    vars(patcher).update(create_model_options_clone=copy.deepcopy)
    modules["comfy"].sampler_helpers, modules["comfy"].model_patcher = helpers, patcher  # type: ignore[attr-defined]
    for name, module in {**modules, "comfy.sampler_helpers": helpers, "comfy.model_patcher": patcher}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path_factory.mktemp("cache")))
    return import_pack(ROOT)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def models(log: list[str]) -> tuple[Scheduled, Scheduled]:
    unet = tiny.components("sd15")["unet"]
    return Scheduled("full", unet, log), Scheduled("small", copy.deepcopy(unet), log)


def schedule(pack: Any, own: Any, small: Any, text: str) -> Any:
    return pack.NODE_CLASS_MAPPINGS["LowVRAMUNetSchedule"]().schedule(own, small, text)[0]


def sample(model: Scheduled, sigmas: Tensor = SIGMAS, fail_at: float = -1.0, control: Any = None) -> None:
    """As the host samples by Heun's method but for the sums: twice at each step, but the last."""

    def inner(noise: Tensor, latents: Any, sampler: Any, sigmas: Tensor) -> None:
        load = sys.modules["comfy.sampler_helpers"].prepare_sampling
        around = model.through("prepare_sampling", lambda one, shape, conds: load(one, shape, conds, {}), None)
        assert around(model, noise.shape, {"positive": []})[0] is model.model
        for one in [at for pair in itertools.pairwise(sigmas) for at in pair if at > 0]:
            if one == fail_at:
                raise MemoryError
            call = model.through("apply_model", model.call, model.model)
            assert call(noise, one.expand(2), None, None, control, {"sample_sigmas": sigmas}) is noise

    door = [one for some in model.wrappers["outer_sample"].values() for one in some]
    Executor(inner, None, door)(NOISE, None, None, sigmas)


def test_each_step_is_called_on_the_model_whose_turn_it_is(pack: Any, models: Any, log: list[str]) -> None:
    made = schedule(pack, *models, "small:2,full:3")
    sample(made)
    assert log == [
        *("load small for (1, 4, 8, 8)", "small begins"),
        *("small 8", "small 4", "small 4"),
        *("load full for (1, 4, 8, 8)", "full 2"),  # the second look of the second step is at the third one's noise
        *("full 2", "full 1", "full 1", "full 0.5", "full 0.5"),
        "small ends",
    ]
    log.clear()
    sample(schedule(pack, *models, "full:1,small:1,full:3"))
    assert [line for line in log if line.startswith("load")] == [
        f"load {name} for (1, 4, 8, 8)" for name in ("full", "small", "full")
    ]
    assert log.count("small begins") == log.count("small ends") == 1
    assert models[0].wrappers == {} == models[1].wrappers


def test_a_run_that_fails_leaves_nothing(pack: Any, models: Any, log: list[str]) -> None:
    made = schedule(pack, *models, "small:2,full:3")
    with pytest.raises(MemoryError):
        sample(made, fail_at=2.0)
    assert log[-1] == "small ends"
    log.clear()
    sample(made)
    assert log[0] == "load small for (1, 4, 8, 8)" and log.count("small ends") == 1


def test_what_wraps_the_other_model_is_called(pack: Any, models: Any, log: list[str]) -> None:
    own, small = models

    def around(apply: Any, call: dict[str, Any]) -> Tensor:
        log.append("around")
        assert call["c"]["transformer_options"].keys() == {"sample_sigmas", "mine", "wrappers"}
        result: Tensor = apply(call["input"], call["timestep"], **call["c"])
        return result

    small.model_options = {"transformer_options": {"mine": 1}, "model_function_wrapper": around}
    sample(schedule(pack, own, small, "small:2,full:3"))
    assert log.count("around") == 3


def test_the_steps_are_those_of_the_sampler(pack: Any, models: Any, log: list[str]) -> None:
    made = schedule(pack, *models, "small:2,full:3")
    with pytest.raises(ValueError, match="of the schedule add up to 5 and the sampler runs 3: write as many"):
        sample(made, SIGMAS[:4])
    assert log == []
    node = pack.NODE_CLASS_MAPPINGS["LowVRAMUNetSchedule"]
    assert node.VALIDATE_INPUTS(schedule="small:10,full:15") is True is node.VALIDATE_INPUTS(schedule=None)
    for text, why in (
        ("small", "schedule has 'small' where NAME:STEPS is needed"),
        ("small:0,full:3", "a UNet takes at least 1 step"),
        ("tiny:2,full:3", "schedule names 'tiny', which is unknown: known are full, small"),
        ("full:5", "small is not in schedule 'full:5'"),
    ):
        assert why in node.VALIDATE_INPUTS(schedule=text)


def test_two_models_that_do_not_match_are_refused(pack: Any, models: Any, log: list[str]) -> None:
    own, small = models
    other = Scheduled("small", small.model.diffusion_model, log, context_dim=1024)
    with pytest.raises(ValueError, match="context_dim is 768 in one and 1024 in the other"):
        schedule(pack, own, other, "small:2,full:3")
    made = schedule(pack, own, small, "small:2,full:3")
    with pytest.raises(ValueError, match="this MODEL is a schedule of two"):
        schedule(pack, made, small, "small:2,full:3")
    with pytest.raises(ValueError, match="put the low VRAM nodes before UNet Schedule"):
        pack.NODE_CLASS_MAPPINGS["LowVRAMOptimizeModel"]().optimize(made, "", 64, 64, 1)


def test_a_controlnet_for_other_blocks_is_refused(pack: Any, models: Any) -> None:
    own, small = models
    own.model.diffusion_model.input_blocks, small.model.diffusion_model.input_blocks = [0] * 12, [0] * 8
    made = schedule(pack, own, small, "full:2,small:3")
    with pytest.raises(ValueError, match=r"maps for the 12 input blocks of the whole UNet, .* has 8"):
        sample(made, control={"output": []})


def test_deep_features_have_one_turn(pack: Any, models: Any) -> None:
    own, small = models
    optimize = pack.NODE_CLASS_MAPPINGS["LowVRAMOptimizeModel"]().optimize
    deep, _ = optimize(own, "8GB", 64, 64, 1, deep_cache=3)["result"]
    schedule(pack, deep, small, "full:2,small:3")
    with pytest.raises(ValueError, match="deep_cache and a schedule in which a model has more than one turn"):
        schedule(pack, deep, small, "full:1,small:3,full:1")
