"""The nodes on a host: the same picture, less memory asked for, nothing left behind, other nodes' patches unharmed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import importlib
import json
import re
import sys
import threading
import types
from typing import Any

import comfy_host
import families
import numpy
import pytest
import tiny
import torch
from comfy_host import ROOT, Bar, DynamicPatcher, Guider, Interrupted, Model, Patcher, Range, import_pack
from PIL import Image
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensor

from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.commands.decode_saved import decode_file
from sd_lowvram.saved_latents.file import read_saved
from sd_lowvram.saved_latents.hosted import read_hosted

TEXT = torch.randn(1, 77, 32, generator=torch.Generator().manual_seed(1))
NOISE = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(2))
CHUNKED = {"residual_strips": 4, "feed_forward_chunks": 4, "park_skips": "on", "guidance_in_turn": "on"}


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SD_LOWVRAM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield import_pack(ROOT)


@pytest.fixture(autouse=True)
def cancelled(monkeypatch) -> list[bool]:
    """The host's modules; append something and the next look at the cancel button stops the run."""
    pressed: list[bool] = []
    for name, module in comfy_host.host_modules(lambda: bool(pressed)).items():
        monkeypatch.setitem(sys.modules, name, module)
    Bar.shown.clear()
    return pressed


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    parts = families.parts("sd15")
    return {name: parts[name].eval().requires_grad_(False) for name in ("unet", "vae")}


@pytest.fixture
def model(parts) -> Patcher:
    return Patcher(Model(parts["unet"]))


def choose(pack: Any, **knobs: Any) -> Any:
    """What Low VRAM Settings gives."""
    return pack.NODE_CLASS_MAPPINGS["LowVRAMSettings"]().choose(**knobs)[0]


def shown_and_given(pack: Any, model: Patcher, vae: Any, budget: str = "", **knobs: Any) -> tuple[str, Any]:
    """The text that Low VRAM shows, and its model, VAE and record."""
    out = pack.NODE_CLASS_MAPPINGS["LowVRAM"]().optimize(model, vae, budget, choose(pack, **knobs))
    return out["ui"]["text"][0], out["result"][:3]


def optimize(pack: Any, model: Patcher, budget: str = "") -> tuple[Patcher, Any]:
    """One set of knobs for all tests: their traces are made once and remembered."""
    vae = comfy_host.VAE(build_components(families.config("sd15"), only=("vae",))["vae"])
    mine, _, record = shown_and_given(pack, model, vae, budget, **CHUNKED)[1]
    return mine, record


def traces_of_us(module: torch.nn.Module) -> list[str]:
    """Where anything of ours is set on a model."""
    return [
        f"{name}.{attribute}"
        for name, one in module.named_modules()
        for attribute, value in vars(one).items()
        if "lowvram" in attribute or type(value).__name__ == "Trampoline"
    ]


def test_the_same_picture_and_nothing_left(pack, model) -> None:
    plain = Guider(model, TEXT).sample(NOISE)
    mine, record = optimize(pack, model)
    during: list[int] = []
    original = model.model.apply

    def watched(*args: Any) -> torch.Tensor:
        during.append(len(traces_of_us(_unet(model))))
        return original(*args)

    model.model.apply = watched
    ours = Guider(mine, TEXT).sample(NOISE)
    assert during[0] > 8 and record.sites["residual_strips"] == 8 and record.sites["feed_forward"] == 4
    assert tiny.relative_error(ours, plain) < 1e-5
    assert not traces_of_us(_unet(model))
    del model.model.apply
    assert vars(model.model).keys() == {"diffusion_model", "memory_usage_factor", "manual_cast_dtype"}
    assert not model.wrappers and Guider(model, TEXT).sample(NOISE).equal(plain)


def _unet(model: Patcher) -> torch.nn.Module:
    return model.model.diffusion_model


@pytest.mark.parametrize("error", [RuntimeError("of the model"), Interrupted()], ids=["error", "cancel"])
def test_errors_and_cancel_leave_nothing(pack, model, error) -> None:
    mine, _ = optimize(pack, model)

    def fail(*args: Any) -> None:
        assert traces_of_us(_unet(model))
        raise error

    model.model.apply = fail
    with pytest.raises(type(error)):
        Guider(mine, TEXT).sample(NOISE)
    del model.model.apply
    assert not traces_of_us(_unet(model))
    assert vars(model.model) == vars(Model(_unet(model)))


def test_the_host_is_asked_for_what_is_needed(pack, model) -> None:
    mine, record = optimize(pack, model, "1024GB")  # what is free changes while other programs run
    planned = next(stage.activation_bytes for stage in record.plans["denoise"].stages)
    asked: list[float] = []
    guider = Guider(mine, TEXT, lambda patcher: asked.append(patcher.model.memory_required([2, 4, 8, 8])))
    guider.sample(NOISE)
    assert guider.asked_to_load == planned == pytest.approx(asked[0])
    assert model.model.memory_required([2, 4, 8, 8]) > 10 * planned  # the host's own estimate, as before


def test_memory_outside_the_budget_is_not_for_weights(pack, model) -> None:
    mine, record = optimize(pack, model, "1GB")
    guider = Guider(mine, TEXT)
    room = sys.modules[pack.__name__ + ".nodes.host"].room
    guider.sample(NOISE)
    planned = next(stage.activation_bytes for stage in record.plans["denoise"].stages)
    free = room(torch.device("cpu"))
    assert guider.asked_to_load == pytest.approx(planned + free - (1 << 30), rel=0.2)


def test_a_model_that_is_gone_from_the_hosts_list_holds_nothing(pack, monkeypatch) -> None:
    """The host keeps its entry until it cleans up."""
    management, device = sys.modules["comfy.model_management"], torch.device("cuda", 0)
    gone = types.SimpleNamespace(device=device, model=None)
    here = types.SimpleNamespace(device=device, model=object(), model_loaded_memory=lambda: 5)
    monkeypatch.setattr(management, "current_loaded_models", [gone, here])
    assert sys.modules[pack.__name__ + ".nodes.host"].room(device) == (8 << 30) + 5


def test_below_what_fits_a_plan_does_less_not_more(pack, model, vae) -> None:
    """The host keeps the weights whatever is asked: what is left of a smaller budget is never more."""
    found = {}
    weights = sum(tensor.numel() * 4 for tensor in _unet(model).parameters())
    for budget in (weights + (8 << 20), weights + (1 << 20), weights // 2, 100 << 10):
        text, (mine, _, record) = shown_and_given(pack, model, vae, f"{budget}B")
        plan = record.plans["denoise"]
        found[plan.predicted.activation_bytes] = text.split(":")[0]
        assert plan.request.vram == budget
    assert [*found] == sorted(found, reverse=True) and [*found.values()] == ["fits", "above the budget"]
    assert tiny.relative_error(Guider(mine, TEXT).sample(NOISE), Guider(model, TEXT).sample(NOISE)) < 1e-5
    assert record.sites["park_skips"] == 17 and record.notes[0].startswith("denoise 64x64 ")
    assert "residual_strips" not in record.sites  # where skips are parked, they take nothing more off the peak


def test_another_size_is_planned_when_it_comes(pack, model) -> None:
    mine, record = optimize(pack, model)
    larger = torch.randn(1, 4, 16, 24, generator=torch.Generator().manual_seed(2))
    plain = Guider(model, TEXT).sample(larger)
    assert tiny.relative_error(Guider(mine, TEXT).sample(larger), plain) < 1e-5
    request = record.plans["denoise"].request
    assert (request.width, request.height, request.batch) == (192, 128, 1)


def test_a_card_that_is_full_after_all_gets_a_leaner_plan(pack, model, vae) -> None:
    mine, _, record = shown_and_given(pack, model, vae)[1]
    plain, first = Guider(model, TEXT).sample(NOISE), record.plans["denoise"]

    times = iter(range(2))

    def full(_: Any, given: tuple[Any, ...]) -> None:
        if not isinstance(given[0], FakeTensor) and next(times, None) is not None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    hook = _unet(model).mid_block.register_forward_pre_hook(full)
    assert tiny.relative_error(Guider(mine, TEXT).sample(NOISE), plain) < 1e-5
    hook.remove()
    assert len(record.plans["denoise"].fallback_steps) == 2
    assert record.plans["denoise"].predicted.peak_bytes < first.predicted.peak_bytes
    assert any("the UNet ran out of memory" in note for note in record.notes)
    assert not traces_of_us(_unet(model))


def test_prompts_that_do_not_fit_together_come_one_after_the_other(pack, model, vae) -> None:
    """Five rows where masks ask for them were planned as two, and all of them came."""
    plain = Guider(model, TEXT, positive=4).sample(NOISE)
    knobs = {**CHUNKED, "guidance_in_turn": "off"}
    record = shown_and_given(pack, model, vae, "1B", **knobs)[1][2]
    for budget in ("1024GB", f"{needed(pack, record) + (64 << 10)}B"):
        mine, _, record = shown_and_given(pack, model, vae, budget, **knobs)[1]
        guider = Guider(mine, TEXT, positive=4)
        assert tiny.relative_error(guider.sample(NOISE), plain) < 1e-5
        assert record.plans["denoise"].request.shape.rows == max(guider.rows) and record.plans["denoise"].fits
        assert guider.rows == ([5] * 2 if budget == "1024GB" else [1] * 10)
        assert record.calls == sum(guider.rows) / 2 / max(guider.rows)


def needed(pack: Any, record: Any) -> int:
    return int(sys.modules[pack.__name__ + ".nodes.report_text"].needed_bytes(record.plans["denoise"], "denoise"))


def test_a_step_of_several_calls_takes_as_many_times_as_long(pack, model, vae, sent) -> None:
    """The time was that of one call, half of a step's of heun; of samplers that are not known the steps show it."""

    def sample_heun() -> None: ...
    def sample_of_somebody() -> None: ...

    for function, expected in ((sample_heun, [1.5]), (sample_of_somebody, [1, 2])):
        mine, _, record = shown_and_given(pack, model, vae, "4GB", **CHUNKED)[1]
        record.node = "12"
        sent.clear()
        Guider(mine, TEXT).sample(NOISE, types.SimpleNamespace(sampler_function=function))
        seconds = record.plans["denoise"].stages[0].seconds / record.plans["denoise"].request.steps
        told = [one["output"]["text"][0].splitlines()[0] for _, one, _ in sent]
        steps = [sys.modules[pack.__name__ + ".sd_lowvram.units"].format_time(seconds * calls) for calls in expected]
        assert [one.split("(2 steps of ")[1].split(",")[0].split(")")[0] for one in told] == steps
        assert record.step_calls == [1, 2] and record.calls == 2


def test_pieces_of_a_picture_are_logged_with_its_size(pack, model, vae, caplog) -> None:
    """They were under the piece's alone; another node tiles the latents, or takes windows of them."""
    mine, _, record = shown_and_given(pack, model, vae, "4GB", **CHUNKED)[1]

    def in_quarters(executor: Any, x: Any, *args: Any) -> Any:
        rows = [torch.cat([executor(part, *args) for part in half.chunk(2, 3)], 3) for half in x.chunk(2, 2)]
        return torch.cat(rows, 2)

    before = mine.wrappers["apply_model"]
    mine.wrappers["apply_model"] = {"somebody": [in_quarters], **before}
    larger = torch.cat([torch.cat([NOISE, NOISE], 2)] * 2, 3)
    with caplog.at_level("INFO"):
        Guider(mine, TEXT).sample(larger)
    (line,) = [one.message for one in caplog.records if "sd-lowvram" in one.message]
    assert re.match("sd-lowvram: 128x128 .*64x64, 8 calls .*2 steps ", line)
    assert record.plans["denoise"].request.width == 64 and record.step_calls == [4, 4] and record.calls == 4
    assert re.search("128x128.*64x64.*1", report(pack, record))


def report(pack: Any, record: Any) -> str:
    return str(pack.NODE_CLASS_MAPPINGS["LowVRAMReport"]().report(torch.zeros(1, 8, 8, 3), record)["result"][0])


def test_a_budget_above_what_is_free_is_said(pack, model, vae, monkeypatch) -> None:
    """It read "fits: 1.2 of 99999 GiB"."""
    host = sys.modules[pack.__name__ + ".nodes.host"]
    plan = shown_and_given(pack, model, vae, "99999GB", **CHUNKED)[1][2].plans["denoise"]
    size = needed(pack, types.SimpleNamespace(plans={"denoise": plan}))
    for free, budget, begins, ends in (
        (7 << 30, "99999GB", "fits: ", ". Only 7 GiB are free"),
        (size // 2, "99999GB", "more than is free: ", " are free"),
        (7 << 30, "6GB", "fits: ", " a step"),
        (7 << 30, "", "fits: ", " a step"),
    ):
        monkeypatch.setattr(host, "room", lambda device, free=free: free)
        first = shown_and_given(pack, model, vae, budget, **CHUNKED)[0].splitlines()[0]
        assert first.startswith(begins) and first.endswith(ends)


def test_a_report_without_a_plan_says_why(pack) -> None:
    """The page sends none where Low VRAM is bypassed, and the host refused the node: "plan missing"."""
    node = pack.NODE_CLASS_MAPPINGS["LowVRAMReport"]
    assert [*node.INPUT_TYPES()["required"]] == ["images"]
    shown = node().report(torch.zeros(1, 8, 8, 3))
    text, plot = shown["result"]
    assert "Low VRAM is bypassed" in text and shown["ui"]["text"] == [text] and plot.shape[-1] == 3


@pytest.mark.parametrize("name", ["LowVRAM", "LowVRAMPlan", "LowVRAMVAEDecode", "LowVRAMVAEEncode"])
def test_what_a_node_refuses_takes_the_place_of_its_verdict(pack, model, vae, sent, name) -> None:
    given = {"vae": vae, "budget": "banana", "unique_id": "12"}
    others = {
        "LowVRAM": {"model": model},
        "LowVRAMPlan": {"model": model, "width": 64, "height": 64, "batch": 1, "steps": 2},
        "LowVRAMVAEDecode": {"samples": {"samples": LATENTS}},
        "LowVRAMVAEEncode": {"pixels": torch.zeros(1, 64, 64, 3)},
    }
    node = pack.NODE_CLASS_MAPPINGS[name]
    with pytest.raises(Exception, match="banana") as raised:
        getattr(node(), node.FUNCTION)(**given, **others[name])
    assert [(told["node"], told["output"]["text"]) for _, told, _ in sent] == [("12", [str(raised.value)])]
    assert node.INPUT_TYPES()["hidden"]["unique_id"] == "UNIQUE_ID"


def test_a_second_node_replaces_the_first(pack, model) -> None:
    mine, _ = optimize(pack, model)
    again, _ = optimize(pack, mine)
    assert all(len(keys["sd-lowvram"]) == 1 for keys in again.wrappers.values())
    assert mine.wrappers.keys() == again.wrappers.keys() and mine.wrappers != again.wrappers


def test_an_unknown_model_is_refused_by_name(pack) -> None:
    with pytest.raises(Exception, match="ComfyUI's") as raised:
        optimize(pack, Patcher(Model(torch.nn.Linear(2, 2))))
    assert type(raised.value).__name__ == "BadInputError"


@pytest.mark.parametrize("reshaped", [False, True])
@pytest.mark.parametrize("masked", [None, (6, 7), (2, 6, 7)], ids=str)
def test_attention_by_the_hosts_signature(pack, reshaped, masked) -> None:
    module = sys.modules[pack.__name__ + ".nodes.attending"]
    settings = sys.modules[pack.__name__ + ".sd_lowvram.settings"].Settings(attention="sliced")
    q, k, v = (torch.randn(2, rows, 8) for rows in (6, 7, 7))
    mask = None if masked is None else torch.rand(masked) > 0.3
    apart = [one.unflatten(-1, (2, 4)).transpose(1, 2) for one in (q, k, v)]
    wide = mask if mask is None or mask.dim() == 2 else mask[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(*apart, attn_mask=wide)
    seen: list[Any] = []
    run = module.override(settings, q.device, seen.append, None)
    heads = apart if reshaped else (q, k, v)
    shaped = {"skip_reshape": reshaped, "skip_output_reshape": reshaped}
    out = run(None, *heads, 2, mask=mask, transformer_options={"block": ("input", 1)}, **shaped)
    torch.testing.assert_close(out, expected if reshaped else expected.transpose(1, 2).flatten(2))
    assert seen == [(("input", 1), None, 7)]


def test_somebody_elses_override_stays_the_outer_one(pack) -> None:
    module = sys.modules[pack.__name__ + ".nodes.attending"]
    settings = sys.modules[pack.__name__ + ".sd_lowvram.settings"].Settings(attention="sliced")
    q = torch.randn(1, 6, 8)

    def theirs(kernel: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
        return 2 * kernel(q, *args, **kwargs)

    alone = module.override(settings, q.device, [].append, None)(None, q, q, q, 2)
    chained = module.override(settings, q.device, [].append, theirs)(None, q, q, q, 2)
    assert chained.equal(2 * alone)


@pytest.fixture
def vae(parts) -> comfy_host.VAE:
    return comfy_host.VAE(parts["vae"])


def optimize_vae(pack: Any, vae: Any, **knobs: Any) -> Any:
    """The copy of ``vae`` that Low VRAM gives, without planning for a model next to it."""
    inside = f"{pack.__name__}.nodes."
    request = sys.modules[inside + "node_request"].NodeRequest("", choose(pack, **knobs).settings)
    return sys.modules[inside + "autoencoder"].optimized_vae(vae, request)


LATENTS = torch.randn(2, 4, 9, 13, generator=torch.Generator().manual_seed(3))


def test_the_stock_decode_and_encode_become_exact(pack, vae) -> None:
    before = dict(vars(vae))
    mine = optimize_vae(pack, vae, vae_tiles="exact", vae_map="parked")
    pixels = vae.decode(LATENTS)
    assert tiny.relative_error(mine.decode(LATENTS), pixels) < 1e-5
    assert tiny.relative_error(mine.encode(pixels), vae.encode(pixels)) < 1e-5
    stock, ours = vae.asked[0], vae.asked[1]
    assert ours < stock / 2
    assert vars(vae) == before and not traces_of_us(vae.first_stage_model)
    assert Bar.shown and Bar.shown[-1][0] == Bar.shown[-1][1]


def test_stock_tiled_nodes_run_exact_strips_instead(pack, model, vae) -> None:
    _, mine, record = shown_and_given(pack, model, vae, "1024GB")[1]
    pixels = vae.decode(LATENTS)
    assert tiny.relative_error(mine.decode_tiled(LATENTS, tile_x=32, tile_y=32, overlap=8), pixels) < 1e-5
    assert record.plans["decode"].settings.vae_tiles == "exact" and vae.asked[1] < vae.asked[0] / 2
    assert tiny.relative_error(mine.encode_tiled(pixels, tile_x=64), vae.encode(pixels)) < 1e-5
    assert record.plans["encode"].settings.vae_tiles == "exact"
    mine.decode(LATENTS)
    assert record.plans["decode"].settings.vae_tiles != "exact"  # nobody has asked for tiles, and it fits


def test_a_decode_above_its_budget_is_told(pack, model, vae, monkeypatch, caplog) -> None:
    """The host keeps the weights: in the node that has a budget, and on the stock node that runs an optimized VAE."""
    shown: list[tuple[str, str]] = []
    page = types.SimpleNamespace(send_progress_text=lambda text, node: shown.append((node, text)))
    running = types.SimpleNamespace(node_id="7")
    for name, content in (
        ("server", {"PromptServer": types.SimpleNamespace(instance=page)}),
        ("comfy_execution", {}),
        ("comfy_execution.utils", {"get_executing_context": lambda: running}),
    ):
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    weights = sum(tensor.numel() * 4 for tensor in vae.first_stage_model.parameters())
    nodes = pack.NODE_CLASS_MAPPINGS
    for budget, told in ((f"{weights}B", True), ("1GB", False)):
        shown.clear()
        made = nodes["LowVRAMVAEDecode"]().decode({"samples": LATENTS}, vae, budget)
        assert made["ui"]["text"][0].startswith("above the budget: " if told else "fits: ")
        shown_and_given(pack, model, vae, budget)[1][1].decode(LATENTS)
        assert [node for node, _ in shown] == ["7", "7"] * told
    assert all("104x72" in text for _, text in shown)
    assert caplog.text.count("ComfyUI keeps all weights loaded on this device") == 2


def test_what_the_budget_counts_and_what_lies_beside_it_is_named(pack, model, vae) -> None:
    clip = comfy_host.CLIP(torch.nn.Linear(1024, 768))
    text, (_, _, record) = shown_and_given(pack, model, vae, "1GB", **CHUNKED)
    first, counted, *others = text.splitlines()
    stage = next(one for one in record.plans["denoise"].stages if one.name == "denoise")
    sizes = [sys.modules[pack.__name__ + ".sd_lowvram.units"].format_size(size)
             for size in (stage.weights_bytes, stage.activation_bytes)]  # fmt: skip
    assert first.startswith("fits: ")
    assert counted == f"largest moment: a step (model {sizes[0]}, intermediate results {sizes[1]})"
    assert "CLIP 3.0 MiB, VAE " in others[0] and others[0].endswith("ComfyUI does not unload them on this device")
    assert others[1].endswith("for parked results, in the same memory on a CPU")
    decode = pack.NODE_CLASS_MAPPINGS["LowVRAMVAEDecode"]().decode({"samples": LATENTS}, vae, "1GB")
    assert "largest moment: decoding (VAE " in decode["ui"]["text"][0] and "CLIP 3.0 MiB, " in decode["ui"]["text"][0]
    del clip


def test_dynamic_vram_is_planned_in_pages_and_buffers(pack, parts, monkeypatch) -> None:
    """ComfyUI's own way on NVIDIA's cards from 0.33 on: whole pages stay, the rest passes in each step, at the bus's
    rate."""
    core, loading = pack.__name__ + ".sd_lowvram", sys.modules[pack.__name__ + ".nodes.loading"]
    monkeypatch.setattr(loading, "_PAGE", 1 << 16)
    monkeypatch.setattr(loading, "_CHUNK", 1 << 10)
    free = types.ModuleType("comfy.memory_management")
    free.aimdo_enabled = True
    monkeypatch.setitem(sys.modules, "comfy.memory_management", free)
    host = sys.modules[pack.__name__ + ".nodes.host"]
    assert host.loading(torch.device("cpu")) == loading.Loading()
    kind = host.loading(torch.device("cuda", 0))
    assert kind == loading.InRange(most=8 << 30)
    settings = sys.modules[core + ".settings"].Settings(attention="sliced", attention_mib=1)
    anatomy = sys.modules[core + ".session"].anatomy_of(parts["unet"])
    request_for = sys.modules[core + ".planning.request"].request_for
    weights = sum(tensor.numel() * 4 for tensor in parts["unet"].parameters())

    def planned(vram: int) -> Any:
        request = request_for(anatomy, vram=vram, width=64, height=64, device="cpu", ram=1 << 34)
        return loading.plan_beside(kind, anatomy, request, settings)

    plenty = planned(1 << 40).stages[0]
    beside = loading.non_weight_bytes(plenty)
    plan = planned(beside + weights * 3 // 4)
    (part,), copies = plan.stages, kind.buffers(loading.layer_bytes(parts["unet"]))
    kept = part.weights_bytes - copies
    assert plenty.weights_bytes == weights and plan.fits
    assert kept % loading._PAGE == 0 and 0 < kept <= weights * 3 // 4 - copies < kept + loading._PAGE
    passing = plan.request.steps * (weights - kept) / plan.request.rates.copy_bandwidth
    assert part.seconds == pytest.approx(plenty.seconds + passing)


class Prefetch:
    """As comfy.model_prefetch: opens a graph of allocations in a model's forward, unless the options say not to."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.recorded: list[Any] = []

    def enabled(self) -> bool:
        return not self.options.disable_comfy_compiler

    def malloc_graph_begin(self, module: Any, device: Any) -> None:
        if self.enabled():
            self.recorded.append(traces_of_us(module))

    def malloc_graph_end(self) -> None: ...

    def around(self, module: Any, call: Any) -> Any:
        self.malloc_graph_begin(module, "cuda")
        try:
            return call()
        finally:
            self.malloc_graph_end()


class ScopedPrefetch(Prefetch):
    """Its later shape: one graph a thread, cut by a scope."""

    @contextlib.contextmanager
    def malloc_graph_scope(self, device: Any) -> Any:
        if self.enabled():
            self.recorded.append(device)
        yield

    def around(self, module: Any, call: Any) -> Any:
        with self.malloc_graph_scope("cuda"):
            return call()


@pytest.fixture(params=[Prefetch, ScopedPrefetch])
def prefetch(request, monkeypatch) -> Any:
    """ComfyUI's compiler, which is on."""
    options = types.SimpleNamespace(disable_comfy_compiler=False, disable_cuda_graphs=False, other=1)
    module = types.ModuleType("comfy.cli_args")
    module.args = options
    monkeypatch.setitem(sys.modules, "comfy.cli_args", module)
    return request.param(options)


def _recorded_in(prefetch: Any, model: Patcher) -> None:
    """Have the model's forward take part in the compiler."""
    original = model.model.apply
    model.model.apply = lambda *args: prefetch.around(_unet(model), functools.partial(original, *args))


@pytest.mark.parametrize("users", [False, True])
def test_the_hosts_compiler_records_no_call_with_hooks_in_its_layers(pack, model, prefetch, users) -> None:
    prefetch.options.disable_comfy_compiler = users
    mine, _ = optimize(pack, model)
    _recorded_in(prefetch, model)
    Guider(mine, TEXT).sample(NOISE)
    assert prefetch.recorded == []
    assert vars(prefetch.options) == {"disable_comfy_compiler": users, "disable_cuda_graphs": False, "other": 1}
    Guider(model, TEXT).sample(NOISE)
    assert len(prefetch.recorded) == 2 * (not users)


def test_of_two_samplings_at_once_the_last_turns_the_compiler_on_again(pack, parts, prefetch) -> None:
    """The one that began first fails."""
    models = [Patcher(Model(parts["unet"])) for _ in range(2)]
    begun, failed = threading.Event(), threading.Event()
    options, told = prefetch.options, []

    def fail(patcher: Patcher) -> None:
        assert begun.wait(60)
        raise RuntimeError("of the model")

    def wait(patcher: Patcher) -> None:
        begun.set()
        assert failed.wait(60)
        told.append((options.disable_comfy_compiler, options.disable_cuda_graphs))

    first, second = (Guider(optimize(pack, one)[0], TEXT, seen) for one, seen in zip(models, (fail, wait), strict=True))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        failing, waiting = pool.submit(first.sample, NOISE), pool.submit(second.sample, NOISE)
        assert isinstance(failing.exception(60), RuntimeError)
        failed.set()
        waiting.result(60)
    assert told == [(True, True)] * 2
    assert not options.disable_comfy_compiler and not options.disable_cuda_graphs


def test_the_hosts_compiler_records_no_decode_of_ours(pack, vae, prefetch) -> None:
    decode, seen = vae.first_stage_model.decode, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[0], FakeTensor):  # as in the plan's trace
            seen.append(prefetch.options.disable_comfy_compiler)
        return decode(*args, **kwargs)

    vae.first_stage_model.decode = watched
    try:
        pack.NODE_CLASS_MAPPINGS["LowVRAMVAEDecode"]().decode({"samples": LATENTS}, vae, "")
    finally:
        del vae.first_stage_model.decode
    assert seen == [True] and not prefetch.options.disable_comfy_compiler


@pytest.mark.parametrize("opens", ["malloc_graph_begin", "malloc_graph_scope", "get_submodule"])
@pytest.mark.parametrize("on", [True, False])
def test_a_model_that_the_hosts_compiler_records_is_planned_with_its_peak(pack, parts, monkeypatch, opens, on) -> None:
    """Whole pages of the compiler are planned; for a hooked model, or one that opens no graph, what torch holds."""
    core, nodes = pack.__name__ + ".sd_lowvram", pack.__name__ + ".nodes"
    unet = _copy_of_kind(parts["unet"], opens)
    prefetch = types.ModuleType("comfy.model_prefetch")
    prefetch.malloc_graph_enabled = lambda device: on and device.type == "cuda"
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", prefetch)
    anatomy = sys.modules[core + ".session"].anatomy_of(unet)
    settings = sys.modules[core + ".settings"].Settings(attention="sdpa")
    rates = sys.modules[core + ".planning.request"].rates_of(torch.device("cpu"))
    stages = {}
    for hosted in (True, False):
        family = dataclasses.replace(anatomy.family, hosted=hosted)
        request = sys.modules[core + ".planning.request"].request_for(
            anatomy, vram=1 << 40, width=512, height=512, device="cuda", rates=rates, ram=1 << 34
        )
        made = dataclasses.replace(anatomy, family=family)
        plan = sys.modules[nodes + ".node_request"].plan_for_host(made, request, settings)
        (stages[hosted],) = plan.stages
    beside = {hosted: one.reserved_bytes - one.weights_bytes for hosted, one in stages.items()}
    assert (beside[True] < beside[False]) == (on and opens != "get_submodule")
    assert beside[True] >= stages[True].activation_bytes == stages[False].activation_bytes


def _copy_of_kind(unet: torch.nn.Module, opens: str) -> torch.nn.Module:
    """``unet`` with a forward in whose code a function called ``opens`` is named."""
    space: dict[str, Any] = {"prefetch": None, "Kind": type(unet)}
    own = "Kind.forward(self, *args, **kwargs)"
    exec(f"def forward(self, *args, **kwargs):\n return prefetch.{opens}() if prefetch else {own}", space)
    result = copy.copy(unet)
    result.__class__ = type(type(unet).__name__, (type(unet),), {"forward": space["forward"]})
    return result


def test_a_host_without_a_compiler_gets_no_option(pack, model, monkeypatch) -> None:
    module = types.ModuleType("comfy.cli_args")
    module.args = types.SimpleNamespace(other=1)
    monkeypatch.setitem(sys.modules, "comfy.cli_args", module)
    during: list[dict[str, Any]] = []
    Guider(optimize(pack, model)[0], TEXT, lambda patcher: during.append(dict(vars(module.args)))).sample(NOISE)
    assert during == [{"other": 1}] * 2


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("refuses", "said"),
    [
        (lambda size: size < Range.max_size, "refused to limit the weights (VBAR set_watermark failed)"),
        (lambda size: size == Range.max_size, "refused to lift the limit of the weights"),
    ],
    ids=["bound", "opening"],
)
def test_a_bound_that_dynamic_vram_refuses_is_told_and_leaves_nothing(pack, parts, refuses, said, fails) -> None:
    weights = Range(refuses)
    model = DynamicPatcher(Model(parts["unet"]), weights)
    mine, record = optimize(pack, model)

    def seen(patcher: Patcher) -> None:
        if fails:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        Guider(mine, TEXT, seen).sample(NOISE)
    assert [said in note for note in record.notes] == [True]
    assert weights.watermark == weights.max_size and not mine.callbacks["on_load"]


@pytest.mark.parametrize("budget", ["2GB", ""])
def test_the_weights_of_a_clip_are_limited_to_a_stated_budget_at_each_load(pack, model, vae, budget) -> None:
    weights = Range(lambda size: False)
    weights.offset = 1 << 33
    clip = types.SimpleNamespace(patcher=DynamicPatcher(torch.nn.Linear(64, 64), weights))
    clip.clone = lambda: types.SimpleNamespace(patcher=clip.patcher.clone())
    low = pack.NODE_CLASS_MAPPINGS["LowVRAM"]()
    made = low.optimize(model, vae, budget, clip=clip)["result"][3]
    made.patcher.load()
    least = (2 << 30) - (1 << 30)  # context, 512 MiB of intermediate results, buffers of copies, whole pages
    assert least <= weights.watermark < least + (128 << 20) if budget else weights.watermark == weights.max_size
    clip.patcher.load()
    assert weights.watermark == weights.max_size
    assert low.optimize(model, vae, budget)["result"][3] is None


@pytest.mark.parametrize("gone", ["comfy_aimdo.model_vbar.ModelVBAR.set_watermark", ""])
def test_a_renamed_part_of_dynamic_vram_is_told_at_import_and_costs_the_bound_alone(
    pack, parts, monkeypatch, caplog, gone
) -> None:
    bound = sys.modules[pack.__name__ + ".nodes.dynamic_vram"]
    for place, names in bound.TOUCHED.items():
        module, _, kind = place.rpartition(".") if place.rpartition(".")[2][0].isupper() else (place, "", "")
        if module not in sys.modules:
            monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        owner = sys.modules[module]
        if kind:
            owner = type(kind, (), {})
            monkeypatch.setattr(sys.modules[module], kind, owner, raising=False)
        for name in names:
            if f"{place}.{name}" != gone:
                monkeypatch.setattr(owner, name, getattr(owner, name, None), raising=False)
    weights = Range(lambda size: size < Range.max_size)
    model = DynamicPatcher(Model(parts["unet"]), weights)
    expected = Guider(model, TEXT).sample(NOISE)
    bounds = types.SimpleNamespace(ON_LOAD="on_load")
    monkeypatch.setattr(sys.modules["comfy.patcher_extension"], "CallbacksMP", bounds)
    try:
        importlib.reload(bound)
        told = f"names parts of dynamic VRAM differently ({gone}): the budget does not limit weights"
        assert bound.renamed() == bound.RENAMED == [gone] * bool(gone) and (told in caplog.text) == bool(gone)
        mine, record = optimize(pack, model)
        assert tiny.relative_error(Guider(mine, TEXT).sample(NOISE), expected) < 1e-5
        assert [told in note for note in record.notes] == [bool(gone)]
        assert gone or "refused to limit" in record.notes[0]  # the bound is tried
    finally:
        monkeypatch.undo()
        importlib.reload(bound)


def test_a_decode_that_somebody_else_has_set_stays(pack, vae) -> None:
    vae.decode = lambda samples: 1 - comfy_host.VAE.decode(vae, samples)
    assert tiny.relative_error(optimize_vae(pack, vae).decode(LATENTS), vae.decode(LATENTS)) < 1e-5


def test_cancel_stops_a_decode_and_leaves_nothing(pack, vae, cancelled) -> None:
    mine = optimize_vae(pack, vae, vae_tiles="exact")
    cancelled.append(True)
    with pytest.raises(Interrupted):
        mine.decode(LATENTS)
    assert not traces_of_us(vae.first_stage_model)


def test_out_of_memory_means_a_leaner_plan_and_no_tiles(pack, vae) -> None:
    ours = sys.modules[f"{pack.__name__}.nodes.node_request"]
    optimized = sys.modules[f"{pack.__name__}.nodes.autoencoder"].optimized_vae
    settings = sys.modules[f"{pack.__name__}.sd_lowvram.settings"].Settings()
    pixels, asked, record = vae.decode(LATENTS), ours.NodeRequest("", settings), ours.PlanRecord()
    vae.short = [1, 1]
    assert tiny.relative_error(optimized(vae, asked, record).decode(LATENTS), pixels) < 1e-5
    assert [step.name for step in record.plans["decode"].fallback_steps][1:] == ["smaller strips"] and len(
        record.notes
    ) == 2
    vae.short = [1] * 30
    with pytest.raises(comfy_host.OutOfMemory, match="nothing leaner fits"):
        optimize_vae(pack, vae).decode(LATENTS)
    assert not traces_of_us(vae.first_stage_model)


def test_decode_and_encode_nodes(pack, vae) -> None:
    nodes, exact = pack.NODE_CLASS_MAPPINGS, choose(pack, vae_tiles="exact")
    pixels, told = nodes["LowVRAMVAEDecode"]().decode({"samples": LATENTS}, vae, "2GB", exact)["result"]
    assert tiny.relative_error(pixels, vae.decode(LATENTS)) < 1e-5 and list(told.plans) == ["decode"]
    with_alpha = torch.cat([pixels, torch.ones_like(pixels[..., :1])], dim=-1)
    latents, _ = nodes["LowVRAMVAEEncode"]().encode(with_alpha, vae, "2GB", exact)["result"]
    assert tiny.relative_error(latents["samples"], vae.encode(pixels)) < 1e-5


@pytest.mark.parametrize("choice", ["off", "until decoded", "keep"])
def test_latents_are_saved_first(pack, vae, tmp_path, monkeypatch, choice) -> None:
    """They are in the file while they are decoded, with the workflow; after a failure they stay, and are decoded."""
    files = types.SimpleNamespace(
        get_output_directory=lambda: str(tmp_path), get_full_path=lambda kind, name: f"/models/{kind}/{name}"
    )
    monkeypatch.setitem(sys.modules, "folder_paths", files)
    prompt = {
        "1": {"inputs": {"ckpt_name": "a.safetensors"}},
        "2": {"inputs": {"vae": ["1", 2]}},
        "3": {"inputs": {"vae": ["2", 0], "samples": ["9", 0]}},
    }
    told = {"prompt": prompt, "extra_pnginfo": {"workflow": {"nodes": []}, "other": 1}, "unique_id": "3"}
    node, seen, stock = pack.NODE_CLASS_MAPPINGS["LowVRAMVAEDecode"](), [], type(vae).decode

    def decode(self, latents):
        seen.extend(tmp_path.iterdir())
        if fails:
            raise RuntimeError("of the card")
        return stock(self, latents)

    monkeypatch.setattr(type(vae), "decode", decode)
    asked = {"budget": "2GB", "settings": choose(pack, vae_tiles="exact", save_latents=choice), **told}
    fails = False
    pixels, _ = node.decode({"samples": LATENTS}, vae, **asked)["result"]
    assert len(seen) == (choice != "off") and len([*tmp_path.iterdir()]) == (choice == "keep")
    for file in tmp_path.iterdir():
        file.unlink()
    fails = True
    with pytest.raises(RuntimeError, match="of the card"):
        node.decode({"samples": LATENTS}, vae, **asked)
    left = [*tmp_path.iterdir()]
    assert len(left) == (choice != "off")
    if not left:
        return
    saved = read_saved(left[0])
    hosted = read_hosted(left[0], saved)
    assert hosted.autoencoder == "/models/checkpoints/a.safetensors"
    assert [sorted(one) for one in hosted.texts] == [["prompt", "workflow"]] * len(LATENTS)
    vae.first_stage_model.save_pretrained(tmp_path / "vae")
    result = decode_file(left[0], saved, {"model": str(tmp_path / "vae")}, False, Console(quiet=True))
    assert not left[0].exists() and len(result["files"]) == len(LATENTS)
    with Image.open(result["files"][0]) as picture:
        assert json.loads(picture.text["prompt"]) == prompt
        values = ((pixels[0] / 2 + 0.5).clamp(0, 1) * 255).round()  # this host gives what the autoencoder does
        assert (torch.from_numpy(numpy.array(picture)) - values).abs().max() <= 1


def test_what_comes_to_the_model_is_what_is_planned(pack, model) -> None:
    """The host alone knows how many rows it runs at a time: two halves, or at a scale of 1 two pictures."""
    mine, record = optimize(pack, model)
    both = record.plans["denoise"].predicted.activation_bytes
    two = torch.cat([NOISE, NOISE.flip(-1)])
    plain = Guider(model, TEXT, cfg=1.0).sample(two)
    assert tiny.relative_error(Guider(mine, TEXT, cfg=1.0).sample(two), plain) < 1e-5
    request = record.plans["denoise"].request
    assert (request.batch, request.passes, request.shape.rows) == (2, 1, 2)
    Guider(mine, TEXT, cfg=1.0).sample(NOISE)
    plan = record.plans["denoise"]
    assert plan.request.shape.rows == 1 and plan.predicted.activation_bytes < both


def test_a_plan_counts_no_hook_that_the_nodes_do_not_attach(pack, model) -> None:
    """It did: inference mode's, by which a GEGLU is computed in place, so that a step held more than was predicted."""
    _, record = optimize(pack, model, "1024GB")
    settings = record.plans["denoise"].settings
    attached = sys.modules[f"{pack.__name__}.nodes.node_request"].attachable(settings)
    counted = {name for name, knob, value in settings.decided() if value and value != "none" and knob.hook_of(value)}
    assert counted == {name for name in counted if getattr(attached, name)}


def test_a_plan_that_changes_nothing_attaches_nothing(pack, model, vae) -> None:
    seen: list[Any] = []

    def watched(x: Any, t: Any, c: Any, text: Any, control: Any, options: Any) -> Any:
        seen.append(options)
        return type(model.model).apply(model.model, x, t, c, text, control, options)

    for knobs, overridden in (({}, False), ({"attention": "sliced"}, True)):
        mine = shown_and_given(pack, model, vae, "1024GB", **knobs)[1][0]
        model.model.apply = watched
        Guider(mine, TEXT).sample(NOISE)
        del model.model.apply
        assert ("optimized_attention_override" in seen[-1]) == overridden


def test_a_call_that_ours_does_not_know_goes_to_the_hosts_kernel(pack) -> None:
    module = sys.modules[pack.__name__ + ".nodes.attending"]
    settings = sys.modules[pack.__name__ + ".sd_lowvram.settings"].Settings(attention="sliced")
    calls: list[dict[str, Any]] = []

    def kernel(q: Any, k: Any, v: Any, heads: int, **kwargs: Any) -> str:
        calls.append(kwargs)
        return "theirs"

    run = module.override(settings, torch.device("cpu"), [].append, None)
    q = torch.randn(1, 2, 6, 4)
    apart = {"skip_reshape": True}
    assert run(kernel, q, q[:, :1], q[:, :1], 2, **apart) == "theirs"  # heads share keys
    assert run(kernel, q, q, torch.randn(1, 2, 6, 4), 2, mask=torch.ones(1, 1, 3, 6), **apart) == "theirs"
    assert run(kernel, q, q, q, 2, enable_gqa=True, **apart) == "theirs"
    assert run(kernel, q, torch.randn(1, 2, 6, 8), q, 2, **apart) == "theirs"
    assert [one.get("skip_reshape") for one in calls] == [True] * 4 and calls[2]["enable_gqa"]


def test_tiled_queries_meet_the_keys_as_in_the_hosts_kernel(pack) -> None:
    """HyperTile tiles queries into the batch and leaves the keys; the host divides these among the tiles."""
    module = sys.modules[pack.__name__ + ".nodes.attending"]
    settings = sys.modules[pack.__name__ + ".sd_lowvram.settings"].Settings(attention="sliced")
    k, v = torch.randn(1, 16, 8), torch.randn(1, 16, 8)
    q = torch.randn(4, 4, 8)
    apart = [one.view(4, -1, 2, 4).transpose(1, 2) for one in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*apart).transpose(1, 2).flatten(2)
    out = module.override(settings, q.device, [].append, None)(None, q, k, v, 2)
    torch.testing.assert_close(out, expected)


def test_weights_are_planned_as_the_host_keeps_them(pack, parts) -> None:
    """In part on a GPU, the rest copied in for every step; whole on a CPU, also where that breaks the budget."""
    loading = sys.modules[pack.__name__ + ".nodes.loading"]
    core = pack.__name__ + ".sd_lowvram"
    settings = sys.modules[core + ".settings"].Settings(attention="sliced", attention_mib=1)
    anatomy = sys.modules[core + ".session"].anatomy_of(parts["unet"])
    request_for = sys.modules[core + ".planning.request"].request_for
    weights = sum(tensor.numel() * 4 for tensor in parts["unet"].parameters())
    rooms = {"least": weights // 8, "most": 1 << 40, "reserve": 1 << 19}
    largest = max(tensor.numel() * 4 for tensor in parts["unet"].parameters())

    def planned(vram: int, whole: bool) -> Any:
        kind = loading.Loading(whole, **rooms)
        request = request_for(anatomy, vram=vram, width=64, height=64, device="cpu", ram=1 << 34)
        return loading.plan_beside(kind, anatomy, request, settings)

    plenty = planned(1 << 40, False)
    vram = plenty.stages[0].activation_bytes + weights // 2 + rooms["reserve"]
    part, whole = planned(vram, False), planned(vram, True)
    assert plenty.stages[0].weights_bytes == whole.stages[0].weights_bytes == weights
    kept = vram - part.stages[0].activation_bytes - rooms["reserve"]
    assert part.stages[0].weights_bytes == kept + largest and part.fits and not whole.fits
    assert part.predicted.seconds > plenty.predicted.seconds
    assert whole.predicted.activation_bytes < plenty.predicted.activation_bytes  # the least, as it does not fit
    assert part.predicted.host_bytes == weights - kept + part.stages[0].parked_bytes


def test_the_plot_without_matplotlib(pack, model, vae, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _, plot = pack.NODE_CLASS_MAPPINGS["LowVRAMPlan"]().plan(model, vae, "4GB", 64, 64, 1, 30)["result"]
    assert plot.shape[-1] == 3 and len(plot.flatten(0, 2).unique(dim=0)) > 3


def test_plan_and_report(pack, model, vae) -> None:
    nodes = pack.NODE_CLASS_MAPPINGS
    shown = nodes["LowVRAMPlan"]().plan(model, vae, "4GB", 64, 64, 1, 20, choose(pack, **CHUNKED))
    text, plot = shown["result"]
    assert text.startswith("fits: ") and "4 GiB" in text and "20 steps" in text
    assert shown["ui"]["text"] == [text] and "denoise: " in text and "decode: " in text
    assert "Convolutions in strips: 4" in text and "Wait in RAM: on" in text
    assert plot.dim() == 4 and plot.shape[-1] == 3 and 0 <= plot.min() < plot.max() <= 1
    mine, made, record = shown_and_given(pack, model, vae, **CHUNKED)[1]
    pixels = made.decode(Guider(mine, TEXT).sample(NOISE))
    text, _ = nodes["LowVRAMReport"]().report(pixels, record)["result"]
    for stage in ("denoise", "decode"):
        planned = next(one.peak_bytes for one in record.plans[stage].stages if one.name == stage)
        seen = max(one.peak_bytes for one in record.measured[stage])
        assert seen == pytest.approx(planned, rel=0.05, abs=2 << 20)
        assert stage in text


def test_the_report_tells_the_run_that_was(pack, model, vae) -> None:
    """It showed a whole time for 30 steps after a run of 2, and no second that was measured."""
    mine, made, record = shown_and_given(pack, model, vae, **CHUNKED)[1]
    record.warn("so it was in the run before")
    made.decode(Guider(mine, TEXT).sample(NOISE))
    text = report(pack, record)
    assert "the run before" not in text
    assert "2 steps" in text.splitlines()[0] and "30 steps" not in text
    assert re.search(r"^2 steps ran: .* measured, .* predicted, the first .* s$", text, re.M)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith(("a step", "decode "))}
    short = text.split("\n\n")[1].splitlines()  # behind the sentence; the details are folded away
    assert [line.split()[0] for line in short] == ["predicted", "a", "decode"] and max(map(len, short)) <= 72
    seconds = {name: re.findall(r"([\d.]+) s\b", " ".join(row)) for name, row in rows.items()}
    assert len(record.step_seconds) == len(seconds["a"]) == len(seconds["decode"]) == 2
    assert float(seconds["a"][1]) == pytest.approx(record.step_seconds[1], abs=0.006)  # the first warms up
    assert record.kept == {"denoise": model.loaded_size(), "decode": 0} and "loaded" in text


@pytest.mark.parametrize("reported", [False, True])
def test_a_processor_is_watched_for_a_report_alone(pack, model, vae, monkeypatch, reported) -> None:
    """The recorder of its allocator takes time, and writes lines of its own to the console."""
    queue = [(0, "id", {"1": {"class_type": "LowVRAMReport" if reported else "SaveImage"}}, {}, [])]
    page = types.SimpleNamespace(prompt_queue=types.SimpleNamespace(get_current_queue=lambda: (queue, [])))
    server = types.ModuleType("server")
    server.PromptServer = types.SimpleNamespace(instance=page)
    monkeypatch.setitem(sys.modules, "server", server)
    mine, made, record = shown_and_given(pack, model, vae, **CHUNKED)[1]
    made.decode(Guider(mine, TEXT).sample(NOISE))
    assert bool(record.measured) == reported and len(record.step_seconds) == 2


def test_what_is_chosen_for_pictures_stays_off_the_model(pack, model, vae) -> None:
    """The strips of a decode were put on the UNet too, where they have no site."""
    mine, made, record = shown_and_given(pack, model, vae, **CHUNKED, vae_tiles="exact", vae_map="parked")[1]
    made.decode(Guider(mine, TEXT).sample(NOISE))
    assert record.plans["decode"].settings.vae_tiles == "exact" and "vae_exact" not in record.sites


def test_a_run_is_one_line_in_the_log(pack, model, vae, caplog) -> None:
    with caplog.at_level("INFO"):
        mine, made, record = shown_and_given(pack, model, vae, **CHUNKED)[1]
        pixels = made.decode(Guider(mine, TEXT).sample(NOISE))
        pack.NODE_CLASS_MAPPINGS["LowVRAMReport"]().report(pixels, record)
    (line,) = [one.message for one in caplog.records if "sd-lowvram" in one.message]
    assert re.match("sd-lowvram: 64x64, 2 calls .*2 steps ", line) and " predicted), planned " in line


@pytest.fixture
def sent(monkeypatch) -> list[Any]:
    """What the page is sent."""
    sent: list[Any] = []
    page = types.SimpleNamespace(last_prompt_id="a", client_id="b", send_sync=lambda *told: sent.append(told))
    server = types.ModuleType("server")
    server.PromptServer = types.SimpleNamespace(instance=page)
    monkeypatch.setitem(sys.modules, "server", server)
    return sent


def test_the_verdict_is_made_anew_when_the_sampler_tells_its_steps(pack, model, vae, sent) -> None:
    node = pack.NODE_CLASS_MAPPINGS["LowVRAM"]()
    out = node.optimize(model, vae, "4GB", choose(pack, **CHUNKED), unique_id="12")
    assert " a step" in out["ui"]["text"][0].splitlines()[0] and not sent
    Guider(out["result"][0], TEXT).sample(NOISE)
    ((event, told, client),) = sent
    first = told["output"]["text"][0].splitlines()[0]
    assert (event, told["node"], client) == ("executed", "12", "b")
    assert first.startswith("fits: ") and "2 steps" in first and "decode" in first


def test_a_size_that_does_not_fit_is_refused_with_one_that_does(pack, model, vae, sent) -> None:
    weights = sum(tensor.numel() * 4 for tensor in _unet(model).parameters())
    mine, _, record = shown_and_given(pack, model, vae, f"{weights + (2 << 20)}B", **CHUNKED)[1]
    record.node = "12"
    larger = torch.randn(1, 4, 64, 48, generator=torch.Generator().manual_seed(2))
    with pytest.raises(Exception, match="384x512") as raised:
        Guider(mine, TEXT).sample(larger)
    assert type(raised.value).__name__ == "BudgetError" and type(raised.value).__module__ == "sd_lowvram.errors"
    assert sent[-1][1]["output"]["text"] == [str(raised.value)]
    assert not traces_of_us(_unet(model)) and not record.step_seconds
    width, height = (int(side) for side in str(raised.value).rsplit(". ", 1)[1].split()[0].split("x"))
    Guider(mine, TEXT).sample(larger[..., : height // 8, : width // 8])
    assert record.plans["denoise"].fits


def test_a_node_of_the_vae_goes_on_with_what_low_vram_was_given(pack, model, vae) -> None:
    decode = pack.NODE_CLASS_MAPPINGS["LowVRAMVAEDecode"]().decode
    _, made, record = shown_and_given(pack, model, vae, "3GB", vae_tiles="exact", vae_map="parked")[1]
    for budget, gib in (("", 3), ("2GB", 2)):
        decode({"samples": LATENTS}, made, budget)
        plan = record.plans["decode"]
        assert plan.request.vram == gib << 30 and plan.settings.vae_map == "parked" and "decode" in record.seconds
    decode({"samples": LATENTS}, vae, "1GB")
    assert record.plans["decode"] is plan


def test_a_cpu_that_cannot_keep_the_budget_says_so(pack, model, vae) -> None:
    weights = sum(tensor.numel() * 4 for tensor in _unet(model).parameters())
    text, _ = shown_and_given(pack, model, vae, f"{weights}B", **CHUNKED)
    assert text.startswith("above the budget: ") and "ComfyUI keeps all weights" in text


def test_a_node_that_watches_tokens_is_told_of(pack, model) -> None:
    mine, record = optimize(pack, model)
    mine.model_options["transformer_options"]["patches"] = {"attn1_patch": [lambda q, k, v, extra: (q, k, v)]}
    Guider(mine, TEXT).sample(NOISE)
    assert len(record.notes) == 1 and "attn1_patch" in record.notes[0]
