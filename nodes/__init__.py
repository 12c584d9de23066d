"""ComfyUI nodes: settings become inputs, and hooks go on through the host's own doors. Nothing is computed here.

The ids are in people's workflows: they stay for ever, and so does the order of inputs and outputs.
"""

from __future__ import annotations

from typing import Any

from ..sd_lowvram import doors
from .decoding import LowVRAMVAEDecode, LowVRAMVAEEncode
from .optimising import LowVRAMOptimizeModel, LowVRAMOptimizeVAE
from .reporting import LowVRAMPlan, LowVRAMReport

_NODES: dict[str, tuple[type[Any], str]] = {
    "LowVRAMOptimizeModel": (LowVRAMOptimizeModel, "Optimize Model (low VRAM)"),
    "LowVRAMOptimizeVAE": (LowVRAMOptimizeVAE, "Optimize VAE (low VRAM)"),
    "LowVRAMVAEDecode": (LowVRAMVAEDecode, "VAE Decode (low VRAM)"),
    "LowVRAMVAEEncode": (LowVRAMVAEEncode, "VAE Encode (low VRAM)"),
    "LowVRAMPlan": (LowVRAMPlan, "Plan (low VRAM)"),
    "LowVRAMReport": (LowVRAMReport, "Report (low VRAM)"),
}
doors.find()
_NODES |= {name: given() for name, given in doors.NODES.items()}

NODE_CLASS_MAPPINGS = {name: node for name, (node, _) in _NODES.items()}
NODE_DISPLAY_NAME_MAPPINGS = {name: title for name, (_, title) in _NODES.items()}
