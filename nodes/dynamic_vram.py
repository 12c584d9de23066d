"""A bound on the weights that ComfyUI's dynamic VRAM keeps on a card.

There a model's weights lie in a range of addresses of its own and are faulted in as layers are called, up to all memory
that is free, whatever the host was asked for. What lies above the range's watermark is freed and not faulted in again:
it is copied in for each call. As every load sets the watermark to "all", it is set behind each load while a model runs,
and taken back when it has run, failed or been cancelled.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .loading import InRange, layer_bytes

_KEY = "sd-lowvram"

TOUCHED = {
    "comfy.memory_management": ("aimdo_enabled",),
    "comfy.model_management": ("current_loaded_models",),
    "comfy.model_management.LoadedModel": ("model", "model_memory", "model_loaded_memory"),
    "comfy.model_patcher.ModelPatcherDynamic": (
        *("is_dynamic", "_vbar_get", "loaded_size", "model_size"),
        *("add_callback_with_key", "remove_callbacks_with_key"),
    ),
    "comfy.patcher_extension.CallbacksMP": ("ON_LOAD",),
    "comfy_aimdo.model_vbar.ModelVBAR": ("set_watermark", "free_memory", "loaded_size", "prioritize"),
}
"""What the bound takes of ComfyUI and of its library, by module or class; besides them attributes of instances: offset
and max_size of a ModelVBAR, device and currently_used of a LoadedModel, model_loaded_weight_memory of a model."""


def renamed() -> list[str]:
    """Names of :data:`TOUCHED` that this ComfyUI lacks; empty where it has no dynamic VRAM at all."""
    if "comfy_aimdo.model_vbar" not in sys.modules:
        return []
    return [f"{place}.{name}" for place, names in TOUCHED.items() for name in names if not _has(place, name)]


def _has(place: str, name: str) -> bool:
    module, _, kind = place.rpartition(".")
    owner = sys.modules.get(place) or getattr(sys.modules.get(module), kind, None)
    return owner is not None and hasattr(owner, name)


RENAMED = renamed()
"""Names that were missing when our nodes were imported."""

UNBOUND = (
    f"this ComfyUI names parts of dynamic VRAM differently ({', '.join(RENAMED)}): the budget does not limit weights; "
    "all else works as before"
)
if RENAMED:
    logging.warning(f"sd-lowvram: {UNBOUND}")


def is_dynamic(patcher: Any) -> bool:
    """True if the host holds the weights of a ModelPatcher in a range of addresses."""
    return bool(patcher.is_dynamic()) if hasattr(patcher, "is_dynamic") else False


def range_of(patcher: Any) -> Any:
    """The host's ModelVBAR of the model's weights on the device it computes on; None: there is none."""
    return patcher._vbar_get() if is_dynamic(patcher) and not RENAMED else None


def paged_bytes(patcher: Any) -> int:
    """Bytes of the weights on the GPU that torch's allocator does not see."""
    weights = range_of(patcher)
    return 0 if weights is None else int(weights.loaded_size())


@contextlib.contextmanager
def limit_weights(
    patcher: Any, capacity: int, report: Callable[[int], None], warn: Callable[[str], None]
) -> Iterator[None]:
    """Limit the weights of a dynamic ``patcher`` to ``capacity`` bytes, within the block, from each load on.

    Weights of other models count too; idle models are evicted as far as needed.

    Args:
        report: called with the bytes to which the weights' range was limited.
        warn: called with a sentence if the host's library refuses a limit, or to take it back.
    """
    if not is_dynamic(patcher):
        yield
        return
    if RENAMED:
        warn(UNBOUND)
        yield
        return
    from comfy.patcher_extension import CallbacksMP

    ranges: list[Any] = []

    def after_load(*loaded: Any) -> None:
        size = _limit_range(patcher, capacity, ranges, warn)
        if size is not None:
            report(size)

    patcher.add_callback_with_key(CallbacksMP.ON_LOAD, _KEY, after_load)
    try:
        yield
    finally:
        patcher.remove_callbacks_with_key(CallbacksMP.ON_LOAD, _KEY)
        for weights in dict.fromkeys(ranges):
            _open(weights, warn)


def limit_each_load(patcher: Any, capacity: Callable[[], int], warn: Callable[[str], None]) -> None:
    """Limit the weights of ``patcher`` and of its clones to ``capacity()`` bytes, behind each of their loads.

    A range is open again from the next load on that is of no such patcher.
    """
    if not is_dynamic(patcher):
        return
    if RENAMED:
        warn(UNBOUND)
        return
    from comfy.patcher_extension import CallbacksMP

    def after_load(loaded: Any, *_: Any) -> None:
        _limit_range(loaded, capacity(), [], warn)

    patcher.add_callback_with_key(CallbacksMP.ON_LOAD, _KEY, after_load)


def _limit_range(patcher: Any, capacity: int, ranges: list[Any], warn: Callable[[str], None]) -> int | None:
    """Limit the range of ``patcher``, which was loaded, so that all models hold ``capacity`` bytes.

    Args:
        ranges: gets the ranges that are limited, or of which pages were freed.

    Returns:
        Bytes of the limit; None if there is none, as the model computes on the processor or the library refused.
    """
    weights = range_of(patcher)
    if weights is None:
        return None
    ranges.append(weights)
    try:
        free = capacity - int(patcher.model.model_loaded_weight_memory) - _other_model_bytes(patcher, capacity, ranges)
        if weights.offset > free:
            free -= InRange.buffers(layer_bytes(patcher.model))
        size = InRange.pages(free)
        weights.set_watermark(size)
    except (RuntimeError, AttributeError, TypeError) as error:  # a bound is not a reason to fail the host's load
        warn(f"dynamic VRAM refused to limit the weights ({error}): they may use all free VRAM")
        return None
    return size


def _open(weights: Any, warn: Callable[[str], None]) -> None:
    """Take the bound of a range back; where that is refused, as each load of the host does."""
    try:
        weights.set_watermark(weights.max_size)
    except (RuntimeError, AttributeError, TypeError) as error:
        warn(f"dynamic VRAM refused to lift the limit of the weights ({error}): their next load does")
        with contextlib.suppress(RuntimeError, AttributeError, TypeError):
            weights.prioritize()


def _other_model_bytes(patcher: Any, capacity: int, ranges: list[Any]) -> int:
    """Bytes held by other models on this GPU: running ones in full, idle ones after eviction.

    Args:
        ranges: gets the ranges of which pages were freed.
    """
    from comfy import model_management as host

    loaded = [
        entry for entry in host.current_loaded_models if entry.device == patcher.load_device and entry.model is not None
    ]
    other_models = [entry for entry in loaded if entry.model.model is not patcher.model]
    running = sum(int(entry.model_memory()) for entry in other_models if entry.currently_used)
    waiting = [entry for entry in other_models if not entry.currently_used]
    held = sum(int(entry.model_loaded_memory()) for entry in waiting)
    wanted = int(patcher.model_size()) + running + held - capacity
    for model in waiting:
        weights = range_of(model.model)
        if weights is not None and wanted > 0:
            ranges.append(weights)
            freed = int(weights.free_memory(wanted))
            held, wanted = held - freed, wanted - freed
    return running + held
