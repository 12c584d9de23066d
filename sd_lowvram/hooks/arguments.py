"""Arguments of a UNet's modules: tensors and maps with an entry for each picture of the batch, and, in ComfyUI and
Forge, a dictionary of options that is passed through all modules.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..compat.private import tree_flatten, tree_map
from ..models.compvis import TOKEN_PATCHES
from .parking.offloaded_tensor import OffloadedMap, pictures

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_OF_OPTIONS = "transformer_index"
_A_CONDITION_EACH = ("cond_or_uncond", "uuids")


def change_tensors(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    change: Callable[[Any], Any],
    change_options: Callable[[dict[str, Any]], dict[str, Any]] = lambda options: options,
) -> Arguments:
    """Return the arguments with every leaf changed. Options, which modules write into, stay the same object unless
    ``change_options`` replaces them.

    Args:
        args, kwargs: of a call of a module; nests of lists, tuples and dictionaries are searched for leaves.
        change: function from a leaf to what replaces it.
        change_options: function from a host's options to what replaces them.

    Returns:
        New positional and keyword arguments; those given are left as they are.
    """

    def change_leaf(value: Any) -> Any:
        return change_options(value) if _is_options(value) else tree_map(change, value)

    return tuple(map(change_leaf, args)), {name: change_leaf(value) for name, value in kwargs.items()}


def time_and_more(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments of a residual block after its map: the embedding of time, None if there is none, and all that follow.

    Denoisers pass the embedding by position, autoencoders by keyword."""
    return (*args, *kwargs.values(), None)[: max(1, len(args) + len(kwargs))]


def given_by_name(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a module's call, by the names of its forward."""
    return dict(zip(_names(type(module).forward), args, strict=False)) | kwargs


@functools.lru_cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Pictures in the first map (N, C, H, W) among the arguments; 1 when there is none."""
    return next(
        (len(leaf) for leaf in _leaves(args, kwargs) if isinstance(leaf, (Tensor, OffloadedMap)) and leaf.ndim == 4), 1
    )


def holds_last_pictures(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the last pictures of a map among the arguments are still on the device."""
    return any(isinstance(leaf, OffloadedMap) and leaf.is_last_there() for leaf in _leaves(args, kwargs))


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return tree_flatten([value for value in (*args, *kwargs.values()) if not _is_options(value)])[0]


def shares(args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> int:
    """Number of parts into which a batch divides: one for each condition that the host names, else two, else one a
    picture.

    Args:
        args, kwargs: of a call of a module, with the host's options among them.
        batch: rows of the batch.

    Returns:
        The number of parts, which divides ``batch``.
    """
    for value in (*args, *kwargs.values()):
        conditions = len(value.get(_A_CONDITION_EACH[0]) or ()) if _is_options(value) else 0
        if conditions > 1 and batch % conditions == 0:
            return conditions
    return 2 if batch % 2 == 0 else batch


def are_watched(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a foreign function sees the tokens and may use several rows of the batch together.

    ToMe, for example, draws once for all rows which tokens it merges."""
    patches = [value.get("patches") or {} for value in (*args, *kwargs.values()) if _is_options(value)]
    return any(patch.get(name) for patch in patches for name in TOKEN_PATCHES)


def part_of(args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, number: int, parts: int) -> Arguments:
    """The arguments for one of ``parts`` equal parts of a batch.

    Args:
        batch: rows of the whole batch.
        number: number of the part, from 0.
        parts: number of parts.

    Returns:
        Arguments with rows ``batch * number // parts`` and on of each tensor and parked map; options name the part's
        own conditions.
    """
    start, stop = batch * number // parts, batch * (number + 1) // parts
    chosen = functools.partial(pictures, batch=batch, start=start, stop=stop)
    return change_tensors(args, kwargs, chosen, functools.partial(_options_of_part, chosen, number=number, parts=parts))


def _options_of_part(chosen: Callable[[Any], Any], options: dict[str, Any], number: int, parts: int) -> dict[str, Any]:
    mine = dict(options)
    for name in _A_CONDITION_EACH:
        entries = options.get(name)
        if isinstance(entries, (list, tuple)) and len(entries) == parts:
            mine[name] = entries[number : number + 1]
    if isinstance(options.get("sigmas"), Tensor):
        mine["sigmas"] = chosen(options["sigmas"])
    return mine


def _is_options(value: Any) -> bool:
    return isinstance(value, Mapping) and _OF_OPTIONS in value
