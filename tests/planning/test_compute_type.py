"""Where a host computes in another type than it stores, plans are of the type that is computed in."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import todays
import torch
from manual_cast import manual_cast
from safetensors.torch import load_file, save_file

from sd_lowvram import Fidelity, Settings, attached
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import ConflictError
from sd_lowvram.hooks.numbers.precision import arithmetic
from sd_lowvram.hooks.offers import Target
from sd_lowvram.hooks.registry import list_offers
from sd_lowvram.memory import measured_peak
from sd_lowvram.models.anatomy import Anatomy
from sd_lowvram.planning.plan import Plan
from sd_lowvram.planning.request import request_for
from sd_lowvram.planning.search import make_plan
from sd_lowvram.session import anatomy_of
from sd_lowvram.units import MIB
from sd_lowvram.weights import narrows

FP8 = torch.float8_e4m3fn
STORED = [torch.float16, FP8, torch.float8_e5m2]
SIZE = 192


def unet(stored: torch.dtype, computes: torch.dtype = torch.float32) -> tuple[Any, Anatomy]:
    made = families.parts("sd15")["unet"]
    manual_cast(made, stored)
    return made, dataclasses.replace(anatomy_of(made), computes={"unet": computes})


def planned(anatomy: Anatomy, settings: Settings, vram: int = 1 << 30) -> Plan:
    request = request_for(anatomy, vram=vram, ram=1 << 30, width=SIZE, height=SIZE, device="cpu")
    return make_plan(anatomy, request, settings)


@pytest.mark.parametrize("stored", STORED[:2], ids=str)
def test_activations_are_planned_in_the_type_that_is_computed(stored: torch.dtype) -> None:
    model, anatomy = unet(stored)
    wide = planned(dataclasses.replace(anatomy, components={"unet": unet(torch.float32)[0]}), Settings())
    plenty = planned(anatomy, Settings())
    assert plenty.stages[0].weights_bytes < wide.stages[0].weights_bytes
    assert plenty.stages[0].activation_bytes >= wide.stages[0].activation_bytes
    latents, text = torch.randn(2, 4, SIZE // 8, SIZE // 8), torch.randn(2, 77, 32)

    def run() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model(latents, torch.tensor(3), text).sample
        return result

    expected = run()
    for plan in (plenty, planned(anatomy, Settings.smallest())):
        with attached(model, plan.settings, device="cpu"):
            assert tiny.relative_error(run(), expected) < 1e-4
            held = measured_peak(run)
        weights = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
        assert held <= plan.stages[0].held_bytes - weights + MIB // 2
    assert torch.equal(run(), expected)


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_fidelity_is_against_what_the_host_computes(stored: torch.dtype) -> None:
    _, anatomy = unet(stored)
    assert arithmetic(anatomy, "unet", Settings()).dtype == torch.float32
    fidelity = {
        name: arithmetic(anatomy, "unet", Settings(precision=name)).fidelity for name in ("fp32", "fp16", "bf16")
    }
    assert fidelity == {"fp32": Fidelity.BITWISE, "fp16": Fidelity.APPROXIMATE, "bf16": Fidelity.APPROXIMATE}


def test_layers_that_diffusers_casts_are_refused() -> None:
    model = families.parts("sd15")["unet"]
    model.enable_layerwise_casting(storage_dtype=FP8, compute_dtype=torch.float32)
    with pytest.raises(ConflictError, match=r"enable_layerwise_casting.*weight_storage='fp8'"):
        anatomy_of(model)


def test_types_of_8_bits_narrow_what_is_wider() -> None:
    wider = (torch.float16, torch.bfloat16, torch.float32)
    assert all(narrows(one, FP8) and not narrows(FP8, one) for one in wider)
    assert narrows(FP8, torch.float8_e5m2) and not narrows(FP8, FP8)


def test_weights_of_8_bits_are_not_stored_in_8_bits_again() -> None:
    from sd_lowvram.hooks.numbers.weight_storage import quantised_layers

    assert quantised_layers(unet(torch.float16)[1], "unet")
    assert not quantised_layers(unet(FP8)[1], "unet", as_loaded=True)


def test_weights_that_the_host_moves_are_there_once(tmp_path: Path) -> None:
    """Also where they lie in a mapped file, of which ours are a copy."""
    made, anatomy = unet(torch.float16)
    settings, held = Settings(offload="component"), []
    for mapped in (False, True):
        if mapped:
            save_file(made.state_dict(), tmp_path / "unet.safetensors")
            made.load_state_dict(load_file(tmp_path / "unet.safetensors"), assign=True)
        ours = planned(anatomy, settings).stages[0]
        theirs = planned(dataclasses.replace(anatomy, moved=True), settings).stages[0]
        assert ours.held_bytes - theirs.held_bytes == (2 if mapped else 1) * ours.weights_bytes > 0
        assert ours.peak_bytes == theirs.peak_bytes
        held.append(theirs.held_bytes)
    assert held[0] == held[1]


@pytest.mark.parametrize(
    ("pipe", "loaded", "offered_types"),
    [
        (todays.flux, torch.float32, {None, "bf16"}),
        (todays.flux, torch.bfloat16, set()),
        (functools.partial(families.plain, "sd15"), torch.float32, {None, "fp16"}),
        (functools.partial(families.plain, "sd15"), torch.float16, set()),
    ],
)
def test_no_plan_takes_fp16_for_what_was_made_for_bf16(pipe: Any, loaded: torch.dtype, offered_types: Any) -> None:
    anatomy = anatomy_of(pipe().to(loaded))
    target = Target(anatomy, torch.device("cuda"), profile("rtx3060"), 1, Settings(), approximate=True)
    assert {offer.knobs["precision"] for offer in list_offers(target) if "precision" in offer.knobs} == offered_types
