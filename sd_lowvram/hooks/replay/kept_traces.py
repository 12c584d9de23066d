"""Results of torch.jit.trace, stored in the cache folder for other processes, without the weights.

A file's name is a digest of everything in model, call and settings that a trace depends on. The file holds versions and
a digest of our code; a file of another version is reported and traced again. The tensors of a loaded trace are those of
the model, matched by name. A trace is not stored if it may depend on anything else: layers, processors or functions of
packages whose version is unknown, tensors that are not weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...cache import MOST_BYTES, PACKAGES, code_digest, folder_of, read_private, versions, write_private
from ...compat.private import dumped_spec, loaded_spec
from ...kernels.compiler import limit_folder
from ...patches import roles_of, unpatched_attributes
from ...progress import log_event
from ...settings import Settings
from .captured_calls import setting_of

_FACTS = "sd-lowvram.json"
_NUMBER = 8
"""Bytes of one number: larger tensors of a trace's own may be a model's."""

_OURS = __name__.partition(".")[0]
_KNOWN = {*PACKAGES, _OURS}

Slots = dict[tuple[str, str], tuple[Any, Tensor]]
"""Module and parameter or buffer, by path of the module and name."""


def place_of_trace(model: nn.Module, settings: Settings, kind: Any) -> Path | None:
    """Path of the trace of calls of this ``kind``; None if it is not stored.

    Args:
        model: the traced model.
        settings: those that are attached.
        kind: key of the call, see :func:`.captured_calls.kind_of`.
    """
    folder = folder_of("traced")
    facts = _facts_of(model) if folder is not None else None
    if folder is None or facts is None:
        return None
    named = repr((facts, [(name, value) for name, _, value in settings.decided()], kind))
    return folder / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.pt"


def keep(place: Path, function: Any, model: nn.Module, spec: Any) -> None:
    """Store ``function``, a trace of ``model`` as its attribute ``unet``. A failure only costs time.

    Args:
        place: path of the file.
        function: the trace; its attribute ``unet`` has the weights.
        model: the model that was traced.
        spec: the tree structure of the result.
    """
    slots = _slots(function.unet)
    if slots.keys() != _slots(model).keys() or (stated := dumped_spec(spec)) is None:
        return
    facts = json.dumps({"code": code_digest(), "versions": versions(), "spec": stated})
    written, nothing = io.BytesIO(), torch.empty(0)
    with contextlib.suppress(OSError, RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch recommends another tool
        try:
            for (_, name), (owner, _) in slots.items():
                setattr(owner, name, nothing)
            torch.jit.save(function, written, _extra_files={_FACTS: facts})
        finally:
            for (_, name), (owner, tensor) in slots.items():
                setattr(owner, name, tensor)
        if not _holds_tensors(written):
            write_private(written.getvalue(), place)
            limit_folder(place.parent, MOST_BYTES)


def stored_trace(place: Path, model: nn.Module) -> tuple[Callable[..., Any], Any] | None:
    """Return a stored trace with the weights of ``model``, and the tree structure of its result.

    Args:
        place: path of the file.
        model: model of the same classes, shapes and types as the traced one.

    Returns:
        The function and the structure; None if there is no file, or it cannot be used (a log line says why).
    """
    if (data := read_private(place)) is None:
        return None
    try:
        facts = _facts_in(data)
        if facts["code"] != code_digest():
            raise RuntimeError(_difference(facts["versions"]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = torch.jit.load(io.BytesIO(data))
        slots, here = _slots(function.unet), _slots(model)
        if slots.keys() != here.keys():
            raise RuntimeError("it has other weights")
        for (path, name), (owner, _) in slots.items():
            setattr(owner, name, here[path, name][1])
        return function, loaded_spec(facts["spec"])
    except Exception as error:  # whatever a damaged file leads torch to
        why = " ".join(str(error).split())[:100] or type(error).__name__
        log_event(__name__, f"traced: the stored trace of this model cannot be used ({why}). It is traced again")
        return None


def _facts_in(data: bytes) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > MOST_BYTES:
            raise RuntimeError("it unpacks to more than any of ours")
        if (damaged := archive.testzip()) is not None:
            raise RuntimeError(f"{damaged} is damaged")
        name = next(name for name in archive.namelist() if name.endswith(f"extra/{_FACTS}"))
        facts: dict[str, Any] = json.loads(archive.read(name))
    return facts


def _difference(then: dict[str, str]) -> str:
    now = versions()
    other = [f"{name} {then.get(name)}" for name in {**then, **now} if then.get(name) != now.get(name)]
    return f"it is of {', '.join(other)}" if other else "it is of another version of sd-lowvram"


def _holds_tensors(written: io.BytesIO) -> bool:
    with zipfile.ZipFile(written) as archive:
        return any("/constants/" in entry.filename and entry.file_size > _NUMBER for entry in archive.infolist())


def _slots(module: Any) -> Slots:
    return {
        (path, name): (owner, tensor)
        for path, owner in module.named_modules(remove_duplicate=False)
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items())
        if tensor is not None
    }


def _facts_of(model: nn.Module) -> list[Any] | None:
    """All of a model that a trace takes in; equal in every process. None: that is not known."""
    config = dict(getattr(model, "config", None) or {})
    facts: list[Any] = [sorted((name, repr(value)) for name, value in config.items() if not name.startswith("_"))]
    for path, module in model.named_modules(remove_duplicate=False):
        roles = roles_of(module)
        if sum(hook == "threads" for _, hook, _ in roles) > 1:  # the settings of another attachment act, too
            return None
        facts.append((path, roles))
        for owner in (module, getattr(module, "processor", None)):
            if owner is None:
                continue
            own = unpatched_attributes(owner) if hasattr(owner, "__dict__") else {}
            if not all(map(_is_known, (type(owner), *own.values()))):
                return None
            facts += [type(owner).__qualname__, *_settings_among(own)]
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if type(tensor) not in (Tensor, nn.Parameter, type(None)):
                return None
            facts.append(None if tensor is None else _layout(tensor))
    return facts


def _is_known(value: Any) -> bool:
    """True if ``value`` has no code, or code of a package whose version is known."""
    if isinstance(value, Tensor):
        return False
    return not callable(value) or (getattr(value, "__module__", None) or "").partition(".")[0] in _KNOWN


def _settings_among(own: dict[str, Any]) -> Iterator[Any]:
    for name, value in own.items():
        if (plain := setting_of(name, value)) is not None:
            yield name, plain


def _layout(tensor: Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), str(tensor.dtype), str(tensor.device)
