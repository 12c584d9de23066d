"""The package without each part that can be deleted: all modules import, the commands are listed, a plan is made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = {"unets": "unet", "batches": "batch"}  # the command that each part adds
PARTS = (*COMMANDS, "approximate")

SCRIPT = """
import importlib, pkgutil, sys, warnings
warnings.simplefilter("error", UserWarning)
import sd_lowvram
for module in pkgutil.walk_packages(sd_lowvram.__path__, "sd_lowvram."):
    if ".nodes" not in module.name:  # those import ComfyUI's package, which is the checkout
        importlib.import_module(module.name)
from typer.main import get_command
from typer.testing import CliRunner
from sd_lowvram.cli import app
print(sd_lowvram.__file__, *get_command(app).commands, sep="\\n")
done = CliRunner().invoke(app, "plan --gpu rtx2070 --vram 4GB --json".split())
sys.exit(0 if '"fits": true' in done.output else repr(done))
"""


@pytest.mark.slow(10)
@pytest.mark.parametrize("part", PARTS)
def test_the_package_works_without(part: str, tmp_path: Path) -> None:
    if not (ROOT / "sd_lowvram" / part).is_dir():
        pytest.skip(f"sd_lowvram/{part} is not here, and the other tests show that all works")
    shutil.copytree(
        ROOT / "sd_lowvram",
        tmp_path / "sd_lowvram",
        ignore=lambda folder, names: {part} if Path(folder) == ROOT / "sd_lowvram" else set(),
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    place, *commands = done.stdout.splitlines()
    assert Path(place).is_relative_to(tmp_path)
    added = {COMMANDS[part]} if part in COMMANDS else set()
    assert added.isdisjoint(commands)
    assert {"generate", "plan", *COMMANDS.values()} - added <= set(commands)


@pytest.mark.parametrize("part", [*PARTS, "benchmarks"])
def test_tests_of_the_core_import_nothing_of(part: str) -> None:
    package = part if part == "benchmarks" else f"sd_lowvram.{part}"
    own = [ROOT / "tests" / name for name in (*PARTS, "benchmarks")]
    importing = [
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "tests").rglob("test_*.py")
        if not any(file.is_relative_to(folder) for folder in own)
        and any(
            line.startswith((f"from {package}", f"import {package}")) for line in file.read_text("utf-8").splitlines()
        )
    ]
    assert not importing
