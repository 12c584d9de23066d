"""What others add to the package: a knob with its hook, an attention backend, a model family, a model's class, a
command, a node, a crew.

One call, :func:`register`, takes all of them, from the package's own rooms as from strangers. Who calls it is found

- by folder: each folder of the package that holds a ``door.py``, which registers when it is imported. So it is in a
  clone, and in hosts, where the package has another name and must not be imported twice;
- by entry points of the group ``sd_lowvram``, where the package is installed: each names a function without arguments
  that registers.

Nothing here imports torch, and a door must not import it before it is used, as the command line asks for knobs first;
only a family's own module may, since families are values that hold functions of torch.
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
from .knob import Knob

GROUP = "sd_lowvram"
"""The group of entry points."""

KNOBS: dict[str, Knob] = {}
"""Knobs beside those of :class:`~sd_lowvram.settings.Settings`, by name."""

ATTENTION_BACKENDS: dict[str, Any] = {}
"""Values of the knob ``attention`` beside ours: of :class:`~sd_lowvram.kernels.attention.backend.AttentionBackend`."""

FAMILIES: dict[str, Any] = {}
"""Model families beside those of ``models/``: values of :class:`~sd_lowvram.models.anatomy.Family`."""

CLASSES: dict[str, Callable[[], Any]] = {}
"""Classes of models beside those of diffusers, by the name that a configuration gives (``_class_name``): functions that
import and give one."""

UNETS: dict[str, Callable[..., Any]] = {}
"""What knows UNets in single files beside the architectures' own: functions of an architecture's name, its UNet's
configuration, the header and the path, which give a :class:`~sd_lowvram.checkpoints.inspection.OwnUNet`, or None for
what they do not know."""

NODES: dict[str, Callable[[], tuple[Any, str]]] = {}
"""ComfyUI's nodes beside those of ``nodes/``, by id: functions that import and give the class, and its title."""

COMMANDS: dict[str, Callable[..., Any]] = {}
"""Commands of the command line, by name: functions that import and give one, or typer's group of them."""

CREWS: dict[str, Callable[..., Any]] = {}
"""Places where a batch can run, by the name that ``batch --on`` takes: each makes a crew of a number of workers."""

_PLACES: dict[str, dict[str, Any]] = {
    "knob": KNOBS,
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
    attention_backends: Mapping[str, Any] | None = None,
    families: Mapping[str, Any] | None = None,
    classes: Mapping[str, Callable[[], Any]] | None = None,
    unets: Mapping[str, Callable[..., Any]] | None = None,
    nodes: Mapping[str, Callable[[], tuple[Any, str]]] | None = None,
    commands: Mapping[str, Callable[..., Any]] | None = None,
    crews: Mapping[str, Callable[..., Any]] | None = None,
) -> Callable[[], None]:
    """Add to the package what is given, each by its name.

    Args:
        knobs: declarations whose ``hook`` is a function ``(anatomy, settings, device) -> patches``. Settings take them
            by name, ``Settings(toy=3)``; command line, nodes and panel show them; plans and their cache hold them.
        attention_backends: values of :class:`~sd_lowvram.AttentionBackend`: a function of queries, keys and values, and
            what a plan has to know of it. Each is a choice of the knob ``attention``.
        families: values of :class:`~sd_lowvram.models.anatomy.Family`: what models are made of and how they are called.
        classes: functions that import and give the class of a model whose configuration has this ``_class_name``.
        unets: functions that know the UNet of a single file by its header, see :data:`UNETS`.
        nodes: functions that import and give a node's class for ComfyUI, and its title.
        commands: for ``sd-lowvram NAME``: functions that import and give a command, or typer's group of them.
        crews: for ``batch --on NAME``: functions that make a crew of a number of workers, or of None.

    Returns:
        What takes all of it off again.

    Raises:
        BadInputError: something of this name is there already; nothing is added then.
    """
    given = dict(
        zip(_PLACES, (knobs, attention_backends, families, classes, unets, nodes, commands, crews), strict=True)
    )
    with _lock:
        for kind, added in given.items():
            for name in added or ():
                if name in _PLACES[kind]:
                    raise BadInputError(f"a {kind} {name!r} is registered already: give yours another name")
        for kind, added in given.items():
            _PLACES[kind].update(added or {})

    def unregister() -> None:
        with _lock:
            for kind, added in given.items():
                for name in added or ():
                    _PLACES[kind].pop(name, None)

    return unregister


def find() -> None:
    """Have all register who can be found; once."""
    with _lock:
        if _found.is_set():
            return
        _found.set()  # those who register may ask for knobs themselves
        for door in sorted(Path(__file__).parent.glob("*/door.py")):
            _tried(door.parent.name, functools.partial(importlib.import_module, f"{_PACKAGE}.{door.parent.name}.door"))
        if _PACKAGE == GROUP:  # in a host an entry point would import a second copy of the package
            from importlib.metadata import entry_points

            for point in entry_points(group=GROUP):
                _tried(point.value, functools.partial(_entered, point))


def registered() -> dict[str, list[str]]:
    """The names of all that is registered, by kind."""
    find()
    return {kind: sorted(added) for kind, added in _PLACES.items()}


def _entered(point: Any) -> None:
    point.load()()


def _tried(name: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        warnings.warn(f"{name} could not be added to sd-lowvram, and is left out ({told})", stacklevel=2)
