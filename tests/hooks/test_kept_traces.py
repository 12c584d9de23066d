"""Traces that are stored for other processes: the same bits, what is traced again, and what is never stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from run_log import logged, nothing_logged
from torch import nn

from sd_lowvram import Settings, attached
from sd_lowvram.hooks.replay import kept_traces

TRACED = Settings(traced=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))
    return tmp_path / "traced"


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    trace = torch.jit.trace

    def counted(call: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(call)
        return trace(call, *args, **kwargs)

    monkeypatch.setattr(torch.jit, "trace", counted)
    return found


def passes(unet: Any, count: int = 3, size: int = 8, settings: Settings = TRACED) -> list[torch.Tensor]:
    given = torch.ones(1, 4, size, size), torch.tensor(5), torch.ones(1, 7, unet.config.cross_attention_dim)
    with attached(unet, settings, device="cpu"), torch.inference_mode():
        return [unet(*given).sample for _ in range(count)]


@pytest.mark.slow(15)
def test_another_process_does_not_trace_and_has_the_same_bits(folder: Path) -> None:
    def run(size: int) -> Any:
        command = [sys.executable, str(Path(__file__).with_name("traced_passes.py")), str(size)]
        root = Path(__file__).parents[2]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (root, root / "tests" / "support")))}
        return json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)

    first, second = run(8), run(8)
    assert (first["traced"], second["traced"]) == (1, 0)
    assert first["found"][1:] == second["found"][1:] and second["found"][0] == first["found"][1]
    assert max(first["error"], second["error"]) < 1e-5
    assert len(list(folder.iterdir())) == 1
    assert all(place.stat().st_size < 1 << 20 for place in folder.iterdir())


def test_kept_without_weights_and_bound_to_those_at_hand(folder: Path, followed: list[Any]) -> None:
    passes(families.plain("sd15").unet)
    other = families.plain("sd15").unet
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5)
    plain = passes(other, settings=Settings())[0]
    with nothing_logged():
        found = passes(other)
    assert len(followed) == 1
    assert all(tiny.relative_error(one, plain) < 1e-5 for one in found)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "no archive"])
def test_a_damaged_file_is_traced_anew_and_said(folder: Path, followed: list[Any], damage: str) -> None:
    expected = passes(families.plain("sd15").unet)
    (place,) = folder.iterdir()
    data = place.read_bytes()
    middle = data.index(b"aten::") if b"aten::" in data else data.index(b"torch.")
    changed = data[:middle] + bytes(byte ^ 1 for byte in data[middle : middle + 8]) + data[middle + 8 :]
    place.write_bytes({"cut": data[: len(data) // 2], "changed": changed, "empty": b"", "no archive": b"{}"}[damage])
    with logged("the stored trace of this model cannot be used .*traced again"):
        found = passes(families.plain("sd15").unet)
    assert len(followed) == 2 and torch.equal(found[-1], expected[-1])
    with nothing_logged():
        passes(families.plain("sd15").unet)
    assert len(followed) == 2, "what was written anew is whole"


def test_another_torch_is_said_and_traced_anew(
    folder: Path, followed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as then:
        then.setattr(kept_traces, "versions", lambda: {"torch": "2.0.9"})
        then.setattr(kept_traces, "code_digest", lambda: "of 2.0.9")
        passes(families.plain("sd15").unet)
    with logged("cannot be used .it is of torch 2.0.9.*It is traced again"):
        passes(families.plain("sd15").unet)
    assert len(followed) == 2 and len(list(folder.iterdir())) == 1
    monkeypatch.setattr(kept_traces, "code_digest", lambda: "of other code")
    with logged("of another version of sd-lowvram"):
        passes(families.plain("sd15").unet)
    assert len(followed) == 3


def test_other_settings_sizes_and_configurations_are_other_traces(folder: Path, followed: list[Any]) -> None:
    passes(families.plain("sd15").unet)
    passes(families.plain("sd15").unet, size=16)
    passes(families.plain("sd15").unet, settings=Settings(traced=True, channels_last=True))
    changed = families.plain("sd15").unet
    changed.mid_block.resnets[0].output_scale_factor = 2.0
    plain = passes(changed, settings=Settings())[0]
    assert tiny.relative_error(passes(changed)[-1], plain) < 1e-5
    assert len(followed) == len(list(folder.iterdir())) == 4


class Scaled(nn.Module):
    """Somebody's layer, of a package whose version nobody knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * x


def patched(unet: Any) -> None:
    unet.conv_in.forward = lambda x: 2 * type(unet.conv_in).forward(unet.conv_in, x)


def with_a_layer(unet: Any) -> None:
    unet.conv_act = Scaled()


def with_a_tensor(unet: Any) -> None:
    unet.conv_in.table = torch.ones(3)


@pytest.mark.parametrize("change", [patched, with_a_layer, with_a_tensor])
def test_code_of_others_is_not_kept(folder: Path, followed: list[Any], change: Any) -> None:
    unet = families.plain("sd15").unet
    change(unet)
    plain = passes(unet, settings=Settings())[0]
    assert tiny.relative_error(passes(unet)[-1], plain) < 1e-5
    assert len(followed) == 1 and not folder.exists()


def test_settings_attached_beside_it_are_in_no_name_and_so_not_kept(folder: Path, followed: list[Any]) -> None:
    unet = families.plain("sd15").unet
    with attached(unet, Settings(channels_last=True), device="cpu"):
        passes(unet)
    assert len(followed) == 1 and not folder.exists()


@pytest.mark.parametrize("named", ["", "/dev/null/here"])
def test_without_a_cache_it_is_traced_as_ever(
    named: str, folder: Path, followed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", named)
    with nothing_logged():
        first, second = passes(families.plain("sd15").unet), passes(families.plain("sd15").unet)
    assert len(followed) == 2 and torch.equal(first[-1], second[-1]) and not folder.exists()
