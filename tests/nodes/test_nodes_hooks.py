"""The nodes on a host: the same picture, less memory asked for, nothing left behind, others' patches unharmed."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import comfy_host
import numpy
import pytest
import tiny
import torch
from comfy_host import ROOT, Bar, Guider, Interrupted, Model, Patcher, import_pack
from PIL import Image
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensor

from sd_lowvram.commands.decode_saved import decoded
from sd_lowvram.saved_latents.file import read_saved
from sd_lowvram.saved_latents.hosted import hosted_of

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
    parts = tiny.components("sd15")
    return {name: parts[name].eval().requires_grad_(False) for name in ("unet", "vae")}


@pytest.fixture
def model(parts) -> Patcher:
    return Patcher(Model(parts["unet"]))


def optimize(pack: Any, model: Patcher, budget: str = "") -> tuple[Patcher, Any]:
    """One set of knobs for all tests: their traces are made once and remembered."""
    return pack.NODE_CLASS_MAPPINGS["LowVRAMOptimizeModel"]().optimize(model, budget, 64, 64, 1, **CHUNKED)["result"]


def traces_of_us(module: torch.nn.Module) -> list[str]:
    """Where anything of ours is set on a model."""
    return [
        f"{name}.{attribute}"
        for name, one in module.named_modules()
        for attribute, value in vars(one).items()
        if "lowvram" in attribute or type(value).__name__ == "Trampoline"
    ]


@pytest.mark.slow(8)
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
    assert during[0] > 22 and record.sites["residual_strips"] == 22 and record.sites["feed_forward"] == 16
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


def test_below_what_fits_a_plan_does_less_not_more(pack, model) -> None:
    """The host keeps the weights whatever is asked: what is left of a smaller budget is never more."""
    node, found = pack.NODE_CLASS_MAPPINGS["LowVRAMOptimizeModel"](), {}
    weights = sum(tensor.numel() * 4 for tensor in _unet(model).parameters())
    for budget in (weights + (8 << 20), weights + (1 << 20), weights // 2, 100 << 10):
        made = node.optimize(model, f"{budget}B", 64, 64, 1)
        plan = made["result"][1].plans["denoise"]
        found[plan.predicted.activation_bytes] = made["ui"]["text"][0].split(":")[0]
        assert plan.request.vram == budget
    assert [*found] == sorted(found, reverse=True) and [*found.values()] == ["fits", "above the budget"]
    mine, record = made["result"]
    assert tiny.relative_error(Guider(mine, TEXT).sample(NOISE), Guider(model, TEXT).sample(NOISE)) < 1e-5
    assert record.sites["residual_strips"] == 22 and record.notes[0].startswith("denoise 64x64 is above the budget")


@pytest.mark.slow(5)
def test_another_size_is_planned_when_it_comes(pack, model) -> None:
    mine, record = optimize(pack, model)
    larger = torch.randn(1, 4, 16, 24, generator=torch.Generator().manual_seed(2))
    plain = Guider(model, TEXT).sample(larger)
    assert tiny.relative_error(Guider(mine, TEXT).sample(larger), plain) < 1e-5
    request = record.plans["denoise"].request
    assert (request.width, request.height, request.batch) == (192, 128, 1)


@pytest.mark.slow(10)
def test_a_card_that_is_full_after_all_gets_a_leaner_plan(pack, model) -> None:
    node = pack.NODE_CLASS_MAPPINGS["LowVRAMOptimizeModel"]()
    mine, record = node.optimize(model, "", 64, 64, 1)["result"]
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


def test_a_second_node_replaces_the_first(pack, model) -> None:
    mine, _ = optimize(pack, model)
    again, _ = optimize(pack, mine)
    assert all(len(keys["sd-lowvram"]) == 1 for keys in again.wrappers.values())
    assert mine.wrappers.keys() == again.wrappers.keys() and mine.wrappers != again.wrappers


def test_an_unknown_model_is_refused_by_name(pack) -> None:
    with pytest.raises(
        Exception, match=r"is a model of another kind: Optimize Model .* serves SD1.x, SD2.x, SDXL"
    ) as raised:
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
    return pack.NODE_CLASS_MAPPINGS["LowVRAMOptimizeVAE"]().optimize(vae, "", **knobs)[0]


LATENTS = torch.randn(2, 4, 9, 13, generator=torch.Generator().manual_seed(3))


@pytest.mark.slow(6)
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


@pytest.mark.slow(6)
def test_stock_tiled_nodes_run_exact_strips_instead(pack, vae) -> None:
    record = sys.modules[f"{pack.__name__}.nodes.node_request"].PlanRecord()
    mine = pack.NODE_CLASS_MAPPINGS["LowVRAMOptimizeVAE"]().optimize(vae, "1024GB", plan=record)[0]
    pixels = vae.decode(LATENTS)
    assert tiny.relative_error(mine.decode_tiled(LATENTS, tile_x=32, tile_y=32, overlap=8), pixels) < 1e-5
    assert record.plans["decode"].settings.vae_tiles == "exact" and vae.asked[1] < vae.asked[0] / 2
    assert tiny.relative_error(mine.encode_tiled(pixels, tile_x=64), vae.encode(pixels)) < 1e-5
    assert record.plans["encode"].settings.vae_tiles == "exact"
    mine.decode(LATENTS)
    assert record.plans["decode"].settings.vae_tiles != "exact"  # nobody has asked for tiles, and it fits


def test_a_decode_above_its_budget_is_told(pack, vae, monkeypatch, caplog) -> None:
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
        nodes["LowVRAMOptimizeVAE"]().optimize(vae, budget)[0].decode(LATENTS)
        assert [node for node, _ in shown] == ["7", "7"] * told
    assert all("decode 104x72 is above the budget: " in text for _, text in shown)
    assert caplog.text.count("ComfyUI keeps all weights loaded on this device") == 2


def test_what_the_budget_counts_and_what_lies_beside_it_is_named(pack, model, vae) -> None:
    clip = comfy_host.CLIP(torch.nn.Linear(1024, 768))
    made = pack.NODE_CLASS_MAPPINGS["LowVRAMOptimizeModel"]().optimize(model, "1GB", 64, 64, 1, **CHUNKED)
    first, counted, *others = made["ui"]["text"][0].splitlines()
    stage = next(one for one in made["result"][1].plans["denoise"].stages if one.name == "denoise")
    sizes = [sys.modules[pack.__name__ + ".sd_lowvram.units"].format_size(size)
             for size in (stage.weights_bytes, stage.activation_bytes)]  # fmt: skip
    assert first.startswith("fits: ") and counted == f"counted: UNet {sizes[0]}, a step {sizes[1]}"
    assert "CLIP 3.0 MiB, VAE " in others[0] and others[0].endswith("which ComfyUI keeps loaded")
    assert others[1].endswith("that are parked, in the same memory on a CPU")
    decode = pack.NODE_CLASS_MAPPINGS["LowVRAMVAEDecode"]().decode({"samples": LATENTS}, vae, "1GB")
    assert "counted: VAE " in decode["ui"]["text"][0] and "CLIP 3.0 MiB, model " in decode["ui"]["text"][0]
    del clip


def test_a_host_that_no_budget_bounds_is_told_of(pack, model, monkeypatch) -> None:
    """Dynamic VRAM, ComfyUI's own way on NVIDIA's cards from 0.33 on."""
    free = types.ModuleType("comfy.memory_management")
    free.aimdo_enabled = True
    node = pack.NODE_CLASS_MAPPINGS["LowVRAMOptimizeModel"]()
    for told in (False, True):
        (text,) = node.optimize(model, "1GB", 64, 64, 1, **CHUNKED)["ui"]["text"]
        assert ("not bounded: ComfyUI's dynamic VRAM" in text) == told
        monkeypatch.setitem(sys.modules, "comfy.memory_management", free)


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
    nodes = pack.NODE_CLASS_MAPPINGS
    (pixels,) = nodes["LowVRAMVAEDecode"]().decode({"samples": LATENTS}, vae, "2GB", vae_tiles="exact")["result"]
    assert tiny.relative_error(pixels, vae.decode(LATENTS)) < 1e-5
    with_alpha = torch.cat([pixels, torch.ones_like(pixels[..., :1])], dim=-1)
    (latents,) = nodes["LowVRAMVAEEncode"]().encode(with_alpha, vae, "2GB", vae_tiles="exact")["result"]
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
    asked = {"budget": "2GB", "vae_tiles": "exact", "save_latents": choice, **told}
    fails = False
    (pixels,) = node.decode({"samples": LATENTS}, vae, **asked)["result"]
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
    hosted = hosted_of(left[0], saved)
    assert hosted.autoencoder == "/models/checkpoints/a.safetensors"
    assert [sorted(one) for one in hosted.texts] == [["prompt", "workflow"]] * len(LATENTS)
    vae.first_stage_model.save_pretrained(tmp_path / "vae")
    result = decoded(left[0], saved, {"model": str(tmp_path / "vae")}, False, Console(quiet=True))
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
    """It did: inference mode's, by which a GEGLU is computed in place, so that a step held more than was foretold."""
    _, record = optimize(pack, model, "1024GB")
    settings = record.plans["denoise"].settings
    attached = sys.modules[f"{pack.__name__}.nodes.node_request"].attachable(settings)
    counted = {name for name, knob, value in settings.decided() if value and value != "none" and knob.hook_of(value)}
    assert counted == {name for name in counted if getattr(attached, name)}


def test_a_plan_that_changes_nothing_attaches_nothing(pack, model) -> None:
    node = pack.NODE_CLASS_MAPPINGS["LowVRAMOptimizeModel"]()
    seen: list[Any] = []

    def watched(x: Any, t: Any, c: Any, text: Any, control: Any, options: Any) -> Any:
        seen.append(options)
        return type(model.model).apply(model.model, x, t, c, text, control, options)

    for knobs, overridden in (({}, False), ({"attention": "sliced"}, True)):
        mine, _ = node.optimize(model, "1024GB", 64, 64, 1, **knobs)["result"]
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
    """In part on a GPU, the others copied in for every step; whole on a CPU, also where that breaks the budget."""
    loading = sys.modules[pack.__name__ + ".nodes.loading"]
    core = pack.__name__ + ".sd_lowvram"
    settings = sys.modules[core + ".settings"].Settings(attention="sliced", attention_mib=1)
    anatomy = sys.modules[core + ".session"].anatomy_of(parts["unet"])
    request_for = sys.modules[core + ".planning.request"].request_for
    weights = sum(tensor.numel() * 4 for tensor in parts["unet"].parameters())
    rooms = {"least": weights // 8, "most": 1 << 40, "reserve": 1 << 20}
    largest = max(tensor.numel() * 4 for tensor in parts["unet"].parameters())

    def planned(vram: int, whole: bool) -> Any:
        kind = loading.Loading(whole, **rooms)
        request = request_for(anatomy, vram=vram, width=64, height=64, device="cpu", ram=1 << 34)
        return loading.plan_beside(kind, anatomy, request, settings)

    plenty = planned(1 << 40, False)
    vram = plenty.stages[0].activation_bytes + weights * 3 // 4 + rooms["reserve"]
    part, whole = planned(vram, False), planned(vram, True)
    assert plenty.stages[0].weights_bytes == whole.stages[0].weights_bytes == weights
    kept = vram - part.stages[0].activation_bytes - rooms["reserve"]
    assert part.stages[0].weights_bytes == kept + largest and part.fits and not whole.fits
    assert part.predicted.seconds > plenty.predicted.seconds
    assert whole.predicted.activation_bytes < plenty.predicted.activation_bytes  # the least, as it does not fit
    assert part.predicted.host_bytes == weights - kept + part.stages[0].parked_bytes


def test_the_plot_without_matplotlib(pack, model, vae, monkeypatch) -> None:
    record, _, _ = pack.NODE_CLASS_MAPPINGS["LowVRAMPlan"]().plan(model, vae, "4GB", 64, 64, 1)["result"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reporting = sys.modules[pack.__name__ + ".nodes.reporting"]
    plot = reporting._plot(record)
    assert plot.shape[-1] == 3 and len(plot.flatten(0, 2).unique(dim=0)) > 3


def test_plan_and_report(pack, model, vae) -> None:
    nodes = pack.NODE_CLASS_MAPPINGS
    shown = nodes["LowVRAMPlan"]().plan(model, vae, "4GB", 64, 64, 1, **CHUNKED)
    record, text, plot = shown["result"]
    assert text.startswith("fits: ") and "of 4 GiB, about " in text and " for 30 steps" in text
    assert shown["ui"]["text"] == [text] and {"denoise", "decode"} == record.plans.keys()
    assert "denoise: " in text and "residual_strips 4" in text and "park_skips True" in text
    assert plot.dim() == 4 and plot.shape[-1] == 3 and 0 <= plot.min() < plot.max() <= 1
    mine, record = optimize(pack, model)
    made = optimize_vae(pack, vae, plan=record)
    pixels = made.decode(Guider(mine, TEXT).sample(NOISE))
    _, text, _ = nodes["LowVRAMReport"]().report(record, pixels)["result"]
    for stage in ("denoise", "decode"):
        planned = next(one.peak_bytes for one in record.plans[stage].stages if one.name == stage)
        seen = max(one.peak_bytes for one in record.measured[stage])
        assert seen == pytest.approx(planned, rel=0.05, abs=2 << 20)
        assert stage in text


def test_what_a_plan_shows_is_what_runs(pack, model, vae) -> None:
    """Its budget and knobs count, and those of the nodes that are given it do not."""
    nodes = pack.NODE_CLASS_MAPPINGS
    shown = nodes["LowVRAMPlan"]().plan(model, vae, "4GB", 64, 64, 1, steps=20, **CHUNKED)["result"][0]
    mine, record = nodes["LowVRAMOptimizeModel"]().optimize(model, "1KB", 0, 0, 3, plan=shown)["result"]
    assert record is not shown and record.plans["denoise"] is shown.plans["denoise"]
    latents = Guider(mine, TEXT).sample(NOISE)
    nodes["LowVRAMOptimizeVAE"]().optimize(vae, "1KB", plan=record)[0].decode(latents)
    assert record.plans == shown.plans and record.sites["residual_strips"] == 22
    assert list(record.plans) == ["denoise", "decode"]  # as in a run, in whatever order they came
    text = nodes["LowVRAMReport"]().report(record, latents)["result"][1]
    assert " for 20 steps" in text
    other = Patcher(Model(tiny.components("sd15")["unet"].eval()))
    _, record = nodes["LowVRAMOptimizeModel"]().optimize(other, "", 64, 64, 1, plan=shown)["result"]
    assert record.plans["denoise"] is not shown.plans["denoise"]  # it is of another model, under the same wish
    assert record.plans["denoise"].settings == shown.plans["denoise"].settings


def test_a_cpu_that_cannot_keep_the_budget_says_so(pack, model) -> None:
    weights = sum(tensor.numel() * 4 for tensor in _unet(model).parameters())
    shown = pack.NODE_CLASS_MAPPINGS["LowVRAMOptimizeModel"]().optimize(model, f"{weights}B", 64, 64, 1, **CHUNKED)
    (text,) = shown["ui"]["text"]
    assert text.startswith("above the budget: ") and "ComfyUI keeps all weights" in text


def test_a_node_that_watches_tokens_is_told_of(pack, model) -> None:
    mine, record = optimize(pack, model)
    mine.model_options["transformer_options"]["patches"] = {"attn1_patch": [lambda q, k, v, extra: (q, k, v)]}
    Guider(mine, TEXT).sample(NOISE)
    assert len(record.notes) == 1 and "attn1_patch" in record.notes[0]
