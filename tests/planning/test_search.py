"""The search: what it promises holds, more memory is never slower, and the impossible is refused with the remedy."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

import sd_lowvram
from sd_lowvram import Fidelity, Settings
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.devices.performance import PROFILES, profile
from sd_lowvram.errors import BadInputError, BudgetError, PlanningError
from sd_lowvram.memory import measured_peak
from sd_lowvram.models import anatomy_of_components
from sd_lowvram.models.anatomy import Anatomy
from sd_lowvram.models.calls import Shape
from sd_lowvram.planning.cost_model import Pricing
from sd_lowvram.planning.plan import Request
from sd_lowvram.planning.search import PlanSearch, best_plan, make_plan
from sd_lowvram.planning.stage_costs import StageCosts
from sd_lowvram.session import anatomy_of
from sd_lowvram.settings import STREAMED
from sd_lowvram.streaming.timing import layers_with_weights
from sd_lowvram.tracing.rehearsal import rehearse_filled
from sd_lowvram.units import GIB, MIB
from sd_lowvram.weights import weight_bytes

CPU = torch.device("cpu")
RATES = profile("rtx2070")


def request(vram: int, size: int = 64, **options: Any) -> Request:
    return Request(size, size, options.pop("batch", 1), vram, options.pop("ram", 4 * GIB), CPU, RATES, **options)


@pytest.fixture(scope="module")
def anatomy() -> Any:
    return anatomy_of_components("diffusers", build_components(families.config("sd15"), device="meta"))


@pytest.fixture(scope="module")
def least(anatomy: Any) -> int:
    return make_plan(anatomy, request(GIB), Settings()).minimum_peak_bytes


def test_plenty_leaves_the_model_resident(anatomy: Any) -> None:
    plan = make_plan(anatomy, request(GIB), Settings())
    assert plan.fits
    assert (plan.settings.offload, plan.settings.vae_tiles) == ("none", "off")
    assert plan.predicted.host_bytes == 0
    assert plan.predicted.weights_bytes == weight_bytes(*anatomy.components.values())
    assert plan.predicted.peak_bytes >= plan.predicted.weights_bytes + plan.predicted.activation_bytes
    assert plan.fidelity.lossless


def test_more_memory_is_never_slower(anatomy: Any, least: int) -> None:
    most = make_plan(anatomy, request(GIB), Settings()).predicted.peak_bytes
    budgets = [least + (most - least) * step // 4 for step in range(5)]
    plans = [make_plan(anatomy, request(budget), Settings()) for budget in budgets]
    times = [plan.predicted.seconds for plan in plans]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) > 2
    for plan, budget in zip(plans, budgets, strict=True):
        assert plan.predicted.peak_bytes + plan.predicted.overhead_bytes <= budget
        assert plan.predicted.peak_bytes == max(stage.peak_bytes for stage in plan.stages)
        assert plan.minimum_peak_bytes == least


@pytest.mark.slow(5)
def test_nothing_that_was_left_out_is_faster(anatomy: Any, least: int, monkeypatch: Any) -> None:
    """The search leaves out what cannot be faster; here all is priced."""
    monkeypatch.setattr(Pricing, "confirm", lambda self, run, *most: run)
    most = make_plan(anatomy, request(GIB, 128), Settings()).predicted.peak_bytes
    fewer = 0
    for step in range(4):
        asked = request(least + (most - least) * step // 3, 128)
        search, whole = (PlanSearch(anatomy, asked, Settings(), False) for _ in range(2))
        found = search.fastest()
        fastest = []
        for base in whole._placements:
            options = [[whole._option(base, group, choice) for choice in group.choices] for group in whole._groups]
            ways = [min(filter(whole._fits, each), key=lambda way: way.seconds, default=None) for each in options]
            if None not in ways:
                fastest.append(whole.pricing.whole(base, ways))
        best = min((run.seconds for run in fastest), default=None)
        assert (found.seconds if found else None) == (best and pytest.approx(best))
        fewer += len(search.pricing.costs._known) < len(whole.pricing.costs._known)
    assert fewer > 1


def test_a_run_that_its_whole_trace_finds_slower_is_not_taken(anatomy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search goes on with the next one."""
    priced: list[Any] = []

    def slower(pricing: Pricing, run: Any, *most: float) -> Any:
        priced.append(run)
        factor = 10 if len(priced) == 1 else 1
        slow = (dataclasses.replace(stage, seconds=factor * stage.seconds) for stage in run.stages)
        return dataclasses.replace(run, stages=tuple(slow))

    monkeypatch.setattr(Pricing, "confirm", slower)
    found = PlanSearch(anatomy, request(GIB), Settings(), approximate=False).fastest()
    assert found is not None and priced[0].seconds < found.seconds < 5 * priced[0].seconds


def test_the_impossible_is_refused(anatomy: Any, least: int) -> None:
    with pytest.raises(BudgetError) as refusal:
        make_plan(anatomy, request(least - 1), Settings())
    assert refusal.value.needed_bytes == least
    assert refusal.value.exit_code == 3
    assert refusal.value.stage in ("text", "denoise", "decode")
    assert make_plan(anatomy, request(least), Settings()).fits
    with pytest.raises(BudgetError) as refusal:
        make_plan(anatomy, request(least, ram=MIB), Settings())
    assert refusal.value.stage == "host"


@pytest.fixture
def on_a_card() -> Any:
    """A request for so many bytes of a card by name, and the target: with a ControlNet, a stage without levels."""
    target = controlled()
    asked = dataclasses.replace(request(1), device=torch.device("cuda"), rehearsal=target.rehearsal)
    return lambda vram, **limits: (target, dataclasses.replace(asked, vram=vram, **limits), Settings())


def test_a_controlnet_is_planned_with_fused_kernels(on_a_card: Any) -> None:
    """They act on UNets and autoencoders; in its own stage there is nothing for them to act on."""
    target, asked, _ = on_a_card(4 * GIB)
    assert make_plan(target, asked, Settings(fused_kernels=True)).settings.fused_kernels is True


def test_the_least_that_is_told_is_planned(on_a_card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the whole trace of a stage without levels finds more."""
    confirmed = Pricing._confirm_stage

    def more(pricing: Pricing, stage: Any, planned: Any, settings: Settings, beyond: float) -> Any:
        whole = confirmed(pricing, stage, planned, settings, beyond)
        found = 2 * MIB if stage.name == "control" else 0
        return dataclasses.replace(whole, reserved_bytes=whole.reserved_bytes + found)

    monkeypatch.setattr(Pricing, "_confirm_stage", more)
    with pytest.raises(BudgetError) as refusal:
        make_plan(*on_a_card(1))
    assert refusal.value.stage == "control"
    assert make_plan(*on_a_card(refusal.value.needed_bytes)).fits


def test_the_least_is_planned_whatever_the_search_for_the_fastest_finds(
    on_a_card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlanSearch, "fastest", lambda self: None)
    with pytest.raises(BudgetError) as refusal:
        make_plan(*on_a_card(1))
    least = refusal.value.needed_bytes
    assert make_plan(*on_a_card(least)).predicted.host_bytes <= request(least).ram
    with pytest.raises(BudgetError) as refusal:
        make_plan(*on_a_card(least, ram=MIB))
    assert refusal.value.needed_bytes > MIB


def test_what_the_next_larger_budget_buys(anatomy: Any, least: int) -> None:
    plan = make_plan(anatomy, request(least), Settings())
    faster = plan.next_faster
    assert faster is not None and faster.needed_bytes > least and faster.seconds < plan.predicted.seconds
    assert make_plan(anatomy, request(faster.needed_bytes), Settings()).predicted.seconds <= faster.seconds
    told = plan.as_dict()["next_faster"]
    assert told["saved_seconds"] == pytest.approx(plan.predicted.seconds - faster.seconds)
    gained = 1 - faster.seconds / plan.predicted.seconds
    assert any("instead of" in reason for reason in plan.reasons) == (gained >= 0.05)
    assert any("needs" in stage.why for stage in plan.stages)
    plenty = make_plan(anatomy, request(GIB), Settings())
    assert plenty.next_faster is None and not any(stage.why for stage in plenty.stages)


@pytest.mark.slow(5)
def test_the_largest_allocation_is_bounded(anatomy: Any) -> None:
    """That the limit of a refusal is then enough: test_remedies.py."""
    free = make_plan(anatomy, request(GIB, 256), Settings())
    limit = free.predicted.largest_bytes // MIB - 1
    bound = make_plan(anatomy, request(GIB, 256), Settings(largest_mib=limit))
    assert bound.predicted.largest_bytes <= limit * MIB < free.predicted.largest_bytes
    assert bound.predicted.seconds > free.predicted.seconds
    assert any("single allocation" in stage.why for stage in bound.stages)


def test_composed_figures_are_those_of_whole_traces(anatomy: Any) -> None:
    """The search adds streamed weights to activations; the whole trace with the engine attached sees the same."""
    for offload in ("layer", "component"):
        fixed = Settings(offload=offload, feed_forward_chunks=4, park_skips=True)
        pricing = Pricing(anatomy, request(GIB))
        for stage in pricing.costs.stages:
            settings = fixed.filled(vae_tiles="exact", vae_map="parked", inference_mode=True)
            planned = pricing.stage(settings, stage, {}, settings)
            timing = pricing.timing(stage, settings) if stage.repeats and offload == "layer" else None
            traced = pricing.costs.trace(stage, pricing.as_traced(stage, settings), timing, whole=True)
            beside = 0 if offload == "layer" else planned.weights_bytes - traced.weights_bytes
            assert planned.peak_bytes * 0.999 <= traced.peak_bytes + beside <= planned.peak_bytes * 1.001


def test_a_long_run_is_called_slow(anatomy: Any) -> None:
    slow = dataclasses.replace(RATES, half_flops=1e6, float_flops=1e6)
    plan = make_plan(anatomy, dataclasses.replace(request(GIB), rates=slow), Settings())
    assert plan.predicted.seconds > 600
    assert any(reason.startswith("slow: ") for reason in plan.reasons)


def controlled() -> Anatomy:
    """A pipeline with a ControlNet, with the calls of a picture of 64x64."""
    pipe = families.controlled(1)
    return anatomy_of(pipe, rehearsal=rehearse_filled(pipe, {}, 64, 64, 1, 30, None))


def test_a_controlnet_is_counted() -> None:
    target = controlled()
    alone = make_plan(anatomy_of_components("diffusers", {"unet": target.components["unet"]}), request(GIB), Settings())
    asked = dataclasses.replace(request(GIB), rehearsal=target.rehearsal)
    both = make_plan(target, asked, Settings())
    stages = {stage.name: stage for stage in both.stages}
    assert list(stages) == ["text", "control", "denoise", "decode"]
    assert stages["control"].seconds > 0 and both.predicted.seconds > alone.predicted.seconds
    assert (
        stages["control"].weights_bytes == stages["denoise"].weights_bytes == weight_bytes(*target.components.values())
    )
    residuals = 2 * 2 * 32 * 8 * 8 * 4  # of the first level alone
    assert stages["denoise"].activation_bytes - alone.stages[0].activation_bytes >= residuals
    least = dataclasses.replace(asked, vram=both.minimum_vram_bytes)
    assert make_plan(target, least, Settings()).settings.offload in STREAMED


@pytest.mark.parametrize("offload", ["none", "component", "blocks", "layer"])
def test_a_stage_takes_at_least_the_time_of_the_host_and_that_of_the_device(anatomy: Any, offload: str) -> None:
    asked = dataclasses.replace(request(GIB), device=torch.device("cuda"))
    stages = make_plan(anatomy, asked, Settings(offload=offload)).stages
    for stage in stages:
        assert 0 < max(stage.host_seconds, stage.device_seconds) <= stage.seconds * (1 + 1e-9)
        assert offload != "none" or stage.seconds <= stage.host_seconds + stage.device_seconds


def test_layers_that_are_lent_and_copies_of_weights_take_host_time(anatomy: Any) -> None:
    def host(offload: str, **rates: float) -> float:
        on_gpu = {"device": torch.device("cuda"), "rates": dataclasses.replace(RATES, **rates)}
        chosen = make_plan(anatomy, dataclasses.replace(request(GIB, steps=1), **on_gpu), Settings(offload=offload))
        return next(stage.host_seconds for stage in chosen.stages if stage.name == "denoise")

    layers = len(layers_with_weights(anatomy.components["unet"]))
    lent = host("component") - host("none")
    assert lent == pytest.approx(layers * RATES.layer_launches * RATES.launch_seconds)
    fetched = host("layer") - host("component")
    assert fetched > 0 and host("layer", fetch_launches=0.0) == pytest.approx(host("component"))
    assert fetched / (RATES.fetch_launches * RATES.launch_seconds) == pytest.approx(
        round(fetched / (RATES.fetch_launches * RATES.launch_seconds))
    )


def test_components_that_take_turns_in_a_step_are_copied_in_each() -> None:
    target = controlled()
    parts = [target.components[name] for name in ("controlnet", "unet")]

    def seconds(offload: str, steps: int) -> float:
        record = rehearse_filled(families.controlled(1), {}, 64, 64, 1, steps, None)
        unlent = dataclasses.replace(RATES, layer_launches=0.0)
        asked = dataclasses.replace(request(GIB, steps=steps), rehearsal=record, rates=unlent)
        of = dataclasses.replace(target, rehearsal=record)
        return make_plan(of, asked, Settings(offload=offload)).predicted.seconds

    copied, held = (seconds(offload, 21) - seconds(offload, 11) for offload in ("component", "none"))
    assert copied - held == pytest.approx(10 * weight_bytes(*parts) / RATES.copy_bandwidth, rel=0.01)


def test_a_step_of_two_calls_takes_twice_as_long(anatomy: Any) -> None:
    one, two = (make_plan(anatomy, request(GIB, calls=calls), Settings()) for calls in (1, 2))
    steps = [next(stage for stage in plan.stages if stage.name == "denoise").seconds for plan in (one, two)]
    assert steps[1] == pytest.approx(2 * steps[0])


def test_fixed_knobs_stay(anatomy: Any) -> None:
    fixed = Settings(offload="layer", vae_tiles="exact", vae_map="recomputed", attention="sliced", precision="bf16")
    plan = make_plan(anatomy, request(GIB), fixed)
    assert all(getattr(plan.settings, name) == value for name, _, value in fixed.decided())
    assert plan.fidelity is Fidelity.APPROXIMATE


def test_larger_pictures_never_need_less(anatomy: Any) -> None:
    """Between neighbouring sizes the least peak may waver by a row of a strip; from step to step of a doubling not."""
    for fixed in (Settings(), Settings.smallest(), Settings(offload="none", vae_tiles="off")):
        found = [
            PlanSearch(anatomy, request(GIB, size), fixed, approximate=False).smallest() for size in (64, 128, 192)
        ]
        peaks = [candidate.peak_bytes for candidate in found if candidate is not None]
        assert len(peaks) == 3 and peaks == sorted(peaks)


@pytest.mark.slow(16)
def test_larger_pictures_of_a_full_size_model_never_need_less() -> None:
    """Sizes between which pieces of tokens and rows change in number."""
    unet = anatomy_of_components("diffusers", build_components("sd15", torch.float16, "meta", only=("unet",)))
    search, peaks = None, []
    for size in (320, 384, 512, 520):
        search = PlanSearch(unet, request(GIB, size), Settings(), approximate=False, like=search)
        smallest = search.smallest()
        assert smallest is not None
        peaks.append(smallest.peak_bytes)
    assert peaks == sorted(set(peaks))


def test_weights_that_a_host_moves_in_parts_are_counted_as_it_keeps_them() -> None:
    anatomy = anatomy_of_components("diffusers", build_components(tiny.config("sd15"), device="meta"))
    moved = Settings(offload="component")
    whole = make_plan(anatomy, request(GIB), moved)
    kept = dataclasses.replace(anatomy, kept={"unet": MIB})
    parts = make_plan(kept, request(GIB), moved)
    denoise = [next(s for s in plan.stages if s.name == "denoise") for plan in (whole, parts)]
    assert [stage.weights_bytes for stage in denoise] == [weight_bytes(anatomy.denoiser_module), MIB]
    between = request((whole.minimum_vram_bytes + parts.minimum_vram_bytes) // 2)
    assert make_plan(kept, between, moved).fits
    with pytest.raises(BudgetError):
        make_plan(anatomy, between, moved)


def test_guidance_and_batch_count(anatomy: Any) -> None:
    resident = Settings(offload="none", attention="sdpa")
    without = make_plan(anatomy, request(GIB, passes=1), resident)
    three = make_plan(anatomy, request(GIB, batch=3), resident)
    one = make_plan(anatomy, request(GIB), resident)
    peaks = [next(s for s in plan.stages if s.name == "denoise").activation_bytes for plan in (without, one, three)]
    assert peaks[0] < peaks[1] < peaks[2]
    assert three.settings.vae_slices and not one.settings.vae_slices


@pytest.mark.slow(15)
def test_a_narrower_type_only_when_asked(anatomy: Any) -> None:
    """On a card: a processor without instructions for 16-bit types unfolds their convolutions, and saves nothing."""
    rates = dataclasses.replace(request(GIB).rates, launch_seconds=0.0)  # of a small model they are all of the time
    ask = dataclasses.replace(request(GIB), device=torch.device("cuda"), rates=rates)
    plain, narrow = (make_plan(anatomy, ask, Settings(), approximate=approximate) for approximate in (False, True))
    assert (plain.settings.precision, narrow.settings.precision) == (None, "fp16")
    assert narrow.predicted.peak_bytes < plain.predicted.peak_bytes


@pytest.mark.slow(6)
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_plan_between_least_and_plenty_runs_within_it(family: str) -> None:
    """The least and plenty, of every kind of pipeline: test_families.py."""
    pipe = families.plain(family, "StableDiffusionPipeline" if family == "sd15" else families.XL + "Pipeline")
    expected = tiny.run(pipe)
    plenty = sd_lowvram.plan(pipe, vram="1GB")
    least, most = plenty.minimum_vram_bytes, plenty.predicted.peak_bytes
    plan = sd_lowvram.optimize(pipe, vram=f"{least + (most - least) * 2 // 5} B", ram="1GB")
    pictures: list[torch.Tensor] = []
    measured = measured_peak(lambda: pictures.append(tiny.run(pipe)))
    assert tiny.relative_error(pictures[0], expected) < 1e-4
    # what is allocated during the run is on the device or parked; resident weights were there before
    resident = weight_bytes(*plan_components(pipe)) if plan.settings.offload == "none" else 0
    assert measured <= plan.predicted.peak_bytes + plan.predicted.host_bytes - resident + 2 * MIB


def plan_components(pipe: Any) -> list[torch.nn.Module]:
    return [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]


def test_plan_attaches_nothing_also_to_an_optimised_target() -> None:
    pipe = families.plain("sd15")
    sd_lowvram.optimize(pipe, vram="1GB", settings=Settings(offload="layer"))
    hooked = pipe.unet.forward
    first = sd_lowvram.plan(pipe, vram="1GB")
    assert pipe.unet.forward is hooked
    sd_lowvram.restore(pipe)
    assert sd_lowvram.plan(pipe, vram="1GB").settings == first.settings


def test_weights_that_are_in_memory_already_are_not_asked_for_again(monkeypatch: Any) -> None:
    pipe = families.plain("sd15")
    weights = weight_bytes(*plan_components(pipe))
    monkeypatch.setattr("sd_lowvram.planning.request.available_ram", lambda: 1 * GIB)
    monkeypatch.setattr("sd_lowvram.planning.request.free_vram", lambda device: 2 * GIB)
    found = sd_lowvram.plan(pipe).request
    assert (found.ram, found.vram) == (GIB + weights, 2 * GIB + weights)
    assert sd_lowvram.plan(pipe, vram="1GB", ram="1GB").request.ram == GIB


def test_weights_in_their_file_are_no_memory_that_is_held(tmp_path: Path, monkeypatch: Any) -> None:
    unet = families.plain("sd15").unet
    save_file(unet.state_dict(), tmp_path / "unet.safetensors")
    unet.load_state_dict(load_file(tmp_path / "unet.safetensors"), assign=True)
    monkeypatch.setattr("sd_lowvram.planning.request.available_ram", lambda: GIB)
    assert sd_lowvram.plan(unet, vram="1GB", device="cpu", width=64, height=64).request.ram == GIB


def test_more_steps_take_longer() -> None:
    pipe = families.plain("sd15")
    short, long = (sd_lowvram.plan(pipe, vram="1GB", ram="1GB", steps=steps) for steps in (5, 50))
    steps = [next(stage for stage in plan.stages if stage.name == "denoise").seconds for plan in (short, long)]
    assert steps[1] == pytest.approx(10 * steps[0])


def test_as_dict_is_json(anatomy: Any) -> None:
    plan = json.loads(json.dumps(make_plan(anatomy, request(GIB), Settings()).as_dict()))
    wanted = [
        "settings",
        "fits",
        "predicted",
        "minimum_peak_bytes",
        "minimum_vram_bytes",
        "minimum_ram_bytes",
        "fidelity",
        "reasons",
    ]
    assert set(wanted) <= set(plan)
    parts = ["peak_bytes", "overhead_bytes", "weights_bytes", "activation_bytes", "host_bytes", "seconds"]
    assert set(parts) <= set(plan["predicted"])


def test_who_shows_no_minimum_gets_the_same_plan_for_less(anatomy: Any) -> None:
    whole, search = (PlanSearch(anatomy, request(GIB), Settings(), approximate=False) for _ in range(2))
    told, plan = best_plan(whole), best_plan(search, least=False)
    assert told.as_dict() | {"minimum_peak_bytes": 0, "minimum_vram_bytes": 0, "minimum_ram_bytes": 0} == (
        plan.as_dict() | {"minimum_peak_bytes": 0, "minimum_vram_bytes": 0, "minimum_ram_bytes": 0}
    )
    assert told.minimum_peak_bytes < plan.minimum_peak_bytes == plan.predicted.peak_bytes
    assert len(search.pricing.priced_stages(search.base)) <= len(whole.pricing.priced_stages(whole.base))
    with pytest.raises(BudgetError):
        make_plan(anatomy, request(MIB // 2), Settings(), least=False)


def test_a_decode_looks_for_no_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanSearch, "smallest", lambda self: pytest.fail("nobody sees it"))
    assert sd_lowvram.decode(tiny.tiniest().vae, torch.zeros(1, 4, 8, 8), vram="1GB").shape == (1, 3, 16, 16)


def test_costs_are_remembered(anatomy: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))
    first = make_plan(anatomy, request(GIB), Settings())
    assert list(tmp_path.rglob("*.json"))
    monkeypatch.setattr("sd_lowvram.planning.stage_costs.trace_equals_once", lambda *_: pytest.fail("traced again"))
    monkeypatch.setattr("sd_lowvram.tracing.fake_model.fake_copy", lambda *_: pytest.fail("copied again"))
    assert make_plan(anatomy, request(GIB), Settings()) == first


def test_costs_are_those_of_a_model_and_a_size(anatomy: Any, tmp_path: Any, monkeypatch: Any) -> None:
    config = families.config("sd15")
    config["unet"] |= {"block_out_channels": [32, 32]}
    other = anatomy_of_components("diffusers", build_components(config, device="meta"))
    asked = ((anatomy, 64), (anatomy, 128), (other, 64))

    def plans(*folders: str) -> list[Any]:
        found = []
        for folder, (model, size) in zip(folders, asked, strict=True):
            monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path / folder))
            found.append(make_plan(model, request(GIB, size), Settings(offload="none", vae_tiles="off")).predicted)
        return found

    assert plans("shared", "shared", "shared") == plans("first", "second", "third")


def test_what_a_broken_model_raises_is_all_that_is_told() -> None:
    parts = build_components(families.config("sd15"), device="meta")
    parts["unet"].conv_out = torch.nn.Conv2d(3, 4, 3, device="meta")
    with pytest.raises(PlanningError, match=r"unet \(UNet2DConditionModel\) .* RuntimeError: .*channels") as told:
        make_plan(anatomy_of_components("diffusers", parts), request(GIB), Settings())
    assert told.value.__cause__ is not None and told.value.__cause__.__context__ is None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"width": 101}, "104"),
        ({"width": 0}, "multiple of 8"),
        ({"height": -64}, "multiple of 8"),
        ({"height": 64.5}, "64.5"),
        ({"batch": 0}, "batch 0"),
        ({"vram": "banana"}, "banana"),
        ({"vram": 0}, "more than zero"),
        ({"ram": "-1GB"}, "-1GB"),
    ],
)
def test_bad_requests_are_named(wrong: dict[str, Any], says: str) -> None:
    unet = build_components(families.config("sd15"), device="meta", only=("unet",))["unet"]
    with pytest.raises(BadInputError, match=says):
        sd_lowvram.plan(unet, **wrong)


def test_profiles() -> None:
    assert profile("RTX 2070") is profile("rtx2070") is PROFILES["rtx2070"]
    assert all(rates.source and rates.vram_bytes >= 4 * GIB for rates in PROFILES.values())
    with pytest.raises(BadInputError, match="rtx3060"):
        profile("banana")


def test_what_is_remembered_of_a_unet_hangs_on_the_latents_of_its_vae() -> None:
    config = tiny.config("sd15")
    small = {**config, "vae": {**config["vae"]}}
    for name in ("block_out_channels", "down_block_types", "up_block_types"):
        small["vae"][name] = config["vae"][name][:-1]
    called, weights = set(), set()
    for one in (config, small):
        parts = build_components(one, torch.float16, "meta", ("unet", "vae"))
        costs = StageCosts(anatomy_of_components("diffusers", parts), Shape(512, 512), False, torch.device("cuda"))
        called.add(costs._call_facts["denoise", "unet"])
        weights.add(costs._fake.fingerprint("unet"))
    assert len(called) == 2 and len(weights) == 1
