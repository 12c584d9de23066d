"""Gradients on the card, with what moves weights or runs on a card only: as on the plain model, or refused by name."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import tiny
import torch
from gradients import WANTED, Case, every_knob, named, tolerance
from on_card import GPU

from sd_lowvram import Settings, attached
from sd_lowvram.errors import LowVRAMError

CARDS = ("offload", "precision", "weight_storage", "cuda_graphs", "fused_kernels")
"""Knobs that act on a card in another way than on a CPU."""
NARROW = ("fp16", "bf16", "autocast-fp16", "autocast-bf16")
"""The simulated card has no kernels for the way back in 16 bits."""
WAYS = [one for one in every_knob() if any(getattr(one, name) for name in CARDS) and one.precision not in NARROW]


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("settings", WAYS, ids=named)
def test_gradients(gpu: Any, settings: Settings, wanted: str) -> None:
    case = Case("unet", wanted, GPU)
    with attached(case.model, Settings(offload="none"), device=GPU):
        expected = [one.cpu() for one in case.gradients()]
    allowed = tolerance(settings)
    with warnings.catch_warnings(), contextlib.suppress(LowVRAMError):
        warnings.simplefilter("ignore")
        with attached(case.model, settings.filled(offload="none"), device=GPU):
            found = case.gradients()
            for leaf, one in zip(case.weights, found, strict=False):
                assert (one.device, one.dtype) == (leaf.device, leaf.dtype)
            found = [one.cpu().float() for one in found]
            error = tiny.relative_error(*(torch.cat([one.flatten() for one in all_]) for all_ in (found, expected)))
            assert error <= (0.5 if allowed is None else allowed)
