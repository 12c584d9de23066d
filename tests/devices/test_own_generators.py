"""Plans and measurements draw from generators of their own: a seed that was set before gives the same picture."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import numpy
import pytest
import torch

import sd_lowvram
from sd_lowvram.commands import examination
from sd_lowvram.devices import calibration
from sd_lowvram.devices.info import default_device
from sd_lowvram.kernels import winograd
from sd_lowvram.planning import compile_gain
from sd_lowvram.settings import Settings


def _states() -> list[Any]:
    """States of every generator that a user may have seeded."""
    cards = [torch.cuda.get_rng_state(number) for number in range(torch.cuda.device_count())]
    kind, words, *more = numpy.random.get_state()
    return [random.getstate(), kind, words.tolist(), more, *(one.tolist() for one in (torch.get_rng_state(), *cards))]


def _as_users_do(pipe: Any) -> None:
    sd_lowvram.plan(pipe, width=64, height=64)
    sd_lowvram.optimize(pipe, vram="1GB", width=64, height=64)
    sd_lowvram.restore(pipe)
    sd_lowvram.decode(pipe.vae, torch.zeros(1, 4, 8, 8), settings=Settings(vae_tiles="exact"))


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "plan, optimize, decode": _as_users_do,
    "doctor": lambda _: examination.examine(),
    "doctor --calibrate": lambda _: examination.calibrate_machine(),
    "what compiling gains": lambda _: compile_gain._part_of_unet(default_device()),
    "rates without diffusers": lambda _: calibration._plain_layers(default_device()),
}
if importlib.util.find_spec("sd_lowvram.unets") is not None:
    ACTIONS["analysis of a UNet"] = lambda pipe: importlib.import_module("sd_lowvram.unets.analysis").analyse_unet(
        pipe.unet, 64, 64
    )


@pytest.mark.slow(5)
@pytest.mark.parametrize("action", ACTIONS)
def test_no_generator_of_the_process_is_drawn_from(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))
    monkeypatch.setattr(winograd, "_MAPS", ((8, 16),))
    monkeypatch.delitem(examination.MEASURED, "compile")  # takes minutes
    pipe = families.plain("sd15")
    before = _states()
    ACTIONS[action](pipe)
    assert _states() == before
