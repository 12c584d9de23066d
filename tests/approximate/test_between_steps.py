"""Deep features that are used again between steps, and tokens that are merged: what is near, and what is exact."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import compvis
import pytest
import tiny
import torch

from sd_lowvram import Settings, attached, plan
from sd_lowvram.approximate.merge_tokens import merge_by_likeness
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.errors import ConflictError, NoSiteError, SettingsError

FAMILIES = ("diffusers", "ldm")


@pytest.fixture(scope="module")
def unets() -> dict[str, Any]:
    return {"diffusers": tiny.pipeline("sd15").unet, "ldm": compvis.unet()}


def call(unet: Any, timestep: int, size: tuple[int, int] = (24, 32), batch: int = 2, seed: int = 1) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    sample = torch.randn(batch, 4, *size, generator=noise)
    if hasattr(unet, "input_blocks"):
        context = torch.randn(batch, 7, 32, generator=noise)
        with torch.no_grad():
            return unet(sample, timesteps=torch.full((batch,), timestep), context=context)
    context = torch.randn(batch, 7, unet.config.cross_attention_dim, generator=noise)
    with torch.no_grad():
        return unet(sample, torch.tensor(timestep), encoder_hidden_states=context).sample


@pytest.fixture(scope="module")
def plains(unets: dict[str, Any]) -> dict[str, dict[int, torch.Tensor]]:
    return {family: {step: call(unet, step) for step in (900, 899, 898, 897)} for family, unet in unets.items()}


@contextlib.contextmanager
def deep_calls(unet: Any) -> Iterator[list[int]]:
    """A list that grows with each call of a convolution in the innermost block."""
    calls: list[int] = []
    inner = unet.middle_block[0].in_layers[2] if hasattr(unet, "middle_block") else unet.mid_block.resnets[0].conv1
    hook = inner.register_forward_hook(lambda *_: calls.append(1))
    yield calls
    hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("branch", "sites"), [(0, 43), (3, 31), (10, 6)])
def test_between_full_steps_only_outer_layers_run(unets, plains, family, branch, sites):
    unet, plain = unets[family], plains[family]
    settings = Settings(deep_cache=3, deep_cache_branch=branch)
    with attached(unet, settings, device="cpu") as attachment, deep_calls(unet) as deep:
        found = {timestep: call(unet, timestep) for timestep in plain}
        assert len(deep) == 2
        again = call(unet, 900)  # a timestep that does not fall begins a run
        assert len(deep) == 3
    assert attachment.sites == {"deep_cache": sites}
    assert (
        torch.equal(found[900], plain[900]) and torch.equal(found[897], plain[897]) and torch.equal(again, plain[900])
    )
    for timestep in (899, 898):
        assert 0 < tiny.relative_error(found[timestep], plain[timestep]) < 0.2
    assert "forward" not in vars(unet) and torch.equal(call(unet, 899), plain[899])


def test_calls_of_a_step_keep_features_of_their_own(unets):
    """As hosts call it that take prompt and negative prompt one by one; and a size that was not there before."""
    unet = unets["diffusers"]
    with attached(unet, Settings(deep_cache=2), device="cpu"), deep_calls(unet) as deep:
        first = [call(unet, 900, seed=seed) for seed in (1, 2)]
        second = [call(unet, 900 - 1, seed=seed) for seed in (1, 2)]
        assert len(deep) == 2
        call(unet, 898, size=(16, 16))
        call(unet, 897, size=(24, 32))  # of which nothing was stored by now
        assert len(deep) == 4
    for one, other in zip(first, second, strict=True):
        assert tiny.relative_error(other, one) < 0.05
    assert tiny.relative_error(second[0], first[1]) > 0.1


@pytest.mark.parametrize(
    "others",
    [
        {"park_skips": True, "guidance_in_turn": True},
        {"residual_strips": 3, "transformer_chunks": 3, "feed_forward_chunks": 3, "guidance_in_turn": True},
        {"offload": "component", "inference_mode": True, "channels_last": True},
    ],
)
def test_with_other_hooks_the_same(others):
    pipe = tiny.pipeline("sd15")
    with attached(pipe, Settings(deep_cache=2), device="cpu"):
        expected = tiny.run(pipe, size=128, steps=4)
    with attached(pipe, Settings(deep_cache=2, **others), device="cpu"), deep_calls(pipe.unet) as deep:
        assert tiny.relative_error(tiny.run(pipe, size=128, steps=4), expected) < 1e-4
    assert len(deep) == (4 if "guidance_in_turn" in others else 2)


def test_what_is_kept_goes_when_the_decoder_runs():
    pipe = tiny.pipeline("sd15")
    with attached(pipe, Settings(deep_cache=2), device="cpu"):
        reuse = pipe.unet._sd_lowvram_slots["forward"].patches[0].make(None).func.__self__
        tiny.run(pipe, steps=2)
        assert not reuse._given


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (Settings(deep_cache=2, deep_cache_branch=11), SettingsError, "from 0 to 10"),
        (
            Settings(deep_cache=2, offload="layer"),
            SettingsError,
            "offload=.layer.",
        ),
        (Settings(deep_cache=2, compile="whole"), SettingsError, "compile=.whole."),
        (Settings(deep_cache=2, traced=True), SettingsError, "traced=True"),
        (Settings(deep_cache=2, cuda_graphs=True), SettingsError, "cuda_graphs=True"),
    ],
)
def test_refused(unets, settings, error, words):
    with pytest.raises(error, match=words), attached(unets["diffusers"], settings, device="cpu"):
        pass
    assert "forward" not in vars(unets["diffusers"])


@pytest.mark.parametrize("settings", [Settings(deep_cache=2), Settings(merge_tokens=50)])
def test_no_unet(settings):
    with pytest.raises(NoSiteError), attached(tiny.pipeline("sd15").vae, settings, device="cpu"):
        pass


class InPlace(torch.nn.Module):
    """Attention that depends on where tokens are in the map."""

    def in_chunks(self, norm: torch.nn.Module, tokens: torch.Tensor, chunks: int) -> torch.Tensor:
        return tokens


def test_attention_that_needs_every_token_at_its_place_is_named() -> None:
    unet = tiny.tiniest().unet
    next(module for module in unet.modules() if hasattr(module, "attn1")).attn1 = InPlace()
    with pytest.raises(ConflictError, match=r"merge_tokens.*InPlace.*UNet"):
        attached(unet, Settings(merge_tokens=50), device="cpu").__enter__()
    assert "forward" not in vars(unet)


def test_a_plan_counts_the_steps_that_are_short():
    pipe = tiny.pipeline("sd15")
    asked: dict[str, Any] = {"vram": "2GB", "width": 256, "height": 256, "steps": 20, "device": "cpu"}
    steps = {}
    fixed = Settings.policy("diffusers-default")
    for name, knobs in {"plain": {}, "cached": {"deep_cache": 5}, "merged": {"merge_tokens": 50}}.items():
        found = plan(pipe, settings=dataclasses.replace(fixed, **knobs), **asked)
        steps[name] = next(stage for stage in found.stages if stage.name == "denoise")
        assert str(found.fidelity) == ("rounding" if name == "plain" else "approximate") or name == "plain"
    assert 0.2 < steps["cached"].seconds / steps["plain"].seconds < 0.6
    cached = dataclasses.replace(fixed, deep_cache=5)
    four, five, six = (plan(pipe, settings=cached, **{**asked, "steps": count}).stages for count in (4, 5, 6))
    fifth, sixth = (
        sum(stage.seconds for stage in more) - sum(stage.seconds for stage in less)
        for less, more in ((four, five), (five, six))
    )
    assert sixth > 1.5 * fifth  # which is short; the sixth is computed in full again
    assert steps["cached"].peak_bytes >= steps["plain"].peak_bytes


@pytest.mark.slow(20)
def test_the_demos_pictures_stay_near():
    pipe = load_pipeline(None, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)

    def picture() -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return pipe(
            "a red apple", num_inference_steps=20, guidance_scale=4.0, output_type="pt", generator=generator
        ).images

    plain = picture()
    for knobs in ({"deep_cache": 3}, {"merge_tokens": 50}, {"deep_cache": 2, "merge_tokens": 25}):
        with attached(pipe, Settings(**knobs), device="cpu"):
            near = picture()
            assert len(knobs) == 1 or torch.equal(picture(), near)
        decibels = -10 * math.log10((near - plain).square().mean())
        assert 32 < decibels < 60, knobs


@pytest.mark.parametrize(("family", "sites"), [("diffusers", 17), ("ldm", 17)])
def test_merging_finds_its_sites(unets, family, sites):
    unet = unets[family]
    plain = call(unet, 900)
    with attached(unet, Settings(merge_tokens=50), device="cpu") as attachment:
        merged = call(unet, 900)
        odd = call(unet, 900, size=(27, 33)) if family == "diffusers" else merged  # ldm's own takes none
    assert attachment.sites == {"merge_tokens": sites}
    assert 0 < tiny.relative_error(merged, plain) < 0.3
    if odd is not merged:
        assert 0 < tiny.relative_error(odd, call(unet, 900, size=(27, 33))) < 0.3
    assert torch.equal(call(unet, 900), plain)


def test_with_chunks_blocks_that_merge_run_whole(unets):
    unet = unets["diffusers"]
    with attached(unet, Settings(merge_tokens=50), device="cpu"):
        expected = call(unet, 900)
    with attached(unet, Settings(merge_tokens=50, transformer_chunks=4), device="cpu"):
        assert torch.equal(call(unet, 900), expected)


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (1, 5), (2, 2)])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.75])
def test_merged_tokens_come_back(size, share):
    """Equal tokens stand for each other without an error, and no token is farther away than another that stays."""
    count = math.prod(size)
    few = torch.randn(2, 3, 16)
    tokens = few[:, torch.arange(count) % 3]
    merged = merge_by_likeness(tokens, size, share)
    staying = -(-size[0] // 2) * -(-size[1] // 2)
    assert merged.tokens.shape[1] == count - min(int(count * share), count - staying)
    if count > 8:
        assert torch.allclose(merged.spread(merged.tokens), tokens)
    noise = torch.randn(2, count, 16)
    merged = merge_by_likeness(noise, size, share)
    spread = merged.spread(merged.tokens)
    own = (spread == noise).all(dim=2).sum(dim=1)
    assert (own == merged.tokens.shape[1]).all()
