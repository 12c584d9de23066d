"""What a hook yields: patches, set on module instances and undone exactly.

A patch names an owner, an attribute of it, and a function from the attribute's present value to its replacement.
Wrapping patches compose in the order in which they are given; an exclusive patch replaces without calling the
original, and two of them on one attribute are a conflict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .errors import ConflictError, LowVRAMError

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """``owner.attribute = make(owner.attribute)``, undone later.

    Attributes:
        owner: a module, or any object with a ``__dict__``; the instance is patched, never its class.
        attribute: the name of a method or plain attribute (a parameter's or child module's name will not do).
        make: from the present value to the replacement. It must not act on the model: preparing is not entering.
        exclusive: the replacement never calls the original, so no second exclusive patch may share the attribute.
        hook: the name of the hook that wants it, for messages.
    """

    owner: Any
    attribute: str
    make: Callable[[Any], Any]
    exclusive: bool = False
    hook: str = ""


class Replacement:
    """A patched-in callable: looks like the original to ``inspect``, and refuses to be copied with its model."""

    def __init__(self, function: Callable[..., Any], original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original, updated=())
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise LowVRAMError("this model carries sd-lowvram's hooks and cannot be deep-copied: restore() it first")

    def __reduce__(self) -> Any:
        raise LowVRAMError("this model carries sd-lowvram's hooks and cannot be pickled: restore() it first")


def wrap(owner: Any, attribute: str, around: Callable[..., Any], hook: str = "") -> Patch:
    """A patch that calls ``around(original, *args, **kwargs)`` in place of ``original(*args, **kwargs)``."""
    return Patch(owner, attribute, lambda original: Replacement(functools.partial(around, original), original), hook=hook)


def replace(owner: Any, attribute: str, function: Callable[..., Any], hook: str = "") -> Patch:
    """An exclusive patch that calls ``function`` and never the original."""
    return Patch(owner, attribute, lambda original: Replacement(function, original), exclusive=True, hook=hook)


def refuse_conflicts(patches: Iterable[Patch]) -> None:
    """Raise ConflictError when two exclusive patches share an attribute, or one names no plain attribute."""
    taken: dict[tuple[int, str], Patch] = {}
    for patch in patches:
        registered = (getattr(patch.owner, kind, {}) for kind in ("_parameters", "_buffers", "_modules"))
        if any(patch.attribute in names for names in registered) or not hasattr(patch.owner, patch.attribute):
            raise ConflictError(f"{patch.hook}: {type(patch.owner).__name__}.{patch.attribute} cannot be patched")
        if patch.exclusive:
            other = taken.setdefault((id(patch.owner), patch.attribute), patch)
            if other is not patch:
                owner = type(patch.owner).__name__
                raise ConflictError(f"{patch.hook} and {other.hook} both replace {owner}.{patch.attribute}: turn one off")


class Applied:
    """Patches that are set. ``undo`` takes each off again, in any order of calls, and leaves foreign ones alone."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}

    def set(self, patch: Patch) -> None:
        owner, attribute = patch.owner, patch.attribute
        key = id(owner), attribute
        value = patch.make(getattr(owner, attribute))
        before = self._before[key][2] if key in self._before else vars(owner).get(attribute, _ABSENT)
        vars(owner)[attribute] = value
        self._before[key] = (owner, attribute, before, value)

    def undo(self) -> list[str]:
        """Put everything back; returns the attributes that somebody else has patched on top and that were left."""
        foreign = []
        for owner, attribute, before, value in self._before.values():
            if vars(owner).get(attribute, _ABSENT) is not value:
                foreign.append(f"{type(owner).__name__}.{attribute}")
            elif before is _ABSENT:
                del vars(owner)[attribute]
            else:
                vars(owner)[attribute] = before
        self._before.clear()
        return foreign
