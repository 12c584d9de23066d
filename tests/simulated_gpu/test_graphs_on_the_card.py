"""The denoiser's passes recorded and replayed: the same bits, and what a plan says of them on a card of its size."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import families
import full_size
import pytest
import tiny
import torch
from on_card import GPU, LARGE
from run_log import logged, nothing_logged
from test_unet_hosts import add_lora
from torch import Tensor

import sd_lowvram
from sd_lowvram import Settings, attached
from sd_lowvram.devices import calibration
from sd_lowvram.devices.performance import profile
from sd_lowvram.devices.this_machine import HOST_TIME
from sd_lowvram.planning import request
from sd_lowvram.planning.compile_gain import measured_recording
from sd_lowvram.planning.host_time import host_time

GRAPHS = Settings(cuda_graphs=True)
SIZE = {"width": 64, "height": 64, "device": "cuda"}
STEPS = 6


def run(pipe: Any, steps: int = STEPS, **options: Any) -> Tensor:
    return tiny.run(pipe, steps=steps, **options).cpu()


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "rates_of", lambda device: profile("rtx3060"))  # nothing is measured here


def planned(pipe: Any, **options: Any) -> Tensor:
    """The picture of the same plan without recordings."""
    sd_lowvram.optimize(pipe, vram="8GB", **SIZE)
    try:
        return run(pipe, **options)
    finally:
        sd_lowvram.restore(pipe)


@pytest.fixture
def pipe(gpu: Any) -> Iterator[Any]:
    made = families.plain("sd15")
    yield made.to(GPU)
    gc.collect()
    torch.cuda.empty_cache()


def test_recorded_passes_give_the_same_bits(gpu: Any, pipe: Any) -> None:
    plain = sd_lowvram.plan(pipe, vram="8GB", **SIZE)
    wanted, wide, unplanned = planned(pipe), planned(pipe, width=128), run(pipe)
    before = torch.cuda.memory_allocated()
    plan = sd_lowvram.optimize(pipe, vram="8GB", settings=GRAPHS, **SIZE)
    assert plan.settings.offload in (None, "none") and plan.fidelity == plain.fidelity
    assert plan.predicted.reserved_bytes >= plain.predicted.reserved_bytes
    for picture in (wanted, wanted):
        replays = gpu.card.replays
        assert torch.equal(run(pipe), picture)
        assert gpu.card.replays == replays + STEPS - 1
    replays = gpu.card.replays
    assert torch.equal(run(pipe, width=128), wide) and gpu.card.replays == replays + STEPS - 1
    sd_lowvram.restore(pipe)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before
    replays = gpu.card.replays
    assert torch.equal(run(pipe), unplanned) and gpu.card.replays == replays


def test_replayed_steps_allocate_nothing_on_the_card(gpu: Any, pipe: Any) -> None:
    sd_lowvram.optimize(pipe, vram="8GB", settings=GRAPHS, **SIZE)
    allocations: list[int] = []

    def counted(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        allocations.append(gpu.card.allocations)
        return kept

    run(pipe, callback_on_step_end=counted)
    assert len(allocations) == STEPS and len(set(allocations[2:])) == 1
    sd_lowvram.restore(pipe)


def test_recordings_are_freed_before_the_autoencoder_is_widened(gpu: Any, pipe: Any) -> None:
    """SDXL's pipelines widen it between the last step and the decode."""

    def recorded_bytes() -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))

    before = recorded_bytes()  # of captures that failed in earlier tests
    for part in (pipe.unet, pipe.vae, pipe.text_encoder):
        part.half()
    sd_lowvram.optimize(pipe, vram="8GB", settings=GRAPHS, **SIZE)
    pipe("a", num_inference_steps=STEPS, width=64, height=64, output_type="latent")
    assert recorded_bytes() > before
    pipe.vae.to(torch.float32)
    assert recorded_bytes() == before
    pipe.vae.to(torch.float16)
    sd_lowvram.restore(pipe)


def test_a_pass_under_autocast_is_another_one(gpu: Any, pipe: Any) -> None:
    given = torch.zeros(1, 4, 8, 8, device=GPU), torch.tensor(5, device=GPU), torch.ones(1, 7, 32, device=GPU)
    with torch.inference_mode(), torch.autocast("cuda", torch.float16):
        wanted = pipe.unet(*given, return_dict=False)[0].clone()
    with attached(pipe.unet, GRAPHS, device=GPU), torch.inference_mode():
        replays = gpu.card.replays
        plain = [pipe.unet(*given, return_dict=False)[0] for _ in range(3)]
        assert gpu.card.replays == replays + 2 and torch.equal(plain[0], plain[2])
        with torch.autocast("cuda", torch.float16):
            assert torch.equal(pipe.unet(*given, return_dict=False)[0], wanted)


def test_an_adapter_has_passes_recorded_anew(gpu: Any, pipe: Any) -> None:
    add_lora(pipe.unet)
    name = next(iter(pipe.unet.peft_config))
    changes = {0: 1.0, 3: 0.25}

    def changing(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        if step in changes:
            pipe.unet.set_adapters([name], [changes[step]])
        return kept

    pipe.unet.set_adapters([name], [1.0])
    wanted = planned(pipe, steps=8, callback_on_step_end=changing)
    pipe.unet.set_adapters([name], [1.0])
    sd_lowvram.optimize(pipe, vram="8GB", settings=GRAPHS, **SIZE)
    replays = gpu.card.replays
    with logged("recorded anew"):
        got = run(pipe, steps=8, callback_on_step_end=changing)
    assert torch.equal(got, wanted) and gpu.card.replays == replays + 3 + 3 + 1  # the last: begun, and dropped
    sd_lowvram.restore(pipe)


def test_the_scale_of_an_ip_adapter_changes_between_recorded_steps(gpu: Any) -> None:
    """It is a list in the attention processors."""
    pipe = families.with_ip_adapters("plain").to(GPU)

    def changing(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        pipe.set_ip_adapter_scale(0.6 if step < 3 else 0.1)
        return kept

    given = {"ip_adapter_image": families.SEEN, "callback_on_step_end": changing, "steps": 8}
    unchanged = run(pipe, ip_adapter_image=families.SEEN, steps=8)
    pipe.set_ip_adapter_scale(0.6)
    wanted = planned(pipe, **given)
    assert tiny.relative_error(wanted, unchanged) > 1e-3
    pipe.set_ip_adapter_scale(0.6)
    sd_lowvram.optimize(pipe, vram="8GB", settings=GRAPHS, **SIZE)
    replays = gpu.card.replays
    assert torch.equal(run(pipe, **given), wanted) and gpu.card.replays > replays + 4
    sd_lowvram.restore(pipe)


def test_a_replay_that_began_before_a_change_was_found_is_dropped(gpu: Any, pipe: Any) -> None:
    """Settings and plain tensors are compared while the device works, addresses before."""
    given = torch.zeros(1, 4, 8, 8, device=GPU), torch.tensor(5, device=GPU), torch.ones(1, 7, 32, device=GPU)
    block, weight = pipe.unet.mid_block, pipe.unet.conv_out.weight
    inner = block.forward
    block.shift = torch.ones(1, device=GPU)
    block.forward = lambda *args, **kwargs: inner(*args, **kwargs) * getattr(block, "scale", 1.0) + block.shift

    def called() -> Tensor:
        return pipe.unet(*given, return_dict=False)[0].clone()

    changes = [
        (1, lambda: setattr(block, "scale", 2.0)),
        (1, lambda: setattr(block, "shift", torch.full((1,), 3.0, device=GPU))),
        (0, lambda: setattr(weight, "data", weight.data * 2)),
    ]
    with torch.inference_mode(False), torch.no_grad(), attached(pipe.unet, GRAPHS, device=GPU):
        for begun, change in changes:
            first = [called() for _ in range(3)][-1]
            change()
            replays = gpu.card.replays
            changed = called()
            assert gpu.card.replays == replays + begun
            assert not torch.equal(changed, first) and torch.equal(called(), changed)
    del block.forward


def test_a_listener_inside_is_called_at_every_step(gpu: Any, pipe: Any) -> None:
    wanted, seen = planned(pipe), []
    hook = pipe.unet.mid_block.register_forward_hook(lambda *_: seen.append(1))
    sd_lowvram.optimize(pipe, vram="8GB", settings=GRAPHS, **SIZE)
    seen.clear()
    replays = gpu.card.replays
    with logged("a foreign hook is on its layers"):
        assert torch.equal(run(pipe), wanted)
    assert len(seen) == STEPS and gpu.card.replays == replays
    sd_lowvram.restore(pipe)
    hook.remove()


def test_what_waits_for_the_card_is_told_and_runs_as_it_is(gpu: Any, pipe: Any, monkeypatch: Any) -> None:
    monkeypatch.delattr(torch, "OutOfMemoryError")  # as before torch 2.5
    inner = pipe.unet.mid_block.forward

    def waiting(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(x) is Tensor:  # not while a plan is made
            x.sum().item()
        return inner(x, *args, **kwargs)

    wanted = planned(pipe)
    pipe.unet.mid_block.forward = waiting
    sd_lowvram.optimize(pipe, vram="8GB", settings=GRAPHS, **SIZE)
    with logged("cannot be recorded"):
        assert torch.equal(run(pipe), wanted)
    with nothing_logged():
        assert torch.equal(run(pipe), wanted)
    sd_lowvram.restore(pipe)
    del pipe.unet.mid_block.forward


@pytest.mark.parametrize(("model", "side"), [("sd15", 512), pytest.param("sdxl", 1024, marks=LARGE)])
def test_plans_hold_what_recordings_take(gpu: Any, model: str, side: int) -> None:
    """Full size, shapes only, on a card that has just what the plan needs until the decode."""
    from sd_lowvram.devices.this_machine import overhead_of

    gpu.kernels.computes = False
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    pipe: Any = None
    try:
        with gpu.card.of_size(40 << 30):
            overhead_of(torch.device("cuda", 0), recalibrate=True)
            pipe = full_size.pipeline(model, torch.device("cuda"))
            size: Any = {"width": side, "height": side, "device": "cuda", "ram": "64GB"}
            plan = sd_lowvram.optimize(pipe, vram="40GB", settings=GRAPHS, **size)
        gpu.kernels.forget()
        torch.cuda.empty_cache()
        (denoising,) = (stage.reserved_bytes for stage in plan.stages if stage.name == "denoise")
        overhead = plan.predicted.overhead_bytes
        replays = gpu.card.replays
        with gpu.card.of_size(denoising + overhead + before, context=overhead), nothing_logged("ran out of memory"):
            pipe("", width=side, height=side, num_inference_steps=4, output_type="latent")
            assert gpu.card.replays == replays + 3
    finally:
        gpu.kernels.computes = True
        if pipe is not None:
            sd_lowvram.restore(pipe)
        del pipe
        gc.collect()
        torch.cuda.empty_cache()


def test_what_recording_gains_is_measured(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.kernels, "computes", False)
    replays = gpu.card.replays
    (gain,) = measured_recording(GPU).values()
    assert gain > 0 and gpu.card.replays >= replays + 3


def test_the_host_time_of_layers_strips_and_replays_is_measured(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.kernels, "computes", False)
    monkeypatch.setattr(calibration, "_QUEUED", 1)
    replays = gpu.card.replays
    measured = host_time(profile("rtx2070"), GPU)
    assert gpu.card.replays > replays and measured.keys() == {*HOST_TIME}
    assert min(measured["fetch_launches"], measured["strip_launches"], measured["replay_launches"]) > 0
