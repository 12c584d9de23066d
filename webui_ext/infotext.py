"""The panel's arguments in the parameters that a picture carries, written and pasted back.

One entry, such as "Low VRAM: vram 4GB | preset smallest | attention sliced"; it names what is not the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sd_lowvram.errors import BadInputError

from .arguments import TITLE, arguments

KEY = TITLE
RAN_OUT = f"{TITLE} ran out"
"""The entry of a picture whose run was short of memory: what it gave up."""
REFUSED = f"{TITLE} refused"
"""The entry of a picture in whose generation another picture did not fit: its size."""
NOT_KEPT = {f"{TITLE} budget": "exceeded by the WebUI"}
"""The entry of a picture whose run took more than the budget, as the host decided."""
_MARK = " | "


def write(chosen: Mapping[str, Any]) -> str:
    """The entry's text for checked arguments."""
    changed = [
        argument for argument in arguments() if argument.name != "enabled" and chosen[argument.name] != argument.default
    ]
    return _MARK.join(f"{argument.name} {chosen[argument.name]}" for argument in changed) or "on"


def paste(parameters: Mapping[str, Any], name: str) -> Any:
    """The value of the argument ``name`` in a picture's parameters; None, which leaves the control as it is, when the
    picture was made without us."""
    text = parameters.get(KEY)
    if text is None:
        return None
    if name == "enabled":
        return True
    argument = next(argument for argument in arguments() if argument.name == name)
    for part in str(text).split("|"):
        written, _, value = part.strip().partition(" ")
        if written == name:
            try:
                return argument.check(int(value) if argument.kind == "number" else value)
            except (BadInputError, ValueError):  # of a newer version
                return argument.default
    return argument.default
