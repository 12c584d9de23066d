"""The command line in processes of its own: how it is called, and programs for :mod:`forked`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "sd_lowvram", *map(str, arguments)]


def call(*arguments: object, folder: Path, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


MAIN = "from sd_lowvram.__main__ import main; main()"
LIGHT = """
import sys
try:
    from sd_lowvram.__main__ import main
    main()
finally:
    print([name for name in ("torch", "diffusers", "transformers") if name in sys.modules])
"""
LIGHTLY = """
from typer.testing import CliRunner
from sd_lowvram.cli import app
assert CliRunner().invoke(app, ["generate", "an apple", "--steps", "0"]).exit_code == 2
"""
HEAVILY = f"""{LIGHTLY}
import rich.progress, torch
import sd_lowvram.commands.latents, sd_lowvram.commands.paint, sd_lowvram.commands.resume, sd_lowvram.commands.show
from sd_lowvram.checkpoints.load import load_pipeline
load_pipeline(None, dtype=torch.float32)
"""
"""Imports of a picture, the classes of its models included: 4 of the 6 seconds that one takes."""
