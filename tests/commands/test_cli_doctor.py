"""What doctor warns of, on machines that are not here."""

from __future__ import annotations

import pytest
import torch

from sd_lowvram.commands import examination as doctor
from sd_lowvram.devices.info import Gpu, Memory


def gpu(name: str = "NVIDIA GeForce RTX 2070", spills: bool = False) -> Gpu:
    return Gpu(name, Memory(8 << 30, 7 << 30), "550.1", (7, 5), spills)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], []),
        ([gpu()], []),
        ([gpu(spills=True)], ["Sysmem Fallback"]),
        ([gpu("NVIDIA GeForce GTX 1650")], ["fp16-storage"]),
        ([gpu("NVIDIA GeForce GTX 1660 SUPER", spills=True)], ["Sysmem Fallback", "fp16-storage"]),
    ],
)
def test_warnings(found, words):
    warnings = doctor._warnings(found)
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))


def test_what_is_missing_comes_with_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(doctor, "DEMO", tmp_path)
    monkeypatch.setattr(doctor, "_attention", lambda device, probe: [])
    missing = doctor.examine()["missing"]
    names = {part["what"] for part in missing}
    assert {"psutil", "pynvml", "diffusers", "matplotlib", "the demo model"} <= names
    if default_is_cpu():
        assert "CUDA in torch" in names
    assert all(part["effect"] and part["remedy"] for part in missing)


def default_is_cpu() -> bool:
    return doctor.default_device() == torch.device("cpu")
