"""A LoRA of the whole UNet on one that was cut: the layers that are left get theirs, those that were cut are named."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from two_layer_unets import tiny
from typer.testing import CliRunner

import sd_lowvram
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.cli import app
from sd_lowvram.errors import BadInputError, CheckpointError
from sd_lowvram.settings import Settings
from sd_lowvram.unets.combine import combine_unets
from sd_lowvram.unets.lora import lora_for
from sd_lowvram.unets.prune import cut_by_names, cut_of_kind, prune_unet


def of_kind(kind: str) -> Callable[[Any], Any]:
    return lambda unet: prune_unet(unet, cut_of_kind(unet.config, kind))


def by_names(*names: str) -> Callable[[Any], Any]:
    return lambda unet: prune_unet(unet, cut_by_names(unet.config, drop=names))


def m2(unet: Any) -> Any:
    return combine_unets(of_kind("base")(unet), unet, 2)


CUTS = {
    "base": (of_kind("base"), "dn0.1, dn1.1, dn2.1, dn3.1, up0.1, up1.1, up2.1, up3.1"),
    "small": (of_kind("small"), "dn0.1, dn1.1, dn2.1, dn3.1, mid, up0.1, up1.1, up2.1, up3.1"),
    "tiny": (of_kind("tiny"), "dn2.1, dn2.sample, dn3.0, dn3.1, mid, up0.0, up0.1, up0.2, up0.sample, up1.1"),
    "by names": (by_names("dn0.1", "up3.1"), "dn0.1, up3.1"),
    "cut twice": (lambda unet: by_names("dn1.1", "up2.1")(by_names("dn0.1", "up3.1")(unet)), "dn0.1, dn1.1, up2.1"),
    "m2": (m2, "dn0.1, dn1.1, up2.1, up3.1"),
}


def random_lora(model: nn.Module) -> dict[str, Tensor]:
    """Of rank 2, for every linear layer and every convolution, in PEFT's names."""
    torch.manual_seed(1)
    found = {}
    for path, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            weight = layer.weight
            found[f"unet.{path}.lora_A.weight"] = torch.randn(2, *weight.shape[1:]) / 10
            found[f"unet.{path}.lora_B.weight"] = torch.randn(weight.shape[0], 2, *[1] * (weight.ndim - 2)) / 10
    return found


def fused(unet: Any, lora: Mapping[str, Tensor]) -> Any:
    made = copy.deepcopy(unet)
    for name, down in lora.items():
        if name.endswith(".lora_A.weight"):
            up = lora[name.replace("lora_A", "lora_B")]
            weight = made.get_submodule(name.removeprefix("unet.").removesuffix(".lora_A.weight")).weight
            # one output channel at a time: a product of narrowed weights adds in another order otherwise
            with torch.no_grad():
                weight += (up.flatten(1)[:, :, None] * down.flatten(1)[None]).sum(1).view_as(weight)
    return made


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_after_the_lora_is_the_lora_after_the_cut(name: str) -> None:
    cut, gone = CUTS[name]
    lora = random_lora(tiny())
    with pytest.warns(UserWarning, match="layers that were cut are left out of the LoRA") as told:
        found = lora_for(cut(tiny()), lora)
    assert len(told) == 1 and gone in str(told[0].message)
    one, other = cut(fused(tiny(), lora)).state_dict(), fused(cut(tiny()), found).state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    layers = sum(isinstance(layer, (nn.Linear, nn.Conv2d)) for layer in cut(tiny()).modules())
    assert len(found) == 2 * layers < len(lora)
    assert any(tensor is not lora.get(key) for key, tensor in found.items())  # numbers changed


def test_names_of_kohya_are_counted_anew_too() -> None:
    cut = of_kind("base")(tiny())
    lora = random_lora(tiny())

    def kohya(name: str) -> str:
        path, _, kind = name.removeprefix("unet.").rpartition(".lora_")
        return f"lora_unet_{path.replace('.', '_')}.{'lora_down' if kind[0] == 'A' else 'lora_up'}.weight"

    with pytest.warns(UserWarning, match="up3.1"):
        wanted = {kohya(name): tensor for name, tensor in lora_for(cut, lora).items()}
    theirs = {kohya(name): tensor for name, tensor in lora.items()}
    alphas = {name.split(".")[0] + ".alpha": torch.tensor(2.0) for name in theirs}
    text = {"lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.zeros(2, 4)}
    with pytest.warns(UserWarning, match="up3.1"):
        found = lora_for(cut, theirs | alphas | text)
    assert {name for name in found if name.endswith(".alpha")} == {name.split(".")[0] + ".alpha" for name in wanted}
    assert {name: found[name] for name in wanted}.keys() <= found.keys() and text.keys() <= found.keys()
    assert all(
        found[name] is tensor for name, tensor in wanted.items() if name in theirs and found[name] is theirs[name]
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_numbers_of_checkpoints_are_counted_anew_too() -> None:
    one = torch.zeros(2, 2)
    numbered = {
        "input_blocks_1_1": "input_blocks_1_1",  # dn0.0
        "input_blocks_2_1": None,
        "input_blocks_3_0_op": "input_blocks_2_0_op",  # between two blocks
        "input_blocks_4_1": "input_blocks_3_1",
        "input_blocks_10_0": "input_blocks_7_0",  # dn3.0
        "middle_block_1": "middle_block_1",
        "output_blocks_2_1_conv": "output_blocks_1_1_conv",
        "output_blocks_5_2_conv": "output_blocks_3_2_conv",
        "output_blocks_10_1": None,
        "output_blocks_11_1": "output_blocks_7_1",
        "time_embed_0": "time_embed_0",
        "input_blocks_0_0": "input_blocks_0_0",
    }
    lora = {f"lora_unet_{name}.lora_up.weight": one for name in numbered}
    with pytest.warns(UserWarning, match=r": dn0\.1, up3\.1$"):
        found = lora_for(of_kind("base")(tiny()), lora)
    assert [*found] == [f"lora_unet_{name}.lora_up.weight" for name in numbered.values() if name]


def test_a_whole_model_takes_a_lora_as_it_is() -> None:
    lora = random_lora(tiny())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lora_for(tiny(), lora) == lora


def test_what_is_no_lora_or_of_another_model_is_told(tmp_path: Path) -> None:
    base = of_kind("base")(tiny())
    with pytest.raises(BadInputError, match=r"LoRA.* 1 tensors"):
        lora_for(base, {"conv_in.weight": torch.zeros(1)})
    with pytest.raises(BadInputError, match=r"LoRA.*dn0\.1$"):
        lora_for(base, {"unet.down_blocks.0.resnets.1.conv1.lora_A.weight": torch.zeros(2, 2)})
    for number, called in (("4_resnets_0", "dn4.0"), ("0_resnets_5", "dn0.5")):
        with pytest.raises(BadInputError, match=f"LoRA .*{called}"):
            lora_for(tiny(), {f"lora_unet_down_blocks_{number}_conv1.lora_down.weight": torch.zeros(2, 2)})
    with pytest.raises(BadInputError, match="number 12 "):
        lora_for(tiny(), {"lora_unet_output_blocks_12_0_in_layers_2.lora_down.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="cannot be read"):
        lora_for(base, tmp_path / "none.safetensors")
    damaged = of_kind("base")(tiny())
    for note in ("text", {"layers": [2] * 4, "down": [[0]] * 3, "up": [[0, 2]] * 3, "mid": True}):
        damaged.register_to_config(_kept_layers=note)
        with pytest.raises(CheckpointError, match="_kept_layers"):
            lora_for(damaged, random_lora(tiny()))


@pytest.mark.slow(30)
def test_the_command_writes_what_diffusers_loads_beside_a_plan(tmp_path: Path) -> None:
    pipe = load_pipeline(None, dtype=torch.float32)
    attention = {name: part for name, part in random_lora(pipe.unet).items() if "attn" in name}
    save_file(attention, tmp_path / "style.safetensors", metadata={"ss_tag": "style"})
    runner = CliRunner()
    assert runner.invoke(app, ["unet", "prune", "--drop", "mid", "--out", str(tmp_path / "cut")]).exit_code == 0
    asked = ["unet", "lora", "--model", str(tmp_path / "cut"), "--lora", str(tmp_path / "style.safetensors")]
    run = runner.invoke(app, [*asked, "--out", str(tmp_path / "fitted.safetensors"), "--json"], catch_exceptions=False)
    assert run.exit_code == 0, run.output
    told = json.loads(run.stdout)
    (left_out,) = told["left_out"]
    assert left_out.endswith(" style.safetensors: mid")
    assert told["tensors"] == len(load_file(tmp_path / "fitted.safetensors")) < len(attention)
    with safe_open(tmp_path / "fitted.safetensors", "pt") as file:
        assert file.metadata() == {"ss_tag": "style"}

    def drawn(pipe: Any) -> Tensor:
        noise = torch.Generator().manual_seed(0)
        result: Tensor = pipe("a red apple", num_inference_steps=2, generator=noise, output_type="pt").images
        return result

    pipe.load_lora_weights(tmp_path / "style.safetensors")
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    pipe.register_modules(unet=prune_unet(pipe.unet, cut_by_names(pipe.unet.config, drop=["mid"])))
    cut = load_pipeline(str(tmp_path / "cut"), dtype=torch.float32)
    plain = drawn(cut)
    cut.load_lora_weights(tmp_path / "fitted.safetensors")
    sd_lowvram.optimize(
        cut, settings=Settings(offload="layer", split_layers=True, weights_mib=1), width=128, height=128
    )
    ours = drawn(cut)
    sd_lowvram.restore(cut)
    wanted = drawn(pipe)
    assert (ours - wanted).abs().max() < 1e-3 < (plain - wanted).abs().max()
    again = runner.invoke(app, [*asked, "--out", str(tmp_path / "fitted.safetensors")])
    assert again.exit_code != 0 and "is there already" in " ".join(again.output.split())
