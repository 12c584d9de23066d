"""The UNet in little memory gives what the plain UNet gives, hook by hook and with all of them."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import families
import pytest
import tiny
import torch
from torch import nn

from sd_lowvram import Settings, attached
from sd_lowvram.checkpoints.architectures import architecture, build_components
from sd_lowvram.errors import NoSiteError
from sd_lowvram.tracing import trace

ALONE: dict[str, dict[str, Any]] = {
    "feed_forward": {"feed_forward_chunks": 5},
    "residual_strips": {"residual_strips": 3},
    "transformer_chunks": {"transformer_chunks": 4},
    "park_skips": {"park_skips": True},
    "guidance_in_turn": {"guidance_in_turn": True},
}
TOGETHER = {name: value for knobs in ALONE.values() for name, value in knobs.items()}
SITES = {
    "sd15": {"feed_forward": 16, "residual_strips": 22, "transformer_chunks": 16},
    "sd21": {"feed_forward": 16, "residual_strips": 22, "transformer_chunks": 16},
    "sdxl": {"feed_forward": 70, "residual_strips": 17, "transformer_chunks": 70},
}
STATIONS = {"sd15": 45, "sd21": 45, "sdxl": 33}


def inputs(unet: Any, size: tuple[int, int], batch: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What a pipeline calls the UNet with; size in latent pixels (height, width)."""
    noise = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise).to(dtype)

    given: dict[str, Any] = {
        "sample": random(batch, 4, *size),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": random(batch, 77, unet.config.cross_attention_dim),
        "return_dict": False,
    }
    if unet.config.addition_embed_type == "text_time":
        pooled = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
        given["added_cond_kwargs"] = {"text_embeds": random(batch, pooled), "time_ids": random(batch, 6)}
    return given


def run(unet: Any, size: tuple[int, int] = (33, 41), batch: int = 2, **more: Any) -> torch.Tensor:
    dtype = next(unet.parameters()).dtype
    with torch.no_grad():
        return unet(**{**inputs(unet, size, batch, dtype), **more})[0]


@functools.lru_cache
def unet_of(name: str) -> Any:
    return build_components(tiny.config(name), only=("unet",))["unet"]


@functools.lru_cache
def plain(name: str, size: tuple[int, int], batch: int) -> torch.Tensor:
    return run(unet_of(name), size, batch)


@pytest.mark.parametrize("hook", ALONE)
def test_alone_the_same(hook: str) -> None:
    """The sites in each family, and the pass of one; the picture: test_pipelines.py."""
    for name in tiny.FAMILIES:
        with attached(unet_of(name), Settings(**ALONE[hook]), device="cpu") as attachment:
            result = run(unet_of(name)) if name == "sd15" else None
        sites = {**SITES[name], "guidance_in_turn": STATIONS[name], "park_skips": STATIONS[name] + 2}
        assert attachment.sites == {hook: sites[hook]}
        assert result is None or tiny.relative_error(result, plain(name, (33, 41), 2)) < 1e-5


@pytest.mark.parametrize(
    ("name", "size", "batch"), [("sd15", (47, 65), 2), ("sd21", (33, 41), 1), ("sdxl", (33, 41), 3)]
)
def test_together_the_same(name: str, size: tuple[int, int], batch: int) -> None:
    unet = unet_of(name)
    with attached(unet, Settings(**TOGETHER), device="cpu") as attachment:
        result = run(unet, size, batch)
    assert SITES[name].items() <= attachment.sites.items()
    assert tiny.relative_error(result, plain(name, size, batch)) < 1e-5


def test_a_residual_block_takes_time_by_keyword() -> None:
    """A host's or a user's own block may call its layers so."""
    unet = unet_of("sd15")
    block = unet.down_blocks[0].resnets[0]
    noise = torch.Generator().manual_seed(1)
    x, time = torch.randn(1, 32, 33, 9, generator=noise), torch.randn(1, 128, generator=noise)
    with torch.no_grad():
        expected = block(x, temb=time)
        with attached(unet, Settings(residual_strips=3), device="cpu"):
            assert tiny.relative_error(block(x, temb=time), expected) < 1e-5


def test_parking_changes_no_bit() -> None:
    unet = families.parts("sd15")["unet"]
    expected = run(unet)
    with attached(unet, Settings(park_skips=True), device="cpu"):
        assert torch.equal(run(unet), expected)
    with attached(unet, Settings(guidance_in_turn=True), device="cpu"):
        in_turn = run(unet)
    with attached(unet, Settings(guidance_in_turn=True, park_skips=True), device="cpu"):
        assert torch.equal(run(unet), in_turn)


def test_full_width() -> None:
    config = architecture("sd15")["unet"] | families.SHALLOW["sd15"] | {"block_out_channels": [320, 640]}
    unet = build_components({"unet": config}, only=("unet",))["unet"]
    expected = run(unet, (9, 13))
    with attached(unet, Settings(**TOGETHER), device="cpu"):
        assert tiny.relative_error(run(unet, (9, 13)), expected) < 1e-5


@pytest.mark.parametrize("way", ["inference_mode", "autocast", "fp16", "bf16", "fp16-storage", "channels_last"])
def test_narrow_types_and_modes(way: str) -> None:
    """Not farther from float32 than the plain pass is in the same type."""
    unet = families.parts("sd15")["unet"]
    expected = run(unet)
    settings: dict[str, Any] = {
        "inference_mode": {"inference_mode": True},
        "autocast": {"precision": "autocast-bf16"},
        "channels_last": {"channels_last": True},
    }.get(way, {"precision": way})
    given = inputs(unet, (33, 41), 2)
    errors = []
    for knobs in ({}, TOGETHER):
        slower = pytest.warns(UserWarning, match="'bf16'") if way == "autocast" else nullcontext()
        with slower, attached(unet, Settings(**settings, **knobs), device="cpu"), torch.no_grad():
            errors.append(tiny.relative_error(unet(**given)[0].float(), expected))
    assert errors[1] < 1.1 * errors[0] + 1e-5


def test_with_offload_and_attention() -> None:
    """Of components; by layers they are the smallest settings, in test_pipelines.py."""
    unet, more = families.parts("sd21")["unet"], {"attention": "fused-softmax", "attention_mib": 1}
    expected = run(unet)
    with attached(unet, Settings(**TOGETHER, **more, offload="component", inference_mode=True), device="cpu"):
        assert tiny.relative_error(run(unet), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_multiplies_in_place(dtype: torch.dtype) -> None:
    """A GEGLU's product takes no memory of its own, and has the same bits."""
    unet = families.parts("sd15")["unet"].to(dtype)
    expected, given = run(unet), inputs(unet, (64, 64), 2, dtype)
    before = trace(unet, **given)
    with attached(unet, Settings(inference_mode=True), device="cpu") as attachment:
        assert torch.equal(run(unet), expected)
        after = trace(unet, **given)
    product = (
        2 * 64 * 64 * unet.up_blocks[-1].attentions[0].transformer_blocks[0].ff.net[2].in_features * dtype.itemsize
    )
    assert before.activation_bytes - after.activation_bytes == product
    assert attachment.sites == {"inference_mode": 5}


@pytest.mark.parametrize("hook", ALONE)
def test_nothing_to_act_on(hook: str) -> None:
    vae = build_components(tiny.config("sd15"), only=("vae",))["vae"]
    with pytest.raises(NoSiteError), attached(vae, Settings(**ALONE[hook]), device="cpu"):
        pass


def everything_of(unet: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        path: {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for path, module in unet.named_modules()
    }


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_restored(error: type[BaseException] | None) -> None:
    unet = families.parts("sd15")["unet"]
    expected = run(unet)
    before, weights = everything_of(unet), {name: t.clone() for name, t in unet.state_dict().items()}

    def fail(*_: Any) -> None:
        raise error("planted")  # type: ignore[misc]

    with attached(unet, Settings(**TOGETHER, offload="layer"), device="cpu"):
        if error is None:
            run(unet)
        else:  # amid the loop in which projections of keys and values answer with what is there
            place = unet.up_blocks[-1].attentions[1].transformer_blocks[0].attn1.to_out[0]
            planted = place.register_forward_pre_hook(fail)
            with pytest.raises(error, match="planted"):
                run(unet)
            planted.remove()
            assert tiny.relative_error(run(unet), expected) < 1e-5
    assert everything_of(unet) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in unet.state_dict().items())
