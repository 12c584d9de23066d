"""Weights in 8 bits: how far they are off, what they take, that hosts' LoRAs work, and that all comes off again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from test_unet_hooks import TOGETHER, inputs
from test_unet_hooks import run as run_unet
from test_unet_hosts import add_lora
from torch import nn

from sd_lowvram import Settings, attached, optimize, plan, trace
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.errors import ConflictError, NoSiteError
from sd_lowvram.kernels.quantised import quantise, widen
from sd_lowvram.weights import all_tensors, weight_bytes

KINDS = ("fp8", "int8")
TYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of normal weights: fp8 rounds to 4 bits, the last one of half a step; int8 to 1/127 of about 3.3 standard deviations.
LARGEST_ERROR = {"fp8": 0.035, "int8": 0.013}


def run(unet: Any) -> torch.Tensor:
    return run_unet(unet, size=(8, 11))


@pytest.fixture
def unet() -> Any:
    return build_components(tiny.config("sd15"), only=("unet",))["unet"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_channel_has_its_scale(kind: str, dtype: torch.dtype) -> None:
    magnitudes = torch.logspace(-4, 2, 64)[:, None, None, None]
    weight = (torch.randn(64, 32, 3, 3, generator=torch.Generator().manual_seed(0)) * magnitudes).to(dtype)
    stored, scale = quantise(weight, kind)
    widened = widen(stored, scale)
    assert (stored.element_size(), scale.shape, widened.dtype) == (1, (64, 1, 1, 1), dtype)
    assert not stored.is_floating_point()
    worst = max(tiny.relative_error(widened[channel], weight[channel]) for channel in range(64))
    assert LARGEST_ERROR[kind] / 10 < worst < LARGEST_ERROR[kind]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_extremes(kind: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max / 4
    weight = torch.zeros(4, 8, dtype=dtype)
    weight[1, 0], weight[2], weight[3] = largest, 1e-7, torch.linspace(-1, 1, 8).to(dtype)
    widened = widen(*quantise(weight, kind))
    assert widened.isfinite().all()
    assert torch.equal(widened[0], weight[0])
    assert (widened[1] / largest - weight[1] / largest).abs().max() < 0.01
    assert (widened[2].double() - weight[2].double()).abs().max() < 1e-7
    assert tiny.relative_error(widened[3], weight[3]) < LARGEST_ERROR[kind] + 0.01


def test_strides_are_kept() -> None:
    weight = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
    stored, scale = quantise(weight, "int8")
    assert stored.stride() == weight.stride() == widen(stored, scale).stride()


@pytest.mark.parametrize(("name", "kind"), [("sd15", "fp8"), ("sdxl", "int8")])
def test_a_pipeline_runs_near_its_own_picture_and_comes_back(name: str, kind: str) -> None:
    pipe = tiny.pipeline(name)
    plain = tiny.run(pipe, steps=1)
    tensors = all_tensors(pipe.unet, pipe.text_encoder, pipe.vae)
    tensors[0].requires_grad_(True)
    before = [(tensor.data_ptr(), tensor.dtype, tensor.requires_grad) for tensor in tensors]
    small = {part: weight_bytes(getattr(pipe, part)) for part in ("unet", "vae")}
    with attached(pipe, Settings(weight_storage=kind), device="cpu") as attachment:
        picture = tiny.run(pipe, steps=1)
        assert attachment.sites["weight_storage"] > 100
        assert weight_bytes(pipe.unet) < 0.3 * small["unet"]  # float32 before
        assert weight_bytes(pipe.vae) == small["vae"]
        assert pipe.unet.dtype == pipe.text_encoder.dtype == torch.float32
    assert 1e-4 < tiny.relative_error(picture, plain) < {"fp8": 0.06, "int8": 0.02}[kind]
    assert [(tensor.data_ptr(), tensor.dtype, tensor.requires_grad) for tensor in tensors] == before
    assert torch.equal(tiny.run(pipe, steps=1), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_image_prompts_are_projected_by_a_layer_whose_owner_reads_its_type(kind: str) -> None:
    pipe = families.with_ip_adapters("plain", "plus")
    seen = {"ip_adapter_image": [families.SEEN] * 2}
    plain = tiny.run(pipe, steps=1, **seen)
    with attached(pipe, Settings(weight_storage=kind), device="cpu"):
        assert tiny.relative_error(tiny.run(pipe, steps=1, **seen), plain) < 0.06


BITWISE = [{"offload": "layer"}, {"offload": "component"}, {"offload": "blocks", "weights_mib": 1}]
ROUNDING = [{"channels_last": True}, {"offload": "layer", "split_layers": True}]


@pytest.mark.parametrize("settings", [*BITWISE, *ROUNDING])
def test_other_hooks_change_nothing(unet: Any, settings: dict[str, Any]) -> None:
    with attached(unet, Settings(weight_storage="int8"), device="cpu"):
        alone = run(unet)
    with attached(unet, Settings(weight_storage="int8", **settings), device="cpu"):
        result = run(unet)
    assert torch.equal(result, alone) if settings in BITWISE else tiny.relative_error(result, alone) < 1e-5


@pytest.mark.parametrize("precision", ["bf16", "fp16-storage"])
def test_other_hooks_compose(unet: Any, precision: str) -> None:
    plain = run(unet)
    settings = Settings(weight_storage="int8", precision=precision, offload="layer", **TOGETHER)
    with attached(unet, settings, device="cpu"):
        assert tiny.relative_error(run(unet), plain) < 0.03
    assert torch.equal(run(unet), plain)


@pytest.mark.parametrize(("kind", "when"), [("fp8", "before"), ("int8", "after")])
def test_lora_has_its_whole_effect(unet: Any, kind: str, when: str) -> None:
    without = run(unet)
    with attached(unet, Settings(weight_storage=kind), device="cpu"):
        stored_without = run(unet)
    if when == "before":
        add_lora(unet)
    with attached(unet, Settings(weight_storage=kind), device="cpu"):
        if when == "after":
            add_lora(unet)
        result = run(unet)
        parameters = dict(unet.named_parameters())
        assert all(value.is_floating_point() for path, value in parameters.items() if "lora_" in path)
    expected = run(unet)
    assert tiny.relative_error(expected, without) > 0.05
    off = tiny.relative_error(stored_without, without)
    assert tiny.relative_error(result, expected) < 1.5 * off


def test_what_would_lose_is_refused(unet: Any, tmp_path: Path) -> None:
    add_lora(unet)
    with attached(unet, Settings(weight_storage="fp8"), device="cpu"):
        for attempt in (unet.fuse_lora, unet.unfuse_lora, lambda: unet.save_pretrained(tmp_path / "model")):
            with pytest.raises(ConflictError, match=r"8 bits.*restore\(\)"):
                attempt()
    assert not (tmp_path / "model").exists()
    unet.fuse_lora()


def test_tied_layers_share_their_store(unet: Any) -> None:
    first, second = (layer for layer in unet.mid_block.resnets)
    second.conv1.weight = first.conv1.weight
    plain = run(unet)
    with attached(unet, Settings(weight_storage="int8"), device="cpu"):
        assert first.conv1.weight is second.conv1.weight
        assert tiny.relative_error(run(unet), plain) < 0.03
    assert torch.equal(run(unet), plain)


def test_nothing_to_store() -> None:
    vae = build_components(tiny.config("sd15"), only=("vae",))["vae"]
    with pytest.raises(NoSiteError, match="VAE"), attached(vae, Settings(weight_storage="fp8"), device="cpu"):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_the_trace_counts_eight_bits_and_one_wide_layer(unet: Any, kind: str) -> None:
    given = inputs(unet, (8, 11), 2)
    whole = trace(unet, **given)
    plain = whole.weights_bytes
    layers = [module.weight for module in unet.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    with attached(unet, Settings(weight_storage=kind), device="cpu"):
        traced = trace(unet, **given)
    scales = 4 * sum(len(weight) for weight in layers)
    assert 0.25 * plain < traced.weights_bytes < 0.25 * plain + scales + 100_000
    largest = max(weight.numel() for weight in layers) * 4
    assert whole.activation_peak_bytes <= traced.activation_peak_bytes <= whole.activation_peak_bytes + largest
    assert traced.largest_bytes >= largest
    assert traced.peak_bytes < whole.peak_bytes / 2


@pytest.mark.slow(5)
@pytest.mark.parametrize("settings", [{"weight_storage": "int8"}, {"precision": "bf16"}])
def test_a_plan_starts_from_the_model_as_it_was_loaded(unet: Any, settings: dict[str, Any]) -> None:
    request = {"width": 64, "height": 64, "device": "cpu", "vram": "1GB"}
    resident, stored = Settings(offload="none"), Settings(offload="none", **settings)
    plain = plan(unet, settings=resident, **request)
    small = plan(unet, settings=stored, **request)
    assert small.predicted.weights_bytes < 0.6 * plain.predicted.weights_bytes
    with attached(unet, Settings(**settings), device="cpu"):
        assert plan(unet, settings=resident, **request).predicted == plain.predicted
        assert plan(unet, settings=stored, **request).predicted == small.predicted


def test_the_search_takes_eight_bits_where_another_picture_is_allowed(unet: Any) -> None:
    request = {"width": 64, "height": 64, "device": "cpu"}
    fixed = Settings(precision="fp32", offload="none")
    plain = plan(unet, vram="1GB", settings=fixed, **request)
    chosen = plan(unet, vram=f"{plain.predicted.peak_bytes // 2} b", settings=fixed, approximate=True, **request)
    assert (chosen.settings.weight_storage, str(chosen.fidelity)) == ("int8", "approximate")
    assert plan(unet, vram="1GB", settings=fixed, approximate=True, **request).settings.weight_storage is None


def test_a_pipeline_is_planned_and_optimized() -> None:
    pipe = tiny.pipeline("sd15")
    request = {"vram": "1GB", "device": "cpu"}
    stored = Settings(weight_storage="fp8", offload="none")
    plain = plan(pipe, settings=Settings(offload="none"), **request)
    small = optimize(pipe, settings=stored, **request)
    assert small.settings.weight_storage == "fp8"
    assert str(small.fidelity) == "approximate"
    assert small.predicted.peak_bytes < plain.predicted.peak_bytes
    assert tiny.run(pipe, steps=1).isfinite().all()
    assert optimize(pipe, settings=stored, **request).predicted == small.predicted
