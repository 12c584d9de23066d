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
NOTHING = {"c_concat": None, "c_crossattn": None}


class EPS: ...


class V_PREDICTION(EPS): ...


class Scheduled(Patcher):
    """A MODEL whose own model records when it is called, loaded, begun and ended."""

    def __init__(self, name: str, unet: Any, log: list[str], prediction: type = EPS, **config: Any) -> None:
        super().__init__(Model(unet))
        self.name, self.log = name, log
        unet_config = {"in_channels": 4, "out_channels": 4, "context_dim": 768, **config}
        self.model.model_config = types.SimpleNamespace(unet_config=unet_config)
        self.model.apply_model = self.apply
        self.model.model_sampling = type("ModelSampling", (prediction,), {})()

    def clone(self) -> Any:
        made = copy.copy(self)
        made.wrappers = {door: {key: [*some] for key, some in keys.items()} for door, keys in self.wrappers.items()}
        made.model_options = copy.deepcopy(self.model_options)
        return made

    def call(self, x: Tensor, t: Tensor, *args: Any) -> Tensor:
        self.log.append(f"{self.name} {float(t.max()):g}")
        self.told = args[3]
        return x

    def apply(self, x: Tensor, t: Tensor, *, transformer_options: dict[str, Any], **given: Any) -> Tensor:
        doors = transformer_options.get("wrappers", {}).get("apply_model", {}).values()
        call = Executor(self.call, self.model, [one for some in doors for one in some])
        result: Tensor = call(x, t, given.pop("c_concat"), given.pop("c_crossattn"), None, transformer_options)
        return result

    def pre_run(self) -> None:
        self.log.append(f"{self.name} begins")

    def cleanup(self) -> None:
        self.log.append(f"{self.name} ends")


def executor(original: Any, owner: Any, wrappers: list[Any]) -> Any:
    return types.SimpleNamespace(execute=Executor(original, owner, wrappers))


@pytest.fixture
def pack(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    modules = comfy_host.host_modules()
    helpers, patcher = types.ModuleType("comfy.sampler_helpers"), types.ModuleType("comfy.model_patcher")

    def load(model: Any, shape: Any, conds: Any, options: Any) -> tuple[Any, Any, list[Any]]:
        assert conds == {"positive": []}  # with them ControlNets stay loaded
        model.log.append(f"load {model.name} for {tuple(shape)}")
        return model.model, conds, []

    def prepare(model: Any, conds: Any, options: dict[str, Any]) -> None:
        options["transformer_options"] |= {"wrappers": model.wrappers} if model.wrappers else {}

    vars(helpers).update(prepare_model_patcher=prepare, prepare_sampling=load)
    vars(patcher).update(create_model_options_clone=copy.deepcopy)
    modules["comfy"].sampler_helpers, modules["comfy"].model_patcher = helpers, patcher  # type: ignore[attr-defined]
    vars(modules["comfy.patcher_extension"])["WrapperExecutor"] = types.SimpleNamespace(new_class_executor=executor)
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
    unet.input_blocks = unet.output_blocks = [0] * 12
    return Scheduled("full", unet, log), Scheduled("small", copy.deepcopy(unet), log)


def schedule(pack: Any, own: Any, small: Any, text: str) -> Any:
    return pack.NODE_CLASS_MAPPINGS["LowVRAMUNetSchedule"]().schedule(own, small, text)[0]


def optimized(pack: Any, model: Any, **knobs: Any) -> tuple[Any, Any]:
    """What Low VRAM makes of a MODEL, and its record."""
    nodes, vae = pack.NODE_CLASS_MAPPINGS, comfy_host.VAE(tiny.components("sd15")["vae"])
    settings = nodes["LowVRAMSettings"]().choose(**knobs)[0]
    made, _, record, _ = nodes["LowVRAM"]().optimize(model, vae, "8GB", settings)["result"]
    return made, record


def sample(model: Scheduled, sigmas: Tensor = SIGMAS, fail_at: float = -1.0, control: Any = None) -> None:
    """As the host samples by Heun's method but for the sums: twice at each step, but the last."""

    def inner(
        noise: Tensor, latents: Any, sampler: Any, sigmas: Tensor, mask: Any = None, callback: Any = None
    ) -> None:
        load = sys.modules["comfy.sampler_helpers"].prepare_sampling
        around = model.through("prepare_sampling", lambda one, shape, conds: load(one, shape, conds, {}), None)
        assert around(model, noise.shape, {"positive": []})[0] is model.model
        for one in [at for pair in itertools.pairwise(sigmas) for at in pair if at > 0]:
            if one == fail_at:
                raise MemoryError
            call = model.through("apply_model", model.call, model.model)
            options = {**model.model_options["transformer_options"], "sample_sigmas": sigmas}
            assert call(noise, one.expand(2), None, None, control, options) is noise

    door = [one for some in model.wrappers["outer_sample"].values() for one in some]
    guider = types.SimpleNamespace(model_patcher=model, model_options=model.model_options, cfg=7.0)
    Executor(inner, guider, door)(NOISE, None, None, sigmas)


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
        assert call["c"]["transformer_options"].keys() == {"sample_sigmas", "mine"}
        result: Tensor = apply(call["input"], call["timestep"], **call["c"])
        return result

    small.model_options = {"transformer_options": {"mine": 1}, "model_function_wrapper": around}
    sample(schedule(pack, own, small, "small:2,full:3"))
    assert log.count("around") == 3


def test_the_model_that_comes_to_the_sampler_is_loaded(pack: Any, models: Any, log: list[str]) -> None:
    """A LoRA that stands behind our node is on a clone of what it gives out."""
    behind = schedule(pack, *models, "full:1,small:2,full:2").clone()
    behind.name = "behind"
    sample(behind)
    assert [line.split()[1] for line in log if line.startswith("load")] == ["behind", "small", "behind"]


@pytest.mark.parametrize("blocks", [12, 8])
def test_patches_from_behind_come_to_both(pack: Any, models: Any, blocks: int) -> None:
    """Those before our node stay with their model; blocks that are numbered otherwise are none of the small one's."""
    own, small = models
    small.model.diffusion_model.input_blocks = [0] * blocks
    first, middle = ("input", 1), ("middle", 0)
    own.model_options = {"transformer_options": {"patches": {"x": [1]}, "patches_replace": {"attn1": {first: 2}}}}
    small.model_options = {"transformer_options": {"patches": {"x": [3]}}}
    behind = schedule(pack, own, small, "full:2,small:3").clone()
    there = behind.model_options["transformer_options"]
    there["patches"] = {"x": [1, 4], "y": [5]}
    there["patches_replace"] = {"attn1": {first: 2, ("input", 2): 6, middle: 7}}
    sample(behind)
    told = small.told
    assert told["patches"] == {"x": [3, 4], "y": [5]}
    assert told["patches_replace"] == {"attn1": {middle: 7} | ({("input", 2): 6} if blocks == 12 else {})}
    assert small.model_options == {"transformer_options": {"patches": {"x": [3]}}}


def test_what_calls_the_own_model_leaves_the_others_turns(pack: Any, models: Any, log: list[str]) -> None:
    own, small = models
    own.model_options["model_function_wrapper"] = lambda apply, call: (
        log.append("around") or apply(call["input"], call["timestep"], **call["c"])
    )
    made = schedule(pack, own, small, "small:2,full:3")
    for sigma in SIGMAS[:5]:
        call = {"input": NOISE, "timestep": sigma, "c": {**NOTHING, "transformer_options": {"sample_sigmas": SIGMAS}}}
        made.model_options["model_function_wrapper"](own.apply, call)
    assert log == ["full 8", "full 4", "around", "full 2", "around", "full 1", "around", "full 0.5"]
    with pytest.raises(ValueError, match="does not pass its sigmas"):
        made.through("apply_model", own.call, own.model)(NOISE, SIGMAS[:1], None, None, None, {})


def test_each_model_is_optimized_for_the_sampling(pack: Any, models: Any, caplog: Any) -> None:
    made = [optimized(pack, model, feed_forward_chunks=2) for model in models]
    with caplog.at_level("INFO"):
        for _ in range(2):
            sample(schedule(pack, made[0][0], made[1][0], "small:2,full:3"))
    told = [record.message for record in caplog.records if "calls of the model" in record.message]
    assert [line.split(", ")[1] for line in told] == ["6 calls of the model", "3 calls of the model"] * 2
    assert all(record.sites["feed_forward"] == 16 for _, record in made)


def test_the_steps_are_those_of_the_sampler(pack: Any, models: Any, log: list[str]) -> None:
    made = schedule(pack, *models, "small:2,full:3")
    with pytest.raises(ValueError, match=r"5 .*3: "):
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
    with pytest.raises(ValueError, match=r"context_dim.*768.*1024"):
        schedule(pack, own, other, "small:2,full:3")
    other = Scheduled("small", small.model.diffusion_model, log, prediction=V_PREDICTION)
    with pytest.raises(ValueError, match=r"EPS.*V_PREDICTION"):
        schedule(pack, own, other, "small:2,full:3")
    made = schedule(pack, own, small, "small:2,full:3")
    with pytest.raises(ValueError, match="MODEL"):
        schedule(pack, made, small, "small:2,full:3")
    with pytest.raises(ValueError, match=r"VRAM.*UNet Schedule"):
        optimized(pack, made)


def test_a_controlnet_for_other_blocks_is_refused(pack: Any, models: Any) -> None:
    own, small = models
    own.model.diffusion_model.input_blocks, small.model.diffusion_model.input_blocks = [0] * 12, [0] * 8
    made = schedule(pack, own, small, "full:2,small:3")
    with pytest.raises(ValueError, match=r"12.*UNet.*8"):
        sample(made, control={"output": []})


def test_deep_features_have_one_turn(pack: Any, models: Any) -> None:
    own, small = models
    deep, _ = optimized(pack, own, deep_cache=3)
    schedule(pack, deep, small, "full:2,small:3")
    with pytest.raises(ValueError, match=r"[Dd]eep features"):
        schedule(pack, deep, small, "full:1,small:3,full:1")
