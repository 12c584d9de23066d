"""What the machine has; containers' limits count."""

from __future__ import annotations

import builtins
import warnings

import pytest
import torch

from sd_lowvram.devices import info as device
from sd_lowvram.devices.info import (
    Memory,
    available_ram,
    default_device,
    device_memory,
    free_vram,
    host_memory,
    spills_to_host,
)


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(str(content))


def test_the_machine():
    memory = host_memory()
    assert 0 < memory.free <= memory.total
    assert available_ram() > 0 and free_vram(torch.device("cpu")) > 0
    assert default_device().type in ("cpu", "cuda", "mps", "xpu")


def test_cgroup_v2(tmp_path):
    write(tmp_path, memory__max=1 << 30, memory__current=600 << 20, memory__stat=f"anon 5\ninactive_file {100 << 20}\n")
    assert host_memory(tmp_path) == Memory(1 << 30, (1 << 30) - (500 << 20))


def test_cgroup_v1(tmp_path):
    write(tmp_path / "memory", memory__limit_in_bytes=1 << 30, memory__usage_in_bytes=2 << 30)
    assert host_memory(tmp_path) == Memory(1 << 30, 0)


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096), ""])
def test_no_limit(tmp_path, limit):
    write(tmp_path, memory__max=limit, memory__current=5)
    assert host_memory(tmp_path).total == host_memory(tmp_path / "none").total


def test_without_psutil_and_nvml(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name in ("psutil", "pynvml"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    device._warn_missing.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            assert host_memory().free > 0
            assert device.driver_version() == ""
    device._warn_missing.cache_clear()
    assert sorted(str(w.message).split()[0] for w in seen) == ["nvidia-ml-py", "psutil"]


@pytest.mark.parametrize(
    ("system", "release", "spills"),
    [("win32", "10", True), ("linux", "5.15.90.1-microsoft-standard-WSL2", True), ("linux", "6.1.0", False)],
)
def test_spilling(system, release, spills):
    assert spills_to_host(system, release) is spills


@pytest.mark.gpu
def test_gpu_memory():
    memory = device_memory(torch.device("cuda"))
    block = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    assert device_memory(torch.device("cuda")).free < memory.free
    del block
    # What torch keeps in its cache is free for the next tensor.
    assert abs(device_memory(torch.device("cuda")).free - memory.free) < 64 << 20
    (gpu, *_) = device.gpus()
    assert gpu.driver and gpu.memory.total > 1 << 30
