"""Which calls the guard plans anew, by the sizes that come: where the threshold lies, and what is asked then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import families
import pytest
import torch

import sd_lowvram
from sd_lowvram.session import attachments

PLANNED = {"width": 64, "height": 64, "batch": 2}
"""Four rows of the denoiser, 8x8 latent pixels each."""

AS_PLANNED = [
    ("unet", (4, 4, 8, 8)),
    ("unet", (2, 4, 8, 8)),
    ("unet", (1, 4, 8, 8)),
    ("unet", (2, 4, 16, 8)),
    ("unet", (1, 4, 16, 16)),
    ("decode", (2, 4, 8, 8)),
    ("decode", (1, 4, 16, 8)),
]
"""No more pixels in all than were planned, however they are shared among rows."""

LARGER = [
    ("unet", (4, 4, 16, 8), (64, 128, 2)),
    ("unet", (4, 4, 8, 16), (128, 64, 2)),
    ("unet", (2, 4, 24, 8), (64, 192, 2)),
    ("unet", (6, 4, 8, 8), (64, 64, 3)),
    ("unet", (8, 4, 8, 8), (64, 64, 4)),
    ("unet", (5, 4, 8, 8), (64, 64, 3)),
    ("decode", (2, 4, 9, 8), (64, 72, 2)),
    ("decode", (3, 4, 8, 8), (64, 64, 3)),
    ("encode", (2, 3, 64, 64), (64, 64, 2)),
]
"""What comes, and the width, height and pictures for which the next plan is made: never less than what came."""


@pytest.fixture(scope="module")
def loaded() -> Any:
    return families.plain("sd15")


@pytest.fixture
def pipe(loaded: Any) -> Iterator[Any]:
    fixed = sd_lowvram.Settings.policy("diffusers-default")  # so that of each size that comes one way alone is traced
    sd_lowvram.optimize(loaded, vram="1GB", device="cpu", settings=fixed, **PLANNED)
    yield loaded
    sd_lowvram.restore(loaded)


def call(pipe: Any, entry: str, shape: tuple[int, ...], by_name: bool = False) -> None:
    """One call of a part, with its inputs by position, or by name and the conditions before the latents."""
    x = torch.zeros(shape)
    with torch.no_grad():
        if entry != "unet":
            getattr(pipe.vae, entry)(x)
        elif by_name:
            text = torch.zeros(len(x), 77, 32)
            pipe.unet(encoder_hidden_states=text, timestep=torch.tensor(1), sample=x)
        else:
            pipe.unet(x, torch.tensor(1), torch.zeros(len(x), 77, 32))


def size(plan: Any) -> tuple[int, int, int]:
    return plan.request.width, plan.request.height, plan.request.batch


def test_what_was_planned_for_keeps_its_plan(pipe: Any) -> None:
    planned = attachments(pipe)
    for entry, shape in AS_PLANNED:
        call(pipe, entry, shape)
        assert attachments(pipe) == planned, (entry, shape)


@pytest.mark.parametrize(("entry", "shape", "asked"), LARGER)
def test_what_is_larger_is_planned_for_what_came(
    pipe: Any, entry: str, shape: tuple[int, ...], asked: tuple[int, ...]
) -> None:
    (first,) = attachments(pipe)
    call(pipe, entry, shape)
    (now,) = attachments(pipe)
    assert size(now.plan) == asked
    assert now.plan.request.vram == first.plan.request.vram
    call(pipe, entry, shape)
    assert attachments(pipe) == [now]


def test_a_call_by_name_is_looked_at_by_its_latents(pipe: Any) -> None:
    call(pipe, "unet", (4, 4, 16, 8), by_name=True)
    assert size(attachments(pipe)[0].plan) == (64, 128, 2)
