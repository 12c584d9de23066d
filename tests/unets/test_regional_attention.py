"""Regional attention: what it computes, what it costs, and right under every hook and command."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from PIL import Image
from test_unet_hooks import TOGETHER, inputs
from torch.utils.flop_counter import FlopCounterMode
from two_layer_unets import full_size, write_changed_demo
from two_layer_unets import tiny as original
from typer.testing import CliRunner
from unet_bounds import BOUNDS, SMALLEST

import sd_lowvram
from sd_lowvram import Settings
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.cli import app
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import BadInputError, ConflictError
from sd_lowvram.hooks.numbers.attention import kernel_counts
from sd_lowvram.models import anatomy_of_components
from sd_lowvram.settings import Fidelity
from sd_lowvram.tracing import trace
from sd_lowvram.unets.analysis import analyse_unet
from sd_lowvram.unets.asdm_unet import ASDMUNet2DConditionModel
from sd_lowvram.unets.changes import BlockChanges
from sd_lowvram.unets.cuts import whole
from sd_lowvram.unets.prune import prune_unet
from sd_lowvram.unets.regional_attention import Band, RegionalAttention, region_sizes, runs

SIZES = (512, 1024, 2048)


def gated(unet: Any, gate: float = 0.5) -> Any:
    """``unet`` with gates that training has opened."""
    for attention in attentions_of(unet).values():
        attention.gate.data.fill_(gate)
    return unet


def attentions_of(unet: Any) -> dict[str, RegionalAttention]:
    return {path: module for path, module in unet.named_modules() if isinstance(module, RegionalAttention)}


@functools.cache
def regional(side: int = 8, blocks: tuple[str, ...] = ()) -> Any:
    return gated(prune_unet(original(), whole(original().config), BlockChanges(regions=side, blocks=blocks)))


def called(unet: Any, size: tuple[int, int] = (33, 41), batch: int = 2) -> torch.Tensor:
    with torch.no_grad():
        return unet(**inputs(unet, size, batch, unet.dtype))[0]


@functools.cache
def regional_of_full_size(side: int | None) -> Any:
    return prune_unet(full_size(), whole(full_size().config), BlockChanges(regions=side))


@functools.cache
def pipeline() -> Any:
    """The demo model with regions of four by four tokens in its outermost blocks."""
    pipe = load_pipeline(None, dtype=torch.float32)
    unet = gated(prune_unet(pipe.unet, whole(pipe.unet.config), BlockChanges(regions=4)))
    made = type(pipe)(**{**pipe.components, "unet": unet}, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


def asked(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(("total", "side"), [(64, 32), (65, 32), (7, 4), (10, 3), (5, 8), (9, 1), (1, 1)])
def test_regions_make_up_a_side_as_evenly_as_they_can(total: int, side: int) -> None:
    sizes = region_sizes(total, side)
    assert sum(sizes) == total and len(sizes) == -(-total // side)
    assert max(sizes) <= side and max(sizes) - min(sizes) <= 1
    found = runs(sizes)
    assert [run.size for run in found for _ in range(run.number)] == sizes
    assert [run.start for run in found] == [0, found[0].stop][: len(found)]


def expected(attention: RegionalAttention, tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Attention over all tokens with a mask, and to a pooled map that is projected after it is pooled."""
    query, key, value = (
        layer(tokens).unflatten(2, (attention.heads, -1)).transpose(1, 2)
        for layer in (attention.to_q, attention.to_k, attention.to_v)
    )
    rows, columns = (
        torch.tensor([number for number, one in enumerate(sizes) for _ in range(one)])
        for sizes in (region_sizes(side, attention.side) for side in (height, width))
    )
    region = (rows[:, None] * 1000 + columns).flatten()
    inside = F.scaled_dot_product_attention(query, key, value, region[:, None] == region)
    sides = min(8, height), min(8, width)
    pooled = (
        F.adaptive_avg_pool2d(tokens.transpose(1, 2).unflatten(2, (height, width)), sides).flatten(2).transpose(1, 2)
    )
    keys, values = (
        layer(pooled).unflatten(2, (attention.heads, -1)).transpose(1, 2) for layer in (attention.to_k, attention.to_v)
    )
    beyond = F.scaled_dot_product_attention(query, keys, values) * attention.gate[:, None, None]
    return attention.to_out[0]((inside + beyond).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (7, 10), (4, 13), (1, 9), (20, 12)])
def test_tokens_see_their_region_and_the_pooled_map(height: int, width: int, dtype: torch.dtype, most: float) -> None:
    attention = next(iter(attentions_of(regional(4)).values()))
    attention.latents = height, width
    tokens = torch.randn(2, height * width, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = expected(attention, tokens, height, width)
        found = attention.to(dtype)(tokens.to(dtype))
        attention.to(torch.float32)
    assert tiny.relative_error(found, wanted) < most


@pytest.mark.parametrize("size", [(33, 41), (16, 16)])
def test_regions_as_large_as_the_map_are_plain_attention(size: tuple[int, int]) -> None:
    shut = prune_unet(original(), whole(original().config), BlockChanges(regions=41))
    assert len(attentions_of(shut)) == 5 and all(not one.gate.any() for one in attentions_of(shut).values())
    plain = called(original(), size)
    assert tiny.relative_error(called(shut, size), plain) < 1e-6
    assert tiny.relative_error(called(gated(shut), size), plain) > 1e-3
    assert tiny.relative_error(called(regional(), size), plain) > 1e-3


@pytest.mark.parametrize("blocks", [("dn1", "up1"), ("mid",), ("dn2", "up2")])
def test_maps_of_inner_blocks_are_found(blocks: tuple[str, ...]) -> None:
    made = regional(4, blocks)
    assert len(attentions_of(made)) == (1 if blocks == ("mid",) else 5)
    assert called(made, (33, 41)).isfinite().all() and called(made, (16, 24)).isfinite().all()


def test_cost_grows_with_the_pixels() -> None:
    regional_costs, plain_costs = (
        [
            {
                unit.name: unit
                for unit in analyse_unet(regional_of_full_size(side), size, size, rates=profile("rtx2070"))
            }
            for size in SIZES
        ]
        for side in (32, None)
    )
    for name in ("dn0.0.attn", "dn0.1.attn", "up3.2.attn"):
        small, middle, large = (costs[name].operations for costs in regional_costs)
        assert 3.99 < middle / small <= 4 and 15.9 < large / small <= 16  # the text's keys and values do not grow
        assert [costs[name].peak_bytes for costs in plain_costs] == [costs[name].peak_bytes for costs in regional_costs]
        small, middle, large = (costs[name].operations for costs in plain_costs)
        assert middle > 10 * small and large > 140 * small
    peaks = [costs["dn0.0.attn"].peak_bytes for costs in regional_costs]
    assert peaks[1] == pytest.approx(4 * peaks[0], rel=0.02) and peaks[2] == pytest.approx(16 * peaks[0], rel=0.02)


def test_torch_counts_the_same() -> None:
    attention = next(iter(attentions_of(regional_of_full_size(32)).values()))
    counted = []
    for size in SIZES:
        attention.latents = size // 8, size // 8
        with FlopCounterMode(display=False) as counter:
            attention(torch.empty(2, (size // 8) ** 2, 320, dtype=torch.float16, device="meta"))
        counted.append(counter.get_total_flops())
    tokens = 2 * 64 * 64
    assert counted[0] == tokens * (4 * 2 * 320 * 320 + 4 * 320 * (32 * 32 + 8 * 8))
    assert counted[1:] == [4 * counted[0], 16 * counted[0]]


@pytest.mark.parametrize("way", ["layer", "blocks", "halves", "component"])
def test_streamed_the_bits_are_the_same(way: str) -> None:
    before = called(regional())
    with sd_lowvram.attached(
        regional(), Settings(offload=way, weights_mib=1 if way == "blocks" else None), device="cpu"
    ):
        assert torch.equal(called(regional()), before)
    assert torch.equal(called(regional()), before)


@pytest.mark.parametrize(
    ("knobs", "sites"),
    [
        ({"guidance_in_turn": True}, {"guidance_in_turn": 45}),
        ({"transformer_chunks": 4}, {"transformer_chunks": 16}),
        (TOGETHER, {"transformer_chunks": 16, "residual_strips": 22}),
        ({**TOGETHER, "offload": "layer", "channels_last": True}, {"transformer_chunks": 16}),
        ({"attention": "fused-softmax", "attention_mib": 1}, {"attention": 32}),
        ({"attention": "sliced", "attention_mib": 1}, {"attention": 32}),
    ],
    ids=[
        "in turn",
        "chunks",
        "together",
        "streamed",
        "fused softmax",
        "sliced",
    ],
)
@pytest.mark.parametrize("batch", [2, 3])
def test_hooks_change_no_more_than_rounding(knobs: dict[str, Any], sites: dict[str, int], batch: int) -> None:
    before = called(regional(), batch=batch)
    with sd_lowvram.attached(regional(), Settings(**knobs), device="cpu") as attachment:
        assert tiny.relative_error(called(regional(), batch=batch), before) < 1e-5
    assert sites.items() <= attachment.sites.items()
    assert torch.equal(called(regional(), batch=batch), before)


def test_guidance_goes_in_turn_through_regions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    forward = RegionalAttention.forward

    def noted(self: RegionalAttention, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        batches.append(len(tokens))
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(RegionalAttention, "forward", noted)
    with sd_lowvram.attached(regional(), Settings(guidance_in_turn=True), device="cpu"):
        called(regional())
    assert batches == [1] * 10


@pytest.mark.parametrize(("size", "bands"), [((33, 41), [14, 13, 6]), ((24, 16), [16, 8]), ((7, 64), [7])])
def test_chunks_are_bands_of_regions(size: tuple[int, int], bands: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    forward = RegionalAttention.forward

    def noted(self: RegionalAttention, tokens: torch.Tensor, *args: Any, band: Band | None = None, **kw: Any) -> Any:
        seen.extend([] if band is None else [sum(band.rows)])
        return forward(self, tokens, *args, band=band, **kw)

    before = called(regional(), size)
    monkeypatch.setattr(RegionalAttention, "forward", noted)
    with sd_lowvram.attached(regional(), Settings(transformer_chunks=2 if size == (24, 16) else 4), device="cpu"):
        assert tiny.relative_error(called(regional(), size), before) < 1e-5
    assert seen == 5 * bands


@pytest.mark.slow(5)
def test_the_least_memory_is_no_more_than_of_the_plain_unet() -> None:
    """Full-size SD1.5 at 2048x2048 in fp16, every shallow layer changed: strips and bands hold what they should."""
    latents = torch.empty(2, 4, 256, 256, dtype=torch.float16, device="meta")
    text = torch.empty(2, 77, 768, dtype=torch.float16, device="meta")
    peaks = []
    for changes in (BlockChanges(), BlockChanges(experts=2, regions=32)):
        unet = prune_unet(full_size(), whole(full_size().config), changes)
        with sd_lowvram.attached(unet, SMALLEST, device="cpu"), torch.inference_mode():
            peaks.append(trace(unet, latents, torch.tensor(1), text, return_dict=False).activation_peak_bytes)
    assert peaks[1] <= 1.02 * peaks[0] < BOUNDS[2048]


def test_attention_in_8_bits_and_by_a_backend_is_the_layers_own() -> None:
    before = called(regional())
    with sd_lowvram.attached(regional(), Settings(weight_storage="int8"), device="cpu"):
        assert tiny.relative_error(called(regional()), before) < 0.02
    with sd_lowvram.attached(regional(), Settings(attention="sliced", attention_mib=1), device="cpu"):
        called(regional())
        sites = anatomy_of_components("diffusers", {"unet": regional()}).attentions
        inside = [site for site in sites if isinstance(site.module, RegionalAttention)]
        assert len(inside) == 5 and sum(kernel_counts(inside).values()) == 5 * (4 + 1)


def test_merged_tokens_and_masks_are_refused() -> None:
    with pytest.raises(ConflictError, match=r"merge_tokens.*RegionalAttention"):
        sd_lowvram.optimize(pipeline(), settings=Settings(merge_tokens=50))
    attention = next(iter(attentions_of(regional()).values()))
    attention.latents = 8, 8
    with pytest.raises(ConflictError, match=r"60.*8.*8"):
        attention(torch.zeros(1, 60, 32))
    with pytest.raises(ConflictError, match="takes no attention mask"):
        attention(torch.zeros(1, 64, 32), attention_mask=torch.zeros(1, 1, 64))


@pytest.mark.parametrize(
    "ask",
    [
        lambda pipe: sd_lowvram.optimize(pipe, vram="8GB", width=64, height=64),
        lambda pipe: sd_lowvram.optimize(pipe, settings=Settings.smallest(), width=64, height=64),
        lambda pipe: sd_lowvram.optimize(pipe, settings=Settings(offload="layer"), width=64, height=64),
    ],
    ids=["plenty", "smallest", "layer"],
)
def test_a_pipeline_is_optimized_runs_and_is_restored(ask: Callable[[Any], Any]) -> None:
    before = tiny.run(pipeline())
    plan = ask(pipeline())
    hooked = tiny.run(pipeline())
    sd_lowvram.restore(pipeline())
    exact = plan.fidelity == Fidelity.BITWISE
    assert torch.equal(hooked, before) if exact else (hooked - before).abs().max() < 5e-3
    assert torch.equal(tiny.run(pipeline()), before)


def test_a_folder_is_loaded_wherever_models_are(tmp_path: Path) -> None:
    model, picture = str(tmp_path / "model"), tmp_path / "apple.png"
    write_changed_demo(tmp_path / "model", regions=4, experts=2)
    pipe = load_pipeline(model)
    assert type(pipe.unet) is ASDMUNet2DConditionModel and len(attentions_of(pipe.unet)) == 3
    sizes = ["--width", "64", "--height", "64"]
    asked("generate", "a red apple", "--model", model, *sizes, "--steps", "2", "--output", str(picture))
    assert picture.exists()
    listed = json.loads(asked("unet", "analyse", "--model", model, *sizes, "--json"))
    assert listed["parameters"] == sum(weight.numel() for weight in pipe.unet.parameters())
    config = json.loads(Path(model, "unet", "config.json").read_text(encoding="utf-8"))
    assert (config["regions"], config["experts"], config["changed_blocks"]) == (4, 2, ["dn0", "up3"])


@pytest.mark.slow(15)
def test_gates_are_opened_by_training(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "pictures").mkdir()
    for number, colour in enumerate(("red", "green")):
        Image.new("RGB", (40, 40), colour).save(tmp_path / "pictures" / f"{number}.png")
        (tmp_path / "pictures" / f"{number}.txt").write_text(f"a {colour} box", encoding="utf-8")
    write_changed_demo(tmp_path / "model", regions=4)
    given = ["--student", str(tmp_path / "model"), "--data", str(tmp_path / "pictures"), "--steps", "2", "--batch", "2"]
    asked("unet", "distil", *given, "--rate", "1e-2", "--out", str(tmp_path / "trained"))
    gates = [
        [one.gate for one in attentions_of(load_pipeline(tmp_path / name).unet).values()]
        for name in ("model", "trained")
    ]
    assert len(gates[0]) == 3 and not any(gate.any() for gate in gates[0]) and all(gate.all() for gate in gates[1])


def test_stock_diffusers_loads_regions_as_plain_attention(tmp_path: Path) -> None:
    regional().save_pretrained(tmp_path / "unet")
    stock = UNet2DConditionModel.from_pretrained(tmp_path / "unet").eval()
    assert torch.equal(called(stock), called(original()))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--regions", "0"], "--regions 0"),
        (["--regions", "-3"], "--regions -3"),
        (["--regions", "8", "--changed", "dn3"], "dn3 have no self-attention"),
        (["--regions", "8", "--changed", "left"], "'left'"),
    ],
)
def test_bad_input_is_told(arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["unet", "prune", *arguments, "--dry-run"])
    assert result.exit_code == 2 and why in " ".join(result.output.split()), result.output


@pytest.mark.parametrize("value", [0, "wide", 2.5])
def test_a_configuration_that_makes_no_sense_is_told(value: Any) -> None:
    config = {**regional().config, "_class_name": type(regional()).__name__, "regions": value}
    with pytest.raises(BadInputError, match="is not a side of a region"):
        build_components({"unet": config}, device="meta")
