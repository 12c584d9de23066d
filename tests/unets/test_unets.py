"""Smaller UNets: what units take, what cuts leave, and that the result is a plain model that everything else takes."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from two_layer_unets import full_size, tiny
from typer.testing import CliRunner

import sd_lowvram
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.cli import app
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import BadInputError
from sd_lowvram.unets.analysis import OTHERS, analyse_unet, sum_blocks
from sd_lowvram.unets.combine import combine_unets
from sd_lowvram.unets.prune import cut_by_names, cut_of_kind, prune_unet


def told(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["unet", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["unet", *arguments])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("kind", "millions", "share"), [("base", 579.4, 0.657), ("small", 482.3, 0.639), ("tiny", 323.4, 0.604)]
)
def test_cuts_of_full_size_are_as_published(kind: str, millions: float, share: float) -> None:
    found = told("prune", "--model", "sd15", "--kind", kind, "--dry-run")
    assert found["parameters"] == pytest.approx(millions * 1e6, abs=5e4)
    assert found["peak_bytes"] <= found["before"]["peak_bytes"]
    sizes = {"width": 256, "height": 256, "rates": profile("rtx2070")}
    whole, cut = (
        analyse_unet(full_size(), **sizes),
        analyse_unet(prune_unet(full_size(), cut_of_kind(full_size().config, kind)), **sizes),
    )
    ratio = sum(unit.operations for unit in cut) / sum(unit.operations for unit in whole)
    assert ratio == pytest.approx(share, abs=0.005)


@pytest.mark.parametrize(("blocks", "share"), [(1, 0.882), (2, 0.776)])
def test_combinations_of_full_size_take_the_operations_that_they_should(blocks: int, share: float) -> None:
    sizes = {"width": 256, "height": 256, "rates": profile("rtx2070")}
    base = prune_unet(full_size(), cut_of_kind(full_size().config, "base"))
    mixed = analyse_unet(combine_unets(base, full_size(), blocks), **sizes)
    whole = analyse_unet(full_size(), **sizes)
    ratio = sum(unit.operations for unit in mixed) / sum(unit.operations for unit in whole)
    assert ratio == pytest.approx(share, abs=0.005)


def test_outer_blocks_hold_few_parameters_and_take_much_time() -> None:
    taken = analyse_unet(full_size(), 512, 512, rates=profile("rtx2070"))
    blocks = {block.name: block for block in sum_blocks(taken)}
    weights, seconds = sum(unit.parameters for unit in taken), sum(unit.seconds for unit in taken)
    assert weights == 859_520_964
    outer = [blocks["dn0"], blocks["up3"]]
    assert sum(block.parameters for block in outer) < 0.04 * weights
    assert sum(block.seconds for block in outer) > 0.3 * seconds
    names = [unit.name for unit in taken]
    assert names[:3] == ["dn0.0.res", "dn0.0.attn", "dn0.1.res"] and names[-1] == OTHERS and len(names) == 45


def test_units_are_measured_and_their_times_add_up() -> None:
    taken = analyse_unet(tiny(), 128, 128)
    assert all(unit.seconds > 0 for unit in taken) and not tiny()._forward_hooks


def test_kept_layers_keep_their_weights() -> None:
    base = prune_unet(tiny(), cut_of_kind(tiny().config, "base"))
    whole, left = tiny().state_dict(), base.state_dict()
    pairs = {
        "down_blocks.1.resnets.0": "down_blocks.1.resnets.0",
        "up_blocks.2.resnets.1": "up_blocks.2.resnets.2",
        "up_blocks.3.attentions.1": "up_blocks.3.attentions.2",
        "mid_block": "mid_block",
        "conv_out": "conv_out",
    }
    for new, old in pairs.items():
        named = [name for name in left if name.startswith(new + ".")]
        assert named and all(torch.equal(left[name], whole[old + name.removeprefix(new)]) for name in named)
    assert not any(name.startswith("down_blocks.1.resnets.1.") for name in left)
    for weight in left.values():
        assert not weight.requires_grad
    base.conv_in.weight.zero_()
    assert whole["conv_in.weight"].any()  # copies


def test_a_combination_takes_outer_blocks_from_one_and_the_rest_from_the_other() -> None:
    base = prune_unet(tiny(), cut_of_kind(tiny().config, "base"))
    for weight in base.parameters():
        weight.add_(1)
    mixed = combine_unets(base, tiny(), 1)
    assert torch.equal(mixed.down_blocks[0].resnets[0].conv1.weight, base.down_blocks[0].resnets[0].conv1.weight)
    assert torch.equal(mixed.up_blocks[3].resnets[1].conv1.weight, base.up_blocks[3].resnets[1].conv1.weight)
    assert torch.equal(mixed.conv_in.weight, base.conv_in.weight)
    assert torch.equal(mixed.down_blocks[1].resnets[1].conv1.weight, tiny().down_blocks[1].resnets[1].conv1.weight)
    assert torch.equal(mixed.time_embedding.linear_1.weight, tiny().time_embedding.linear_1.weight)


@pytest.mark.parametrize("kind", ["base", "small", "tiny"])
def test_what_a_cut_leaves_runs_and_loads_again(kind: str, tmp_path: Path) -> None:
    from diffusers import UNet2DConditionModel

    made = prune_unet(tiny(), cut_of_kind(tiny().config, kind))
    made.save_pretrained(tmp_path / kind)
    again = UNet2DConditionModel.from_pretrained(tmp_path / kind).eval()
    latents, text = torch.randn(2, 4, 16, 16), torch.randn(2, 7, 32)
    with torch.no_grad():
        outputs = [unet(latents, 500, text).sample for unit, unet in enumerate((made, again))]
    assert outputs[0].shape == latents.shape and torch.equal(*outputs)


def test_a_pruned_demo_model_is_planned_streamed_and_draws(tmp_path: Path) -> None:
    out = tmp_path / "no-middle"
    found = told("prune", "--drop", "mid", "--out", str(out))
    assert found["parameters"] < found["before"]["parameters"] and found["out"] == str(out)
    pipe = load_pipeline(out, dtype=torch.float32)
    assert pipe.unet.mid_block is None
    run = functools.partial(pipe, "a red apple", num_inference_steps=2, output_type="np", width=64, height=64)
    plain = run(generator=torch.Generator().manual_seed(1)).images
    plan = sd_lowvram.optimize(pipe, settings=sd_lowvram.Settings.smallest(), width=64, height=64)
    small = run(generator=torch.Generator().manual_seed(1)).images
    sd_lowvram.restore(pipe)
    assert plan.settings.offload is not None
    assert abs(plain - small).max() < 2e-3
    assert [path.name for path in tmp_path.iterdir()] == ["no-middle"]  # no folder of halves


def test_a_cut_block_that_was_wider_leaves_the_skip_connections_weights() -> None:
    config = {**tiny().config, "block_out_channels": [32, 64, 64, 96]}
    whole = build_components({"unet": config}, seed=3)["unet"]
    made = prune_unet(whole, cut_of_kind(config, "tiny")).up_blocks[0].resnets[0].conv1.weight
    old = whole.up_blocks[1].resnets[0].conv1.weight  # of 96 channels from below and 64 across
    assert torch.equal(made, torch.cat([old[:, :64], old[:, 96:]], dim=1))
    narrow = build_components({"unet": {**config, "block_out_channels": [32, 64, 64, 32]}}, device="meta")["unet"]
    with pytest.raises(BadInputError, match=r"64.*32"):
        prune_unet(narrow, cut_of_kind(narrow.config, "tiny"))


@functools.cache
def cut_pipelines() -> dict[str, Any]:
    """The demo model with UNets of random weights: one of two layers a block is cut, or put together with a cut one."""
    pipe = load_pipeline(None, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    config = {**pipe.unet.config, "layers_per_block": 2}
    whole = build_components({"unet": config}, seed=5)["unet"]
    base, least = (prune_unet(whole, cut_of_kind(whole.config, kind)) for kind in ("base", "tiny"))
    unets = {"tiny": least, "M2": combine_unets(base, whole, 2)}
    return {name: type(pipe)(**{**pipe.components, "unet": unet}, **_NO_CHECKER) for name, unet in unets.items()}


_NO_CHECKER = {"requires_safety_checker": False}


@pytest.mark.parametrize("name", ["tiny", "M2"])
@pytest.mark.parametrize(
    "settings",
    [
        sd_lowvram.Settings.smallest(),
        sd_lowvram.Settings(weight_storage="int8"),
        sd_lowvram.Settings(channels_last=True, guidance_in_turn=True, park_skips=True),
    ],
    ids=["smallest", "int8", "parked"],
)
def test_cut_and_combined_models_run_under_hooks(name: str, settings: Any) -> None:
    pipe = cut_pipelines()[name]
    pipe.set_progress_bar_config(disable=True)
    run = functools.partial(pipe, "a red apple", num_inference_steps=2, output_type="np", width=64, height=64)
    plain = run(generator=torch.Generator().manual_seed(1)).images
    sd_lowvram.optimize(pipe, settings=settings, width=64, height=64)
    hooked = run(generator=torch.Generator().manual_seed(1)).images
    sd_lowvram.restore(pipe)
    assert abs(plain - hooked).max() < (0.1 if settings.weight_storage else 5e-3)
    assert (run(generator=torch.Generator().manual_seed(1)).images == plain).all()


def test_models_are_combined_by_the_command(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    told("prune", "--drop", "mid", "--out", first)
    combine = "combine", "--compressed", first, "--blocks", "2", "--out", second
    assert "the original is what would come out" in refused(*combine) and not Path(second).exists()
    pipe: Any = load_pipeline(first)
    pipe.unet.conv_out.bias.data += 1
    pipe.save_pretrained(tmp_path / "trained")
    found = told("combine", "--compressed", str(tmp_path / "trained"), *combine[3:])
    assert found["parameters"] == found["before"]["parameters"]  # the middle is the original's
    made: Any = load_pipeline(second)
    assert made.unet.mid_block is not None and (made.unet.conv_out.bias > 0.9).all()


def test_components_are_written_in_the_types_that_they_had(tmp_path: Path) -> None:
    pipe = load_pipeline(None, dtype=torch.float16)
    pipe.vae.to(torch.float32)
    pipe.save_pretrained(tmp_path / "given")
    given, pruned_, both = (str(tmp_path / name) for name in ("given", "pruned", "both"))
    told("prune", "--model", given, "--drop", "mid", "--out", pruned_)
    pipe.unet.conv_out.bias.data += 1
    pipe.save_pretrained(tmp_path / "other")
    told("combine", "--model", given, "--compressed", str(tmp_path / "other"), "--out", both)
    wanted = {"unet": torch.float16, "text_encoder": torch.float16, "vae": torch.float32}
    for folder in (pruned_, both):
        files = {name: next(Path(folder, name).glob("*.safetensors")) for name in wanted}
        stored = {name: {tensor.dtype for tensor in load_file(file).values()} for name, file in files.items()}
        assert stored == {name: {dtype} for name, dtype in wanted.items()}


def test_an_analysis_is_drawn_and_told(tmp_path: Path) -> None:
    picture = tmp_path / "units.png"
    found = told("analyse", "--width", "64", "--height", "64", "--gpu", "rtx2070", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG") and found["units"][-1]["name"] == OTHERS
    assert found["parameters"] == sum(unit["parameters"] for unit in found["units"])
    measured = told("analyse", "--width", "64", "--height", "64")  # in float32, where the file holds float16
    assert measured["bytes"] == 4 * measured["parameters"] == 2 * found["bytes"]
    shown = CliRunner().invoke(app, ["unet", "analyse", "--width", "64", "--height", "64"])
    assert shown.exit_code == 0 and "up3.1.attn" in shown.stdout and "mid  " in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["prune", "--kind", "huge", "--dry-run"], "'huge' .*base, small, tiny"),
        (["prune", "--kind", "base", "--dry-run"], "--drop mid"),
        (
            [
                "prune",
                "--keep",
                "mid",
                *(f"--keep=dn{n}" for n in range(4)),
                *(f"--keep=up{n}" for n in range(4)),
                "--dry-run",
            ],
            "nothing would be cut",
        ),
        (["prune", "--experts", "2", "--dry-run"], "the demo model has one layer a block"),
        (
            ["prune", "--drop", "mid", "--regions", "4", "--dry-run"],
            "--model PATH --kind base --regions 4",
        ),
        (["combine", "--compressed", "sd15", "--model", "sd15", "--dry-run"], "are both sd15"),
        (["prune", "--dry-run"], "name one cut"),
        (["prune", "--kind", "tiny", "--drop", "mid", "--dry-run"], "name one cut"),
        (["prune", "--drop", "dn7", "--dry-run"], "dn7.*dn3"),
        (["prune", "--drop", "up1.5", "--dry-run"], "up1.5.*up3, .*2"),
        (["prune", "--drop", "left", "--dry-run"], "'left'"),
        (["prune", "--drop", "dn0", "--dry-run"], "dn0 .*0 .*up3 2"),
        (["prune", "--model", "sd15", "--drop", "dn0.0", "--drop", "up3.1", "--dry-run"], "dn0.0"),
        (["prune", "--model", "sd15", "--drop", "dn0.1", "--drop", "up3.0", "--dry-run"], "first and the last layer"),
        (["prune", "--drop", "mid"], "--out"),
        (["prune", "--drop", "mid", "--out", "/"], "is there already"),
        (["prune", "--model", "sd15", "--kind", "base", "--out", "/tmp/never"], "architecture without weights"),
        (["combine", "--compressed", "sdxl", "--model", "sd15", "--dry-run"], "cross_attention_dim"),
        (["combine", "--compressed", "sd15", "--model", "sd21", "--blocks", "4", "--dry-run"], "1 to 3"),
        (["prune", "--drop", "dn3", "--drop", "up0", "--dry-run"], "the middle block was made for the innermost"),
        (["prune", "--model", "sdxl", "--drop", "dn2", "--drop", "up0", "--dry-run"], "drop mid, too"),
        (["prune", "--drop", "mid", "--dry-run", "--out", "/"], "is there already"),
        (["analyse", "--dry-run"], "--gpu"),
        (["analyse", "--plot", "units.txt"], ".png"),
        (["analyse", "--width", "100"], "multiple of 8"),
    ],
)
def test_bad_input_is_told(arguments: list[str], why: str) -> None:
    assert re.search(why, refused(*arguments))


def test_all_blocks_of_a_tiny_unet_cannot_be_the_outermost() -> None:
    """Its innermost one gives its map to no other."""
    whole = tiny()
    small = prune_unet(whole, cut_of_kind(whole.config, "tiny"))
    with pytest.raises(BadInputError, match=f"from 1 to {len(small.down_blocks) - 1} can"):
        combine_unets(small, whole, len(small.down_blocks))


def test_a_dry_run_does_not_say_that_it_wrote(tmp_path: Path) -> None:
    asked = "prune", "--drop", "mid", "--dry-run", "--out", str(tmp_path / "new")
    assert told(*asked)["out"] is None
    shown = CliRunner().invoke(app, ["unet", *asked])
    assert shown.exit_code == 0 and "written" not in shown.stdout and not [*tmp_path.iterdir()]


def test_a_model_for_inpainting_is_cut(tmp_path: Path) -> None:
    pipe: Any = load_pipeline(None)
    config = {**pipe.unet.config, "in_channels": 9}
    pipe.register_modules(unet=type(pipe.unet).from_config(config))
    pipe.save_pretrained(tmp_path / "whole")
    out = str(tmp_path / "cut")
    assert told("prune", "--model", str(tmp_path / "whole"), "--drop", "mid", "--out", out)["out"] == out
    made: Any = load_pipeline(out, "inpaint")
    assert made.unet.config.in_channels == 9 and made.unet.mid_block is None


def test_only_unets_that_are_known_are_taken() -> None:
    with pytest.raises(BadInputError, match=r"Linear.*UNet"):
        analyse_unet(torch.nn.Linear(2, 2), 64, 64)
    config = full_size().config
    with pytest.raises(BadInputError, match="either"):
        cut_by_names(config, ["dn0.0"], ["mid"])
