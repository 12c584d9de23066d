"""``generate --memory-plot``: refused before anything is loaded, or a picture of the plan and the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
from PIL import Image
from typer.testing import CliRunner

from sd_lowvram.cli import app
from sd_lowvram.planning import memory_profile as recording


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("model")
    families.plain("sd15").save_pretrained(folder)
    return folder


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["generate", "a red apple", "--steps", "2", *map(str, arguments)])


def test_a_plot_of_the_run(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(recording, "overrun", lambda plan, run: "decode took more")
    plot = tmp_path / "plots" / "memory.png"
    done = call("--model", model, "-o", tmp_path / "a.png", "--memory-plot", plot, "--json")
    assert done.exit_code == 0, done.output
    with Image.open(plot) as image:
        assert image.format == "PNG" and image.width > 800
    result = json.loads(done.stdout[done.stdout.index("{") :])
    assert result["memory_plot"] == str(plot)
    assert [stage["name"] for stage in result["measured"]["stages"]] == ["text", "denoise", "denoise", "decode"]
    assert done.stderr.count("decode took more") == 1


def test_another_ending_is_refused_at_once(tmp_path: Path) -> None:
    done = call("--memory-plot", tmp_path / "memory.jpg")
    assert done.exit_code == 2
    assert ".png" in done.stderr


def test_a_plot_that_cannot_be_drawn_is_refused_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    done = call("--memory-plot", tmp_path / "memory.png")
    assert done.exit_code == 2
    assert "sd-lowvram[plots]" in done.stderr
