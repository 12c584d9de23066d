"""Plans that stream weights: what they choose, and that the engine holds and does what they say."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save, save_file
from test_unet_hooks import run

from sd_lowvram import Settings
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.devices.disk import DISKS
from sd_lowvram.devices.info import Memory
from sd_lowvram.devices.performance import THIS, Rates, profile
from sd_lowvram.errors import BudgetError
from sd_lowvram.memory import pinned
from sd_lowvram.models import anatomy_of_components
from sd_lowvram.models.calls import Shape
from sd_lowvram.planning import search
from sd_lowvram.planning.cost_model import Pricing
from sd_lowvram.planning.host_resident import read_bytes
from sd_lowvram.planning.plan import Candidate, Request
from sd_lowvram.planning.search import make_plan
from sd_lowvram.planning.stage_costs import StageCosts
from sd_lowvram.session import attached
from sd_lowvram.streaming.host_weights import RING_BYTES, host_budget
from sd_lowvram.streaming.mapped_files import MappedFiles, can_read_past_cache
from sd_lowvram.streaming.timing import StepTiming
from sd_lowvram.units import GIB, MIB
from sd_lowvram.weights import weight_bytes

GPU = torch.device("cuda")
RATES = dataclasses.replace(profile("rtx2070"), half_flops=8e10, float_flops=8e10, copy_bandwidth=1.2e9)
"""As much slower than the card as the model is smaller, so that copies matter as much."""


FIXED = Settings.policy("diffusers-default")
"""All knobs: with a way to offload, one run alone is traced."""
CONFIG = tiny.config("sd15")
CONFIG["unet"] |= {"block_out_channels": [64, 128, 256, 256]}


@pytest.fixture(scope="module")
def anatomy() -> Any:
    """The topology of SD1.5 with some 70 MiB of weights in the UNet."""
    return anatomy_of_components("diffusers", build_components(CONFIG, torch.float16, "meta", only=("unet",)))


def test_streamed_settings_that_cost_the_same_are_traced_once(
    anatomy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))
    traced, trace = list[Settings](), StageCosts.trace

    def follow(costs: Any, stage: Any, settings: Settings, *more: Any, **named: Any) -> Any:
        traced.append(settings)
        return trace(costs, stage, settings, *more, **named)

    monkeypatch.setattr(StageCosts, "trace", follow)
    costs = StageCosts(anatomy, Shape(512, 512), False, GPU)
    (stage,) = (stage for stage in costs.stages if stage.repeats)
    two, many, more = (costs(stage, Settings(offload="layer", feed_forward_chunks=chunks)) for chunks in (2, 32, 64))
    assert two != many == more  # no layer has so many tokens that more chunks are made
    assert [settings.feed_forward_chunks for settings in traced if settings.offload] == [2, 32]


def request(vram: int, size: int = 128) -> Request:
    return Request(size, size, 1, vram, 4 * GIB, GPU, RATES)


def planned(anatomy: Any, settings: Settings, vram: int = 8 * GIB) -> Any:
    return make_plan(anatomy, request(vram), settings)


def streamed(offload: str | None, **more: Any) -> Settings:
    return dataclasses.replace(FIXED, offload=offload, **more)


def denoising(plan: Any) -> Any:
    return next(stage for stage in plan.stages if stage.name == "denoise")


def test_between_layers_and_components_it_streams_blocks(anatomy: Any) -> None:
    layer, component = (planned(anatomy, streamed(offload)) for offload in ("layer", "component"))
    needs = [one.predicted.reserved_bytes + one.predicted.overhead_bytes for one in (layer, component)]
    assert needs[0] < needs[1] - 8 * MIB
    plan = planned(anatomy, streamed(None), (needs[0] + needs[1]) // 2)
    assert plan.settings.offload == "blocks" and plan.settings.weights_mib is not None
    assert component.predicted.seconds * 0.9 < plan.predicted.seconds < layer.predicted.seconds
    assert 1 <= denoising(plan).slowdown < denoising(layer).slowdown
    assert any("streamed while it computes" in reason for reason in plan.reasons)
    assert plan.timing is not None and "timing" not in plan.as_dict()
    assert denoising(plan).weights_bytes <= plan.settings.weights_mib * MIB


def test_more_room_is_faster(anatomy: Any) -> None:
    rates = dataclasses.replace(RATES, launch_seconds=0.0)  # for which so small a model waits, not for weights
    pricing = Pricing(anatomy, dataclasses.replace(request(8 * GIB), rates=rates))
    stage = pricing.costs.stages[0]
    total = weight_bytes(anatomy.denoiser_module) // MIB
    rooms = [total // 4, total // 2, total * 3 // 4, total + 2]
    steps = [pricing.step(stage, Settings(offload="blocks", weights_mib=room)) for room in rooms]
    assert all(step.device_bytes <= room * MIB for step, room in zip(steps, rooms, strict=True))
    assert all(more.seconds <= less.seconds * 1.001 for less, more in itertools.pairwise(steps))
    assert steps[-1].streamed_bytes == 0 and steps[-1].seconds < 0.9 * steps[0].seconds


def test_a_run_copies_what_stays_once_and_the_rest_in_each_step_alone(anatomy: Any) -> None:
    asked, settings = request(8 * GIB), Settings(offload="blocks", weights_mib=32)
    first, eleventh = (
        denoising(make_plan(anatomy, dataclasses.replace(asked, steps=steps), settings)).seconds for steps in (1, 11)
    )
    before_the_steps = first - (eleventh - first) / 10
    assert 0 < before_the_steps * RATES.copy_bandwidth < 32 * MIB < weight_bytes(anatomy.components["unet"])


def test_a_room_alone_asks_for_blocks(anatomy: Any) -> None:
    total = weight_bytes(anatomy.denoiser_module) // MIB
    plan = planned(anatomy, Settings(weights_mib=total // 2))
    assert (plan.settings.offload, plan.settings.weights_mib) == ("blocks", total // 2)


@pytest.mark.parametrize(
    ("offload", "fixed"),
    [
        ("blocks", {}),
        ("blocks", {"transformer_chunks": 4, "residual_strips": 4, "guidance_in_turn": True}),
        ("halves", {}),
        ("layer", {}),
    ],
)
def test_the_engine_holds_what_the_plan_says(anatomy: Any, offload: str, fixed: dict[str, Any]) -> None:
    room = weight_bytes(anatomy.denoiser_module) // MIB // 3 if offload == "blocks" else None
    settings = Settings(offload=offload, weights_mib=room, inference_mode=True, **fixed)
    pricing = Pricing(anatomy, request(8 * GIB))
    for stage in pricing.costs.stages:
        one = pricing.stage(settings, stage, {}, settings)
        timing = pricing.timing(stage, settings) if stage.repeats else None
        traced = pricing.costs(stage, pricing.as_traced(stage, settings), timing)
        assert traced.peak_bytes <= one.peak_bytes
        if stage.repeats:
            assert traced.peak_bytes == one.peak_bytes
            copied, step = traced.copied_bytes - one.parked_bytes, pricing.step(stage, settings)
            # what is read ahead into the ring, and little that strips fetch again
            assert (
                0 <= copied - step.staying_bytes - step.streamed_bytes <= step.device_bytes + step.streamed_bytes // 20
            )


def test_a_run_that_is_found_to_be_too_slow_is_not_traced_on(
    anatomy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))
    settings = Settings(offload="layer", inference_mode=True)

    pricing = Pricing(anatomy, request(8 * GIB))
    options = (pricing.stage(settings, stage, {}, settings) for stage in pricing.costs.stages)
    run = pricing.whole(settings, [Candidate(settings, (option,), 0, settings) for option in options])
    assert pricing.confirm(run, 0).seconds == math.inf and not pricing._traced_whole
    with monkeypatch.context() as again:
        again.setattr("sd_lowvram.planning.stage_costs.trace_equals_once", lambda *_: pytest.fail("traced again"))
        assert Pricing(anatomy, request(8 * GIB)).confirm(run, 0).seconds == math.inf
    whole = pricing.confirm(run, run.seconds + 1e-9)  # nothing that was left by the trace that ended is in it
    assert run.seconds <= whole.seconds < math.inf and pricing._traced_whole
    assert whole == Pricing(anatomy, request(8 * GIB)).confirm(run, 0)  # a known result is returned


def test_nothing_is_traced_after_a_stage_that_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy = anatomy_of_components("diffusers", build_components(tiny.config("sd15"), torch.float16, "meta"))
    settings = Settings(offload="layer", inference_mode=True)
    pricing = Pricing(anatomy, request(8 * GIB))
    options = (pricing.stage(settings, stage, {}, settings) for stage in pricing.costs.stages)
    run = pricing.whole(settings, [Candidate(settings, (option,), 0, settings) for option in options])
    traced: list[str] = []
    confirmed = Pricing._confirm_stage

    def noted(self: Pricing, stage: Any, *given: Any) -> Any:
        traced.append(stage.name)
        return confirmed(self, stage, *given)

    monkeypatch.setattr(Pricing, "_confirm_stage", noted)
    assert pricing.confirm(run, 0).seconds == math.inf and traced == ["denoise"]
    pricing.confirm(run)
    assert traced == ["denoise", "denoise", "decode"]


def test_weights_that_pieces_fetch_again_make_a_step_slower_than_its_compute(anatomy: Any) -> None:
    settings = Settings(offload="layer", split_layers=True, transformer_chunks=4, guidance_in_turn=True)
    pricing = Pricing(anatomy, request(8 * GIB))
    (stage,) = pricing.costs.stages
    option = pricing.stage(settings, stage, {}, settings)
    run = pricing.whole(settings, [Candidate(settings, (option,), 0, settings)])
    (whole,) = pricing.confirm(run).stages
    assert whole.seconds > 1.1 * option.seconds
    assert pricing.confirm(run).stages == (whole,)  # though the run was priced before it was traced
    assert whole.slowdown / option.slowdown == pytest.approx(whole.seconds / option.seconds, rel=0.02)


def test_the_engine_keeps_the_schedule_of_the_plan(anatomy: Any) -> None:
    """The blocks that stay are those of the search over the plan's times, not those of a search without."""
    room = weight_bytes(anatomy.denoiser_module) // MIB // 3
    plan = planned(anatomy, Settings(offload="blocks", weights_mib=room))
    unet = build_components(CONFIG, dtype=torch.float16, only=("unet",))["unet"]

    def residents(timing: StepTiming | None) -> set[str]:
        with attached(unet, Settings(offload="blocks", weights_mib=room), device="cpu", timing=timing) as attachment:
            layout = stream_of(attachment)._layout
            return {layout.blocks[number].name for number in layout.residents}

    assert residents(plan.timing) != residents(None)


def test_too_little_room_is_refused(anatomy: Any) -> None:
    with pytest.raises(BudgetError, match="split_layers"):
        planned(anatomy, Settings(offload="blocks", weights_mib=1))


def test_the_less_is_pinned_the_longer_a_step_takes(anatomy: Any) -> None:
    """What stays in its file is read in every step: it costs nothing under the compute, until reading takes longer."""
    rates = dataclasses.replace(RATES, launch_seconds=0.0, reading=3e8, reordering=2e8)
    total = weight_bytes(anatomy.denoiser_module)
    settings = Settings(offload="blocks", weights_mib=total // MIB // 4)
    steps = []
    for share in (2.0, 1.2, 0.9, 0.6, 0.3, 0.0):
        asked = dataclasses.replace(request(8 * GIB), rates=rates, ram=2 * (RING_BYTES + int(share * total)))
        pricing = Pricing(anatomy, asked)
        (stage,) = pricing.costs.stages
        planned = pricing.stage(settings, stage, {}, settings)
        assert planned.host_bytes <= asked.ram
        steps.append((pricing.step(stage, settings).seconds, planned.seconds))
    for less, more in itertools.pairwise(steps):
        assert less[0] <= more[0] * 1.001 and less[1] <= more[1] * 1.001
    assert steps[0] == steps[1] and steps[-1][0] > 1.2 * steps[0][0]
    last = settings.filled(channels_last=True)  # kernels are brought in another order while they are read
    assert pricing.step(stage, last).seconds > 1.05 * steps[-1][0]
    reordered = pricing.stage(last, stage, {}, last)
    assert reordered.host_bytes == planned.host_bytes and reordered.seconds > planned.seconds


def test_what_is_copied_in_every_step_is_pinned_before_what_stays(tmp_path: Path) -> None:
    weights = build_components(CONFIG, dtype=torch.float16, only=("unet",))["unet"].state_dict()
    save_file(weights, tmp_path / "unet.safetensors")
    unet = build_components(CONFIG, torch.float16, "meta", only=("unet",))["unet"]
    unet.load_state_dict(load_file(tmp_path / "unet.safetensors"), assign=True)
    unet.requires_grad_(False)
    settings = Settings(offload="blocks", weights_mib=weight_bytes(unet) // MIB // 2)
    room = weight_bytes(unet) // 3
    with host_budget(RING_BYTES + room), attached(unet, settings, device="cpu") as attachment:
        stream = stream_of(attachment)
        layout, mapping = stream._layout, MappedFiles()
        in_file = {
            number: all(mapping.kind(tensor) == "mapped" for tensor in block.tensors)
            for number, block in enumerate(layout.blocks)
        }
        assert 0.9 * room <= stream._host_weights.pinned_bytes <= room
    assert layout.residents and all(in_file[number] for number in layout.residents)
    read = [in_file[number] for number in layout.streamed]
    assert any(read[: len(read) // 2]) and any(read[len(read) // 2 :])  # the disk works in all of a step
    assert not all(read[: len(read) // 2]) and not all(read[len(read) // 2 :])


def _read_from_disk() -> int:
    """Bytes that this process has had read from a disk so far."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines())
    return int(told["read_bytes"])


@pytest.mark.skipif(not can_read_past_cache(), reason="the system does not tell")
def test_as_many_bytes_come_from_the_disk_as_are_planned(tmp_path: Path) -> None:
    """A third of the weights in memory, and of them a part in that of the device: the rest is read in every step."""
    with (tmp_path / "unet.safetensors").open("w+b") as file:
        file.write(save(build_components(CONFIG, dtype=torch.float32, only=("unet",))["unet"].state_dict()))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        unet = build_components(CONFIG, torch.float32, "meta", only=("unet",))["unet"]
        unet.load_state_dict(load_file(file.name), assign=True)
    unet.requires_grad_(False)
    total = weight_bytes(unet)
    settings = Settings(offload="blocks", weights_mib=total // MIB // 4)
    asked = dataclasses.replace(request(GIB), ram=RING_BYTES + total // 3, disk=0.5e9, device=torch.device("cpu"))
    plan = make_plan(anatomy_of_components("diffusers", {"unet": unet}), asked, settings)
    with host_budget(asked.ram), attached(unet, settings, device="cpu", timing=plan.timing):
        reads = []
        for _ in range(4):
            before = _read_from_disk()
            run(unet, (16, 16))
            reads.append(_read_from_disk() - before)
    read = reads[-1]
    if read == 0:
        pytest.skip("this file system reads from no disk")
    planned = denoising(plan).disk_bytes
    assert total // 3 < planned < total * 2 // 3
    assert 0.97 * planned <= read <= 1.03 * planned + MIB, reads  # whole pages


def test_a_plan_tells_what_a_step_waits_for_the_disk(anatomy: Any) -> None:
    total = weight_bytes(anatomy.denoiser_module)
    asked = dataclasses.replace(request(8 * GIB), ram=RING_BYTES + total // 3, rates=_without_launches())
    plans = {
        name: make_plan(anatomy, dataclasses.replace(asked, disk=rate), streamed("layer"))
        for name, rate in DISKS.items()
    }
    enough = make_plan(anatomy, dataclasses.replace(asked, ram=4 * GIB, disk=DISKS["hdd"]), streamed("layer"))
    seconds = [plan.predicted.seconds for plan in (enough, *plans.values())]
    assert seconds == sorted(seconds)
    assert denoising(enough).disk_bytes == denoising(enough).disk_wait == 0
    assert not any("from the disk" in reason for reason in enough.reasons)
    slow = denoising(plans["hdd"])
    assert total // 2 < slow.disk_bytes < total
    assert 0.7 < slow.disk_wait * DISKS["hdd"] / slow.disk_bytes < 1  # a part of it under the compute
    (told,) = (reason for reason in plans["hdd"].reasons if "from the disk" in reason)
    assert "(0.15 GB/s)" in told and "waiting for" in told and "1 GiB" in told


def test_room_on_the_card_is_taken_where_memory_is_short(anatomy: Any) -> None:
    """Of weights that stay on the card none have to be read again."""
    total = weight_bytes(anatomy.denoiser_module)
    rates = dataclasses.replace(_without_launches(), half_flops=RATES.half_flops / 8)
    plans = [
        make_plan(anatomy, dataclasses.replace(request(700 * MIB), rates=rates, ram=ram, disk=DISKS["hdd"]), Settings())
        for ram in (4 * GIB, RING_BYTES + total // 3)
    ]
    assert [plan.fits for plan in plans] == [True, True]
    assert denoising(plans[1]).disk_bytes < total // 3


def _without_launches() -> Rates:
    return dataclasses.replace(RATES, launch_seconds=0.0)


@pytest.mark.parametrize("offload", ["layer", "component"])
def test_what_is_locked_is_a_share_of_what_is_free_and_told(anatomy: Any, offload: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(pinned, "own_ram", lambda: 0)
    here = dataclasses.replace(RATES, name=THIS, reading=4e8, reordering=2e8)

    def plan(free_mib: int, ram: int = 4 * GIB) -> Any:
        monkeypatch.setattr(pinned, "host_memory", lambda: Memory(16 * GIB, free_mib * MIB))
        return make_plan(anatomy, Request(128, 128, 1, GIB, ram, GPU, here), streamed(offload))

    weights = weight_bytes(anatomy.denoiser_module)
    plenty, busy, bounded = plan(12000), plan(96), plan(12000, RING_BYTES + 8 * MIB)
    assert plenty.predicted.locked_bytes >= 0.9 * weights
    assert any("page-locked" in reason and "are not" not in reason for reason in plenty.reasons)
    assert 0 < busy.predicted.locked_bytes <= 48 * MIB
    assert 0 < bounded.predicted.locked_bytes <= RING_BYTES + 8 * MIB
    for less in (busy, bounded):
        (told,) = (reason for reason in less.reasons if "page-locked" in reason)
        assert "are read when they are copied" in told
        assert less.predicted.seconds > plenty.predicted.seconds
        assert "of the run" in told


@pytest.mark.parametrize("offload", ["layer", "component"])
def test_half_of_the_memory_beside_a_named_card_is_locked(anatomy: Any, offload: str) -> None:
    """As on the machine itself; the plan is the same for every budget that leaves the half large enough."""

    def plan(ram: int) -> Any:
        return make_plan(anatomy, Request(128, 128, 1, GIB, ram, GPU, RATES), streamed(offload))

    weights = weight_bytes(anatomy.denoiser_module)
    plenty, half = plan(4 * GIB), plan(2 * (RING_BYTES + 24 * MIB))
    assert plenty.predicted.locked_bytes >= 0.9 * weights
    assert 0 < half.predicted.locked_bytes <= RING_BYTES + 24 * MIB < 0.9 * weights
    assert any("are read when they are copied" in reason for reason in half.reasons)
    least, _ = plenty.alike["ram"]
    assert 2 * weights < least < 2 * (weights + 2 * RING_BYTES)
    assert plan(int(least)).predicted == plenty.predicted


def test_parked_maps_take_their_share_of_the_memory(anatomy: Any) -> None:
    """Weights that can stay in their file leave parked maps their bytes: of the memory, and of its locked half."""
    most, settings = RING_BYTES + weight_bytes(anatomy.denoiser_module) // 2, streamed("layer", park_skips=True)
    asked = Request(128, 128, 1, GIB, most, GPU, RATES)
    scarce, half = (make_plan(anatomy, one, settings) for one in (asked, dataclasses.replace(asked, ram=2 * most)))
    assert denoising(scarce).parked_bytes > 0
    assert scarce.predicted.host_bytes <= most and half.predicted.locked_bytes <= most


def test_the_least_memory_holds_what_the_engine_takes(tmp_path: Path) -> None:
    unet = build_components(CONFIG, torch.float16, only=("unet",))["unet"].requires_grad_(False)
    save_file(unet.state_dict(), tmp_path / "unet.safetensors")
    unet.load_state_dict(load_file(tmp_path / "unet.safetensors"), assign=True)
    asked = dataclasses.replace(request(GIB), device=torch.device("cpu"))
    least = make_plan(anatomy_of_components("diffusers", {"unet": unet}), asked, streamed("layer"))
    with host_budget(least.minimum_ram_bytes), attached(unet, streamed("layer"), device="cpu") as attachment:
        weights = stream_of(attachment)._host_weights
        assert weights.ring_bytes + weights.pinned_bytes + weights.held_bytes <= least.minimum_ram_bytes


def test_memory_holds_first_what_a_step_uses_first() -> None:
    weights = {"text_encoder": 3, "unet": 10, "vae": 5}
    read = {name: read_bytes(name, ("unet", "vae"), weights, 12) for name in weights}
    assert read == {"text_encoder": 0, "unet": 0, "vae": 3}


def test_other_programs_memory_is_not_locked(monkeypatch: Any) -> None:
    monkeypatch.setattr(pinned, "host_memory", lambda: Memory(16 * GIB, 6 * GIB))
    for own, most in ((0, 3), (4, 5), (14, 8)):
        monkeypatch.setattr(pinned, "own_ram", lambda own=own: own * GIB)
        assert pinned.most_pinned_bytes() == most * GIB


def test_a_ring_that_follows_the_activations(anatomy: Any) -> None:
    """The bits of resident weights, in fewer bytes than a ring of two of the largest layers and the activations, and
    no slower; where a layer fails, all is as it was."""
    settings = Settings(offload="layer", inference_mode=True)
    plan = planned(anatomy, settings)
    unet = build_components(CONFIG, dtype=torch.float32, only=("unet",))["unet"]
    before, expected = {id(tensor): tensor.data_ptr() for tensor in unet.parameters()}, run(unet, (16, 16))
    with attached(unet, settings, device="cpu", timing=plan.timing) as attachment:
        layout = stream_of(attachment)._layout
        assert max(layout.rooms) > 1.5 * min(layout.rooms)
        assert all(torch.equal(run(unet, (16, 16)), expected) for _ in range(2))
        planted = unet.mid_block.register_forward_hook(_fail)
        with pytest.raises(RuntimeError, match="planted"):
            run(unet, (16, 16))
        planted.remove()
        assert stream_of(attachment).device_bytes == 0
        assert torch.equal(run(unet, (16, 16)), expected)
    assert {id(tensor): tensor.data_ptr() for tensor in unet.parameters()} == before


def _fail(*_: Any) -> None:
    raise RuntimeError("planted")


def stream_of(attachment: Any) -> Any:
    return next(step.apply.__self__ for step in attachment._steps if hasattr(getattr(step, "apply", None), "__self__"))


def test_a_ring_that_follows_the_activations_needs_less_and_is_no_slower(
    anatomy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than a ring of two of the largest layers in addition to the activations."""
    settings = Settings(offload="layer", inference_mode=True, attention="sdpa", channels_last=True)
    pricing, fixed = (Pricing(anatomy, request(8 * GIB, 256)) for _ in range(2))
    (stage,) = pricing.costs.stages
    timing = pricing.timing(stage, settings)
    follows, traced = pricing.step(stage, settings), pricing.costs.trace(stage, settings, timing)
    monkeypatch.setattr(fixed, "timing", lambda *_: dataclasses.replace(timing, maps=()))
    assert traced.peak_bytes == follows.peak_bytes < fixed.stage(settings, stage, {}, settings).peak_bytes
    assert follows.seconds <= fixed.step(stage, settings).seconds * (1 + 1e-6)


@pytest.mark.parametrize("channels_last", [None, True])
def test_weight_and_bias_come_in_one_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, channels_last: bool | None
) -> None:
    from sd_lowvram.streaming.host_weights import HostWeights

    copies: list[int] = []
    before = HostWeights.copy_to

    def noted(self: HostWeights, source: torch.Tensor, *rest: Any) -> None:
        copies.append(source.nbytes)
        before(self, source, *rest)

    weights = build_components(CONFIG, dtype=torch.float32, only=("unet",))["unet"].state_dict()
    save_file(weights, tmp_path / "unet.safetensors")
    unet = build_components(CONFIG, torch.float32, "meta", only=("unet",))["unet"]
    unet.load_state_dict(load_file(tmp_path / "unet.safetensors"), assign=True)
    unet.requires_grad_(False)
    with attached(unet, Settings(channels_last=channels_last), device="cpu"):
        expected = run(unet, (16, 16))
    monkeypatch.setattr(HostWeights, "copy_to", noted)
    with attached(unet, Settings(offload="layer", channels_last=channels_last), device="cpu") as attachment:
        for _ in range(2):
            copies.clear()
            assert torch.equal(run(unet, (16, 16)), expected)
        layout = stream_of(attachment)._layout
        # Attached by hand, host memory lies in the order of the definition, of which the first run has shown another: a
        # block of several small layers comes in one copy where these are neighbours there, too.
        assert len(copies) <= 1.3 * len(layout.streamed) < len([*layout.streamed_tensors()]) / 2


def test_a_stated_budget_is_filled(anatomy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow bus, so that weights that stay always make a step faster."""
    step, slow = 4, dataclasses.replace(RATES, copy_bandwidth=2e8, launch_seconds=0.0)
    monkeypatch.setattr(search, "_FILLED_MIB", step)
    monkeypatch.setattr(search, "_SHARES", (1, 4, 16))
    least, most = (planned(anatomy, Settings(offload=way)).stages[0].reserved_bytes for way in ("layer", "component"))
    overhead = planned(anatomy, Settings()).predicted.overhead_bytes
    budgets = [overhead + least + (most - least) * part // 8 for part in (3, 5, 7)]
    asked = [dataclasses.replace(request(budget), rates=slow) for budget in budgets]
    as_is = [make_plan(anatomy, one, Settings()) for one in asked]
    filled = [make_plan(anatomy, dataclasses.replace(one, fills=True), Settings()) for one in asked]
    needed = [one.predicted.reserved_bytes + overhead for one in filled]
    assert all(one.settings.offload == "blocks" for one in filled)
    assert all(less.predicted.seconds >= more.predicted.seconds for less, more in itertools.pairwise(filled))
    assert all(one.predicted.seconds <= other.predicted.seconds for one, other in zip(filled, as_is, strict=True))
    assert any(one.predicted.seconds < 0.97 * other.predicted.seconds for one, other in zip(filled, as_is, strict=True))
    layer = max(tensor.nbytes for tensor in anatomy.components["unet"].parameters())
    assert all(0 <= budget - held < step * MIB + layer for budget, held in zip(budgets, needed, strict=True))
    fixed = make_plan(anatomy, dataclasses.replace(asked[-1], fills=True), Settings(offload="blocks", weights_mib=16))
    assert fixed.settings.weights_mib == 16


def test_a_filled_budget_spares_the_disk(anatomy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that host memory lacks stay on the device, even where reading them is hidden behind the compute."""
    monkeypatch.setattr(search, "_FILLED_MIB", 4)
    total = weight_bytes(anatomy.denoiser_module)
    rates = dataclasses.replace(_without_launches(), half_flops=RATES.half_flops / 32)
    streams, whole = Settings(offload="blocks"), planned(anatomy, Settings(offload="component")).predicted
    budget = whole.reserved_bytes + whole.overhead_bytes - total // 4
    asked = dataclasses.replace(request(budget), rates=rates, ram=RING_BYTES + total // 2, disk=DISKS["nvme"])
    as_is, filled = (make_plan(anatomy, dataclasses.replace(asked, fills=fills), streams) for fills in (False, True))
    assert denoising(as_is).disk_bytes > denoising(filled).disk_bytes == 0
    assert filled.predicted.seconds < 1.1 * as_is.predicted.seconds


def test_a_filled_plan_is_that_of_all_budgets_of_its_interval(anatomy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_FILLED_MIB", 16)
    monkeypatch.setattr(search, "_SHARES", (1, 16))
    slow = dataclasses.replace(RATES, copy_bandwidth=2e8, launch_seconds=0.0)
    budget = planned(anatomy, Settings(offload="component")).predicted.reserved_bytes * 3 // 4

    def at(vram: float) -> Any:
        return make_plan(anatomy, dataclasses.replace(request(int(vram)), rates=slow, fills=True), Settings())

    overhead = planned(anatomy, Settings()).predicted.overhead_bytes
    plan = at(budget + overhead)
    least, most = plan.alike["vram"]
    assert plan.settings.weights_mib is not None and plan.settings.weights_mib % 16 == 0
    assert least < most - 10 * MIB and at(most).settings == at(most - 10 * MIB).settings == plan.settings
    assert at(least).settings == plan.settings != at(least - 1).settings
    assert at(most + 1).settings != plan.settings
