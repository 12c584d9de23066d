"""What hosts and users add to a UNet keeps working with the UNet hooks: LoRA, ControlNet, FreeU, masks, processors."""

from __future__ import annotations

from typing import Any

import families
import pytest
import tiny
import torch
from test_unet_hooks import ALONE, TOGETHER, inputs, run
from torch import nn

from sd_lowvram import Settings, attached

EITHER = {**ALONE, "together": TOGETHER}
LORA_LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2", "conv1", "conv2", "conv_shortcut", "proj_in"]


@pytest.fixture
def unet() -> Any:
    return families.parts("sd15")["unet"]


def add_lora(unet: Any) -> None:
    from peft import LoraConfig

    unet.add_adapter(LoraConfig(r=4, target_modules=LORA_LAYERS, init_lora_weights=False))
    noise = torch.Generator().manual_seed(5)
    for name, parameter in unet.named_parameters():
        if "lora" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=noise)
            parameter.requires_grad_(False)
    unet.eval()


@pytest.mark.parametrize("hook", EITHER)
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_has_its_whole_effect(unet: Any, hook: str, when: str) -> None:
    without = run(unet)
    if when == "before":
        add_lora(unet)
    with attached(unet, Settings(**EITHER[hook]), device="cpu"):
        if when == "after":
            add_lora(unet)
        result = run(unet)
    expected = run(unet)
    assert tiny.relative_error(without, expected) > 0.05
    assert tiny.relative_error(result, expected) < 1e-5


SIZES = [(33, 41)] * 2 + [(17, 21)] * 2
WIDTHS = [32, 32, 32, 64]


def maps(batch: int, places: list[tuple[int, tuple[int, int]]]) -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(2)
    return [torch.randn(batch, width, *size, generator=noise) for width, size in places]


def controlnet() -> dict[str, Any]:
    """What a ControlNet hands to the UNet for latents of (33, 41)."""
    *down, mid = maps(2, [*zip(WIDTHS, SIZES, strict=True), (64, (17, 21))])
    return {"down_block_additional_residuals": tuple(down), "mid_block_additional_residual": mid}


def adapter() -> dict[str, Any]:
    """What a T2I-Adapter adds inside the down blocks; the last one in place, to map and skip at once."""
    return {"down_intrablock_additional_residuals": maps(2, [(32, (33, 41)), (64, (17, 21))])}


@pytest.mark.parametrize("hook", EITHER)
@pytest.mark.parametrize("extra", [controlnet, adapter])
def test_residuals_from_outside(unet: Any, hook: str, extra: Any) -> None:
    expected = run(unet, **extra())
    assert tiny.relative_error(run(unet), expected) > 0.05
    with attached(unet, Settings(**EITHER[hook]), device="cpu"):
        result = run(unet, **extra())
    assert torch.equal(result, expected) if hook == "park_skips" else tiny.relative_error(result, expected) < 1e-5


def test_sums_of_skips_wait_too(unet: Any) -> None:
    """A ControlNet does not bring the skips back to the device."""
    from sd_lowvram.tracing import trace

    given = {**inputs(unet, (33, 41), 2), **controlnet()}
    peaks = []
    for knobs in (Settings(), Settings(guidance_in_turn=True, park_skips=True)):
        with attached(unet, knobs, device="cpu"), torch.no_grad():
            peaks.append(trace(unet, **given))
    skips = sum(tensor.numel() * 4 for tensor in given["down_block_additional_residuals"])
    assert peaks[1].host_peak_bytes >= skips
    assert peaks[1].activation_peak_bytes < 0.6 * peaks[0].activation_peak_bytes


@pytest.mark.parametrize("hook", EITHER)
def test_freeu(unet: Any, hook: str) -> None:
    without = run(unet)
    unet.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)
    expected = run(unet)
    assert tiny.relative_error(without, expected) > 0.01
    with attached(unet, Settings(**EITHER[hook]), device="cpu"):
        assert tiny.relative_error(run(unet), expected) < 1e-5


@pytest.mark.parametrize("hook", ["transformer_chunks", "guidance_in_turn", "together"])
def test_masks_of_the_text_go_with_their_pictures(unet: Any, hook: str) -> None:
    mask = torch.ones(2, 77, dtype=torch.bool)
    mask[0, 5:] = mask[1, 40:] = False
    expected = run(unet, encoder_attention_mask=mask)
    assert tiny.relative_error(run(unet, encoder_attention_mask=mask.flip(0)), expected) > 1e-3
    with attached(unet, Settings(**EITHER[hook]), device="cpu"):
        assert tiny.relative_error(run(unet, encoder_attention_mask=mask), expected) < 1e-5


@pytest.mark.parametrize("hook", ["residual_strips", "together"])
def test_circular_padding(unet: Any, hook: str) -> None:
    without = run(unet)
    for module in unet.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "circular"
    expected = run(unet)
    assert tiny.relative_error(without, expected) > 0.01
    with attached(unet, Settings(**EITHER[hook]), device="cpu"):
        assert tiny.relative_error(run(unet), expected) < 1e-5


def test_processors_that_mix_queries_are_left_alone(unet: Any) -> None:
    from diffusers.models.attention_processor import AttnProcessor2_0

    lengths = []

    class Mixing(AttnProcessor2_0):
        def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            lengths.append(hidden_states.shape[1])
            return super().__call__(attn, hidden_states - hidden_states.mean(1, keepdim=True), *args, **kwargs)

    unet.set_attn_processor(Mixing())
    expected = run(unet)
    whole, lengths = lengths, []
    with attached(unet, Settings(transformer_chunks=4), device="cpu"):
        assert torch.equal(run(unet), expected)
    assert lengths == whole


@pytest.mark.parametrize("processor", ["AttnProcessor", "SlicedAttnProcessor"])
def test_older_processors_take_chunks(unet: Any, processor: str) -> None:
    from diffusers.models import attention_processor

    kind = getattr(attention_processor, processor)
    unet.set_attn_processor(kind() if processor == "AttnProcessor" else kind(1))
    expected = run(unet)
    with attached(unet, Settings(transformer_chunks=4), device="cpu"):
        assert tiny.relative_error(run(unet), expected) < 1e-5


def test_ip_adapter(unet: Any) -> None:
    """Its image tokens come next to the text's; the cross-attention is left whole, and halves take theirs along."""
    from diffusers.models.attention_processor import AttnProcessor2_0, IPAdapterAttnProcessor2_0

    torch.manual_seed(0)
    unet.set_attn_processor(
        {
            name: IPAdapterAttnProcessor2_0(
                unet.get_submodule(name.removesuffix(".processor")).to_q.out_features, 32, (4,)
            )
            if "attn2" in name
            else AttnProcessor2_0()
            for name in unet.attn_processors
        }
    )
    unet.requires_grad_(False)
    noise = torch.Generator().manual_seed(2)
    text = torch.randn(2, 77, 32, generator=noise)
    context = (text, [torch.randn(2, 1, 4, 32, generator=noise)])
    expected = run(unet, encoder_hidden_states=context)
    assert tiny.relative_error(run(unet, encoder_hidden_states=(text, [context[1][0].flip(0)])), expected) > 1e-3
    with attached(unet, Settings(**TOGETHER), device="cpu"):
        assert tiny.relative_error(run(unet, encoder_hidden_states=context), expected) < 1e-5
