"""The tensors that hold the bytes of quantised weights.

Libraries keep such a weight's bytes in several plain tensors. bitsandbytes keeps them beside the weight, in
``quant_state`` (with a second one in it) or as ``CB`` and ``SCB``; its first call moves the latter to the ``state`` of
the layer. quanto and torchao keep them inside of a tensor that has no memory of its own, and that torch takes apart and
puts together by ``__tensor_flatten__`` and ``__tensor_unflatten__``. Blocks of GGUF are one plain tensor. No library is
imported here: attributes and torch's protocol are all that is looked at.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .compat.private import storage_key

_BYTES = ("CB", "SCB")
"""Names of bitsandbytes' int8: the weight's bytes once more, and the scales of its rows."""

_PLAIN = (nn.Parameter, Tensor)

_TABLE = "code"
"""bitsandbytes' name of the numbers that its bits stand for."""

Holder = tuple[Any, str]
"""An object, or a dictionary, and a name in it."""


@dataclass(frozen=True, eq=False)
class Link:
    """A tensor that is no parameter, or has no memory of its own: on the device another object takes its place.

    Attributes:
        value: the tensor.
        holders: where it may be found; a layer's first call may move it from one to another.
        parts: the plain tensors with its bytes, ``value`` itself if it is plain.
        memory: the weight whose bytes these are, if it is another one.
    """

    value: Tensor
    holders: tuple[Holder, ...]
    parts: tuple[Tensor, ...]
    memory: Tensor | None = None

    @property
    def is_shared(self) -> bool:
        """True for a table that all weights of a process may have in common."""
        return self.holders[0][1] == _TABLE

    def made_of(self, parts: Mapping[int, Tensor]) -> Tensor:
        """Return the tensor that takes its place.

        Args:
            parts: the parts that it is to have, by the ids of those that it has.
        """
        return rebuilt(self.value, parts)

    def exchange(self, before: Tensor, after: Tensor) -> bool:
        """Put ``after`` where ``before`` is; return False if it is nowhere."""
        found = [holder for holder in self.holders if _get(*holder) is before]
        for inside, name in found:
            if isinstance(inside, dict):
                inside[name] = after
            else:
                setattr(inside, name, after)
        return bool(found)


def _get(inside: Any, name: str) -> Any:
    return inside.get(name) if isinstance(inside, dict) else vars(inside).get(name)


def registered(*modules: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield the parameters and buffers that the modules themselves hold, with the dictionary and the name of each."""
    for module in modules:
        tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for table in tables:
            yield from ((table, name, tensor) for name, tensor in table.items() if tensor is not None)


def is_wrapper(tensor: Tensor) -> bool:
    """True if ``tensor`` has no memory of its own, and torch can take it apart."""
    return hasattr(type(tensor), "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")


def is_gguf(tensor: Tensor) -> bool:
    """True if ``tensor`` holds blocks of a GGUF file as diffusers stores them: bytes with a ``quant_type``."""
    return hasattr(tensor, "quant_type") and hasattr(tensor, "as_tensor") and tensor.dtype == torch.uint8


def is_quantised(tensor: Tensor) -> bool:
    """True if a library has stored ``tensor`` in fewer bits, so that no other type can be given to it."""
    if type(tensor) in _PLAIN and not vars(tensor):
        return False
    return is_wrapper(tensor) or is_gguf(tensor) or is_of_bitsandbytes(tensor)


def is_of_bitsandbytes(tensor: Tensor) -> bool:
    """True if ``tensor`` has a state or scales beside itself."""
    return "quant_state" in vars(tensor) or "SCB" in vars(tensor)


def is_packed(tensor: Tensor) -> bool:
    """True if bitsandbytes has quantised its weight ``tensor``; before it is moved it holds plain numbers."""
    return vars(tensor).get("quant_state") is not None or tensor.dtype == torch.int8


def rebuilt(tensor: Tensor, parts: Mapping[int, Tensor]) -> Tensor:
    """``tensor`` made of other ``parts``, which are given by the ids of its own."""
    if not is_wrapper(tensor):
        return parts[id(tensor)]
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: rebuilt(getattr(tensor, name), parts) for name in names}
    kind: Any = type(tensor)
    made: Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    own = vars(made)
    own.update({name: value for name, value in vars(tensor).items() if name not in own})
    if isinstance(tensor, nn.Parameter):
        made._is_param = True
    return made


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside of ``tensor``; if it is plain, itself and those in its state."""
    if not is_wrapper(tensor):
        return [tensor, *(link.value for link in _states(vars(tensor).get("quant_state")))]
    return [part for name in tensor.__tensor_flatten__()[0] for part in parts_of(getattr(tensor, name))]  # type: ignore[attr-defined]


def links_of(module: nn.Module) -> Iterator[Link]:
    """Yield the links of the weights that ``module`` itself holds."""
    for table, name, tensor in registered(module):
        if is_wrapper(tensor):
            yield Link(tensor, ((table, name),), tuple(parts_of(tensor)))
        elif "quant_state" in vars(tensor):
            yield from _states(vars(tensor)["quant_state"])
        elif "SCB" in vars(tensor):
            yield from _rows(tensor, vars(module).get("state"))


def is_in_parts(component: nn.Module) -> bool:
    """True if ``component`` holds weights that a library has quantised and keeps in several tensors."""
    return any(True for module in component.modules() for _ in links_of(module))


def describe_as(plain: Tensor, weight: Tensor, made: Callable[[Tensor], Tensor]) -> None:
    """Give ``plain`` what a quantised ``weight`` has beside itself.

    Args:
        plain: a tensor with the shape of ``weight``.
        weight: a weight of bitsandbytes.
        made: returns what takes the place of a tensor beside the weight.
    """

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return made(value)
        if not hasattr(value, "absmax"):
            return value
        state = copy.copy(value)
        vars(state).update({name: copied(inner) for name, inner in vars(value).items()})
        return state

    vars(plain).update({name: copied(value) for name, value in vars(weight).items() if name != "module"})


def _states(state: Any) -> Iterator[Link]:
    """Links of a state, and of the one in it."""
    for name, value in vars(state).items() if state is not None else ():
        if isinstance(value, Tensor):
            yield Link(value, ((state, name),), (value,))
        elif name.startswith("state") and hasattr(value, "absmax"):
            yield from _states(value)


def _rows(weight: Tensor, state: Any) -> Iterator[Link]:
    """Links of a weight of 8 bits: of its bytes, which are those of the weight itself, and of its scales."""
    inside = [weight] if state is None else [weight, state]
    for name in _BYTES:
        holders = tuple((each, name) for each in inside)
        value = next((_get(*holder) for holder in holders if _get(*holder) is not None), None)
        if value is not None:
            same = name == "CB" and storage_key(value) == storage_key(weight)
            yield Link(value, holders, () if same else (value,), weight if same else None)
