"""Patches and changes: the results of hooks, set on one model and undone exactly.

A patch names an owner, an attribute, and a function from the attribute's value to its replacement. A change is an
action that returns the function that undoes it (moving or converting weights). Every patched attribute has one slot,
stored on its owner, in which the patches of all hooks and attachments stack. They can be removed in any order, and a
wrapper that other code put around a slot keeps working after ours is gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.overrides import TorchFunctionMode

from .errors import ConflictError, LowVRAMError

_ABSENT = object()
_SLOTS = "_sd_lowvram_slots"
RECORD = "_sd_lowvram"
"""The attribute under which a target keeps what is attached to it."""


@dataclass(frozen=True, eq=False)
class Patch:
    """``owner.attribute = make(owner.attribute)``, undone later.

    Attributes:
        owner: a module, or any object with a ``__dict__``; the instance is patched, never its class.
        attribute: the name of a method or plain attribute (a parameter's or child module's name will not do).
        make: from the present value to the replacement. It must not act on the model: preparing is not entering.
        exclusive: the replacement never calls the original, so no second exclusive patch may share the attribute.
        hook: the name of the hook that wants it, for messages.
        role: where a hook treats modules differently that are equal, how it treats this one.
    """

    owner: Any
    attribute: str
    make: Callable[[Any], Any]
    exclusive: bool = False
    hook: str = ""
    role: str = ""


@dataclass(frozen=True, eq=False)
class Change:
    """An action on the model's tensors. ``apply`` performs it and returns the function that undoes it."""

    apply: Callable[[], Callable[[], None]]
    hook: str = ""


def wrap(owner: Any, attribute: str, around: Callable[..., Any], hook: str = "", role: str = "") -> Patch:
    """Return a patch that calls ``around(original, *args, **kwargs)`` in place of ``original(*args, **kwargs)``.

    Args:
        owner: a module, or any object with a ``__dict__``.
        attribute: name of the method.
        around: function that gets the original and its arguments.
        hook: name of the hook, for messages.
        role: role of this owner, if the hook treats equal modules differently.
    """
    return Patch(owner, attribute, lambda original: functools.partial(around, original), hook=hook, role=role)


class Answered(TorchFunctionMode):
    """Replaces some of torch's functions in this thread while entered.

    Layers are called unchanged, so that everything that a host does to weights in the call (streaming, casting, a LoRA)
    still happens.

    Args:
        answers: for each function, the one that is called with its arguments instead.
    """

    def __init__(self, answers: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._answers = answers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._answers.get(func, func)(*args, **(kwargs or {}))


def replace(owner: Any, attribute: str, replacement: Any, hook: str = "") -> Patch:
    """Return an exclusive patch: a function that never calls the original, or another value of a host's switch.

    Args:
        owner, attribute: as for :func:`wrap`.
        replacement: the new value.
        hook: name of the hook, for messages.
    """
    return Patch(owner, attribute, lambda original: replacement, exclusive=True, hook=hook)


class Trampoline:
    """A patched-in callable: looks like the original to ``inspect`` and refuses to be copied with its model."""

    def __init__(self, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original, updated=())
        self.function = self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(eq=False)
class Slot:
    """The patches of one attribute, first set first applied."""

    owner: Any
    attribute: str
    before: Any
    original: Any
    installed: Any = None
    patches: list[Patch] = field(default_factory=list)

    def refresh(self) -> None:
        """Install the present patches around the original; without patches, restore the original."""
        here = vars(self.owner)
        foreign = self.installed is not None and here.get(self.attribute, _ABSENT) is not self.installed
        replacement = functools.reduce(lambda current, patch: patch.make(current), self.patches, self.original)
        if isinstance(self.installed, Trampoline):
            self.installed.function = replacement
        elif callable(self.original):
            self.installed = Trampoline(self.original)
            self.installed.function = replacement
        else:
            self.installed = replacement
        if foreign:  # another wrapper was put over ours: it stays, and calls what the trampoline calls now
            return
        if self.patches:
            here[self.attribute] = self.installed
        elif self.before is _ABSENT:
            here.pop(self.attribute, None)
        else:
            here[self.attribute] = self.before


def carries_hooks(done: str) -> LowVRAMError:
    """Return the error for a model that cannot be ``done`` ("copied") because it carries hooks."""
    return LowVRAMError(
        f"this model carries sd-lowvram's hooks and cannot be {done}: restore() it first",
        plainly=f"this model carries sd-lowvram's hooks while a picture is made, and cannot be {done}: "
        "try again when the picture is there",
    )


class _Slots(dict[str, Slot]):
    """The slots of one owner. They name the owner, so a copy of it would act on the original: copying is refused."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise carries_hooks("copied")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise carries_hooks("pickled")


def set_patch(patch: Patch) -> Callable[[], None]:
    """Set ``patch`` and return the function that takes it off.

    Raises:
        ConflictError: the attribute cannot be patched, or another exclusive patch has it.
    """
    _refuse_unpatchable(patch)
    slots = vars(patch.owner).setdefault(_SLOTS, _Slots())
    slot = slots.get(patch.attribute)
    if slot is None:
        before = vars(patch.owner).get(patch.attribute, _ABSENT)
        slot = slots[patch.attribute] = Slot(
            patch.owner, patch.attribute, before, getattr(patch.owner, patch.attribute)
        )
    slot.patches.append(patch)
    slot.refresh()
    return functools.partial(take_off, patch)


def take_off(patch: Patch) -> None:
    """Remove ``patch`` from its owner; nothing happens if it is not set."""
    slots = vars(patch.owner).get(_SLOTS, {})
    slot = slots.get(patch.attribute)
    if slot is None or patch not in slot.patches:
        return
    slot.patches.remove(patch)
    slot.refresh()
    if not slot.patches:
        del slots[patch.attribute]
    if not slots:
        vars(patch.owner).pop(_SLOTS, None)


def roles_of(owner: Any) -> tuple[tuple[str, str, str], ...]:
    """Attributes of ``owner`` that are patched, each with a hook that patched it and the owner's role there."""
    slots = vars(owner).get(_SLOTS, {}).values()
    return tuple((slot.attribute, patch.hook, patch.role) for slot in slots for patch in slot.patches)


def unpatched_attributes(owner: Any) -> dict[str, Any]:
    """Attributes of ``owner`` without our patches."""
    own = dict(vars(owner))
    own.pop(RECORD, None)
    for name, slot in own.pop(_SLOTS, {}).items():
        if slot.before is _ABSENT:
            own.pop(name, None)
        else:
            own[name] = slot.before
    return own


def is_foreign(owner: Any, attribute: str) -> bool:
    """Return True if other code has set ``attribute`` on the instance ``owner``.

    A bound method of the owner's own class, which hosts leave behind when they undo a patch, does not count."""
    slot = vars(owner).get(_SLOTS, {}).get(attribute)
    here = vars(owner).get(attribute, _ABSENT)
    if slot is not None and here is slot.installed:
        here = slot.before
    elif isinstance(here, Trampoline):  # a former patch of ours, restored by other code
        here = here.function
    own = getattr(here, "__self__", None) is owner and here.__func__ is getattr(type(owner), attribute, None)
    return here is not _ABSENT and not own


def refuse_conflicts(patches: Iterable[Patch]) -> None:
    """Refuse patches that cannot be set together.

    Args:
        patches: patches that are not set yet.

    Raises:
        ConflictError: two exclusive patches share an attribute, or an attribute cannot be patched.
    """
    taken: dict[tuple[int, str], Patch] = {}
    for patch in patches:
        _refuse_unpatchable(patch)
        if not patch.exclusive:
            continue
        key = id(patch.owner), patch.attribute
        slot = vars(patch.owner).get(_SLOTS, {}).get(patch.attribute)
        other = taken.get(key) or next((p for p in slot.patches if p.exclusive), None) if slot else taken.get(key)
        if other is not None:
            where = f"{type(patch.owner).__name__}.{patch.attribute}"
            raise ConflictError(f"{patch.hook} and {other.hook} both replace {where}: turn one of them off")
        taken[key] = patch


def _refuse_unpatchable(patch: Patch) -> None:
    registered = (getattr(patch.owner, kind, {}) for kind in ("_parameters", "_buffers", "_modules"))
    if any(patch.attribute in names for names in registered) or not hasattr(patch.owner, patch.attribute):
        raise ConflictError(f"{patch.hook}: {type(patch.owner).__name__}.{patch.attribute} cannot be patched")
