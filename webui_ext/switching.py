"""Another model in the midst of a generation: a refiner, a hires fix with a checkpoint of its own.

The host loads it by one function of its module for models, often in place of the one that carries our hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from modules import sd_models, shared

from sd_lowvram.patches import Patch, wrap

from . import host
from .refusal import refuse_errors

Switch = Callable[[Callable[[], Any], Callable[[], Any]], Any]


def watch_loading(model: Any, switch: Switch) -> Iterator[Patch]:
    """A patch of the host's loading: another model than ``model`` is loaded by ``switch(load, loaded)``, where ``load``
    is what the host would do and ``loaded`` returns what it has then."""
    name = "forge_model_reload" if host.kind(model) == "forge" else "reload_model_weights"
    if hasattr(sd_models, name):
        yield wrap(sd_models, name, functools.partial(_loading, model, switch), "switching")


def _loading(model: Any, switch: Switch, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    load = functools.partial(original, *args, **kwargs)
    if _stays(model, *args, **kwargs):
        return load()
    with refuse_errors():
        return switch(load, lambda: shared.sd_model)


def _stays(model: Any, sd_model: Any = None, info: Any = None, forced_reload: bool = False) -> bool:
    """True if the host is asked to load ``model``."""
    if host.kind(model) == "forge":
        data = sd_models.model_data
        return bool(data.forge_hash == str(data.forge_loading_parameters))
    wanted = info or sd_models.select_checkpoint()
    return not forced_reload and bool(wanted.filename == model.sd_checkpoint_info.filename)
