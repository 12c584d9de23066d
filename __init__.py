"""ComfyUI's door: a clone of this repository in custom_nodes/ is a node pack."""

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from .sd_lowvram.errors import speak_plainly
from .sd_lowvram.settings import knobs

speak_plainly(labels={name: knob.label for name, knob in knobs().items()})

WEB_DIRECTORY = "web"

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]
