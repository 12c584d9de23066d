"""Devices that nobody has tried: what is reported of them, what is asked of them, and what is refused there."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

from sd_lowvram.commands import examination as doctor
from sd_lowvram.devices import info, support
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import BadInputError, NoSiteError
from sd_lowvram.hooks.registry import applicable
from sd_lowvram.planning.request import Request
from sd_lowvram.planning.search import PlanSearch
from sd_lowvram.session import anatomy_of, attach
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB

FOREIGN = [torch.device("mps"), torch.device("xpu")]


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.pipeline("sd15")


def request_on(device: torch.device) -> Request:
    return Request(64, 64, 1, 4 * GIB, 8 * GIB, device, profile("rtx2070"))


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps", "xpu"])
def test_every_device_tells_what_may_be_expected(kind: str, monkeypatch: Any) -> None:
    told = support.support_of(torch.device(kind))
    assert told.level == {"cpu": "tested", "cuda": "simulated"}.get(kind, "untested") and told.sentence
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert support.support_of(torch.device("cuda")).level == "untested"
    assert [support.support_of_system(name) is None for name in ("linux", "win32", "darwin")] == [True, False, False]


@pytest.mark.parametrize("device", FOREIGN, ids=str)
def test_doctor_tells_it(device: torch.device, monkeypatch: Any) -> None:
    monkeypatch.setattr(doctor, "default_device", lambda: device)
    monkeypatch.setattr(doctor, "_attention", lambda *_: [])
    monkeypatch.setattr(doctor, "support_of_system", lambda: support.support_of_system("win32"))
    told = doctor.examine()["support"]
    assert [one["level"] for one in told] == ["untested", "untested"] and told[1]["name"] == "Windows"


@pytest.mark.parametrize("device", FOREIGN, ids=str)
def test_weights_are_not_streamed_there(device: torch.device, pipe: Any) -> None:
    with pytest.raises(NoSiteError, match=f"to {device.type}"):
        attach(pipe, Settings(offload="layer"), device)
    assert not any(tensor.is_meta for tensor in pipe.unet.parameters())
    anatomy = anatomy_of(pipe)
    with pytest.raises(NoSiteError, match="none or component"):
        PlanSearch(anatomy, request_on(device), Settings(offload="blocks"), approximate=False)
    assert applicable(Settings.smallest(), anatomy, device).offload is None
    assert applicable(Settings.smallest(), anatomy, torch.device("cpu")).offload == "layer"
    tried = PlanSearch(anatomy, request_on(device), Settings(), approximate=False)._placements
    assert [one.offload for one in tried] == ["none", "component"]


@pytest.mark.parametrize("device", FOREIGN, ids=str)
def test_a_run_there_is_not_recorded(device: torch.device) -> None:
    with pytest.raises(BadInputError, match=f"{device.type}"):
        support.check_measuring(device)


def test_memory_of_an_apple_gpu_is_a_share_of_the_hosts(monkeypatch: Any) -> None:
    mps = SimpleNamespace(
        recommended_max_memory=lambda: 12 * GIB,
        driver_allocated_memory=lambda: 3 * GIB,
        current_allocated_memory=lambda: 2 * GIB,
    )
    monkeypatch.setattr(torch, "mps", mps)
    for free, expected in ((14, 10), (6, 7)):  # what torch has in its cache is free too
        host = info.Memory(16 * GIB, free * GIB)
        monkeypatch.setattr(info, "host_memory", lambda host=host: host)
        assert info.device_memory(FOREIGN[0]) == info.Memory(12 * GIB, expected * GIB)


def test_memory_of_an_intel_gpu_is_asked_of_it_alone(monkeypatch: Any) -> None:
    xpu = SimpleNamespace(
        get_device_properties=lambda _: SimpleNamespace(total_memory=16 * GIB),
        memory_reserved=lambda _: 4 * GIB,
        memory_allocated=lambda _: 3 * GIB,
        mem_get_info=lambda _: (9 * GIB, 16 * GIB),
    )
    monkeypatch.setattr(torch, "xpu", xpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: pytest.fail("CUDA was asked"))
    assert info.free_vram(FOREIGN[1]) == 10 * GIB
    del xpu.mem_get_info
    assert info.device_memory(FOREIGN[1]) == info.Memory(16 * GIB, 13 * GIB)
    assert dataclasses.astuple(support.support_of(FOREIGN[1]))[1] == "untested"
