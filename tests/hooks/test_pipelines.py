"""The same picture: each knob that claims it, on a pipeline of each kind of model; gradients: test_gradients.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import todays
import torch
from gradients import every_knob, named, tolerance

import sd_lowvram
from sd_lowvram import Settings, attached
from sd_lowvram.errors import NoSiteError
from sd_lowvram.hooks.pieces import feed_forward, residual_strips, transformer_chunks
from sd_lowvram.settings import Fidelity, knobs
from sd_lowvram.weights import all_tensors

LOSSLESS = [settings for settings in every_knob() if tolerance(settings) is not None]
"""A case for each value of each knob that claims the same picture: one that is declared anew has its case by that."""
BY_SMALL_PIECES = [
    Settings(attention="fused-softmax", attention_mib=1),
    *(Settings(vae_tiles="exact", vae_map=where, vae_strip_mib=1) for where in ("held", "parked", "recomputed")),
]
ELSEWHERE = {
    "attention=efficient": "kernels/test_attention.py",
    "attention=xformers": "kernels/test_attention.py",
    "attention=cudnn": "simulated_gpu/test_cudnn_attention_on_the_card.py",
    "attention=triton": "test_remedies.py",
    "cuda_graphs=True": "simulated_gpu/test_graphs_on_the_card.py",
    "streamed_graphs=True": "simulated_gpu/test_streamed_graphs_on_the_card.py",
    "fused_kernels=True": "hooks/fused_interpreted.py",
    "vae_fused_kernels=True": "hooks/fused_interpreted.py",
    "compile=regional": "hooks/test_compiled.py",
    "compile=whole": "hooks/test_compiled.py",
    "packed_weights=True": "hooks/test_packed_weights.py",
    "winograd=True": "hooks/test_winograd.py",
}
"""What a CPU does not run, compiles for minutes, or has no layer for in models so narrow, and the tests that hold it to
its claim."""
TOGETHER = [
    Settings.smallest(),
    Settings(
        attention="fused-softmax",
        deterministic=True,
        channels_last=True,
        inference_mode=True,
        vae_slices=True,
        vae_tiles="exact",
        decoder_device="cpu",
        offload="component",
    ),
]
TASKS = [*((family, "") for family in tiny.FAMILIES), ("sd15", "Img2Img"), ("sdxl", "Inpaint")]
KINDS: dict[str, Callable[[], Any]] = {"unet": lambda: families.plain("sd15"), "transformer": todays.z_image}
"""The smallest pipeline of each kind of model; a transformer that is given both rows of a guided picture at once."""
WITHOUT_SITE = {"transformer": ("residual_strips", "park_skips")}
"""Knobs for which a kind of model has nothing to act on."""


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """Strips and chunks may be so small here that there are several even of these pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residual_strips, "FEWEST_ROWS", 4)
        for hook in (feed_forward, transformer_chunks):
            patch.setattr(hook, "FEWEST_TOKENS", 32)
        yield


@functools.cache
def plain(kind: str) -> tuple[Any, torch.Tensor]:
    """The pipeline of a kind of model, and its picture."""
    pipe = KINDS[kind]()
    return pipe, drawn(pipe)


def drawn(pipe: Any) -> torch.Tensor:
    return todays.picture(pipe) if hasattr(pipe, "transformer") else tiny.run(pipe, batch=3, size=72)


_CALLED = {"park_skips": "skip_parking"}
"""Of hooks whose sites are counted by another name than their own."""


def check(pipe: Any, expected: torch.Tensor, settings: Settings) -> None:
    """Hold ``settings`` to what the knobs in them claim."""
    allowed = tolerance(settings)
    assert allowed is not None
    with attached(pipe, settings) as attachment:
        picture = drawn(pipe)
        wanted = {str(knob.hook_of(value)).rpartition(".")[2] for _, knob, value in settings.decided()} - {""}
        acting = {_CALLED.get(hook, hook) for hook in attachment.sites}
        assert wanted <= acting
    assert tiny.relative_error(picture, expected) <= allowed


@pytest.mark.parametrize("settings", [*LOSSLESS, *BY_SMALL_PIECES], ids=named)
@pytest.mark.parametrize("kind", KINDS)
def test_each_knob_that_claims_the_same_picture(kind: str, settings: Settings) -> None:
    pipe, expected = plain(kind)
    elsewhere = ELSEWHERE.get(named(settings))
    if any(name in WITHOUT_SITE.get(kind, ()) for name, _, _ in settings.decided()):
        with pytest.raises(NoSiteError), attached(pipe, settings):
            pass
    elif elsewhere is None:
        check(pipe, expected, settings)
        assert torch.equal(drawn(pipe), expected)
    else:
        ((name, _, value),) = settings.decided()
        told = (Path(__file__).parents[1] / elsewhere).read_text()
        assert name in told and (value is True or f'"{value}"' in told)


def test_a_knob_that_claims_too_much_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is declared decides which cases there are, and what is asked of them."""
    assert ELSEWHERE.keys() <= set(map(named, LOSSLESS))
    pipe, expected = plain("unet")
    told = {"merge_tokens": Fidelity.ROUNDING, "guidance_in_turn": Fidelity.BITWISE}
    for name, fidelity in told.items():
        monkeypatch.setitem(vars(knobs()[name]), "fidelity", fidelity)
    cases = {settings for settings in every_knob() if tolerance(settings) is not None}
    for settings in (Settings(merge_tokens=50), Settings(guidance_in_turn=True)):
        assert settings in cases
        with pytest.raises(AssertionError):
            check(pipe, expected, settings)


@pytest.mark.parametrize(("family", "task"), TASKS)
def test_all_together(family: str, task: str) -> None:
    """Return components with every level, block and attention of a family."""
    pipe = tiny.pipeline(family, task)
    expected = drawn(pipe)
    for settings in TOGETHER:
        with attached(pipe, settings):
            assert tiny.relative_error(drawn(pipe), expected) < 1e-4
    assert torch.equal(drawn(pipe), expected)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_attention_is_hit(family: str) -> None:
    pipe = tiny.pipeline(family)
    with attached(pipe.unet, Settings(attention="sliced")) as attachment:
        assert attachment.sites["attention"] == tiny.ATTENTIONS[family]
    assert len(attachment.anatomy.residual_blocks) == tiny.RESIDUAL_BLOCKS[family]


def test_offload_is_bitwise_in_bf16() -> None:
    pipe = families.plain("sd15").to(dtype=torch.bfloat16)
    expected = tiny.run(pipe)
    for offload in ("none", "component", "layer"):
        with attached(pipe, Settings(offload=offload)):
            assert torch.equal(tiny.run(pipe), expected)


@pytest.mark.parametrize("changed", [False, True])
def test_component_offload_copies_nothing_back_that_did_not_change(changed: bool) -> None:
    pipe = families.plain("sd15")
    weights = dict(pipe.unet.named_parameters())

    def state() -> dict[str, tuple[int, int]]:
        return {name: (weight.data_ptr(), weight._version) for name, weight in weights.items()}

    def write(*_: Any) -> None:
        if changed:
            pipe.unet.conv_out.bias.detach().add_(1)

    with attached(pipe, Settings(offload="component")):
        waiting, before = state(), pipe.unet.conv_out.bias.clone()
        hook = pipe.unet.conv_out.register_forward_hook(write)
        tiny.run(pipe, steps=1)
        hook.remove()
        now = state()
        assert {name for name in weights if now[name] != waiting[name]} == ({"conv_out.bias"} if changed else set())
        assert now["conv_out.bias"][0] == waiting["conv_out.bias"][0]
        assert torch.equal(pipe.unet.conv_out.bias, before + changed)


@pytest.mark.parametrize(("precision", "limit"), [("fp16", 0.01), ("bf16", 0.05), ("autocast-bf16", 0.05)])
def test_narrower_types_stay_near(precision: str, limit: float) -> None:
    pipe, _ = plain("unet")
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(5))  # drawn in fp16 it would be another
    expected = tiny.run(pipe, batch=2, latents=noise)
    with attached(pipe, Settings(precision=precision)):
        picture = tiny.run(pipe, batch=2, latents=noise)
        narrow = {tensor.dtype for tensor in all_tensors(pipe.unet)}
    assert 0 < tiny.relative_error(picture, expected) < limit
    if not precision.startswith("autocast"):
        assert narrow == {torch.float16 if precision == "fp16" else torch.bfloat16}


def test_fp16_storage_computes_in_fp32() -> None:
    pipe = families.plain("sd15")
    pipe.to(dtype=torch.float16)
    half = tiny.run(pipe)
    with attached(pipe, Settings(precision="fp16-storage")):
        mixed = tiny.run(pipe)
        assert {tensor.dtype for tensor in pipe.unet.parameters()} == {torch.float16}
    pipe.to(dtype=torch.float32)
    wide = tiny.run(pipe)
    assert tiny.relative_error(mixed, wide) < 1e-3 < 10 * tiny.relative_error(half, wide)


def test_force_upcast_is_obeyed() -> None:
    pipe = families.plain("sdxl", families.XL + "Pipeline")
    assert pipe.vae.config.force_upcast
    with attached(pipe, Settings(precision="fp16")):
        assert pipe.vae.dtype == torch.float32
        assert pipe.unet.dtype == torch.float16
    half = pipe.vae.half()
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).half()
    pixels = sd_lowvram.decode(half, latents, vram="1GB")
    expected = half.float().decode(latents.float()).sample
    assert tiny.relative_error(pixels, expected) < 1e-5


def _lora(pipe: Any, rank: int = 4) -> dict[str, torch.Tensor]:
    """Random weights of a LoRA over the UNet's attentions, in diffusers' own format."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    other = type(pipe.unet).from_config(pipe.unet.config)
    other.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    generator = torch.Generator().manual_seed(1)
    weights = get_peft_model_state_dict(other)
    return {f"unet.{name}": torch.randn(w.shape, generator=generator) * 0.3 for name, w in weights.items()}


@pytest.mark.parametrize("settings", [Settings.smallest(), Settings(offload="component"), Settings(attention="sliced")])
def test_lora_has_its_full_effect(settings: Settings) -> None:
    pipe = families.plain("sd15")
    lora = _lora(pipe)
    without = tiny.run(pipe)
    pipe.load_lora_weights(dict(lora))
    expected = tiny.run(pipe)
    assert tiny.relative_error(expected, without) > 0.01

    with attached(pipe, settings):  # loaded before
        assert tiny.relative_error(tiny.run(pipe), expected) < 1e-4
        pipe.unload_lora_weights()
        assert tiny.relative_error(tiny.run(pipe), without) < 1e-4
        pipe.load_lora_weights(dict(lora))  # loaded after
        assert tiny.relative_error(tiny.run(pipe), expected) < 1e-4
        pipe.fuse_lora()
        assert tiny.relative_error(tiny.run(pipe), expected) < 1e-3
    assert tiny.relative_error(tiny.run(pipe), expected) < 1e-3
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    assert tiny.relative_error(tiny.run(pipe), without) < 1e-4


def test_ip_adapter_and_other_processors_keep_working() -> None:
    from diffusers.models.attention_processor import AttnProcessor, IPAdapterAttnProcessor2_0

    pipe = tiny.pipeline("sd15")
    pipe.unet.set_attn_processor(AttnProcessor())
    expected = tiny.run(pipe)
    with attached(pipe, Settings(attention="sliced", attention_mib=1)):
        assert tiny.relative_error(tiny.run(pipe), expected) < 1e-4
    assert {type(p) for p in pipe.unet.attn_processors.values()} == {AttnProcessor}

    attention = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2
    attention.set_processor(IPAdapterAttnProcessor2_0(64, 32, num_tokens=(4,), scale=0.7))
    hidden, text, image = torch.randn(2, 16, 64), torch.randn(2, 77, 32), torch.randn(2, 1, 4, 32)
    with torch.no_grad():
        expected = attention(hidden, (text, [image]))
        with attached(pipe.unet, Settings(attention="fused-softmax")):
            assert tiny.relative_error(attention(hidden, (text, [image])), expected) < 1e-5
