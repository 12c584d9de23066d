"""What callers give by mistake gets one sentence: the value, and what would work; the model stays as it was."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import families
import pytest
import torch

import sd_lowvram
from sd_lowvram import Settings, attached
from sd_lowvram.errors import BadInputError

PLENTY: dict[str, Any] = {"vram": "1GB", "ram": "1GB", "width": 64, "height": 64, "device": "cpu"}
LATENTS, PIXELS = torch.zeros(1, 4, 8, 8), torch.zeros(1, 3, 64, 64)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return families.plain("sd15")


DEVICES: list[tuple[Any, str]] = [
    ("tpu", "device 'tpu' is unknown: choose one of cpu, cuda"),
    ("", "device '' is unknown"),
    ("cpu:x", "device 'cpu:x' is unknown"),
    ("meta", "device 'meta' is unknown"),
    (torch.device("meta"), "device 'meta' is unknown"),
    (3, "device 3 is not a device: give its name"),
    (True, "device True is not a device"),
    *([] if torch.cuda.is_available() else [("cuda", "device 'cuda' cannot be used .*: cpu always can")]),
    ("cuda:99", "device 'cuda:99' cannot be used .*: cpu always can"),
]
SETTINGS: list[tuple[Any, str]] = [
    ({"weights_mib": 4}, r"expected Settings, got {'weights_mib': 4}: give sd_lowvram.Settings\(weights_mib=4\)"),
    ({}, "expected Settings, got {}: give"),
    ("fast", "expected Settings, got 'fast': give"),
]
NUMBERS: list[tuple[str, Any, str]] = [
    *(("steps", value, f"steps {value!r} must be a whole number of at least 1") for value in (-1, 0, 1.5, "3", True)),
    *(("pictures", value, f"pictures {value!r} must be a whole number") for value in (-1, 0, 1.5, "2")),
    ("approximate", "yes", "approximate 'yes' must be True or False"),
    ("approximate", 1, "approximate 1 must be True or False"),
]


@pytest.mark.parametrize(("device", "told"), DEVICES, ids=lambda one: repr(one)[:20])
def test_devices(pipe: Any, device: Any, told: str) -> None:
    for ask in (sd_lowvram.plan, sd_lowvram.optimize):
        with pytest.raises(BadInputError, match=told):
            ask(pipe, **{**PLENTY, "device": device})
    with pytest.raises(BadInputError, match=told):
        sd_lowvram.max_size(pipe, vram="1GB", device=device)
    with pytest.raises(BadInputError, match=told):
        sd_lowvram.decode(pipe.vae, LATENTS, device=device)
    with pytest.raises(BadInputError, match=told):
        sd_lowvram.encode(pipe.vae, PIXELS, device=device)
    with pytest.raises(BadInputError, match=told), attached(pipe, Settings(), device=device):
        pass
    assert "forward" not in vars(pipe.unet)


@pytest.mark.parametrize(("settings", "told"), SETTINGS, ids=lambda one: repr(one)[:20])
def test_settings(pipe: Any, settings: Any, told: str) -> None:
    for ask in (sd_lowvram.plan, sd_lowvram.optimize):
        with pytest.raises(BadInputError, match=told) as error:
            ask(pipe, settings=settings, **PLENTY)
    sd_lowvram.plan(pipe, settings=eval(str(error.value).split("give ")[1]), **PLENTY)
    with pytest.raises(BadInputError, match=told):
        sd_lowvram.max_size(pipe, vram="1GB", device="cpu", settings=settings)
    with pytest.raises(BadInputError, match=told):
        sd_lowvram.decode(pipe.vae, LATENTS, vram="1GB", settings=settings)
    with pytest.raises(BadInputError, match=told), attached(pipe, settings, device="cpu"):
        pass
    assert "forward" not in vars(pipe.unet)


@pytest.mark.parametrize(("name", "value", "told"), NUMBERS)
def test_numbers_and_switches(pipe: Any, name: str, value: Any, told: str) -> None:
    for ask in (sd_lowvram.plan, sd_lowvram.optimize):
        with pytest.raises(BadInputError, match=re.escape(told)):
            ask(pipe, **{**PLENTY, name: value})


@pytest.mark.parametrize("target", ["x", None, 3, {}, [], Settings])
def test_restore_of_what_carries_nothing(target: Any) -> None:
    with pytest.raises(BadInputError, match=r"restore\(\).*optimize\(\)"):
        sd_lowvram.restore(target)


def test_restore_where_nothing_is_attached(pipe: Any) -> None:
    sd_lowvram.restore(pipe)
    sd_lowvram.restore(pipe.unet)


@pytest.mark.parametrize("given", [None, "latents.pt", [[0.0]]])
def test_maps_that_are_no_tensors(pipe: Any, given: Any) -> None:
    for ask, what in ((sd_lowvram.decode, "latents"), (sd_lowvram.encode, "pixels")):
        with pytest.raises(BadInputError, match=f"{what} .*{type(given).__name__}"):
            ask(pipe.vae, given, vram="1GB")


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for Python is a shell script")
@pytest.mark.parametrize("name", ["PROMPT", "SEED", "VRAM", "SIZE", "STEPS", "MODEL", "OUT"])
def test_make_gives_what_is_typed_to_the_program_alone(tmp_path: Path, name: str) -> None:
    """Neither make nor the shell runs what stands in a value."""
    (tmp_path / "bin").mkdir()
    (tmp_path / ".standalone").touch()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    trap = tmp_path / "trap"
    root = Path(__file__).parents[1]
    for value in (f"$(shell touch {trap})", f"1; touch {trap}", f"`touch {trap}`", f'" ; touch {trap} ; "'):
        command = [
            "make",
            "--no-print-directory",
            "--old-file",
            str(tmp_path / ".standalone"),
            "picture",
            f"VENV={tmp_path}",
        ]
        if name == "SIZE":  # the demo model draws the one that it knows
            command.append("MODEL=folder")
        done = subprocess.run([*command, f"{name}={value}"], cwd=root, capture_output=True, text=True, check=True)
        assert value in done.stdout.splitlines()
        assert not trap.exists()
