"""What ComfyUI's registry and AUTOMATIC1111's index of extensions read is valid by their own rules."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
ACCELERATORS = {
    f"Environment :: {name}"
    for name in (
        "GPU :: NVIDIA CUDA", "GPU :: AMD ROCm", "GPU :: Intel Arc", "NPU :: Huawei Ascend", "GPU :: Apple Metal"
    )
}  # fmt: skip
TAGS = {
    "script", "localization", "tab", "dropdown", "ads", "installed", "training", "models", "UI related", "prompting",
    "editing", "manipulations", "online", "animation", "query", "science", "extras",
}  # fmt: skip
"""Those of the index."""


@pytest.fixture
def pyproject() -> dict[str, Any]:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with Python 3.11")
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_comfyuis_registry(pyproject: dict[str, Any]) -> None:
    project, comfy = pyproject["project"], pyproject["tool"]["comfy"]
    assert re.fullmatch(r"(?=.{1,99}$)[a-z]+([-_.]?[a-z0-9]+)*", project["name"]) and "comfyui" not in project["name"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    environments = {one for one in project["classifiers"] if one.startswith("Environment ::")}
    assert environments <= ACCELERATORS, "with any other none is taken"
    assert "Operating System :: OS Independent" in project["classifiers"]
    assert re.fullmatch(r"(>=|<=|==|~=|!=|>|<)?\d+\.\d+\.\d+", comfy["requires-comfyui"])
    assert comfy["PublisherId"] and comfy["DisplayName"]
    addresses = {"Icon", "Banner"} & comfy.keys()
    assert all(comfy[name].startswith("https://") for name in addresses)
    assert set(comfy) - addresses == {"PublisherId", "DisplayName", "requires-comfyui"}


def test_icon_and_banner_have_the_registrys_sizes() -> None:
    with Image.open(ROOT / "docs" / "icon.png") as icon, Image.open(ROOT / "docs" / "banner.png") as banner:
        assert icon.width == icon.height <= 400
        assert banner.width * 9 == banner.height * 21


def test_the_index_of_extensions() -> None:
    told = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    entry = json.loads(told.partition("```json\n")[2].partition("```")[0])
    assert entry.keys() == {"name", "url", "description", "tags"}
    assert entry["url"] == "ADDRESS", "where it is known now: https://"
    assert set(entry["tags"]) <= TAGS
