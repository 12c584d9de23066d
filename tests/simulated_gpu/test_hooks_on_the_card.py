"""Every hook and way of offloading: the same bits however late copies run, no race, and nothing left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from on_card import GPU
from test_unet_hosts import add_lora
from torch import Tensor

from sd_lowvram import Settings, attached
from sd_lowvram.devices.performance import profile
from sd_lowvram.memory import segments
from sd_lowvram.patches import Change
from sd_lowvram.planning.cost_model import Pricing
from sd_lowvram.planning.request import Request
from sd_lowvram.session import anatomy_of
from sd_lowvram.settings import knobs
from sd_lowvram.streaming.engine import Stream
from sd_lowvram.streaming.host_weights import host_budget, mapped_bytes
from sd_lowvram.streaming.timing import StepTiming
from sd_lowvram.units import GIB

LATE = ["lazy", "random"]
TURN = {"guidance_in_turn": True}
SMALL_BLOCKS = {"offload": "blocks", "weights_mib": 1}

STREAMED: dict[str, Settings] = {
    "component": Settings(offload="component"),
    "halves": Settings(offload="halves"),
    "layer": Settings(offload="layer"),
    "layers split": Settings(offload="layer", split_layers=True),
    "blocks": Settings(**SMALL_BLOCKS),
    "blocks, in turn": Settings(**SMALL_BLOCKS, **TURN),
    "blocks, skips parked": Settings(**SMALL_BLOCKS, **TURN, park_skips=True),
    "layer, skips parked": Settings(offload="layer", park_skips=True),
    "layer, in strips": Settings(offload="layer", residual_strips=2, transformer_chunks=2, feed_forward_chunks=2),
    "blocks, channels last": Settings(**SMALL_BLOCKS, channels_last=True),
    "layers split, channels last": Settings(offload="layer", split_layers=True, channels_last=True),
    "blocks, widened": Settings(**SMALL_BLOCKS, precision="fp16-storage"),
    "layer, int8": Settings(offload="layer", weight_storage="int8"),
    "layer, fp8": Settings(offload="layer", weight_storage="fp8"),
    "layer, decoder on the CPU": Settings(offload="layer", decoder_device="cpu"),
    "smallest": Settings.smallest(),
}
# Not `deterministic`, which asks every backend about full-size shapes and moves nothing.
RESIDENT: dict[str, Settings] = {
    "resident": Settings(offload="none"),
    "attention sliced": Settings(attention="sliced", attention_mib=1),
    "attention in place": Settings(attention="fused-softmax", attention_mib=1),
    "attention efficient": Settings(attention="efficient"),
    "attention sdpa": Settings(attention="sdpa"),
    "channels last": Settings(channels_last=True, inference_mode=True),
    "slices": Settings(vae_slices=True),
    "exact, held": Settings(vae_tiles="exact", vae_map="held", vae_strip_mib=1),
    "exact, parked": Settings(vae_tiles="exact", vae_map="parked", vae_strip_mib=1),
    "exact, recomputed": Settings(vae_tiles="exact", vae_map="recomputed", vae_strip_mib=1),
    **({"tiles": Settings(vae_tiles="fast")} if "fast" in knobs()["vae_tiles"].choices else {}),
    "decoder on the CPU": Settings(decoder_device="cpu"),
    "feed forward": Settings(feed_forward_chunks=2),
    "strips": Settings(residual_strips=2, transformer_chunks=2),
    "skips parked": Settings(park_skips=True),
    "in turn, skips parked": Settings(**TURN, park_skips=True),
    "fp16": Settings(precision="fp16"),
    "bf16": Settings(precision="bf16", channels_last=True),
    "autocast": Settings(precision="autocast-fp16"),
    "fp16 flash": Settings(precision="fp16", attention="flash"),
    "int8": Settings(weight_storage="int8"),
    "fp8": Settings(weight_storage="fp8"),
}
WAYS = STREAMED | {name: settings.filled(offload="none") for name, settings in RESIDENT.items()}


def with_lora() -> Any:
    pipe = families.plain("sd15")
    add_lora(pipe.unet)
    return pipe


TARGETS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "sd15": (lambda: families.plain("sd15"), {}),
    "sdxl": (lambda: families.plain("sdxl", "StableDiffusionXLPipeline"), {}),
    "lora": (with_lora, {}),
    "controlnet": (lambda: families.controlled(1), families.IMAGE),
    "ip adapter": (lambda: families.with_ip_adapters("plain", "plus"), {"ip_adapter_image": [families.SEEN] * 2}),
}
OTHERS = [name for name in TARGETS if name != "sd15"]
OFTEN = ["component", "layers split", "blocks, skips parked", "blocks, widened", "layer, int8", "smallest"]


@pytest.fixture(scope="module")
def targets() -> dict[str, Any]:
    """Pipelines by name and pictures by name and settings, made when first asked for."""
    return {}


def target(targets: dict[str, Any], name: str) -> tuple[Any, dict[str, Any]]:
    make, options = TARGETS[name]
    if name not in targets:
        targets[name] = make()
    return targets[name], options


def everything_resident(settings: Settings) -> Settings:
    """The settings without those that say where things wait, which change no bit."""
    decoding = {"vae_map": "held"} if settings.vae_map == "parked" else {}
    if settings.split_layers:
        return dataclasses.replace(settings, park_skips=None, **decoding)
    return dataclasses.replace(settings, offload="none", weights_mib=None, park_skips=None, **decoding)


def expected(targets: dict[str, Any], name: str, settings: Settings) -> Tensor:
    pipe, options = target(targets, name)
    resident = everything_resident(settings)
    key = name, resident
    if key not in targets:
        with attached(pipe, resident, device=GPU):
            targets[key] = run(pipe, options)
    return targets[key]


def run(pipe: Any, options: dict[str, Any], steps: int = 2) -> Tensor:
    """Its picture, in host memory, as is everything that the pipeline's scheduler keeps."""
    try:
        return tiny.run(pipe, steps=steps, **options).cpu()
    finally:
        pipe.scheduler.set_timesteps(steps)


def check(gpu: Any, targets: dict[str, Any], name: str, settings: Settings, schedule: str) -> None:
    pipe, options = target(targets, name)
    picture = expected(targets, name, settings)
    with gpu.watched(schedule) as seen, attached(pipe, settings, device=GPU):
        first = run(pipe, options)
        second = run(pipe, options)  # in the order that the first one showed
    assert torch.equal(first, picture)
    assert torch.equal(second, picture)
    assert seen.clean, seen


@pytest.mark.parametrize(
    ("schedule", "way"),
    [
        *(("eager", way) for way in ("component", "blocks, skips parked", "smallest")),
        *(("lazy", way) for way in WAYS),
        *(("random", way) for way in WAYS if way in STREAMED or "parked" in way),
    ],
)
def test_sd15(gpu: Any, targets: dict[str, Any], schedule: str, way: str) -> None:
    check(gpu, targets, "sd15", WAYS[way], schedule)


@pytest.mark.parametrize(
    ("name", "schedule", "way"),
    [(name, LATE[(first + second) % 2], way) for first, name in enumerate(OTHERS) for second, way in enumerate(OFTEN)],
)
def test_others_streamed(gpu: Any, targets: dict[str, Any], name: str, schedule: str, way: str) -> None:
    check(gpu, targets, name, WAYS[way], schedule)


@pytest.mark.parametrize(
    "settings", [Settings(offload="none"), Settings(offload="layer")], ids=["resident", "streamed"]
)
def test_a_pipeline_makes_its_tensors_on_the_card(gpu: Any, targets: dict[str, Any], settings: Settings) -> None:
    """Guidance and steps in 16 bits have other bits on a processor, and a CUDA generator draws on the card alone."""
    pipe, _ = target(targets, "sd15")
    call = {"prompt": "a red apple", "width": 64, "height": 64, "num_inference_steps": 1, "output_type": "latent"}
    with attached(pipe, settings, device=GPU), attached(pipe, Settings(inference_mode=True), device=GPU):
        latents = pipe(**call, generator=torch.Generator(GPU).manual_seed(0)).images
        assert latents.device == pipe._execution_device == GPU
    pipe.scheduler.set_timesteps(1)
    assert pipe._execution_device == torch.device("cpu")
    assert not any(hasattr(part, "_hf_hook") for part in pipe.components.values())


def timing_of(unet: Any) -> StepTiming:
    """As a plan for the card predicts it, activations included."""
    request = Request(64, 64, 1, 8 * GIB, 4 * GIB, GPU, profile("rtx2070"))
    pricing = Pricing(anatomy_of(unet), request)
    (stage,) = (stage for stage in pricing.costs.stages if stage.repeats)
    return pricing.timing(stage, LAYER)


LAYER = Settings(offload="layer", inference_mode=True)


@pytest.mark.parametrize("where", ["pinned", "in a file"])
@pytest.mark.parametrize("schedule", ["eager", *LATE])
def test_a_ring_that_follows_the_activations(
    gpu: Any, targets: dict[str, Any], schedule: str, where: str, tmp_path: Path
) -> None:
    """Also when a run passes over blocks, and when the next one is on another stream."""
    pipe, _ = target(targets, "sd15")
    pipe.unet.save_pretrained(tmp_path)
    with attached(pipe.unet, Settings(offload="none"), device=GPU):
        wanted, passed = denoise(pipe.unet), denoise_past(pipe.unet)
    timing, other = timing_of(pipe.unet), torch.cuda.Stream()
    with contextlib.ExitStack() as stack:
        unet = pipe.unet if where == "pinned" else stack.enter_context(mapped(tmp_path))
        seen = stack.enter_context(gpu.watched(schedule))
        attachment = stack.enter_context(attached(unet, LAYER, device=GPU, timing=timing))
        assert stream_of(attachment)._layout.rooms
        found = [denoise(unet), denoise_past(unet), denoise(unet)]
        with torch.cuda.stream(other):
            found += [denoise(unet), denoise_past(unet)]
        found.append(denoise(unet))
    for latents, right in zip(found, [wanted, passed, wanted, wanted, passed, wanted], strict=True):
        assert torch.equal(latents, right)
    assert seen.clean, seen


def stream_of(attachment: Any) -> Stream:
    return next(step for step in attachment._steps if isinstance(step, Change)).apply.__self__


def denoise_past(unet: Any) -> Tensor:
    """Without the deepest blocks, of which the engine does not know."""
    unet.mid_block.forward = lambda x, *_, **__: x
    try:
        return denoise(unet)
    finally:
        del unet.mid_block.forward


MAPPED = ["blocks", "layer", "halves", "layers split", "blocks, skips parked"]


@contextlib.contextmanager
def mapped(folder: Path) -> Iterator[Any]:
    """A UNet whose weights lie in a mapped file, and no memory but the ring's for its host weights."""
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(folder).requires_grad_(False)
    assert mapped_bytes(unet) > 0
    with host_budget(0):
        yield unet


def test_nothing_is_fetched_ahead_where_steps_run_short(
    gpu: Any, targets: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights for the next step would lie scattered among segments that it needs. Bits are the same."""
    unet = target(targets, "sd15")[0].unet
    with attached(unet, Settings(offload="none"), device=GPU):
        wanted = denoise(unet, 5)
    timing, before = timing_of(unet), torch.cuda.memory_allocated()

    def left_by_steps() -> tuple[Tensor, list[bool]]:
        left: list[bool] = []
        hook = unet.register_forward_pre_hook(lambda *_: left.append(torch.cuda.memory_allocated() - before > 20_000))
        with attached(unet, LAYER, device=GPU, timing=timing), hook:
            return denoise(unet, 5), left

    found, left = left_by_steps()
    assert torch.equal(found, wanted) and left == [False, True, True, True, True]
    retries = itertools.count()
    monkeypatch.setattr(segments, "_retries", lambda _: next(retries))
    found, left = left_by_steps()
    assert torch.equal(found, wanted) and left == [False, True, False, False, False]


def denoise(unet: Any, steps: int = 3) -> Tensor:
    noise = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 4, 8, 8, generator=noise).to(GPU)
    text = torch.randn(2, 7, unet.config.cross_attention_dim, generator=noise).to(GPU)
    with torch.inference_mode():
        for step in range(steps):
            latents = latents - 0.1 * unet(latents, torch.tensor(900 - step, device=GPU), text, return_dict=False)[0]
    return latents.cpu()


@pytest.mark.parametrize("way", [way for way in STREAMED if way in MAPPED or "channels last" in way])
@pytest.mark.parametrize("schedule", LATE)
def test_masters_in_a_mapped_file(gpu: Any, targets: dict[str, Any], schedule: str, way: str, tmp_path: Path) -> None:
    pipe, _ = target(targets, "sd15")
    pipe.unet.save_pretrained(tmp_path)
    with attached(pipe.unet, everything_resident(WAYS[way]), device=GPU):
        wanted = denoise(pipe.unet)
    with mapped(tmp_path) as unet:
        with gpu.watched(schedule) as seen, attached(unet, WAYS[way], device=GPU):
            first, second = denoise(unet), denoise(unet)
        assert torch.equal(first, wanted)
        assert torch.equal(second, wanted)
        assert seen.clean, seen


def stations(unet: Any) -> list[str]:
    """Every block of a UNet, and its first and last layers."""
    blocks = [name for name, module in unet.named_modules() if name.split(".")[-2:-1] in (["resnets"], ["attentions"])]
    samplers = [
        name for name, _ in unet.named_modules() if name.split(".")[-2:-1] in (["downsamplers"], ["upsamplers"])
    ]
    return ["conv_in", *blocks, *samplers, "conv_out"]


class Broken(Exception):
    """Raised inside a block."""


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("sd15", way) for way in ("component", "halves", "layer", "layers split", "blocks", "blocks, skips parked")),
        *(("sdxl", way) for way in ("component", "layers split", "blocks, skips parked")),
    ],
)
def test_an_error_in_any_block(gpu: Any, targets: dict[str, Any], name: str, way: str) -> None:
    """It reaches the caller, the next run is right, and nothing stays behind."""
    pipe, options = target(targets, name)
    picture = expected(targets, name, WAYS[way])

    def breaks(*_: Any) -> None:
        raise Broken

    with gpu.watched("random") as seen, attached(pipe, WAYS[way], device=GPU):
        for station in stations(pipe.unet):
            hook = pipe.unet.get_submodule(station).register_forward_hook(breaks)
            try:
                with pytest.raises(Broken):
                    run(pipe, options, steps=1)
            finally:
                hook.remove()
        assert torch.equal(run(pipe, options), picture)
    assert seen.clean, seen
    assert {tensor.device.type for tensor in pipe.unet.parameters()} == {"cpu"}
