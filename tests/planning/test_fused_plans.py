"""Plans take our kernels where each was measured to be faster: on the machine at hand, or a GPU of the generation."""

from __future__ import annotations

import dataclasses
from typing import Any

import families
import pytest
import tiny
import torch

from sd_lowvram import Settings
from sd_lowvram.checkpoints.architectures import architecture, build_components
from sd_lowvram.devices.performance import THIS, Rates, profile
from sd_lowvram.devices.this_machine import RECORDED
from sd_lowvram.hooks import offers
from sd_lowvram.kernels.attention.problem import PlannedGpu, _capability, assume_gpu, capability, has_bf16
from sd_lowvram.kernels.triton.support import why_not as triton_why_not
from sd_lowvram.models import anatomy_of_components
from sd_lowvram.planning import search, stage_seconds
from sd_lowvram.planning.plan import Plan, Request
from sd_lowvram.planning.wording import Kind, select_kinds
from sd_lowvram.settings import Fidelity
from sd_lowvram.units import GIB

HERE = dataclasses.replace(profile("rtx2070"), name=THIS)
ELSEWHERE = profile("rtx2070")
NOTHING = Settings()


def planned(
    monkeypatch: pytest.MonkeyPatch,
    gains: dict[str, float],
    rates: Any = HERE,
    settings: Settings = NOTHING,
    only: tuple[str, ...] = ("unet",),
) -> Plan:
    monkeypatch.setattr(offers, "kernel_gains", lambda device: gains)
    monkeypatch.setattr(offers.triton, "why_not", lambda device: None)
    anatomy = anatomy_of_components("diffusers", build_components(families.config("sd15"), only=only))
    request = Request(64, 64, 1, 4 * GIB, 4 * GIB, torch.device("cuda"), rates)
    return search.make_plan(anatomy, request, settings)


DENOISER = {"group_norm, denoise, contiguous_format": 1.4, "group_norm, denoise, channels_last": 1.2, "geglu": 1.1}
AUTOENCODER = {"group_norm, decode, contiguous_format": 6.7, "group_norm, decode, channels_last": 3.3}


def test_measured_as_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(monkeypatch, DENOISER).settings.fused_kernels is True


@pytest.mark.parametrize("gains", [{}, AUTOENCODER, DENOISER | {"geglu": 0.97}])
def test_not_measured_or_not_faster(monkeypatch: pytest.MonkeyPatch, gains: dict[str, float]) -> None:
    assert planned(monkeypatch, gains).settings.fused_kernels is None


SLOW_DENOISER = DENOISER | {"group_norm, denoise, contiguous_format": 0.55}
SLOW_AUTOENCODER = AUTOENCODER | {"group_norm, decode, channels_last": 0.97}


@pytest.mark.parametrize(
    ("gains", "fixed", "kernels"),
    [
        (DENOISER | AUTOENCODER, {}, (True, None)),
        (SLOW_DENOISER | AUTOENCODER, {}, (None, True)),
        (DENOISER | SLOW_AUTOENCODER, {}, (True, False)),
        (SLOW_DENOISER | SLOW_AUTOENCODER, {}, (None, None)),
        (SLOW_DENOISER | AUTOENCODER, {"fused_kernels": False}, (False, None)),
        (DENOISER | AUTOENCODER, {"vae_fused_kernels": False}, (True, False)),
        (SLOW_DENOISER | AUTOENCODER, {"compile": "regional"}, (None, None)),
    ],
)
def test_denoiser_and_autoencoder_have_the_kernels_that_are_faster_there(
    monkeypatch: pytest.MonkeyPatch, gains: dict[str, float], fixed: dict[str, Any], kernels: tuple[Any, Any]
) -> None:
    found = planned(monkeypatch, gains, settings=Settings(**fixed), only=("unet", "vae")).settings
    assert (found.fused_kernels, found.vae_fused_kernels) == kernels


def test_a_decode_is_planned_with_its_kernels_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target without a denoiser, too; the plan counts fewer bytes that move."""
    plain, fused = (planned(monkeypatch, gains, only=("vae",)) for gains in (DENOISER, AUTOENCODER))
    assert (plain.settings.vae_fused_kernels, fused.settings.vae_fused_kernels) == (None, True)
    assert fused.predicted.seconds < plain.predicted.seconds and fused.fidelity < Fidelity.APPROXIMATE


def test_a_named_card_gains_what_its_generation_was_measured_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"group_norm": 1.4, "geglu": 1.1, RECORDED: 1.5}
    found = planned(monkeypatch, here, ELSEWHERE)
    assert not found.settings.fused_kernels and not found.settings.cuda_graphs
    assert not select_kinds(found.reasons, Kind.BY_TIME_MODEL, Kind.FUSED_NOT_FASTER)
    for card in ("h100", "h200"):
        measured = planned(monkeypatch, {}, profile(card))
        assert not measured.settings.fused_kernels and measured.settings.cuda_graphs
        assert select_kinds(measured.reasons, Kind.BY_TIME_MODEL)


@pytest.mark.parametrize("card", ["rtx2070", "h100"])
def test_fused_kernels_that_are_requested_save_no_time_on_a_named_card(
    monkeypatch: pytest.MonkeyPatch, card: str
) -> None:
    plain = Settings(offload="none", fused_kernels=False, cuda_graphs=False)
    slow, found = (
        planned(monkeypatch, {}, profile(card), dataclasses.replace(plain, fused_kernels=fused))
        for fused in (False, True)
    )
    assert found.predicted.seconds == slow.predicted.seconds and found.fidelity < Fidelity.APPROXIMATE
    assert found.predicted.peak_bytes <= slow.predicted.peak_bytes
    assert select_kinds(found.reasons, Kind.FUSED_NOT_FASTER) and not select_kinds(slow.reasons, Kind.FUSED_NOT_FASTER)


@pytest.mark.parametrize("settings", [Settings(fused_kernels=True), Settings(compile="regional")])
def test_what_is_installed_here_changes_no_plan_for_a_named_card(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, settings: Settings
) -> None:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", "")
    found = []
    for installed in (True, False):
        monkeypatch.setattr(offers.triton, "_is_installed", lambda installed=installed: installed)
        anatomy = anatomy_of_components("diffusers", build_components(families.config("sd15"), only=("unet",)))
        request = Request(64, 64, 1, 4 * GIB, 4 * GIB, torch.device("cuda"), ELSEWHERE)
        plan = search.make_plan(anatomy, request, settings)
        found.append((plan.settings, plan.predicted))
    assert found[0] == found[1]
    assert all(getattr(found[0][0], name) == value for name, _, value in settings.decided())
    assert not [one for one in recwarn if "riton" in str(one.message)]


def test_a_card_that_is_here_says_nothing_of_a_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with assume_gpu(PlannedGpu(bf16=False, here=False)):
        assert capability(device) == (7, 5) and not has_bf16(device) and triton_why_not(device) is None
    with assume_gpu(PlannedGpu(bf16=True, here=True)):
        assert capability(device) == (9, 0) and has_bf16(device)
    _capability.cache_clear()


def test_a_unet_with_nothing_to_fuse_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers.triton, "why_not", lambda device: None)
    levels = {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2, "mid_block_type": None}
    changed = {**levels, "block_out_channels": [32, 64], "resnet_time_scale_shift": "scale_shift"}
    config = {"unet": {**tiny.config("sd15")["unet"], **changed}}
    anatomy = anatomy_of_components("diffusers", build_components(config, only=("unet",)))
    request = Request(64, 64, 1, 4 * GIB, 4 * GIB, torch.device("cuda"), ELSEWHERE)
    assert search.make_plan(anatomy, request, NOTHING).settings.fused_kernels is None


def test_recording_that_was_measured_as_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, found = planned(monkeypatch, {}), planned(monkeypatch, {RECORDED: 1.5})
    assert plain.settings.cuda_graphs is None and found.settings.cuda_graphs is True
    assert found.fidelity == plain.fidelity and found.predicted.seconds < plain.predicted.seconds
    assert "recorded once and replayed" in " ".join(found.reasons)
    for other in (
        planned(monkeypatch, {RECORDED: 0.99}),
        planned(monkeypatch, {RECORDED: 1.5}, settings=Settings(cuda_graphs=False)),
        planned(monkeypatch, {RECORDED: 1.5}, settings=Settings(park_skips=True)),
        planned(monkeypatch, {RECORDED: 1.5}, settings=Settings(offload="layer")),
    ):
        assert not other.settings.cuda_graphs


def decoding(monkeypatch: pytest.MonkeyPatch, gains: dict[str, float], vram: int = 8 * GIB, name: str = THIS) -> Plan:
    """Of a full-size autoencoder in fp32, on a processor."""
    monkeypatch.setattr(offers, "kernel_gains", lambda device: gains)
    vae = build_components(architecture("sd15"), torch.float32, "meta", only=("vae",))
    rates = Rates(name, name, 1e11, 1e11, 1e10, 1e10, 1e-6, 16 * GIB, "a test's")
    request = Request(256, 256, 1, vram, 8 * GIB, torch.device("cpu"), rates)
    return search.make_plan(anatomy_of_components("diffusers", vae), request, Settings())


@pytest.mark.parametrize("of_processor", [1e11, 4e11])
def test_a_decode_on_the_processor_at_hand_takes_what_was_calibrated(
    monkeypatch: pytest.MonkeyPatch, of_processor: float
) -> None:
    slow = Rates(THIS, "a processor", of_processor, of_processor, 1e12, 1e10, 0.0, 0, "a test's")
    monkeypatch.setattr(stage_seconds, "rates_of", lambda device: slow)
    vae = build_components(architecture("sd15"), torch.float16, "meta", only=("vae",))
    request = Request(512, 512, 1, 8 * GIB, 8 * GIB, torch.device("cuda"), HERE)
    found = search.make_plan(anatomy_of_components("diffusers", vae), request, Settings(decoder_device="cpu"))
    assert found.predicted.seconds == pytest.approx(2.5e12 / of_processor, rel=0.05)  # operations of a decode in fp32


def test_winograd_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = decoding(monkeypatch, {}), decoding(monkeypatch, {"winograd": 1.5})
    assert plain.settings.winograd is None and ours.settings.winograd is True
    assert ours.predicted.seconds < plain.predicted.seconds / 1.2
    assert ours.fidelity == Fidelity.ROUNDING
    assert decoding(monkeypatch, {"winograd": 0.9}).settings.winograd is None
    assert decoding(monkeypatch, {"winograd": 1.5}, name="another machine").settings.winograd is None


def test_winograd_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformed kernels take is in the peak, and given up where it does not fit."""
    least = decoding(monkeypatch, {}).minimum_vram_bytes
    assert decoding(monkeypatch, {"winograd": 1.5}, vram=least).settings.winograd is None
