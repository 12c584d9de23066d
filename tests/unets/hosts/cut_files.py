"""Single files of SD1.5 with layers cut out, as `unet prune` and `combine` write them: narrow, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import random_checkpoint
from typer.testing import CliRunner

from sd_lowvram.checkpoints import inspection
from sd_lowvram.cli import app

KINDS = ("base", "small", "tiny", "M2")


def write(config: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Kind -> its file in ``folder``, of a model of ``config``, which is like SD1.5's."""
    whole, base = folder / "whole.safetensors", folder / "base.safetensors"
    files = {kind: folder / f"{kind}.safetensors" for kind in KINDS}
    random_checkpoint.write(config, whole)
    with of_config(config):
        for kind in ("base", "small", "tiny"):
            _call("prune", "--model", whole, "--kind", kind, "--out", files[kind])
        _call("combine", "--model", whole, "--compressed", base, "--out", files["M2"])
    whole.unlink()
    return files


def of_config(config: dict[str, Any]) -> Any:
    """Inside, single files are those of ``config``'s widths."""
    return mock.patch.object(
        inspection,
        "architecture",
        lambda name: {key: dict(one) if isinstance(one, dict) else one for key, one in config.items()},
    )


def _call(*words: Any) -> None:
    done = CliRunner().invoke(app, ["unet", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
