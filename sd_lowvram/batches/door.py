"""Registration of the command ``batch``."""

from __future__ import annotations

import importlib
from typing import Any

from ..doors import register


def _command() -> Any:
    return importlib.import_module(".command", __package__).batch


register(commands={"batch": _command})
