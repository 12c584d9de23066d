"""The model for which the page's line plans: the loaded one, or before that its architecture, without weights."""

from __future__ import annotations

from typing import Any

from modules import sd_models

from . import host


def model() -> Any:
    """The loaded model; None when none is loaded yet."""
    loaded = getattr(sd_models.model_data, "sd_model", None)
    return loaded if host.is_loaded(loaded) else None


def identity(target: Any) -> int:
    """Differs for every model that is loaded."""
    return id(target)
