"""Copies of modules that are separate from the originals, and need no memory for weights.

``copy.deepcopy`` is no use here: it clones every tensor, copies handles of native memory (whose copies then free the
original's), and shares functions, which go on calling the original modules.

Here modules, containers and plain objects are copied attribute by attribute, and none of their code runs. If something
points at a copied module (a bound method, a partial, a closure, a weak reference, an object that holds one), its copy
points at that module's copy. Tensors that are not weights, native objects and owners of native handles are shared with
the originals.
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

from ..patches import Trampoline, unpatched_attributes

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
    """Return copies of ``components`` by name, without our hooks.

    Args:
        components: models by name.
        stand_ins: by the id of an object, what replaces it in the copies: for a weight its fake tensor.
        left_out: names of attributes that the copies of modules do not get.
    """
    copies = _Copies(components.values(), stand_ins, left_out)
    return {name: copies.copy(component) for name, component in components.items()}


class _Copies:
    """Copies by the ids of their originals.

    Mutable objects are copied empty first and filled later, so that cycles and long chains of objects need no
    recursion.
    """

    def __init__(self, roots: Iterable[nn.Module], stand_ins: Mapping[int, Any], left_out: Iterable[str]) -> None:
        self._made = dict(stand_ins)
        self._originals: list[Any] = []  # held, so that no other object gets their ids
        self._unfilled: deque[Callable[[], None]] = deque()
        self._left_out = ("_compiled_call_impl", *left_out)
        self._modules = {id(module) for root in roots for module in root.modules()}
        self._leading, self._apart = set(self._modules), set[int]()
        self._kinds: dict[type, type] = {}

    def copy(self, original: Any) -> Any:
        """Return the copy of ``original`` with everything that it holds."""
        copy = self._copy_of(original)
        while self._unfilled:
            self._unfilled.popleft()()
        return copy

    def _copy_of(self, original: Any) -> Any:
        """Return the copy of ``original``, perhaps still empty; or ``original`` itself if it is shared."""
        if type(original) in _ATOMS:
            return original
        cached = self._made.get(id(original), self)
        if cached is self:
            if type(original) in _PROXIES or isinstance(original, weakref.ref):
                copy = self._reference(original)
            elif isinstance(original, _IMMUTABLE):
                copy = self._immutable(original) if self._is_changed(original) else original
            elif isinstance(original, Trampoline):
                copy = self._copy_of(original.original)
            else:
                copy = self._mutable(original)
            self._keep(original, copy)
            return copy
        return cached

    def _keep(self, original: Any, copy: Any) -> None:
        self._made[id(original)] = copy
        self._originals.append(original)

    def _mutable(self, original: Any) -> Any:
        kind = type(original)
        if kind in _PLAIN:  # most attributes of modules, and most of them are empty
            copy = kind()
            if original:
                self._unfilled.append(functools.partial(self._fill_container, copy, original, kind))
            return copy
        if isinstance(original, (Tensor, type, *_NATIVE)) or not self._is_copied(original):
            return original
        layout = next(base for base in _LAYOUTS if issubclass(kind, base))
        try:
            copy = layout.__new__(self._drop_finalizer(kind))
        except TypeError:  # instances are laid out by native code
            return original
        if layout is not object and layout is not types.SimpleNamespace:
            self._unfilled.append(functools.partial(self._fill_container, copy, original, layout))
        if kind is not layout or layout is types.SimpleNamespace:
            self._unfilled.append(functools.partial(self._fill_attributes, copy, original))
        return copy

    def _is_copied(self, original: Any) -> bool:
        """Return True if an object is copied, False if it is shared.

        Shared are objects without state, and objects that own a native handle or whose class defines how they are
        copied. They are copied after all if they hold a copied module.
        """
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
            value, holder = waiting.pop()
            if id(value) in self._leading:
                while holder:
                    self._leading.add(holder)
                    holder = seen[holder][1]
                self._originals += (value for value, _ in seen.values())
                return True
            if (
                id(value) in seen
                or id(value) in self._apart
                or type(value) in _ATOMS
                or isinstance(value, (Tensor, type))
            ):
                continue
            seen[id(value)] = value, holder
            waiting += ((part, id(value)) for part in (_parts if isinstance(value, _IMMUTABLE) else _contents)(value))
        self._apart |= seen.keys()
        self._originals += (value for value, _ in seen.values())
        return False

    def _copy_if_leading(self, original: Any) -> Any:
        return self._copy_of(original) if self._leads(original) else original

    def _drop_finalizer(self, kind: type) -> type:
        """Return ``kind``, or a subclass whose instances free nothing when they are deleted."""
        if not hasattr(kind, "__del__"):
            return kind
        if kind not in self._kinds:
            own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__del__": lambda self: None}
            self._kinds[kind] = type(kind)(kind.__name__, (kind,), own)
        return self._kinds[kind]

    def _fill_container(self, copy: Any, original: Any, layout: Any) -> None:
        if issubclass(layout, dict):
            items = OrderedDict.items if layout is OrderedDict else dict.items
            for key, value in [*items(original)]:
                layout.__setitem__(copy, key if type(key) in _ATOMS else self._key(key), self._copy_of(value))
            if layout is defaultdict:
                copy.default_factory = self._copy_of(original.default_factory)
        elif layout is set:
            set.update(copy, map(self._key, [*set.__iter__(original)]))
        else:
            if layout is deque:
                deque.__init__(copy, maxlen=original.maxlen)
            layout.extend(copy, map(self._copy_of, [*layout.__iter__(original)]))

    def _fill_attributes(self, copy: Any, original: Any) -> None:
        left_out = self._left_out if isinstance(original, nn.Module) else ()
        for name, value in _state(original).items():
            if name not in left_out:
                vars(copy)[name] = value if type(value) in _ATOMS else self._copy_of(value)
        for slot, value in _slots(original):
            slot.__set__(copy, self._copy_of(value))

    def _key(self, key: Any) -> Any:
        """Return the copy of a dictionary's key or a set's member.

        An object that is hashed by its attributes is shared, because its copy is still empty when it is hashed.
        """
        if type(key) is tuple:
            return tuple(map(self._key, key))
        by_identity = vars(object)["__hash__"] is type(key).__hash__ or isinstance(key, (types.MethodType, weakref.ref))
        return self._copy_of(key) if by_identity else self._made.get(id(key), key)

    def _reference(self, original: Any) -> Any:
        """Return a weak reference to the copy of a module, or of something that is copied already."""
        is_proxy = type(original) in _PROXIES
        with contextlib.suppress(ReferenceError):
            referent = original.__repr__.__self__ if is_proxy else original()
            if isinstance(original, weakref.WeakMethod):
                return weakref.WeakMethod(self._copy_of(referent)) if self._is_changed(referent) else original
            copied = (
                self._copy_of(referent) if id(referent) in self._modules else self._made.get(id(referent), referent)
            )
            if copied is not referent and is_proxy:
                return weakref.proxy(copied)
            if copied is not referent and type(original) is weakref.ref:
                return weakref.ref(copied, *filter(None, [self._copy_of(original.__callback__)]))
        return original

    def _is_changed(self, original: Any) -> bool:
        """Return True if a copy of an immutable object would differ.

        A function is copied only if it leads to a module; its other contents may be shared with its maker."""
        if isinstance(original, (types.FunctionType, _CACHED)):
            return self._leads(original)
        return any(self._copy_of(part) is not part for part in _parts(original))

    def _immutable(self, original: Any) -> Any:
        if isinstance(original, types.FunctionType):
            return self._function(original)
        if isinstance(original, types.MethodType):
            return types.MethodType(self._copy_of(original.__func__), self._copy_of(original.__self__))
        if isinstance(original, _BOUND):
            return getattr(self._copy_of(original.__self__), original.__name__)
        if isinstance(original, _CACHED):
            return functools.lru_cache(**original.cache_parameters())(self._copy_of(original.__wrapped__))
        if isinstance(original, functools.partial):
            keywords = {name: self._copy_of(value) for name, value in original.keywords.items()}
            copy: Any = type(original)(self._copy_of(original.func), *map(self._copy_of, original.args), **keywords)
        elif isinstance(original, frozenset):
            copy = frozenset.__new__(type(original), map(self._key, frozenset.__iter__(original)))
        else:
            copy = tuple.__new__(type(original), map(self._copy_of, tuple.__iter__(original)))
        self._unfilled.append(functools.partial(self._fill_attributes, copy, original))
        return copy

    def _function(self, original: types.FunctionType) -> types.FunctionType:
        """A function of the same code whose closure leads to copies."""
        cells = tuple(map(self._cell, original.__closure__ or ()))
        copy = types.FunctionType(original.__code__, original.__globals__, original.__name__, closure=cells)
        copy.__module__, copy.__qualname__, copy.__doc__ = original.__module__, original.__qualname__, original.__doc__

        def fill() -> None:
            copy.__defaults__ = original.__defaults__ and tuple(map(self._copy_if_leading, original.__defaults__))
            named = original.__kwdefaults__
            copy.__kwdefaults__ = named and {name: self._copy_if_leading(value) for name, value in named.items()}
            vars(copy).update((name, self._copy_if_leading(value)) for name, value in vars(original).items())

        self._unfilled.append(fill)
        return copy

    def _cell(self, original: types.CellType) -> types.CellType:
        """Return a cell for the same variable if it leads to a module; functions that share a cell share its copy."""
        if id(original) not in self._made:
            content = [*_content(original)]
            if any(map(self._leads, content)):
                copy = types.CellType()
                self._unfilled.append(lambda: setattr(copy, "cell_contents", self._copy_of(*content)))
                self._keep(original, copy)
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
    """True for a function of the program, not of a model: its Python module has it under its name."""
    attribute: Any = sys.modules.get(function.__module__)
    for name in getattr(function, "__qualname__", "").split("."):
        attribute = getattr(attribute, name, None)
    return attribute is function


def _contents(mutable: Any) -> Iterator[Any]:
    """Contents of a container or an object."""
    if isinstance(mutable, dict):
        yield from (*dict.keys(mutable), *dict.values(mutable))
    elif isinstance(mutable, weakref.ref):
        yield mutable()
    elif isinstance(mutable, (list, set, deque)):
        builtin: Any = next(base for base in (list, set, deque) if isinstance(mutable, base))
        yield from builtin.__iter__(mutable)
    yield from _attributes(mutable)


def _attributes(owner: Any) -> Iterator[Any]:
    yield from _state(owner).values()
    yield from (value for _, value in _slots(owner))


def _state(owner: Any) -> dict[str, Any]:
    """The attributes of ``owner`` in its dictionary, without our hooks."""
    return unpatched_attributes(owner) if hasattr(owner, "__dict__") else {}


def _slots(owner: Any) -> Iterator[tuple[Any, Any]]:
    """The descriptors of the ``__slots__`` of ``owner`` that have a value, with it."""
    kind: Any = type(owner)
    for slot in _slots_of(kind):
        with contextlib.suppress(AttributeError):
            yield slot, slot.__get__(owner)


@functools.lru_cache(maxsize=1024)
def _slots_of(kind: Any) -> tuple[Any, ...]:
    own = (vars(base) for base in kind.__mro__ if "__slots__" in vars(base))
    return tuple(slot for names in own for slot in names.values() if isinstance(slot, types.MemberDescriptorType))


@functools.lru_cache(maxsize=1024)
def _copies_itself(kind: Any) -> bool:
    """True for a class that frees something with its instances, or defines how an instance is copied."""
    own = ("__del__", "__deepcopy__", "__reduce__", "__reduce_ex__")
    return any(name in vars(base) for base in kind.__mro__ if base.__flags__ & _IN_PYTHON for name in own)


_IN_PYTHON = 1 << 9
"""The flag of classes that are made while the program runs."""
