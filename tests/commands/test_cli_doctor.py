"""What doctor warns of, on machines that are not here."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sd_lowvram.cli import app
from sd_lowvram.commands import examination as doctor
from sd_lowvram.commands.doctor import _show
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


def test_the_disk_under_a_model_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "examine", lambda probe: {"gpus": []})
    monkeypatch.setattr(doctor, "disk_rate", lambda path, again: 5e8 if path == tmp_path else None)
    told = CliRunner().invoke(app, ["doctor", "--json", "--model", str(tmp_path)])
    assert json.loads(told.stdout)["disk"] == {"path": str(tmp_path), "rate": 5e8}
    refused = CliRunner().invoke(app, ["doctor", "--model", str(tmp_path / "missing")])
    assert refused.exit_code == 2 and "does not exist" in refused.output


@pytest.mark.parametrize(("rate", "words"), [(5e8, "SATA (0.5 GB/s)"), (None, "not measured")])
def test_a_disk_for_people(rate: float | None, words: str) -> None:
    found = doctor.examine(probe=False) | {"disk": {"path": "here", "rate": rate}}
    with io.StringIO() as out, contextlib.redirect_stdout(out):
        _show(found)
        assert words in out.getvalue()
