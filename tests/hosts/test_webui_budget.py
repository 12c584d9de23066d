"""Budgets in a real AUTOMATIC1111, beside an independent counter: SDXL's base and refiner, and what a step takes.

WEBUI_DIR=... [WEBUI_PYTHON=...] [WEBUI_CHECKPOINT=an SD1.5 of full size] make test-hosts
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_webui import HERE, IS_FORGE, PYTHON, WEBUI, _clone, assert_same
from webui_server import NAME, Server, serving

pytestmark = pytest.mark.skipif(not WEBUI or IS_FORGE, reason="set WEBUI_DIR to an AUTOMATIC1111 that runs")

MIB = 1 << 20
REFINED: dict[str, Any] = {"refiner_checkpoint": "refiner", "refiner_switch_at": 0.5, "steps": 4}


def folder(place: Path) -> Path:
    """A data folder with our extension and the watching script."""
    (place / "models" / "Stable-diffusion").mkdir(parents=True)
    _clone(place / "extensions" / NAME)
    watch = place / "extensions" / "watch-peaks" / "scripts"
    watch.mkdir(parents=True)
    shutil.copy(HERE / "webui_peaks.py", watch)
    return place


def watched(server: Server, since: int = 0) -> list[tuple[str, float, int]]:
    """What the watching script told: stage, bytes or seconds, and bytes that the model holds."""
    told = re.findall(r"^\[peaks\] (\w+) ([\d.]+) beside (\d+)$", server.told(), re.MULTILINE)
    return [(stage, float(figure), int(held)) for stage, figure, held in told][since:]


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A narrow SDXL base, with a refiner of another configuration at hand."""
    data = folder(tmp_path_factory.mktemp("sdxl"))
    for kind in ("base", "refiner"):
        file = data / "models" / "Stable-diffusion" / f"{kind}.safetensors"
        subprocess.run([PYTHON, str(HERE / "webui_models.py"), str(WEBUI), str(file), "3", kind], check=True)
    with serving(
        Path(WEBUI or ""), PYTHON, data, "--ckpt", str(data / "models/Stable-diffusion/base.safetensors")
    ) as s:
        s.ask("/sdapi/v1/options", {"live_previews_enable": False})  # else it downloads a small VAE for them
        yield s


def test_base_and_refiner_keep_the_budget(sdxl: Server) -> None:
    size = {"width": 256, "height": 256}
    plain = sdxl.make(**REFINED, **size)
    bare = watched(sdxl)
    steps = [one for one in bare if one[0] == "denoise"]
    held = max(one[2] for one in bare)
    budget = held + int(0.6 * min(figure for _, figure, _ in steps[:1] + steps[-1:]))
    before = len(sdxl.plans())
    ours = sdxl.make(ours={"offload": "none", "vram": f"{budget // MIB}MB"}, **REFINED, **size)
    assert_same(ours, plain)
    base, refiner = (sdxl.sites(line) for line in sdxl.plans()[before:])
    assert len(base) > 1 and len(refiner) > 1, (base, refiner)
    now = watched(sdxl, len(bare))
    assert [one[0] for one in now] == [one[0] for one in bare]
    assert all(figure + held <= budget for _, figure, held in now), (budget, now)
    assert any(figure + held > budget for _, figure, held in bare)


@pytest.mark.skipif("WEBUI_CHECKPOINT" not in os.environ, reason="WEBUI_CHECKPOINT: an SD1.5 of full size")
def test_a_step_at_scale_1_takes_hardly_longer(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processor seconds, which what else the machine does changes less: 512x512, in pairs."""
    monkeypatch.setenv("WATCH", "time")
    data = folder(tmp_path_factory.mktemp("speed"))
    checkpoint = data / "models" / "Stable-diffusion" / "full.safetensors"
    checkpoint.symlink_to(Path(os.environ["WEBUI_CHECKPOINT"]).resolve())
    asked = {"cfg_scale": 1, "width": 512, "height": 512, "steps": 2}
    with serving(Path(WEBUI or ""), PYTHON, data, "--ckpt", str(checkpoint)) as s:
        pairs = []
        for _ in range(2):
            plain, bare = s.make(**asked), watched(s)[-3:]
            budget = bare[-1][2] // MIB + 190
            ours = s.make(ours={"offload": "none", "vram": f"{budget}MB"}, **asked)
            assert_same(ours, plain)
            sites, taken = s.sites(), watched(s)[-3:]
            assert sites["vae_exact"] == 2 and len(sites) >= 3, sites
            pairs += [one[1] / other[1] for one, other in zip(taken[:2], bare[:2], strict=True)]
        print(f"{budget} MiB: {sites}; a step takes {pairs} times as long")
        assert statistics.median(pairs) <= 1.15
