"""ComfyUI nodes: settings become inputs, and hooks go on through the host's own doors. Nothing is computed here."""

from __future__ import annotations

from typing import Any

from ..sd_lowvram import doors, errors
from .decoding import LowVRAMVAEDecode, LowVRAMVAEEncode
from .optimising import LowVRAM, LowVRAMSettings
from .reporting import LowVRAMPlan, LowVRAMReport

_NODES: dict[str, tuple[type[Any], str]] = {
    "LowVRAM": (LowVRAM, "Low VRAM"),
    "LowVRAMSettings": (LowVRAMSettings, "Low VRAM Settings"),
    "LowVRAMVAEDecode": (LowVRAMVAEDecode, "VAE Decode (low VRAM)"),
    "LowVRAMVAEEncode": (LowVRAMVAEEncode, "VAE Encode (low VRAM)"),
    "LowVRAMPlan": (LowVRAMPlan, "Plan (low VRAM)"),
    "LowVRAMReport": (LowVRAMReport, "Report (low VRAM)"),
}
for _error in vars(errors).values():
    if isinstance(_error, type):
        _error.__module__ = "sd_lowvram.errors"  # the page shows it, and in a host it is a path
doors.find()
_NODES |= {name: make_node() for name, make_node in doors.NODES.items()}

NODE_CLASS_MAPPINGS = {name: node for name, (node, _) in _NODES.items()}
NODE_DISPLAY_NAME_MAPPINGS = {name: title for name, (_, title) in _NODES.items()}
