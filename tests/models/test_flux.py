"""FLUX.1 from the prompt to the picture: planned, the same bits, in the memory that was planned, and restored."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import todays
import torch
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

import sd_lowvram
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import BadInputError, UnsupportedModelError
from sd_lowvram.models import anatomy_of_components
from sd_lowvram.planning.request import request_for
from sd_lowvram.planning.search import make_plan
from sd_lowvram.session import attachments
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB, MIB

ASKED: dict[str, Any] = {"width": todays.SIZE, "height": todays.SIZE, "device": "cpu"}
SEEN = torch.rand(1, 3, todays.SIZE, todays.SIZE, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def pipe() -> Any:
    return todays.flux()


def prompts(pipe: Any) -> list[Tensor]:
    tokens = torch.arange(todays.WORDS)[None] % 1000
    with torch.no_grad():
        return [pipe.text_encoder(tokens[:, :77]).pooler_output, pipe.text_encoder_2(tokens)[0]]


def test_sides_are_multiples_of_what_a_token_stands_for(pipe: Any) -> None:
    with pytest.raises(BadInputError, match=r"72.*16"):
        sd_lowvram.plan(pipe, vram="1GB", width=72, height=64)
    assert sd_lowvram.plan(pipe, vram="1GB", device="cpu").request.width == 1024


KINDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("FluxImg2ImgPipeline", {}, {"image": SEEN, "strength": 1.0}),
    ("FluxFillPipeline", {"channels": 384}, {"image": SEEN, "mask_image": torch.ones(1, 1, 64, 64)}),
    ("FluxControlPipeline", {"channels": 128}, {"control_image": SEEN}),
    ("FluxKontextPipeline", {}, {"image": SEEN, "_auto_resize": False, "max_area": 64 * 64}),
]


@pytest.mark.parametrize(("kind", "made", "options"), KINDS, ids=[row[0] for row in KINDS])
def test_pipelines_that_are_given_pictures(kind: str, made: dict[str, Any], options: dict[str, Any]) -> None:
    pipe = todays.flux(kind, **made)
    expected = todays.picture(pipe, **options)
    first = sd_lowvram.plan(pipe, vram="1GB", **ASKED)
    assert first.stages[0].name == "encode"
    plan = sd_lowvram.optimize(pipe, vram=f"{first.minimum_vram_bytes} B", **ASKED)
    with sd_lowvram.measured(pipe) as run:
        assert torch.equal(todays.picture(pipe, **options), expected)
    assert attachments(pipe)[0].plan is plan  # the guard saw what was planned
    assert todays.within(plan, run)


def test_guidance_by_a_second_call_and_none_embedded() -> None:
    pipe = todays.flux(guidance_embeds=False)
    negative = {"negative_prompt_embeds": todays.noise(1, todays.WORDS, 64, seed=1)}
    negative |= {"negative_pooled_prompt_embeds": todays.noise(1, 32, seed=2), "true_cfg_scale": 3.0}
    expected = todays.picture(pipe, **negative)
    assert not torch.equal(expected, todays.picture(pipe))
    least = sd_lowvram.plan(pipe, vram="1GB", **ASKED).minimum_vram_bytes
    sd_lowvram.optimize(pipe, vram=f"{least} B", **ASKED)
    assert torch.equal(todays.picture(pipe, **negative), expected)


def test_each_model_has_a_buffer_of_its_own_for_streamed_weights(pipe: Any) -> None:
    """That of a T5 whose largest layer has 3 MiB, where the transformer's has 1."""
    pipe.register_modules(text_encoder_2=todays.t5(d_ff=12288))
    expected, read = todays.picture(pipe), prompts(pipe)
    settings = sd_lowvram.Settings(offload="blocks", weights_mib=1)
    plan = sd_lowvram.optimize(pipe, vram="1GB", settings=settings, **ASKED)
    held = {stage.component: stage.weights_bytes for stage in plan.stages}
    assert held["transformer"] <= MIB < 3 * MIB <= held["text_encoder_2"] < 4 * MIB
    with sd_lowvram.measured(pipe) as run:
        assert torch.equal(todays.picture(pipe), expected) and all(map(torch.equal, prompts(pipe), read))
    assert todays.within(plan, run)


def test_a_transformer_or_a_t5_by_itself(pipe: Any) -> None:
    for part in (pipe.transformer, pipe.text_encoder_2):
        plan = sd_lowvram.optimize(part, vram="1GB", **ASKED)
        assert len(plan.stages) == 1
        sd_lowvram.restore(part)


def test_a_part_that_is_not_served_is_named(pipe: Any) -> None:
    pipe.register_modules(image_encoder=nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match=r"FluxPipeline.*\(image_encoder: Linear\)"):
        sd_lowvram.attached(pipe, Settings(attention="sliced")).__enter__()


@pytest.mark.slow(10)
def test_full_size_fits_where_its_weights_do_not() -> None:
    """FLUX.1-dev, 31 GiB of weights, on a card of 4 GiB: planned from its configuration."""
    large = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
    small = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    with torch.device("meta"):
        parts = {
            "text_encoder": CLIPTextModel(CLIPTextConfig(**small)),
            "text_encoder_2": T5EncoderModel(T5Config(**large, is_encoder_decoder=False)),
            "transformer": diffusers.FluxTransformer2DModel(guidance_embeds=True),
            "vae": todays.vae(),
        }
    anatomy = anatomy_of_components("flux", {name: part.to(torch.bfloat16) for name, part in parts.items()})
    rates = profile("rtx3060")
    request = request_for(anatomy, vram=4 * GIB, ram=64 * GIB, device="cuda", rates=rates, passes=1)
    plan = make_plan(anatomy, request, Settings())
    assert (plan.request.width, plan.settings.offload) == (1024, "blocks")
    assert plan.predicted.weights_bytes < request.vram < 30 * GIB < plan.predicted.host_bytes
    denoise = plan.stages[2]
    assert 400 * MIB < denoise.activation_bytes < 500 * MIB and denoise.slowdown < 1.05
    assert plan.minimum_vram_bytes < 1.3 * GIB
