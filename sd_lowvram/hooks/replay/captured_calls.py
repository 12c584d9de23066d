"""Capture and replay of a model's calls: the common part of :mod:`traced` and :mod:`cuda_graphs`.

The first call of a kind runs as it is, the second is captured, and every later one is replayed. Calls are of one kind
if types, shapes, autocast, all other arguments and the model are equal. A LoRA, an adapter's strength or a weight at
another address makes another model, for which everything is captured again. A call under autograd runs as it is.
"""

from __future__ import annotations

import abc
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...compat import autocast_dtype
from ...compat.private import tree_flatten, tree_unflatten
from ...errors import ran_out
from ...memory.fake_mode import active_fake_mode
from ...progress import log_event
from ...weights import needs_graph

_MOST_KINDS = 32
"""Largest number of kinds of calls that are tracked, so that calls that never repeat are not captured."""

_PLAIN = (bool, int, float, str)
_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes of every module that are not settings."""

_Held = TypeVar("_Held")

Replay = Callable[[list[Tensor]], Any]
"""Function from the tensors of a call to its result."""


class Call(NamedTuple):
    """A call: its arguments are ``leaves`` of a tree ``spec``; its tensors are the leaves that are tensors."""

    function: Callable[..., Any]
    leaves: list[Any]
    spec: Any

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def run(self, leaves: list[Any] | None = None) -> Any:
        """Call the function.

        Args:
            leaves: in place of the call's own leaves; None: these.

        Returns:
            What the function returns.
        """
        args, kwargs = tree_unflatten(self.leaves if leaves is None else leaves, self.spec)
        return self.function(*args, **kwargs)


class CapturedCalls(abc.ABC):
    """The calls of ``model`` that were captured, by kind, the one that was used last at the end.

    A subclass says which calls it takes (``takes``) and how one is captured (``capture``).
    """

    knob = ""
    done = ""
    """Name of what the knob does with a call, as a participle."""
    most = _MOST_KINDS
    """Largest number of captured calls that are stored at once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._replays: OrderedDict[Any, Replay] = OrderedDict()
        self._seen: set[Any] = set()
        self._facts: int | None = None
        self._tensors: list[Tensor] = []  # what captures read; held, so that replaced ones stay in memory
        self._addresses: list[tuple[int, int]] = []
        self._refused = False
        self._lock = threading.Lock()

    @abc.abstractmethod
    def takes(self, tensors: list[Tensor]) -> bool:
        """True if a call with these tensors can be captured."""

    @abc.abstractmethod
    def capture(self, call: Call) -> Replay:
        """Capture ``call``.

        Returns:
            The function that replays it.

        Raises:
            RuntimeError: it cannot be captured.
        """

    def kept(self, call: Call) -> Replay | None:
        """The capture of this kind of call by another process; None if there is none."""
        return None

    def called(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model: as it is the first time, captured the second time, replayed from then on.

        Args:
            original: the model's own entry.
            args, kwargs: arguments of the call.

        Returns:
            The call's result.
        """
        call = Call(original, *tree_flatten((args, kwargs)))
        tensors = call.tensors
        kind = None if self._refused or not self._may(tensors) else kind_of(call, tensors[0].device.type)
        if kind is None:
            return original(*args, **kwargs)
        with self._lock:
            if kind in self._replays and self.reads_valid_memory():
                result = self._replays[kind](tensors)
                if self._is_the_same_model() and kind in self._replays:  # compared while the device works
                    self._replays.move_to_end(kind)
                    return result
            replay = self._replay_of(kind, call)
            return original(*args, **kwargs) if replay is None else replay(tensors)

    def reads_valid_memory(self) -> bool:
        """True if a replay may begin before the model is compared with the captured one, and its result be dropped.

        By default False. It takes a replay that returns before it has ended, and addresses as at the capture.
        """
        return False

    def forget(self) -> None:
        """Free all captured calls."""
        self._replays.clear()
        self._seen.clear()
        self._facts, self._tensors, self._addresses = None, [], []

    def _may(self, tensors: list[Tensor]) -> bool:
        return bool(
            tensors
            and active_fake_mode(*tensors) is None
            and self.takes(tensors)
            and not needs_graph(self._model, *tensors)
        )

    def _replay_of(self, kind: Any, call: Call) -> Replay | None:
        """The replay of calls of this ``kind``, captured now or before; None: the call runs as it is."""
        if not self._is_the_same_model():
            return None
        if kind not in self._replays:
            if kind not in self._seen:  # the first call warms up libraries, and a kind that comes once is not captured
                return self._first(kind, call)
            why = self._failure(kind, call)
            if why is not None:  # after the error, whose frames held maps
                self._refuse(why)
                return None
        self._replays.move_to_end(kind)
        return self._replays[kind]

    def _first(self, kind: Any, call: Call) -> Replay | None:
        self._seen.add(kind)
        if len(self._seen) > _MOST_KINDS:
            self._refuse("its calls differ in more than their tensors")
        elif (replay := self.kept(call)) is not None:
            self._replays[kind] = replay
            return replay
        return None

    def _is_the_same_model(self) -> bool:
        """Return True if calls of the model can be captured; drop captures from before it changed."""
        tensors: list[Tensor] = []
        facts = _facts_of(self._model, tensors)
        if facts is None:
            self._refuse(f"a foreign hook is on its layers, which a {self.done} call would not call")
            return False
        if facts != self._facts:
            if self._replays:
                log_event(__name__, f"{self.knob}: the model has changed, as by a LoRA: it is {self.done} anew")
            self.forget()
            self._facts, self._tensors, self._addresses = facts, tensors, addresses(tensors)
        return True

    def _failure(self, kind: Any, call: Call) -> str | None:
        """Why a call cannot be captured; None where it was."""
        if len(self._replays) == self.most:
            self._replays.popitem(last=False)
        try:
            self._replays[kind] = self.capture(call)
        except RuntimeError as error:
            # cached memory cannot be freed while kernels are recorded
            return "no memory is left for it" if ran_out(error) else " ".join(str(error).split())[:200]
        return None

    def _refuse(self, why: str) -> None:
        self._refused = True
        self.forget()
        log_event(__name__, f"{self.knob}: the denoiser cannot be {self.done} ({why}). It runs as it is")


def kind_of(call: Call, device_type: str) -> Any:
    """A key that is equal for calls of one kind; None if an argument cannot be compared.

    Args:
        call: a call of the model.
        device_type: such as "cuda"; autocast of this type is part of the key.
    """
    known = all(isinstance(leaf, (Tensor, *_PLAIN, torch.dtype, torch.device, type(None))) for leaf in call.leaves)
    return (call.spec, tuple(map(_identity, call.leaves)), autocast_dtype(device_type)) if known else None


def _identity(leaf: Any) -> Any:
    """Key of an argument: the layout of a tensor, else the value."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    return leaf


def addresses(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Return address and bytes of each tensor's contents."""
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]


def _facts_of(model: nn.Module, tensors: list[Tensor]) -> int | None:
    """Hash of what a capture has fixed: modules, their settings, and addresses. None if foreign hooks exist.

    Args:
        model: the module whose calls are captured.
        tensors: empty; filled with the tensors that the model's modules hold, in plain attributes too.
    """
    facts: list[Any] = []
    waiting, seen = [model], set[int]()
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        if module._forward_hooks or module._forward_pre_hooks:
            return None
        seen.add(id(module))
        facts.append(id(module))
        held = module.__dict__
        for owner in (held, getattr(held.get("processor"), "__dict__", {})):
            for name, value in owner.items():
                if name in _INTERNAL:
                    continue
                if type(value) in _PLAIN and name[:1] != "_":
                    facts.append((name, value))
                elif value is not None:
                    _add_attribute(name, value, facts, tensors)
        tensors += _present(module._parameters)
        tensors += _present(module._buffers)
        waiting += _present(module._modules)
    facts += addresses(tensors)
    return hash(tuple(facts))


def _present(named: Mapping[str, _Held | None]) -> list[_Held]:
    return [value for value in named.values() if value is not None]


def _add_attribute(name: str, value: Any, facts: list[Any], tensors: list[Tensor]) -> None:
    """Add an attribute that is a setting to ``facts``, and the tensors of a plain attribute to ``tensors``."""
    setting = setting_of(name, value)
    if setting is not None:
        facts.append((name, setting))
    if isinstance(value, (Tensor, list, tuple)):
        tensors += [one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, Tensor)]


def setting_of(name: str, value: Any) -> Any:
    """Value of an attribute that is a setting, such as an adapter's strength; None if it is not a setting."""
    if not isinstance(value, (*_PLAIN, list, tuple, dict)) or (name.startswith("_") and "adapter" not in name):
        return None
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return tuple(one for one in value if isinstance(one, _PLAIN)) if isinstance(value, (list, tuple)) else value
