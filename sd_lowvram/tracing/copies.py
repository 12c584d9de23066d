"""Copies of modules that stand apart from the originals, at no cost in memory.

``copy.deepcopy`` clones every tensor, copies handles of native memory, whose copies then free the original's, and
shares functions, which go on calling the original modules. Here modules, containers and plain objects are copied
attribute by attribute, and none of their code runs. The copy of what points at a copied module (a bound method, a
partial, a closure, a weak reference, an object that holds one) points at that module's copy. Tensors that are not
weights, native objects and owners of native handles are shared with the originals.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..patches import Trampoline, unpatched

_LAYOUTS: tuple[Any, ...] = (OrderedDict, defaultdict, dict, list, set, deque, types.SimpleNamespace, object)
"""Builtin classes by which an instance of a class that derives from them is made without a call of that class."""

_PLAIN = frozenset({OrderedDict, dict, list, set})
_CACHED = type(functools.lru_cache(lambda: None))
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_IMMUTABLE = (tuple, frozenset, functools.partial, types.FunctionType, types.MethodType, *_BOUND, _CACHED)
"""Immutable types, which are copied only if their contents are."""

_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), type, types.ModuleType})
_NATIVE = (ctypes.c_int.__mro__[-2], ctypes.CDLL, weakref.finalize)
"""An object with an attribute of these classes owns native memory."""


def copies_of(
    components: Mapping[str, nn.Module], stand_ins: Mapping[int, Any], left_out: Iterable[str] = ()
) -> dict[str, Any]:
    """Copies of ``components`` by name, without our hooks.

    Args:
        stand_ins: by the ids of objects, what takes their places: of weights fake tensors.
        left_out: attributes that the copies of modules do without.
    """
    copies = _Copies(components.values(), stand_ins, left_out)
    return {name: copies.copy(component) for name, component in components.items()}


class _Copies:
    """Copies by the ids of their originals. What can change is copied empty first and filled later, so rings and long
    chains of objects need no recursion."""

    def __init__(self, roots: Iterable[nn.Module], stand_ins: Mapping[int, Any], left_out: Iterable[str]) -> None:
        self._made = dict(stand_ins)
        self._originals: list[Any] = []  # an id is an object's own as long as it lives
        self._unfilled: deque[Callable[[], None]] = deque()
        self._left_out = ("_compiled_call_impl", *left_out)
        self._modules = {id(module) for root in roots for module in root.modules()}
        self._leading, self._apart = set(self._modules), set[int]()
        self._kinds: dict[type, type] = {}

    def copy(self, original: Any) -> Any:
        """The copy of ``original`` with all that belongs to it."""
        made = self._of(original)
        while self._unfilled:
            self._unfilled.popleft()()
        return made

    def _of(self, original: Any) -> Any:
        """The copy of ``original``, perhaps still empty, or ``original`` itself where it is shared."""
        if type(original) in _ATOMS:
            return original
        found = self._made.get(id(original), self)
        if found is self:
            if type(original) in _PROXIES or isinstance(original, weakref.ref):
                made = self._reference(original)
            elif isinstance(original, _IMMUTABLE):
                made = self._immutable(original) if self._is_changed(original) else original
            elif isinstance(original, Trampoline):
                made = self._of(original.original)
            else:
                made = self._mutable(original)
            self._keep(original, made)
            return made
        return found

    def _keep(self, original: Any, made: Any) -> None:
        self._made[id(original)] = made
        self._originals.append(original)

    def _mutable(self, original: Any) -> Any:
        kind = type(original)
        if kind in _PLAIN:  # most of what hangs on modules, and most of it empty
            made = kind()
            if original:
                self._unfilled.append(functools.partial(self._fill_container, made, original, kind))
            return made
        if isinstance(original, (Tensor, type, *_NATIVE)) or not self._is_copied(original):
            return original
        layout = next(one for one in _LAYOUTS if issubclass(kind, one))
        try:
            made = layout.__new__(self._unfinalized(kind))
        except TypeError:  # native code lays out its instances
            return original
        if layout is not object and layout is not types.SimpleNamespace:
            self._unfilled.append(functools.partial(self._fill_container, made, original, layout))
        if kind is not layout or layout is types.SimpleNamespace:
            self._unfilled.append(functools.partial(self._fill_attributes, made, original))
        return made

    def _is_copied(self, original: Any) -> bool:
        """False for what is shared: an object without state, and one that owns a native handle or whose class copies it
        in a way of its own, unless it holds a module that is copied."""
        kind: Any = type(original)
        if isinstance(original, nn.Module) or kind in _LAYOUTS[:-1]:
            return True
        if kind is object:
            return False
        own = [*_attributes(original)]
        if _copies_itself(kind) or any(isinstance(value, _NATIVE) for value in own):
            return self._leads(original)
        return bool(own) or issubclass(kind, _LAYOUTS[:-1])

    def _leads(self, original: Any) -> bool:
        """True if ``original`` holds a copied module, at any depth."""
        seen: dict[int, Any] = {}
        waiting = [(original, 0)]
        while waiting:
            one, holder = waiting.pop()
            if id(one) in self._leading:
                while holder:
                    self._leading.add(holder)
                    holder = seen[holder][1]
                self._originals += (found for found, _ in seen.values())
                return True
            if id(one) in seen or id(one) in self._apart or type(one) in _ATOMS or isinstance(one, (Tensor, type)):
                continue
            seen[id(one)] = one, holder
            waiting += ((part, id(one)) for part in (_parts if isinstance(one, _IMMUTABLE) else _contents)(one))
        self._apart |= seen.keys()
        self._originals += (one for one, _ in seen.values())
        return False

    def _led(self, original: Any) -> Any:
        return self._of(original) if self._leads(original) else original

    def _unfinalized(self, kind: type) -> type:
        """``kind``, or a class like it whose instances free nothing when they go."""
        if not hasattr(kind, "__del__"):
            return kind
        if kind not in self._kinds:
            own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__del__": lambda self: None}
            self._kinds[kind] = type(kind)(kind.__name__, (kind,), own)
        return self._kinds[kind]

    def _fill_container(self, made: Any, original: Any, layout: Any) -> None:
        if issubclass(layout, dict):
            items = OrderedDict.items if layout is OrderedDict else dict.items
            for key, value in [*items(original)]:
                layout.__setitem__(made, key if type(key) in _ATOMS else self._key(key), self._of(value))
            if layout is defaultdict:
                made.default_factory = self._of(original.default_factory)
        elif layout is set:
            set.update(made, map(self._key, [*set.__iter__(original)]))
        else:
            if layout is deque:
                deque.__init__(made, maxlen=original.maxlen)
            layout.extend(made, map(self._of, [*layout.__iter__(original)]))

    def _fill_attributes(self, made: Any, original: Any) -> None:
        left_out = self._left_out if isinstance(original, nn.Module) else ()
        for name, value in _state(original).items():
            if name not in left_out:
                vars(made)[name] = value if type(value) in _ATOMS else self._of(value)
        for slot, value in _slots(original):
            slot.__set__(made, self._of(value))

    def _key(self, key: Any) -> Any:
        """The copy of a dictionary's key or a set's member. One that is hashed by its attributes, which are not there
        yet, is shared."""
        if type(key) is tuple:
            return tuple(map(self._key, key))
        by_identity = vars(object)["__hash__"] is type(key).__hash__ or isinstance(key, (types.MethodType, weakref.ref))
        return self._of(key) if by_identity else self._made.get(id(key), key)

    def _reference(self, original: Any) -> Any:
        """A weak reference to the copy of a module, or of something that is copied already."""
        is_proxy = type(original) in _PROXIES
        with contextlib.suppress(ReferenceError):
            referent = original.__repr__.__self__ if is_proxy else original()
            if isinstance(original, weakref.WeakMethod):
                return weakref.WeakMethod(self._of(referent)) if self._is_changed(referent) else original
            copied = self._of(referent) if id(referent) in self._modules else self._made.get(id(referent), referent)
            if copied is not referent and is_proxy:
                return weakref.proxy(copied)
            if copied is not referent and type(original) is weakref.ref:
                return weakref.ref(copied, *filter(None, [self._of(original.__callback__)]))
        return original

    def _is_changed(self, original: Any) -> bool:
        """Return True if a copy of an immutable object would differ.

        A function is copied only if it leads to a module; its other contents may be shared with its maker."""
        if isinstance(original, (types.FunctionType, _CACHED)):
            return self._leads(original)
        return any(self._of(part) is not part for part in _parts(original))

    def _immutable(self, original: Any) -> Any:
        if isinstance(original, types.FunctionType):
            return self._function(original)
        if isinstance(original, types.MethodType):
            return types.MethodType(self._of(original.__func__), self._of(original.__self__))
        if isinstance(original, _BOUND):
            return getattr(self._of(original.__self__), original.__name__)
        if isinstance(original, _CACHED):
            return functools.lru_cache(**original.cache_parameters())(self._of(original.__wrapped__))
        if isinstance(original, functools.partial):
            given = {name: self._of(value) for name, value in original.keywords.items()}
            made: Any = type(original)(self._of(original.func), *map(self._of, original.args), **given)
        elif isinstance(original, frozenset):
            made = frozenset.__new__(type(original), map(self._key, frozenset.__iter__(original)))
        else:
            made = tuple.__new__(type(original), map(self._of, tuple.__iter__(original)))
        self._unfilled.append(functools.partial(self._fill_attributes, made, original))
        return made

    def _function(self, original: types.FunctionType) -> types.FunctionType:
        """A function of the same code whose closure leads to copies."""
        cells = tuple(map(self._cell, original.__closure__ or ()))
        made = types.FunctionType(original.__code__, original.__globals__, original.__name__, closure=cells)
        made.__module__, made.__qualname__, made.__doc__ = original.__module__, original.__qualname__, original.__doc__

        def fill() -> None:
            made.__defaults__ = original.__defaults__ and tuple(map(self._led, original.__defaults__))
            named = original.__kwdefaults__
            made.__kwdefaults__ = named and {name: self._led(value) for name, value in named.items()}
            vars(made).update((name, self._led(value)) for name, value in vars(original).items())

        self._unfilled.append(fill)
        return made

    def _cell(self, original: types.CellType) -> types.CellType:
        """A cell for the same variable, where it leads to a module; functions that share one share its copy."""
        if id(original) not in self._made:
            content = [*_content(original)]
            if any(map(self._leads, content)):
                made = types.CellType()
                self._unfilled.append(lambda: setattr(made, "cell_contents", self._of(*content)))
                self._keep(original, made)
            else:
                self._keep(original, original)
        copied: types.CellType = self._made[id(original)]
        return copied


def _parts(immutable: Any) -> Iterator[Any]:
    """Contents of an immutable object, and objects that it leads to."""
    if isinstance(immutable, (tuple, frozenset)):
        builtin: Any = tuple if isinstance(immutable, tuple) else frozenset
        yield from builtin.__iter__(immutable)
    elif isinstance(immutable, functools.partial):
        yield from (immutable.func, *immutable.args, *immutable.keywords.values(), *vars(immutable).values())
    elif isinstance(immutable, _CACHED):
        yield immutable.__wrapped__
    elif not isinstance(immutable, types.FunctionType):
        yield from (immutable.__self__, getattr(immutable, "__func__", None))
    elif not _is_global(immutable):
        for cell in immutable.__closure__ or ():
            yield from _content(cell)
        yield from (*(immutable.__defaults__ or ()), *(immutable.__kwdefaults__ or {}).values())
        yield from vars(immutable).values()


def _content(cell: types.CellType) -> Iterator[Any]:
    with contextlib.suppress(ValueError):  # its variable has no value
        yield cell.cell_contents


def _is_global(function: Any) -> bool:
    """True for a function of the program, not of a model: its module has it under its name."""
    found: Any = sys.modules.get(function.__module__)
    for name in getattr(function, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is function


def _contents(mutable: Any) -> Iterator[Any]:
    """Contents of a container or an object."""
    if isinstance(mutable, dict):
        yield from (*dict.keys(mutable), *dict.values(mutable))
    elif isinstance(mutable, weakref.ref):
        yield mutable()
    elif isinstance(mutable, (list, set, deque)):
        builtin: Any = next(one for one in (list, set, deque) if isinstance(mutable, one))
        yield from builtin.__iter__(mutable)
    yield from _attributes(mutable)


def _attributes(owner: Any) -> Iterator[Any]:
    yield from _state(owner).values()
    yield from (value for _, value in _slots(owner))


def _state(owner: Any) -> dict[str, Any]:
    """The attributes of ``owner`` in its dictionary, without our hooks."""
    return unpatched(owner) if hasattr(owner, "__dict__") else {}


def _slots(owner: Any) -> Iterator[tuple[Any, Any]]:
    """The descriptors of the ``__slots__`` of ``owner`` that have a value, with it."""
    kind: Any = type(owner)
    for slot in _slots_of(kind):
        with contextlib.suppress(AttributeError):
            yield slot, slot.__get__(owner)


@functools.lru_cache(maxsize=1024)
def _slots_of(kind: Any) -> tuple[Any, ...]:
    own = (vars(one) for one in kind.__mro__ if "__slots__" in vars(one))
    return tuple(slot for names in own for slot in names.values() if isinstance(slot, types.MemberDescriptorType))


@functools.lru_cache(maxsize=1024)
def _copies_itself(kind: Any) -> bool:
    """True for a class that frees something with its instances, or defines how an instance is copied."""
    own = ("__del__", "__deepcopy__", "__reduce__", "__reduce_ex__")
    return any(name in vars(one) for one in kind.__mro__ if one.__flags__ & _IN_PYTHON for name in own)


_IN_PYTHON = 1 << 9
"""The flag of classes that are made while the program runs."""
