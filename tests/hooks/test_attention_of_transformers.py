"""Attention backends under diffusion transformers: each gives the picture, with masks and in chunks too."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import todays
import torch
from torch import Tensor

from sd_lowvram import Settings, attached
from sd_lowvram.errors import LowVRAMError
from sd_lowvram.hooks.numbers.attention import kernel_counts
from sd_lowvram.session import attachments

WAYS: list[dict[str, Any]] = [
    {"attention": "sdpa"},
    {"attention": "flash"},
    {"attention": "fused-softmax", "attention_mib": 1},
    {"attention": "sliced", "attention_mib": 1},
    {"attention": "sliced", "attention_mib": 1, "transformer_chunks": 2},
]
SOME = (torch.arange(todays.WORDS)[None] < 40).float()
MASKED: dict[str, dict[str, Any]] = {
    "chroma": {"prompt_attention_mask": SOME, "negative_prompt_attention_mask": SOME},
    "qwen_image": {"prompt_embeds_mask": SOME.bool(), "negative_prompt_embeds_mask": SOME.bool()},
}
"""Of ``z_image`` the prompts themselves are not alike long, and of ``krea2`` they are masked."""


@pytest.mark.parametrize("family", ["flux", "sd3", "z_image", "chroma", "klein", "qwen_image", "krea2"])
def test_every_backend_gives_the_picture(family: str) -> None:
    pipe, before = getattr(todays, family)(), torch.nn.functional.scaled_dot_product_attention

    def latents(**more: Any) -> Tensor:
        return todays.picture(pipe, 256, 320, steps=1, output_type="latent", **more)

    masks = MASKED.get(family, {})
    expected = latents(**masks)
    assert not masks or not torch.equal(expected, latents())
    for way in WAYS:
        with attached(pipe, Settings(**way), device="cpu"):
            assert tiny.relative_error(latents(**masks), expected) < 2e-6
            attachment = attachments(pipe)[0]
            ran = kernel_counts(attachment.anatomy.attentions)
        assert attachment.sites["attention"] == 1
        assert ran.keys() == {"flash" if way["attention"] == "sdpa" else way["attention"]}
    assert torch.nn.functional.scaled_dot_product_attention is before
    assert torch.equal(latents(**masks), expected) and "forward" not in vars(pipe.transformer)


def test_attention_that_torch_does_not_compute_is_refused_by_name() -> None:
    class Theirs:
        def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, *_: Any) -> Any:
            return hidden_states if encoder_hidden_states is None else (hidden_states, encoder_hidden_states)

    pipe = todays.flux()
    own = pipe.transformer.attn_processors
    pipe.transformer.set_attn_processor(Theirs())
    told = "transformer: FluxTransformer2DModel computes attention without .*set_attn_processor.*'native'"
    with attached(pipe, Settings(attention="sliced"), device="cpu"):
        with pytest.raises(LowVRAMError, match=told):
            todays.picture(pipe)
        pipe.transformer.set_attn_processor(own)
        pipe.transformer.set_attention_backend("native")
        todays.picture(pipe)
