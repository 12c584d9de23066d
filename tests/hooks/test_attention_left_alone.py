"""A plan leaves attention alone where its choice would be torch's own, and with it processors that nobody knows."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import tiny
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor
from families import parts, plain

import sd_lowvram
from sd_lowvram import Fidelity, Settings
from sd_lowvram.session import attachments

SIZE = {"width": 64, "height": 64, "device": "cpu"}


class ByHand:
    """A user's processor that works its scores out itself."""

    calls = 0

    def __call__(self, attention: Attention, x: torch.Tensor, encoder_hidden_states: Any = None, **_: Any) -> Any:
        self.calls += 1
        context = x if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = attention.to_q(x), attention.to_k(context), attention.to_v(context)
        query, key, value = map(attention.head_to_batch_dim, (query, key, value))
        scores = attention.get_attention_scores(query, key)
        return attention.to_out[0](attention.batch_to_head_dim(scores @ value))


def test_plenty_changes_no_bit_and_no_attention() -> None:
    pipe = plain("sd15")
    expected = tiny.run(pipe)
    plan = sd_lowvram.optimize(pipe, vram="8GB", ram="8GB", **SIZE)
    assert plan.settings.attention is None and plan.fidelity == Fidelity.BITWISE
    assert attachments(pipe)[0].sites.keys() == {"inference_mode", "offload", "vae_whole"}
    assert not any("forward" in vars(site.module) for site in attachments(pipe)[0].anatomy.attentions)
    assert torch.equal(tiny.run(pipe), expected)


@pytest.mark.parametrize("settings", [None, Settings(vae_tiles="exact", guidance_in_turn=True, offload="layer")])
def test_a_processor_of_the_user_runs(settings: Settings | None) -> None:
    pipe = plain("sd15")
    own = ByHand()
    pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1.set_processor(own)
    expected, once = tiny.run(pipe), own.calls
    sd_lowvram.optimize(pipe, vram="8GB", ram="8GB", settings=settings, **SIZE)
    assert tiny.relative_error(tiny.run(pipe), expected) < 1e-4
    assert own.calls > once > 0


def test_a_processor_set_during_the_run() -> None:
    """Self-attention guidance stores one map of attention in every step."""
    pipe = diffusers.StableDiffusionSAGPipeline(**parts("sd15"), requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    expected = tiny.run(pipe)
    sd_lowvram.optimize(pipe, vram="8GB", ram="8GB", **SIZE)
    assert tiny.relative_error(tiny.run(pipe), expected) < 1e-4


def test_processors_of_before_torch_2_are_given_a_kernel() -> None:
    pipe = plain("sd15")
    pipe.unet.set_attn_processor(AttnProcessor())
    plan = sd_lowvram.optimize(pipe, vram="8GB", ram="8GB", **SIZE)
    assert plan.settings.attention == "sdpa"


def test_gradients_through_the_unet_are_kept() -> None:
    """Attend-and-excite moves the latents by the gradient of a loss over maps of attention."""
    pipe = diffusers.StableDiffusionAttendAndExcitePipeline(**parts("sd15"), requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    pipe.unet.requires_grad_(False)
    options = {"token_indices": [2], "max_iter_to_alter": 1, "thresholds": {}, "attn_res": (8, 8)}
    expected = tiny.run(pipe, **options)
    sd_lowvram.optimize(pipe, vram="8GB", ram="8GB", **SIZE)
    assert tiny.relative_error(tiny.run(pipe, **options), expected) < 1e-4
