"""Registration of extensions: knobs with their hooks, choices of knobs, attention backends, model families, model
classes, commands, nodes, crews.

:func:`register` is the one call for all of them, for the package's own optional parts and for other packages. Callers
are found in two ways:

- by folder: each folder of the package with a ``door.py``, which registers when it is imported. This works in a clone,
  and in hosts, where the package has another name and must not be imported twice;
- by entry points of the group ``sd_lowvram``, if the package is installed: each names a function without arguments.

Nothing here imports torch, and a door must not import torch before it is needed, because the command line reads the
knobs first. Modules of families may, because families hold functions of torch.
"""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import BadInputError
from .knob import Choice, Knob

GROUP = "sd_lowvram"
"""The group of entry points."""

KNOBS: dict[str, Knob] = {}
"""Knobs in addition to those of :class:`~sd_lowvram.settings.Settings`, by name."""

CHOICES: dict[str, Choice] = {}
"""Further choices of our knobs, by knob and value: "vae_tiles=fast"."""

ATTENTION_BACKENDS: dict[str, Any] = {}
"""Further choices of ``attention``: :class:`~sd_lowvram.kernels.attention.backend.AttentionBackend` by name."""

FAMILIES: dict[str, Any] = {}
"""Model families in addition to those of ``models/``: :class:`~sd_lowvram.models.anatomy.Family` by name."""

CLASSES: dict[str, Callable[[], Any]] = {}
"""Model classes in addition to those of diffusers, by the ``_class_name`` of a configuration: functions that import and
return the class."""

UNETS: dict[str, Callable[..., Any]] = {}
"""Detectors of further UNets in single files: functions of an architecture's name, its UNet's configuration, the header
and the path. They return a :class:`~sd_lowvram.checkpoints.inspection.OwnUNet`, or None for unknown files."""

NODES: dict[str, Callable[[], tuple[Any, str]]] = {}
"""ComfyUI nodes in addition to those of ``nodes/``, by id: functions that import and return the class and its title."""

COMMANDS: dict[str, Callable[..., Any]] = {}
"""Commands of the command line, by name: functions that import and return a command, or a typer group."""

CREWS: dict[str, Callable[..., Any]] = {}
"""Places where a batch can run, by the name that ``batch --on`` takes: each makes a crew of a number of workers."""

_PLACES: dict[str, dict[str, Any]] = {
    "knob": KNOBS,
    "choice": CHOICES,
    "attention backend": ATTENTION_BACKENDS,
    "family": FAMILIES,
    "class": CLASSES,
    "unet": UNETS,
    "node": NODES,
    "command": COMMANDS,
    "crew": CREWS,
}
_PACKAGE = __name__.rpartition(".")[0]
_lock = threading.RLock()
_found = threading.Event()


def register(
    *,
    knobs: Mapping[str, Knob] | None = None,
    choices: Mapping[str, Choice] | None = None,
    attention_backends: Mapping[str, Any] | None = None,
    families: Mapping[str, Any] | None = None,
    classes: Mapping[str, Callable[[], Any]] | None = None,
    unets: Mapping[str, Callable[..., Any]] | None = None,
    nodes: Mapping[str, Callable[[], tuple[Any, str]]] | None = None,
    commands: Mapping[str, Callable[..., Any]] | None = None,
    crews: Mapping[str, Callable[..., Any]] | None = None,
) -> Callable[[], None]:
    """Register extensions by name.

    Args:
        knobs: declarations whose ``hook`` is a function ``(anatomy, settings, device) -> patches``. Settings take them
            by name, ``Settings(toy=3)``; command line, nodes and panel show them; plans and their cache store them.
        choices: :class:`~sd_lowvram.knob.Choice` by knob and value, "vae_tiles=fast", each with its hook.
        attention_backends: :class:`~sd_lowvram.AttentionBackend` by name: a function of queries, keys and values, and
            the facts that a plan needs. Each becomes a choice of the knob ``attention``.
        families: :class:`~sd_lowvram.models.anatomy.Family` by name: the parts of models and how they are called.
        classes: functions that import and return the class of a model whose configuration has this ``_class_name``.
        unets: functions that recognise the UNet of a single file by its header, see :data:`UNETS`.
        nodes: functions that import and return a node's class for ComfyUI, and its title.
        commands: for ``sd-lowvram NAME``: functions that import and return a command, or a typer group.
        crews: for ``batch --on NAME``: functions that make a crew of a number of workers, or of None.

    Returns:
        A function that removes all of them again.

    Raises:
        BadInputError: a name is registered already; nothing is added then.
    """
    additions = dict(
        zip(
            _PLACES, (knobs, choices, attention_backends, families, classes, unets, nodes, commands, crews), strict=True
        )
    )
    with _lock:
        for kind, added in additions.items():
            for name in added or ():
                if name in _PLACES[kind]:
                    raise BadInputError(f"a {kind} {name!r} is registered already: give yours another name")
        for kind, added in additions.items():
            _PLACES[kind].update(added or {})

    def unregister() -> None:
        with _lock:
            for kind, added in additions.items():
                for name in added or ():
                    _PLACES[kind].pop(name, None)

    return unregister


def find() -> None:
    """Import all registering modules and call all entry points, once."""
    with _lock:
        if _found.is_set():
            return
        _found.set()  # those who register may ask for knobs themselves
        for door in sorted(Path(__file__).parent.glob("*/door.py")):
            _try(door.parent.name, functools.partial(importlib.import_module, f"{_PACKAGE}.{door.parent.name}.door"))
        if _PACKAGE == GROUP:  # in a host an entry point would import a second copy of the package
            from importlib.metadata import entry_points

            for point in entry_points(group=GROUP):
                _try(point.value, functools.partial(_run_entry_point, point))


def registered_names() -> dict[str, list[str]]:
    """Names of everything that is registered, by kind."""
    find()
    return {kind: sorted(added) for kind, added in _PLACES.items()}


def _run_entry_point(point: Any) -> None:
    point.load()()


def _try(name: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        warnings.warn(f"{name} could not be added to sd-lowvram, and is left out ({message})", stacklevel=2)
