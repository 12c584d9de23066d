"""Registration of smaller UNets: the command ``unet``, their class, their single files, a ComfyUI node."""

from __future__ import annotations

import importlib
from typing import Any

from ..doors import register


def _command() -> Any:
    for name in ("distil", "evaluate", "generate", "lora"):  # which add themselves to it
        _of(f".commands.{name}")
    return _of(".commands.unet").unet


def _cut_unet(*inputs: Any) -> Any:
    return _of(".checkpoints.unet_layout").cut_unet(*inputs)


def _of(name: str) -> Any:
    return importlib.import_module(name, __package__)


register(
    classes={"ASDMUNet2DConditionModel": lambda: _of(".asdm_unet").ASDMUNet2DConditionModel},
    unets={"cut": _cut_unet},
    nodes={"LowVRAMUNetSchedule": lambda: (_of(".nodes.scheduling").LowVRAMUNetSchedule, "UNet Schedule (low VRAM)")},
    commands={"unet": _command},
)
