"""Registration of smaller UNets: the command ``unet``, their class, their single files, a ComfyUI node."""

from __future__ import annotations

import importlib
from typing import Any

from ..doors import register


def _command() -> Any:
    for name in ("distil", "evaluate", "generate", "lora"):  # which add themselves to it
        _import(f".commands.{name}")
    return _import(".commands.unet").unet


def _cut_unet(*inputs: Any) -> Any:
    return _import(".checkpoints.unet_layout").cut_unet(*inputs)


def _import(name: str) -> Any:
    return importlib.import_module(name, __package__)


register(
    classes={"ASDMUNet2DConditionModel": lambda: _import(".asdm_unet").ASDMUNet2DConditionModel},
    unets={"cut": _cut_unet},
    nodes={
        "LowVRAMUNetSchedule": lambda: (_import(".nodes.scheduling").LowVRAMUNetSchedule, "UNet Schedule (low VRAM)")
    },
    commands={"unet": _command},
)
