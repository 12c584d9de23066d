"""What an error says to do is done here, and helps: for every error of the library."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import todays
import torch
from families import KINDS, picture
from torch import nn

import sd_lowvram
from sd_lowvram import Settings, attached
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import BadInputError, BudgetError, ConflictError, LowVRAMError, NoSiteError, SettingsError
from sd_lowvram.hooks.numbers import precision
from sd_lowvram.settings import knobs
from sd_lowvram.units import MIB, parse_size

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sd_lowvram"
PLENTY = {"vram": "1GB", "ram": "1GB", "width": 64, "height": 64, "device": "cpu"}

ROOMS = (
    *("api.py", "session.py", "patches.py", "units.py", "settings.py", "hooks", "streaming", "kernels", "planning"),
    *("models", "tracing", "memory", "saved_latents", "devices", "approximate"),
)
ADVICE = re.compile(
    r"\b(give|choose|leave|set \w+ to|set a|use|call (?!of)|load|take none|restore\(\)|turn one|write it|ask for|"
    r"did you mean|merge no|runs here|bits here|nearest|is needed|needs at least)\b", re.IGNORECASE
)  # fmt: skip
"""What a sentence has in it that says to do something."""


@pytest.fixture(scope="module")
def pipe() -> Any:
    return families.plain("sd15")


def runs(pipe: Any, settings: Settings) -> bool:
    with attached(pipe, settings, device=CPU):
        return bool(torch.isfinite(tiny.run(pipe, steps=1)).all())


EXCLUDE_EACH_OTHER = [
    ({"traced": True, "residual_strips": 1}, [{"traced": True}, {"residual_strips": 1}]),
    ({"traced": True, "offload": "component"}, [{"traced": True}, {"offload": "component"}]),
    ({"precision": "tf32"}, [{"precision": "fp32"}]),
    ({"cuda_graphs": True}, [{"cuda_graphs": False}]),
]  # fmt: skip
"""Settings that are refused, and those that the error names instead."""


@pytest.mark.parametrize(
    ("refused", "instead"), EXCLUDE_EACH_OTHER, ids=lambda one: "-".join(one) if isinstance(one, dict) else ""
)
def test_settings_that_exclude_each_other(pipe: Any, refused: dict[str, Any], instead: list[dict[str, Any]]) -> None:
    for ask in (
        lambda: runs(pipe, Settings(**refused)),
        lambda: sd_lowvram.plan(pipe, settings=Settings(**refused), **PLENTY),
    ):
        with pytest.raises(SettingsError, match=r"leave (one|them)|use fp32"):
            ask()
    assert all(runs(pipe, Settings(**one)) for one in instead)
    sd_lowvram.optimize(pipe, settings=Settings(**instead[0]), **PLENTY)
    sd_lowvram.restore(pipe)


def test_what_is_offloaded_by_others(pipe: Any) -> None:
    for name in ("enable_model_cpu_offload", "enable_sequential_cpu_offload"):
        other = families.plain("sd15")
        getattr(other, name)(device="cpu")
        for settings in (None, Settings(), Settings(offload="none"), Settings(offload="layer")):
            with pytest.raises(ConflictError, match=r"offloaded by .* already: call remove_all_hooks\(\)"):
                sd_lowvram.optimize(other, settings=settings, **PLENTY)
        if name == "enable_model_cpu_offload":
            assert runs(other, Settings(attention="sliced"))
        other.remove_all_hooks()
        sd_lowvram.optimize(other, settings=Settings(offload="layer"), **PLENTY)
        assert torch.equal(tiny.run(other, steps=1), tiny.run(pipe, steps=1))
    group = families.plain("sd15")
    group.unet.enable_group_offload(onload_device=CPU, offload_type="leaf_level")
    with pytest.raises(ConflictError, match="load it again"):
        sd_lowvram.plan(group, **PLENTY)


def test_weights_that_diffusers_casts(pipe: Any) -> None:
    other = families.plain("sd15")
    other.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    with pytest.raises(ConflictError, match="weight_storage='fp8'"):
        sd_lowvram.plan(other, **PLENTY)
    assert runs(pipe, Settings(weight_storage="fp8"))


def test_a_model_that_is_compiled_already() -> None:
    pipe = families.plain("sd15")
    plain, pipe.unet = pipe.unet, torch.compile(pipe.unet, backend="eager")
    with pytest.raises(ConflictError, match="leave compile off, or optimize it uncompiled"):
        runs(pipe, Settings(compile="regional"))
    sd_lowvram.optimize(pipe, settings=Settings(compile="off"), **PLENTY)
    sd_lowvram.restore(pipe)
    pipe.unet = plain
    sd_lowvram.optimize(pipe, settings=Settings(compile="regional"), **PLENTY)


@pytest.mark.parametrize("name", ["efficient", "triton"])
def test_attention_that_does_not_run_here(pipe: Any, name: str) -> None:
    with pytest.raises(SettingsError, match="What runs here: sdpa") as told:
        runs(pipe, Settings(attention=name))
    assert "install" not in str(told.value) and ("use sdpa" in str(told.value)) == (name == "triton")
    for able in str(told.value).split("What runs here: ")[1].split(", "):
        assert runs(pipe, Settings(attention=able))


def test_attention_that_runs_not_with_this_mask_or_size(pipe: Any) -> None:
    from sd_lowvram.kernels.attention.registry import attend

    q = torch.randn(1, 2, 16, 8)
    mask = torch.zeros(16, 16)
    with pytest.raises(SettingsError, match=r"Choose attention='sdpa'.* or 'fused-softmax'"):
        attend("efficient", q, q, q, mask)
    assert all(attend(name, q, q, q, mask).shape == q.shape for name in ("sdpa", "fused-softmax"))


class _ByHand:
    """A processor that computes attention without torch's function."""

    def __call__(self, attention: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return attention.to_out[0](attention.to_v(hidden))


def test_attention_that_torch_does_not_compute() -> None:
    from diffusers.models.attention_processor import AttnProcessor2_0

    pipe = families.plain("sd15")
    attention = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1
    attention.set_processor(_ByHand())
    with pytest.raises(LowVRAMError, match=r"Set a processor .* AttnProcessor2_0, or leave the attention setting"):
        runs(pipe, Settings(attention="sliced"))
    assert runs(pipe, Settings())
    attention.set_processor(AttnProcessor2_0())
    assert runs(pipe, Settings(attention="sliced"))


def test_a_type_that_this_torch_cannot_compute(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "computes_on_cpu", lambda dtype: dtype != torch.float16)
    with pytest.raises(SettingsError, match="choose fp32, bf16 or fp16-storage"):
        runs(pipe, Settings(precision="fp16"))
    assert all(runs(pipe, Settings(precision=name)) for name in ("fp32", "bf16", "fp16-storage"))


def test_exact_tiles_of_an_autoencoder_without_layers() -> None:
    kind = KINDS["taesd"]
    pipe = kind.make()
    with pytest.raises(NoSiteError, match="leave vae_tiles to the plan"):
        sd_lowvram.optimize(pipe, settings=Settings(vae_tiles="exact"), **PLENTY)
    sd_lowvram.optimize(pipe, **PLENTY)
    assert torch.isfinite(picture(pipe, kind)).all()


def test_an_autoencoder_without_layers_that_overflows() -> None:
    pipe = KINDS["taesd"].make()
    vae = pipe.vae.half()
    latents = torch.full((1, 4, 8, 8), 6e4, dtype=torch.float16)
    nn.init.constant_(vae.decoder.layers[-1].weight, 6e4)
    nn.init.constant_(vae.decoder.layers[-1].bias, 6e4)
    with pytest.raises(LowVRAMError, match="load it in float32 or bfloat16"):
        sd_lowvram.decode(vae, latents, vram="1GB")
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.isfinite(sd_lowvram.decode(vae.to(dtype), latents.to(dtype), vram="1GB")).all()


@pytest.mark.parametrize(
    "make", [todays.flux, todays.sd3, todays.z_image, todays.chroma, lambda: families.plain("sd15")]
)
def test_an_autoencoder_of_other_latents(make: Any) -> None:
    pipe = make()
    own, pipe.vae = pipe.vae, todays.vae(12)
    for ask in (sd_lowvram.plan, sd_lowvram.optimize):
        with pytest.raises(BadInputError, match="another model's autoencoder; load the one of this model"):
            ask(pipe, **PLENTY)
    with pytest.raises(BadInputError, match=r"of (4|16) channels, and its vae decodes 12"):
        sd_lowvram.optimize(pipe, settings=Settings(offload="layer"), **PLENTY)
    pipe.vae = own
    assert sd_lowvram.plan(pipe, **PLENTY).stages


def test_two_that_replace_the_same(pipe: Any) -> None:
    tiled = Settings(vae_tiles="exact")
    with attached(pipe, tiled, device=CPU):
        with pytest.raises(ConflictError, match="turn one of them off"):
            runs(pipe, tiled)
        assert runs(pipe, Settings(attention="sliced"))
    assert runs(pipe, tiled)


@pytest.mark.parametrize("name", [name for name, knob in knobs().items() if knob.choices])
def test_choices(name: str) -> None:
    with pytest.raises(SettingsError, match="choose one of") as told:
        Settings(**{name: "none of these"})
    for choice in str(told.value).split("choose one of ")[1].split(", "):
        Settings(**{name: choice})


def test_sizes(pipe: Any) -> None:
    with pytest.raises(BadInputError, match="did you mean") as told:
        parse_size("4")
    assert [parse_size(one) for one in re.findall('"(.*?)"', str(told.value))] == [4 << 30, 4 << 20]
    with pytest.raises(BadInputError, match="write it like") as told:
        parse_size("banana")
    assert all(map(parse_size, [*re.findall('"(.*?)"', str(told.value)), 4096]))
    with pytest.raises(BadInputError, match="the nearest is") as told:
        sd_lowvram.plan(pipe, **{**PLENTY, "width": 61})
    sd_lowvram.plan(pipe, **{**PLENTY, "width": int(str(told.value).split()[-1])})


BUDGETS = [
    ({"vram": "0.5MB"}, "vram", "needs at least ([^.]*?\\.?[^.]*?)\\. Give that much"),
    ({"vram": "20MB", "ram": "1MB"}, "ram", "at least (.*) is needed"),
]


@pytest.mark.parametrize(("asked", "limit", "told"), BUDGETS)
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_budget_that_is_too_small(family: str, asked: dict[str, str], limit: str, told: str) -> None:
    pipe = families.plain(family, "StableDiffusionXLPipeline" if family == "sdxl" else "StableDiffusionPipeline")
    least = sd_lowvram.plan(pipe, **PLENTY)
    if limit == "ram":
        asked = {**asked, "vram": f"{least.minimum_vram_bytes} B"}
    with pytest.raises(BudgetError, match=told) as error:
        sd_lowvram.optimize(pipe, **{**PLENTY, **asked})
    assert error.value.limit == limit
    enough = re.search(told, str(error.value)).group(1)
    sd_lowvram.optimize(pipe, **{**PLENTY, **asked, limit: enough})
    assert torch.isfinite(tiny.run(pipe, steps=1)).all()


def test_a_single_allocation_that_is_too_large() -> None:
    pipe = families.plain("sd15")
    with pytest.raises(BudgetError, match=r"largest_mib 1: .* Give that much") as error:
        sd_lowvram.plan(pipe, **{**PLENTY, "width": 512, "height": 512}, settings=Settings(largest_mib=1))
    enough = int(re.search(r"at least (\d+) MiB", str(error.value)).group(1))
    sd_lowvram.plan(pipe, **{**PLENTY, "width": 512, "height": 512}, settings=Settings(largest_mib=enough))


def test_weights_of_8_bits(tmp_path: Path) -> None:
    pipe = families.plain("sd15")
    pipe.unet.requires_grad_(True)
    x, text = torch.randn(1, 4, 8, 8, requires_grad=True), torch.randn(1, 77, 32)
    stored = {"settings": Settings(weight_storage="int8"), **PLENTY}

    def backward() -> None:
        pipe.unet(x, torch.tensor(1), text).sample.sum().backward()

    sd_lowvram.optimize(pipe, **stored)
    with (
        pytest.raises(ConflictError, match=r"requires_grad_\(False\) .* Settings without weight_storage"),
    ):
        backward()
    for refused in (pipe.unet.fuse_lora, lambda: pipe.unet.save_pretrained(tmp_path)):
        with pytest.raises(ConflictError, match=r"restore\(\)"):
            refused()
    sd_lowvram.restore(pipe)
    pipe.unet.save_pretrained(tmp_path)
    sd_lowvram.optimize(pipe, **PLENTY)
    with pytest.warns(match="gradients"):
        backward()
    sd_lowvram.restore(pipe)
    pipe.unet.requires_grad_(False)
    sd_lowvram.optimize(pipe, **stored)
    with pytest.warns(match="gradients"):
        backward()
    assert x.grad is not None


@pytest.mark.parametrize("split", [None, True])
def test_weights_that_are_larger_than_their_room(pipe: Any, split: bool | None) -> None:
    """Layers that are compiled are not split: they come whole."""
    wide = tiny.config("sd15")
    wide["unet"] |= {"block_out_channels": [32, 32, 32, 256], "layers_per_block": 1}
    unet = build_components(wide, only=("unet",))["unet"]
    if split:
        unet.mid_block.resnets[0].compile(backend="eager")
    asked = {"offload": "blocks", "weights_mib": 2}
    settings = Settings(**asked, split_layers=split)
    with pytest.raises(BudgetError, match="are too few for") as error, attached(unet, settings, device=CPU):
        pass
    assert ("or let layers be split (split_layers)" in str(error.value)) == (not split)
    enough = -(-parse_size(re.search("give (.*?) or more", str(error.value)).group(1)) // MIB)
    for instead in ({"weights_mib": enough, "split_layers": split}, *([] if split else [{"split_layers": True}])):
        with attached(unet, Settings(**{**asked, **instead}), device=CPU), torch.no_grad():
            unet(torch.zeros(1, 4, 8, 8), torch.tensor(1), torch.zeros(1, 77, 32))
        sd_lowvram.plan(unet, settings=Settings(**{**asked, **instead}), **PLENTY)


def test_8_bits_above_weights_that_stream() -> None:
    pipe = families.plain("sd15")
    eight = Settings(weight_storage="int8")
    expected = tiny.run(pipe, steps=1)
    for offload in ("layer", "component"):
        with (
            attached(pipe, Settings(offload=offload), device=CPU),
            pytest.raises(ConflictError, match=r"restore\(\) what has that first, or ask for both at once"),
        ):
            sd_lowvram.optimize(pipe.unet, settings=eight, **PLENTY)
        assert torch.equal(tiny.run(pipe, steps=1), expected)
        for settings in (eight, eight.filled(offload=offload)):
            with attached(pipe, settings, device=CPU):
                assert 0 < tiny.relative_error(tiny.run(pipe, steps=1), expected) < 0.1


def test_weights_that_are_in_order_already(pipe: Any) -> None:
    config = tiny.config("sd15")
    config["unet"] |= {"block_out_channels": [32, 32, 32, 512], "layers_per_block": 1}
    unet = build_components(config, only=("unet",))["unet"]
    packed, others = {"packed_weights": True}, ({"offload": "layer"}, {"weight_storage": "int8"})
    for other in others:
        with pytest.raises(SettingsError, match=r"packed_weights=True cannot go with .* leave one of them off"):
            sd_lowvram.plan(unet, settings=Settings(**packed, **other), **PLENTY)
    for alone in (packed, *others):
        with attached(unet, Settings(**alone), device=CPU), torch.no_grad():
            unet(torch.zeros(1, 4, 8, 8), torch.tensor(1), torch.zeros(1, 77, 32))


class _Foreign(torch.Tensor):
    """A weight of a kind of its own, as those of quantised models are."""


def test_weights_that_cannot_be_streamed() -> None:
    pipe = families.plain("sd15")
    layer = pipe.unet.mid_block.resnets[0].conv1
    plain = layer.weight
    layer.weight = nn.Parameter(plain.detach().as_subclass(_Foreign), requires_grad=False)
    with pytest.raises(ConflictError, match=r'use Settings\(offload="none"\) or unquantised weights'):
        runs(pipe, Settings(offload="layer"))
    assert runs(pipe, Settings(offload="none"))
    layer.weight = nn.Parameter(plain.to("meta"), requires_grad=False)
    with pytest.raises(ConflictError, match="load them before they are streamed"):
        runs(pipe, Settings(offload="layer"))
    layer.weight = plain
    assert runs(pipe, Settings(offload="layer"))


def test_weights_that_change_before_their_backward() -> None:
    unet = families.plain("sd15").unet.half()
    x = torch.randn(1, 4, 8, 8, requires_grad=True)
    with attached(unet, Settings(precision="fp16-storage"), device=CPU):

        def called() -> torch.Tensor:
            return unet(x, torch.tensor(1), torch.zeros(1, 77, 32)).sample.sum()

        late = called()
        with torch.no_grad():
            unet.mid_block.resnets[0].conv1.weight.add_(1)
        with pytest.raises(LowVRAMError, match=r"call backward\(\) before weights or inputs change"):
            late.backward()
        called().backward()
    assert x.grad is not None


def test_a_card_without_a_profile() -> None:
    with pytest.raises(BadInputError, match="choose one of") as told:
        profile("voodoo")
    assert all(map(profile, str(told.value).split("choose one of ")[1].split(", ")))


ELSEWHERE = {
    "needs at least": "test_remedies.py",
    "of RAM cannot hold": "test_remedies.py",
    "expected Settings, got": "test_bad_input.py",
    "is not a device": "test_bad_input.py",
    "is unknown: choose one of {}, or cuda:1": "test_bad_input.py",
    "merge_tokens cannot go with": "approximate/test_between_steps.py",
    "hidden from trace": "streaming/test_threads.py",
    "call one model after the other": "streaming/test_threads.py",
    "gave other bits": "kernels/test_determinism.py",
    "is for transformers, and": "hooks/test_half_products.py",
    "(set_attn_processor) and backend": "hooks/test_attention_of_transformers.py",
    "in float32 too: its weights": "hooks/test_half_products.py",
    "is not an interval": "saved_latents/test_saved_latents.py",
    "or a number of MB/s": "devices/test_disk.py",
    "needs a generator": "saved_latents/test_resumable.py",
    "cannot resume from saved latents": "saved_latents/test_resumable.py",
    "Load the model in a wider type": "commands/test_resume.py",
    "weights are not streamed to": "devices/test_device_support.py",
    "holds no model": "models/test_support.py",
    "a stated call is for pipelines": "planning/test_rehearsed_plans.py",
    "plan a pipeline whole": "models/test_unknown.py",
    "state what it requires as call": "models/test_unknown.py",
    "cannot be put together again": "streaming/test_quantised_weights.py",
    "yet to be quantised": "streaming/test_quantised_weights.py",
    "holds quantised weights, which are streamed": "simulated_gpu/test_quantised_on_the_card.py",
}
"""What other files' tests carry out, or other words here."""

NOT_DONE = {
    "the budget cannot hold both": "no model is known that comes to it",
}


def literal(node: ast.expr) -> str:
    """What of a message stands in the source, {} for what is put in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def messages() -> list[str]:
    """The messages of all errors of the library that say to do something."""
    files = [
        file
        for room in ROOMS
        for file in ([PACKAGE / room] if room.endswith(".py") else (PACKAGE / room).rglob("*.py"))
    ]
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    raised = [call for call in calls if getattr(call.func, "id", "").endswith("Error") and call.args]
    return [text for text in map(literal, (call.args[0] for call in raised)) if ADVICE.search(text)]


def test_every_remedy_is_carried_out() -> None:
    here = Path(__file__).read_text().split("ELSEWHERE")[0]
    matched = [
        match for pair in re.findall(r'match=r?"(.*?)"(?=[,)])|match=r\'(.*?)\'', here) for match in pair if match
    ]
    found = messages()
    for text in found:
        told = text.replace("{}", "sdpa")
        done = any(re.search(match, told) or words in text for match in matched for words in [*ELSEWHERE, *NOT_DONE])
        assert done, f"no test does what this says: {text}"
    for words, file in ELSEWHERE.items():
        assert any(words in text for text in found), words
        assert (ROOT / "tests" / file).is_file()
    assert all(any(words in text for text in found) for words in NOT_DONE)
