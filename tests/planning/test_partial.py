"""Very small models, and targets that are less than a whole pipeline."""

from __future__ import annotations

import dataclasses
from typing import Any

import families
import pytest
import tiny
import torch
from torch import Tensor, nn

import sd_lowvram
from sd_lowvram import Settings, attached
from sd_lowvram.errors import BudgetError, NoSiteError

OFFLOADS = ("none", "component", "halves", "blocks", "layer")


@pytest.mark.parametrize("vram", ["1GB", None])
def test_a_pipeline_of_a_few_kilobytes_is_planned_and_runs(vram: str | None) -> None:
    pipe = tiny.tiniest()
    expected = tiny.run(pipe)
    plan = sd_lowvram.optimize(pipe, vram=vram, ram="1GB", width=64, height=64)
    try:
        assert plan.settings.offload == "none"
        assert tiny.relative_error(tiny.run(pipe), expected) < 1e-5
    finally:
        sd_lowvram.restore(pipe)


@pytest.mark.parametrize("split", [None, True])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_pipeline_of_a_few_kilobytes_streams(offload: str, split: bool | None) -> None:
    pipe = tiny.tiniest()
    expected = tiny.run(pipe)
    fixed = dataclasses.replace(Settings.policy("diffusers-default"), offload=offload, split_layers=split)
    plan = sd_lowvram.optimize(pipe, vram="1GB", ram="1GB", width=64, height=64, settings=fixed)
    try:
        assert plan.settings.offload == offload
        assert tiny.relative_error(tiny.run(pipe), expected) < 1e-5
    finally:
        sd_lowvram.restore(pipe)


def test_a_unet_without_a_plain_residual_block_runs_in_its_least() -> None:
    unet = families.parts("sd15", resnet_time_scale_shift="scale_shift")["unet"]
    with pytest.raises(BudgetError) as refusal:
        sd_lowvram.plan(unet, vram="1 B", width=64, height=64)
    plan = sd_lowvram.optimize(unet, vram=f"{refusal.value.needed_bytes} B", width=64, height=64)
    try:
        assert plan.fits and plan.settings.residual_strips is None
    finally:
        sd_lowvram.restore(unet)


class Tripled(nn.Linear):
    """Its weight is used in a way that no row of it can stand for."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3


def test_weights_that_cannot_be_streamed_as_asked_are_still_planned_on_the_device() -> None:
    pipe = families.plain("sd15")
    feed_forward = pipe.unet.mid_block.attentions[0].transformer_blocks[0].ff
    feed_forward.net[0].proj = Tripled(64, 512)
    expected = tiny.run(pipe)
    split = Settings(split_layers=True)
    plan = sd_lowvram.optimize(pipe, vram="1GB", ram="1GB", settings=split)
    try:
        assert plan.settings.offload == "none"
        assert torch.equal(tiny.run(pipe), expected)
    finally:
        sd_lowvram.restore(pipe)
    sd_lowvram.optimize(pipe, vram="1GB", ram="1GB", settings=split.filled(offload="layer"))  # that layer comes whole
    try:
        assert tiny.relative_error(tiny.run(pipe), expected) < 1e-4
    finally:
        sd_lowvram.restore(pipe)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return families.plain("sd15")


def latents(seed: int = 0) -> Tensor:
    return torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(seed))


def call_of(pipe: Any, part: str) -> Any:
    """A call of one component, giving a tensor."""
    noise = torch.Generator().manual_seed(1)
    text = torch.randn(2, 77, 32, generator=noise)
    tokens = torch.randint(0, 999, (2, 77), generator=noise)
    return {
        "unet": lambda: pipe.unet(latents(), 3, text).sample,
        "vae": lambda: pipe.vae.decode(latents()).sample,
        "text_encoder": lambda: pipe.text_encoder(tokens)[0],
    }[part]


@torch.no_grad()
@pytest.mark.parametrize(
    ("part", "hooks"),
    [
        ("unet", {"attention", "feed_forward", "residual_strips", "transformer_chunks", "park_skips"}),
        ("vae", {"attention", "vae_exact", "vae_slices"}),
        ("text_encoder", set()),
    ],
)
def test_a_preset_does_what_it_can_for_one_component(pipe: Any, part: str, hooks: set[str]) -> None:
    call = call_of(pipe, part)
    expected = call()
    more = {"guidance_in_turn"} if part == "unet" else set()
    with attached(getattr(pipe, part), Settings.smallest()) as attachment:
        assert attachment.sites.keys() == hooks | more | {"offload", "inference_mode"}
        assert tiny.relative_error(call(), expected) < 1e-5
    assert torch.equal(call(), expected)


@torch.no_grad()
def test_a_preset_decodes_and_encodes(pipe: Any) -> None:
    pixels = pipe.vae.decode(latents()).sample
    moments = pipe.vae.encode(pixels).latent_dist.parameters
    smallest = Settings.smallest()
    assert tiny.relative_error(sd_lowvram.decode(pipe.vae, latents(), settings=smallest), pixels) < 1e-5
    assert tiny.relative_error(sd_lowvram.encode(pipe.vae, pixels, settings=smallest), moments) < 1e-5


def test_a_preset_on_a_pipeline_without_an_autoencoder() -> None:
    whole = families.plain("sd15")
    pipe = type(whole)(**{**whole.components, "vae": None}, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)

    def run() -> Tensor:
        noise = torch.Generator().manual_seed(3)
        return pipe(
            "an apple", num_inference_steps=2, width=64, height=64, generator=noise, output_type="latent"
        ).images

    expected = run()
    plan = sd_lowvram.optimize(pipe, vram="1GB", ram="1GB", width=64, height=64, settings=Settings.smallest())
    try:
        assert plan.settings.vae_tiles is None and plan.settings.transformer_chunks == 16
        assert tiny.relative_error(run(), expected) < 1e-5
    finally:
        sd_lowvram.restore(pipe)


def test_a_single_knob_without_a_site_still_raises(pipe: Any) -> None:
    with pytest.raises(NoSiteError), attached(pipe.vae, Settings(transformer_chunks=2)):
        pass
    with pytest.raises(NoSiteError):
        sd_lowvram.decode(pipe.vae, latents(), settings=Settings(transformer_chunks=2))
