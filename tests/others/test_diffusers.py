"""diffusers' own tests of its pipelines, without our hooks and with them: none fails that did not fail before. And the
pipelines that these tests configure, rehearsed against a real run and planned within budgets."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHECKOUT = os.environ.get("DIFFUSERS_DIR")
FILES = {
    "SD": (
        "stable_diffusion/test_stable_diffusion.py",
        "StableDiffusionPipelineFastTests or TestStableDiffusionPipeline",
    ),
    "SDXL": ("stable_diffusion_xl/test_stable_diffusion_xl.py", ""),
    "img2img": ("stable_diffusion/test_stable_diffusion_img2img.py", ""),
    "inpaint": ("stable_diffusion/test_stable_diffusion_inpaint.py", ""),
    "ControlNet": ("controlnet/test_controlnet.py", ""),
    "FLUX.1": ("flux/test_pipeline_flux.py", "TestFluxPipeline"),
    "Klein": ("flux2/test_pipeline_flux2_klein.py", ""),
    "SD3": ("stable_diffusion_3/test_pipeline_stable_diffusion_3.py", ""),
    "Z-Image": ("z_image/test_z_image.py", ""),
    "Chroma": ("chroma/test_pipeline_chroma.py", ""),
    "Qwen-Image": ("qwenimage/test_qwenimage.py", ""),
}
"""By name: the file below tests/pipelines, and which of its tests (-k)."""

OF_UNETS = {"SD", "SDXL", "img2img", "inpaint", "ControlNet"}
"""Those of which some blocks fit in 1 MiB: of all other models one layer takes that."""

EXCUSED = {
    "rounding": {"test_stable_diffusion_inpaint_mask_latents"},
}
"""By hooks: a black picture, all groups of whose map are even, is encoded with our hooks and again without; torch's own
normalisation of such a map, channels last, is off by more than the values are (tests/hooks/test_vae_tiles.py)."""

pytestmark = pytest.mark.skipif(
    not CHECKOUT,
    reason="DIFFUSERS_DIR names no checkout of diffusers, whose tests are run: make test-others DIFFUSERS_DIR=...",
)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their tests apart from their sources, so that the package that is installed is tested."""
    folder = tmp_path_factory.mktemp("diffusers")
    shutil.copytree(Path(CHECKOUT or "") / "tests", folder / "tests")
    return folder


@functools.cache
def outcomes(folder: Path, name: str, hooks: str) -> tuple[frozenset[str], dict[str, Any], str]:
    """The tests that failed, what was attached how often, and what pytest said at last."""
    file, which = FILES[name]
    counts = folder / f"{name}-{hooks}.json"
    path = os.pathsep.join(
        [
            str(Path(__file__).parent),
            str(ROOT / "tests/support"),
            str(ROOT),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    )
    told = {"SD_LOWVRAM_ATTACH": hooks, "SD_LOWVRAM_ATTACHED": str(counts), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "attached_plugin",
        "-q",
        "-rfE",
        f"tests/pipelines/{file}",
        "-k",
        which,
    ]
    run = subprocess.run(command, cwd=folder, env={**os.environ, **told}, capture_output=True, text=True, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    last = (run.stdout.strip().splitlines() or [run.stderr[-400:]])[-1]
    assert counts.is_file() and re.search(r"\d+ passed", last), run.stdout[-3000:] + run.stderr[-1000:]
    return frozenset(failed), json.loads(counts.read_text()), last


@pytest.mark.slow(400)
@pytest.mark.parametrize(
    ("name", "hooks"),
    [(name, kept) for name in FILES for kept in ("bitwise" if name in OF_UNETS else "layers", "rounding")],
)
def test_no_test_of_theirs_fails_that_did_not_before(theirs: Path, name: str, hooks: str) -> None:
    before, none, _ = outcomes(theirs, name, "off")
    after, counts, last = outcomes(theirs, name, hooks)
    refused = {reason: count for reason, count in counts.items() if reason != "attached"}
    print(f"{name}, {hooks}: {counts.get('attached', 0)} calls attached; {last}; refused: {refused or 'none'}")
    assert not none and counts["attached"] >= 20 and sum(refused.values()) <= counts["attached"] // 20
    new = {test for test in after - before if test.rpartition("::")[2] not in EXCUSED.get(hooks, ())}
    assert not new, sorted(new)


@pytest.mark.slow(3600)
@pytest.mark.parametrize("part", ["calls", "half", "plans"])
def test_pipelines_run_as_they_were_rehearsed_and_planned(theirs: Path, part: str, tmp_path: Path) -> None:
    out = tmp_path / "pipelines.md"
    command = [sys.executable, Path(__file__).parent / "over_pipelines.py", theirs, "--part", part, "--out", out]
    run = subprocess.run(command, cwd=theirs, capture_output=True, text=True, check=False)
    sheet = out.read_text(encoding="utf-8")
    print(*(line for line in sheet.splitlines() if line.startswith("- ")), sep="\n")
    assert run.returncode == 0, re.findall(r".*\*\*.*", sheet)
