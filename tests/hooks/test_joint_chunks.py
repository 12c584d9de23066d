"""Blocks of diffusion transformers by chunks of tokens: the same picture, less memory, whatever is around a layer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tiny
import todays
import torch
from torch import Tensor

import sd_lowvram
from sd_lowvram import Settings, attached
from sd_lowvram.models import dissect
from sd_lowvram.session import attachments

MAKERS = (todays.flux, todays.sd3, todays.z_image, todays.chroma, todays.klein, todays.qwen_image, todays.krea2)
SITES = {
    "FluxPipeline": 5,
    "StableDiffusion3Pipeline": 4,
    "ZImagePipeline": 5,
    "ChromaPipeline": 5,
    "Flux2KleinPipeline": 5,
    "QwenImagePipeline": 3,
    "Krea2Pipeline": 3,
}


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def pipe(request: pytest.FixtureRequest) -> Any:
    return request.param()


def latents(pipe: Any, width: int = 512, height: int = 1024) -> Tensor:
    """Of one step, of 2048 tokens of the picture."""
    return todays.picture(pipe, width, height, steps=1, output_type="latent")


def test_chunks_of_tokens_give_the_picture_in_less_memory(pipe: Any) -> None:
    expected, peaks = latents(pipe), []
    for settings in (Settings(inference_mode=True), Settings(feed_forward_chunks=8, transformer_chunks=8)):
        with attached(pipe, settings, device="cpu"), sd_lowvram.measured(pipe) as run:
            assert tiny.relative_error(latents(pipe), expected) < 1e-6
            hit = attachments(pipe)[0].sites
        peaks.append(run.peak_bytes)
    assert hit["transformer_chunks"] == SITES[type(pipe).__name__] and hit["feed_forward"] > 1
    assert peaks[1] < 0.9 * peaks[0], peaks
    assert torch.equal(latents(pipe), expected)


def test_a_plan_by_chunks_takes_what_it_says() -> None:
    pipe = todays.flux()
    settings = Settings(feed_forward_chunks=3, transformer_chunks=3, offload="layer")
    plan = sd_lowvram.optimize(pipe, vram="1GB", settings=settings, width=320, height=512, device="cpu")
    with sd_lowvram.measured(pipe) as run:
        todays.picture(pipe, 320, 512, steps=1)
    assert todays.within(plan, run)


def test_a_lora_acts_under_chunks(pipe: Any) -> None:
    from peft import LoraConfig

    plain = latents(pipe)
    with attached(pipe, Settings(transformer_chunks=3), device="cpu"):
        torch.manual_seed(9)
        wanted = ["to_q", "to_k", "to_qkv_mlp_proj", "proj_mlp"]
        pipe.transformer.add_adapter(LoraConfig(r=4, target_modules=wanted, init_lora_weights=False))
        found = latents(pipe)
    expected = latents(pipe)
    assert tiny.relative_error(found, expected) < 1e-6 < tiny.relative_error(plain, expected)


def test_gradients_are_those_of_the_plain_model(pipe: Any) -> None:
    anatomy = dissect(pipe)
    assert anatomy is not None
    weight = next(one for one in anatomy.joint_blocks[-1].module.parameters() if one.ndim == 2)
    call = type(pipe).__call__.__wrapped__  # without its no_grad

    def gradient() -> Tensor:
        given = {**todays.prompts(pipe), "width": 256, "height": 320, "num_inference_steps": 1}
        made = call(pipe, **given, generator=torch.Generator().manual_seed(3), output_type="latent").images
        return torch.autograd.grad(torch.as_tensor(made).square().sum(), weight)[0]

    expected = gradient()
    with attached(pipe, Settings(transformer_chunks=2, feed_forward_chunks=2), device="cpu"):
        assert torch.equal(gradient(), expected)


def test_a_processor_that_is_not_known_is_left_alone() -> None:
    pipe = todays.flux()

    class Theirs(type(pipe.transformer.transformer_blocks[0].attn.processor)):  # type: ignore[misc]
        """Of which it is not known whether a query's row depends on other queries."""

    pipe.transformer.set_attn_processor(Theirs())
    calls: list[int] = []
    block = pipe.transformer.transformer_blocks[0]
    plain = block.attn.forward
    block.attn.forward = functools.wraps(plain)(lambda *given, **more: calls.append(1) or plain(*given, **more))
    with attached(pipe, Settings(transformer_chunks=3), device="cpu"):
        latents(pipe)
    assert len(calls) == 1
