"""A fake copy never calls a module of the original, frees nothing of it and clones none of its tensors."""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from sd_lowvram.patches import set_patch, wrap
from sd_lowvram.tracing.copies import copies_of


class Layer(nn.Module):
    """Counts its calls by instance."""

    called: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        Layer.called.append(self)
        return x * self.weight


class Model(nn.Module):
    """Calls its layer through ``way``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.way: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.way is None else self.way(x)


def copied(model: nn.Module, left_out: tuple[str, ...] = ()) -> Any:
    """A copy of ``model`` with weights of zeros."""
    zeros = {id(one): nn.Parameter(torch.zeros_like(one)) for one in model.parameters()}
    return copies_of({"model": model}, zeros, left_out)["model"]


class Hook:
    """As accelerate's: an object that holds the module and the forward that it took the place of."""

    def __init__(self, module: Any) -> None:
        self.module, self.original = module, module.forward

    def __call__(self, x: Tensor) -> Tensor:
        return self.original(x)


class Slotted:
    """Holds the module in a slot."""

    __slots__ = ("_module",)

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, x: Tensor) -> Tensor:
        return self._module(x)


class Finalized(Hook):
    """Holds a module, and frees something when it goes."""

    freed = 0

    def __del__(self) -> None:
        Finalized.freed += 1


class Pair(NamedTuple):
    module: Any
    other: int


class Kept(dict):
    """Calls what it holds."""

    def __call__(self, x: Tensor) -> Tensor:
        return self["module"](x)


def closure(layer: Any) -> Any:
    held = {"list": [layer]}

    def call(x: Tensor) -> Tensor:
        return held["list"][0](x)

    return call


def closure_of_closures(layer: Any) -> Any:
    """The functions of a wrapper that know each other."""

    def first(x: Tensor, again: bool = True) -> Tensor:
        return second(x) if again else layer(x)

    def second(x: Tensor) -> Tensor:
        return first(x, again=False)

    return second


def wrapped(layer: Any) -> Any:
    original = layer.forward

    @functools.wraps(original)
    def call(x: Tensor) -> Tensor:
        return call.__wrapped__(x)

    return call


def patched_forward(layer: Any) -> Any:
    """As accelerate sets it on a module."""
    original = layer.forward
    layer.forward = functools.update_wrapper(functools.partial(lambda module, x: original(x), layer), original)
    return layer


WAYS: dict[str, Callable[[Any], Any]] = {
    "bound method": lambda layer: layer.forward,
    "builtin method": lambda layer: functools.partial(lambda get, x: get("module")(x), {"module": layer}.get),
    "partial": lambda layer: functools.partial(layer.__call__),
    "keyword of a partial": lambda layer: functools.partial(lambda x, module: module(x), module=layer),
    "default": lambda layer: lambda x, module=layer: module(x),
    "keyword default": lambda layer: lambda x, *, module=layer: module(x),
    "closure": closure,
    "closures": closure_of_closures,
    "wraps": wrapped,
    "lru_cache": lambda layer: functools.lru_cache(maxsize=2)(layer.forward),
    "hook": Hook,
    "slots": Slotted,
    "with a finalizer": Finalized,
    "namedtuple": lambda layer: functools.partial(lambda pair, x: pair.module(x), Pair(layer, 1)),
    "dictionary of a class": lambda layer: Kept(module=layer),
    "key": lambda layer: functools.partial(lambda held, x: next(iter(held))(x), {layer: 1}),
    "set": lambda layer: functools.partial(lambda held, x: next(iter(held))(x), {layer}),
    "frozenset": lambda layer: functools.partial(lambda held, x: next(iter(held))(x), frozenset({layer})),
    "deque": lambda layer: functools.partial(lambda held, x: held[0](x), deque([layer], maxlen=2)),
    "namespace": lambda layer: functools.partial(lambda held, x: held.module(x), types.SimpleNamespace(module=layer)),
    "weak reference": lambda layer: functools.partial(lambda held, x: held()(x), weakref.ref(layer)),
    "weak proxy": lambda layer: functools.partial(lambda held, x: held(x), weakref.proxy(layer)),
    "weak method": lambda layer: functools.partial(lambda held, x: held()(x), weakref.WeakMethod(layer.forward)),
    "weak keys": lambda layer: functools.partial(
        lambda held, x: next(iter(held))(x), weakref.WeakKeyDictionary({layer: 1})
    ),
    "patched forward": patched_forward,
}


@pytest.mark.parametrize("way", WAYS)
def test_no_call_of_a_copy_reaches_an_original(way: str) -> None:
    model, x = Model(), torch.ones(2)
    model.way = WAYS[way](model.layer)
    copy = copied(model)
    Layer.called.clear()
    assert copy(x).sum() == 0 and Layer.called == [copy.layer]
    assert model(x).sum() == 2 and Layer.called == [copy.layer, model.layer]


@pytest.mark.parametrize("hook", ["_forward_hooks", "_forward_pre_hooks"])
def test_hooks_of_a_copy_hold_the_copy(hook: str) -> None:
    model = Model()
    getattr(model, hook)[1] = functools.partial(lambda held, *given: held.layer(torch.ones(2)) and None, model)
    getattr(model, hook)[1] = lambda *given, held=model: (held.layer(torch.ones(2)), None)[1]
    copy = copied(model)
    Layer.called.clear()
    copy(torch.ones(2))
    assert Layer.called == [copy.layer] * 2


class Native:
    """Owns a handle, which it frees."""

    freed = 0

    def __init__(self) -> None:
        self.pointer = 7

    def __del__(self) -> None:
        Native.freed += 1


class Borrowed:
    """Holds a pointer of another's."""

    def __init__(self) -> None:
        self.pointer = ctypes.pointer(ctypes.c_int(7))


class Closed:
    """Frees by weakref."""

    freed = 0

    def __init__(self) -> None:
        self.finalizer = weakref.finalize(self, self.free)

    @classmethod
    def free(cls) -> None:
        cls.freed += 1


class Stateless:
    """Of which there is one."""


SHARED: dict[str, Callable[[], Any]] = {
    "finalizer": Native,
    "pointer": Borrowed,
    "weakref.finalize": Closed,
    "ctypes": lambda: ctypes.c_uint8(3),
    "array": ctypes.c_uint8 * 3,
    "library": lambda: ctypes.pythonapi,
    "lock": threading.Lock,
    "thread's": threading.local,
    "generator": torch.Generator,
    "tensor": lambda: torch.ones(3),
    "with a history": lambda: torch.ones(2, requires_grad=True) * 2,
    "foreign parameter": lambda: nn.Parameter(torch.ones(3)),
    "sentinel": Stateless,
    "class": lambda: Stateless,
    "function": lambda: torch.nn.functional.silu,
    "closure of no module": lambda: closure(3),
}


@pytest.mark.parametrize("kind", SHARED)
def test_what_is_not_the_models_is_shared(kind: str) -> None:
    model = Model()
    one = SHARED[kind]()
    vars(model).update(one=one, deep={"a": [(one, 1)]})
    copy = copied(model)
    assert copy.one is one and copy.deep["a"][0][0] is one
    assert copy.deep is not model.deep and copy.deep["a"] is not model.deep["a"]


def test_copies_free_nothing_of_the_originals() -> None:
    model = Model()
    model.owned = {"first": (Native(), [(model.layer, 0)]), "second": [Native()]}  # type: ignore[assignment]
    model.way, model.closed = Finalized(model.layer), Closed()  # type: ignore[assignment]

    class Owning(Layer):
        freed = 0

        def __del__(self) -> None:
            Owning.freed += 1

    model.owning = Owning()
    counts = Native.freed, Finalized.freed, Closed.freed
    for _ in range(2):
        copy = copied(model)
        assert copy.owned["first"][1][0][0] is copy.layer
        assert isinstance(copy.owning, Owning) and type(copy.owning).__name__ == "Owning"
        del copy
        gc.collect()
    assert (Native.freed, Finalized.freed, Closed.freed) == counts and Owning.freed == 0
    del model.owning
    gc.collect()
    assert Owning.freed == 1


def test_a_rebuilt_closure_shares_with_its_maker_what_is_not_the_models() -> None:
    """As a counter next to the module: whoever set the function reads it."""
    model, calls = Model(), []
    layer = model.layer

    def call(x: Tensor) -> Tensor:
        calls.append(x)
        return layer(x)

    model.way = call
    copied(model)(torch.ones(2))
    assert len(calls) == 1


class Plain:
    """State and no module."""

    def __init__(self) -> None:
        self.cache: dict[int, int] = {}


def test_containers_keep_their_kinds_and_what_they_share() -> None:
    model = Model()
    shared: list[Any] = []
    held = {
        "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(list, {1: shared}),
        "deque": deque([1, 2], maxlen=2),
        "ring": shared,
        "plain": Plain(),
        (1, "key"): torch.Size((2, 3)),
    }
    held["ordered"].move_to_end("b")
    shared.append(held)
    model.held = held  # type: ignore[assignment]
    copy = copied(model).held
    assert list(copy["ordered"]) == ["a", "b"] and copy["default"].default_factory is list
    assert copy["deque"].maxlen == 2 and copy["deque"] is not held["deque"]
    assert copy["ring"][0] is copy and copy["default"][1] is copy["ring"] and copy[1, "key"] == (2, 3)
    copy["plain"].cache[1] = 1
    assert held["plain"].cache == {}  # type: ignore[attr-defined]


def test_long_chains_of_objects_are_copied() -> None:
    model = Model()
    chain: Any = None
    for _ in range(5000):
        chain = [chain, model.layer]
    model.chain = chain
    copy = copied(model)
    assert copy.chain[0][1] is copy.layer


def test_what_is_ours_stays_behind() -> None:
    model = Model()
    model.other = model.layer.forward
    undo = set_patch(wrap(model.layer, "forward", lambda original, x: original(x) + 1))
    model.taken = model.layer.forward  # as another's wrapper takes it for the original
    copy = copied(model)
    assert "forward" not in vars(copy.layer) and copy.taken(torch.ones(2)).sum() == 0
    assert model.layer(torch.ones(2)).sum() == 4
    undo()


def test_a_compiled_module_is_copied_uncompiled() -> None:
    model = Model()
    model.layer.compile(backend="eager")
    copy = copied(model)
    Layer.called.clear()
    copy(torch.ones(2))
    assert Layer.called == [copy.layer] and model.layer._compiled_call_impl is not None


def test_attributes_that_are_left_out() -> None:
    model = Model()
    model.layer._v = 1  # type: ignore[assignment]
    copy = copied(model, left_out=("_v",))
    assert not hasattr(copy.layer, "_v") and model.layer._v == 1
