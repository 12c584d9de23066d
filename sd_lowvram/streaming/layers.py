"""The layers of a model that are brought to the device one by one: modules that hold tensors and are called.

A layer that somebody has wrapped (a LoRA around a Linear) or compiled comes whole, with all that is below it, because
such a wrapper may look at the weights of what it wraps. Nothing is read here but what tensors there are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..compat.private import FakeTensor, storage_key, writes
from ..errors import ConflictError
from ..weight_parts import (
    Link,
    is_of_bitsandbytes,
    is_packed,
    is_quantised,
    is_wrapper,
    links_of,
    parts_of,
    rebuilt,
    registered,
)
from ..weights import all_tensors, own_tensors
from .schedule import align

_HOLDERS = (nn.ParameterList, nn.ParameterDict)
"""Never called: what they hold is used by the module above."""
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules that read the weights of their children without calling them."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A module that holds tensors.

    Attributes:
        name: its path, for people.
        module: the module that is called.
        tensors: its parameters and buffers; for a layer that is copied whole, also those of all modules below.
        whole: True if no module below is a layer by itself.
        around: True if modules below are layers by themselves, which run while this one runs.
        links: the tensors of its quantised weights that others take the place of while it runs.
        lookup: for a table of which a call reads a few rows in host memory, the method that reads them; else empty.
    """

    name: str
    module: nn.Module
    tensors: tuple[Tensor, ...]
    whole: bool = False
    around: bool = False
    lookup: str = ""
    links: tuple[Link, ...] = ()

    @property
    def component(self) -> str:
        """The name of the model to which it belongs."""
        return self.name.split(".")[0]

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes on the device, each tensor rounded up to its alignment."""
        return sum(place_bytes(tensor) for tensor in self.tensors)

    @property
    def entry(self) -> str:
        """The attribute through which it is called."""
        if self.lookup:
            return self.lookup
        return "forward" if self.module._compiled_call_impl is None else "_compiled_call_impl"


def layers_of(components: Mapping[str, nn.Module]) -> list[Layer]:
    """Return the layers of models, in the order of their definition; the order of a run is known after a first run.

    Args:
        components: models by name.

    Raises:
        ConflictError: weights that cannot be copied byte by byte (unknown tensor subclasses, weights that are yet to
            be quantised, the meta device).
    """
    seen: set[int] = set()
    layers = [layer for name, root in components.items() for layer in _below(name, root, seen)]
    for layer in layers:
        for module in layer.module.modules() if layer.whole else (layer.module,):
            for _, _, tensor in registered(module):
                _refuse_foreign(layer.name, tensor)
    return layers


def inner_layers(layer: Layer) -> list[Layer]:
    """The parts of a wrapped layer: the inner layer, and what was added around it."""
    return list(_below(layer.name, layer.module, set(), apart=True))


def _below(name: str, module: nn.Module, seen: set[int], apart: bool = False) -> Iterator[Layer]:
    if id(module) in seen or isinstance(module, _HOLDERS):
        return
    seen.add(id(module))
    if not apart and _comes_whole(module):
        tensors = tuple(all_tensors(module))
        if tensors:
            yield Layer(name, module, tensors, whole=True, links=_links(*module.modules()))
        return
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    holders = [child for _, child in children if isinstance(child, _HOLDERS)]
    own = (*own_tensors(module), *all_tensors(*holders))
    below = [layer for child, inner in children for layer in _below(f"{name}.{child}", inner, seen)]
    if own:
        yield Layer(name, module, own, around=bool(below), lookup=lookup(module), links=_links(module, *holders))
    yield from below


def lookup(module: Any) -> str:
    """The name of the method that reads a few rows of a module's table; empty if the module holds anything else."""
    if type(module) is nn.Embedding and module.max_norm is None:
        return "forward"
    crops = hasattr(module, "cropped_pos_embed") and module.pos_embed_max_size
    return "cropped_pos_embed" if crops else ""  # SD3's positions


def _comes_whole(module: Any) -> bool:
    if is_compiled(module) or isinstance(module, _WHOLE) or hasattr(module, "parametrizations"):
        return True
    base = getattr(module, "base_layer", None)
    return isinstance(base, nn.Module) and not isinstance(base, nn.Embedding)


def is_compiled(module: nn.Module) -> bool:
    """True if ``module`` was compiled, by ``module.compile()`` or ``torch.compile(module)``."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def place_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor on the device, rounded up to its alignment."""
    return align(tensor.nbytes)


def _links(*modules: nn.Module) -> tuple[Link, ...]:
    return tuple(link for module in modules for link in links_of(module))


def _refuse_foreign(name: str, tensor: Tensor) -> None:
    kind = type(tensor)
    if tensor.device.type == "meta" and not isinstance(tensor, FakeTensor):
        raise ConflictError(f"{name} has weights on the meta device: load them before they are streamed")
    if isinstance(tensor, FakeTensor) or kind in (Tensor, nn.Parameter) or kind is getattr(nn, "Buffer", Tensor):
        return
    if is_wrapper(tensor):
        if not _is_rebuilt(tensor):
            raise ConflictError(
                f"{name} holds {kind.__name__} weights, which cannot be put together again from their parts: "
                'use Settings(offload="none") or weights of another kind'
            )
    elif is_quantised(tensor):
        if is_of_bitsandbytes(tensor) and not is_packed(tensor):
            raise ConflictError(
                f"{name} holds {kind.__name__} weights that are yet to be quantised, as is done when they are moved: "
                "load them with a quantization_config, or call .to() on the model once",
                plainly=f"{name} has weights that are yet to be quantised: load it quantised",
            )
    else:
        raise ConflictError(
            f"{name} holds {kind.__name__} weights, which cannot be streamed byte by byte: "
            'use Settings(offload="none") or unquantised weights'
        )


def _is_rebuilt(wrapper: Tensor) -> bool:
    """True if ``wrapper`` is of the same class when it is put together, and its parts are plain."""
    parts = parts_of(wrapper)
    plain = all(type(part) in (Tensor, nn.Parameter) or isinstance(part, FakeTensor) for part in parts)
    return plain and type(rebuilt(wrapper, {id(part): part for part in parts})) is type(wrapper)


def all_modules(components: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules of ``components``, for :func:`signature`."""
    return [module for component in components for module in component.modules()]


def signature(modules: Iterable[nn.Module], quantised: Iterable[nn.Module] = ()) -> list[Any]:
    """Tensors and children of ``modules``, what was merged into them and whether they are compiled, and the parts of
    the weights of those that are ``quantised``: a cheap key for "nothing changed since the last run"."""
    held = [module.__dict__ for module in modules]
    tables = (inside[name].values() for inside in held for name in ("_parameters", "_buffers", "_modules"))
    return [
        list(map(id, itertools.chain.from_iterable(tables))),
        [tuple(inside.get("merged_adapters", ())) for inside in held],
        [inside.get("_compiled_call_impl") is None for inside in held],
        [id(part) for module in quantised for part in own_tensors(module)],
    ]


def contents(tensors: list[Tensor]) -> list[Any]:
    """Addresses and version counters of tensors, to notice that they were written to."""
    if tensors and isinstance(tensors[0], FakeTensor):
        return [(storage_key(tensor), tensor.dtype, version(tensor)) for tensor in tensors]
    return [list(map(Tensor.data_ptr, tensors)), [tensor.dtype for tensor in tensors], list(map(version, tensors))]


def version(tensor: Tensor) -> int:
    """Version counter of a tensor: it rises with every write in place. 0 for inference tensors, which
    have no counter.
    """
    return 0 if tensor.is_inference() else writes(tensor)
