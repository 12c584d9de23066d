"""A cache of operators' fake results, by shapes, strides and types.

Strips call the same operators thousands of times, and the fake mode is slow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.private import FakeTensor, FakeTensorMode, disable_fakes, resize_storage
from ..memory.fake_mode import fake_around, fake_empty

aten = torch.ops.aten

# They change storages.
_UNREPEATABLE = frozenset(
    f"aten::{name}" for name in ("as_strided_", "resize_", "resize_as_", "set_", "lift_fresh", "lift")
)


class Made(NamedTuple):
    """Layout of one result: a new tensor, or a view of the first argument that begins at ``offset`` elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int | None


class Recipe(NamedTuple):
    """Layouts of an operator's results, and the bytes and operations of its kernel. ``made`` is None for the first
    argument itself.
    """

    made: tuple[Made, ...] | None
    container: type | None
    hidden: int = 0
    flops: int = 0
    moved: int = 0
    packed: int = 0
    besides: int = 0
    wide: bool = False
    group_elements: int = 0


def is_repeatable(func: Any) -> bool:
    """True if the results of ``func`` depend only on shapes, strides, types and numbers, or are its first argument."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.name.startswith("aten::") or schema.name in _UNREPEATABLE:
        return False
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
        return False
    first, *others = schema.arguments or [None]
    if first is None or any(argument.alias_info and argument.alias_info.is_write for argument in others):
        return False
    return not _writes(first) or (len(schema.returns) == 1 and _writes(schema.returns[0]))


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def signature(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return a key of everything that the results of a repeatable operator depend on.

    Args:
        func: the operator.
        args, kwargs: its arguments.

    Returns:
        The key; None if a tensor is not fake, or has a known value.
    """
    parts: list[Any] = [func]
    for value in args:
        if isinstance(value, FakeTensor):
            if value.constant is not None:
                return None
            parts.append((value.shape, value.stride(), value.dtype, value.fake_device))
        elif isinstance(value, (list, tuple)):
            inner = signature(None, tuple(value), {})
            if inner is None:
                return None
            parts.append(inner)
        elif isinstance(value, Tensor):
            return None
        else:
            parts.append((type(value), value))
    for name, value in kwargs.items():
        if isinstance(value, (Tensor, list, tuple)):
            return None
        parts.append((name, type(value), value))
    return tuple(parts)


def recipe_for(result: Any, first: Any, *, view: bool) -> tuple[Made, ...] | None:
    """Return the layouts from which :func:`make` makes ``result`` again.

    Args:
        result: what the operator returned.
        first: its first argument.
        view: True if the result shares the memory of ``first``.

    Returns:
        The layouts; None if ``result`` does not consist of fake tensors alone.
    """
    tensors = (result,) if isinstance(result, Tensor) else result
    if not isinstance(tensors, (list, tuple)):
        return None
    layouts = []
    for tensor in tensors:
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return None
        offset = int(tensor.storage_offset() - (_start(first, tensor) if view else 0))
        if offset and not view:
            return None
        place = offset if view else None
        layouts.append(Made(tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device, place))
    return tuple(layouts)


def make(recipe: Recipe, mode: FakeTensorMode, args: tuple[Any, ...]) -> Any:
    """Make the results that ``recipe`` describes.

    Args:
        recipe: of the operator.
        mode: makes the fake tensors.
        args: arguments of this call; views are of the first.
    """
    if recipe.made is None:
        return args[0]
    results = [fake(layout, mode, args[0]) for layout in recipe.made]
    return results[0] if recipe.container is None else recipe.container(results)


def fake(layout: Made, mode: FakeTensorMode, first: Any) -> Tensor:
    """Make a fake tensor of ``layout``; views are of ``first``."""
    if layout.offset is None:
        return fake_empty(mode, layout.shape, layout.stride, layout.dtype, layout.device)
    if first.is_inference() == torch.is_inference_mode_enabled():
        return _view(layout, layout.offset, mode, first)
    with torch.inference_mode(first.is_inference()):  # a view is an inference tensor if its base is
        return _view(layout, layout.offset, mode, first)


def _start(first: Tensor, view: Tensor) -> int:
    """Offset of ``first``, in elements of its ``view``."""
    return int(first.storage_offset() * first.element_size() // view.element_size())


def _view(layout: Made, offset: int, mode: FakeTensorMode, first: Any) -> Tensor:
    storage = first.untyped_storage()
    size = storage.nbytes()
    with disable_fakes():
        meta = torch.empty(0, dtype=layout.dtype, device="meta")
        meta.set_(storage, _start(first, meta) + offset, layout.shape, layout.stride)
        if storage.nbytes() != size:  # before torch 2.4 it ends where the view does
            resize_storage(storage, size)
    return fake_around(meta, mode, layout.device)
