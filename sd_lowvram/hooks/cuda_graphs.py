"""Passes of the denoiser recorded once as CUDA graphs, and replayed: the processor launches no kernel by itself then.

The first call of a kind runs as it is, the second is recorded, and every later one copies what it is given into the
recording's tensors and replays it. What a kind is, :mod:`alike_calls` says: a LoRA, an adapter's strength or a weight
at another place has calls recorded anew. All recordings share one pool of memory, which goes when another component
runs. Fidelity: ``bitwise``, by the same kernels. Source: PyTorch's notes on CUDA graphs.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.private import tree_flatten, tree_unflatten
from ..devices.this_machine import RECORDED
from ..errors import NoSiteError, SettingsError, ran_out
from ..memory.fake_mode import active_fake_mode
from ..memory.pinned import recording
from ..models.anatomy import Anatomy
from ..patches import Patch, wrap
from ..settings import Settings
from ..weights import needs_graph
from .alike_calls import facts_of, kind_of
from .compiled import is_followed
from .offers import Kind, Offer, Target

_MOST = 4
"""Recordings that are kept: each has inputs of its own, while their pool is shared."""

_MOST_KINDS = 32
"""Of calls, among which some come again: a denoiser whose every call is another is not recorded."""


def cuda_graphs(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Record the denoiser's passes and replay them, until another component runs.

    Raises:
        NoSiteError: the target has no denoiser.
        SettingsError: the device has no CUDA graphs, or the model runs with a ControlNet.
    """
    check_recording(anatomy, settings, device)
    if anatomy.denoiser is None or anatomy.denoiser_module is None:
        raise NoSiteError("cuda graphs: the model has no denoiser to record")
    recordings = _Recordings(anatomy.denoiser_module)
    for name, component in anatomy.components.items():
        around = recordings.called if name == anatomy.denoiser else recordings.elsewhere
        for entry in anatomy.entries[name]:
            yield wrap(component, entry, around, "cuda_graphs", "" if name == anatomy.denoiser else "giving up")


def offers(target: Target) -> Iterator[Offer]:
    """Where it was measured to be faster on the card; hosts' own code acts between the denoiser's layers, which a
    recorded pass would not call."""
    anatomy = target.anatomy
    if anatomy.denoiser is None or anatomy.family.hosted or anatomy.kept or is_followed(target.fixed):
        return
    open_ = target.fixed.cuda_graphs is None and unrecordable(anatomy, target.device) is None
    if open_ and target.is_faster(RECORDED):
        yield Offer(Kind.WHOLE, {"cuda_graphs": True})


def unrecordable(anatomy: Anatomy, device: torch.device) -> str | None:
    """Why passes cannot be recorded on ``device``; None where they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"cuda_graphs are recorded on NVIDIA GPUs, and this runs on {device.type}: leave them off"
    if any(name.startswith("controlnet") for name in anatomy.components):
        return "cuda_graphs cannot go with a ControlNet, which takes its turn with the denoiser: leave one of them off"
    return None


def check_recording(anatomy: Anatomy, settings: Settings, device: torch.device) -> None:
    """Raise SettingsError where ``settings`` ask for recorded passes that cannot be."""
    if settings.cuda_graphs and (why := unrecordable(anatomy, device)) is not None:
        raise SettingsError(why)


class _Recording:
    """One pass: the tensors that it reads, and those that it leaves."""

    def __init__(self, given: list[Tensor], graph: Any, results: list[Any], spec: Any) -> None:
        self._given, self._graph, self._results, self._spec = given, graph, results, spec

    def replayed(self, tensors: list[Tensor]) -> Any:
        for place, tensor in zip(self._given, tensors, strict=True):
            place.copy_(tensor)
        self._graph.replay()
        found = [one.clone() if isinstance(one, Tensor) else one for one in self._results]
        return tree_unflatten(found, self._spec)


class _Recordings:
    """The passes that are recorded, by kind, the one that was used last at the end."""

    def __init__(self, unet: nn.Module) -> None:
        self._unet = unet
        self._pool: Any = None
        self._kept: OrderedDict[Any, _Recording] = OrderedDict()
        self._met: set[Any] = set()
        self._facts: Any = None
        self._refused = False
        self._done: Any = None
        self._lock = threading.Lock()

    def called(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around a call of the denoiser."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kind = kind_of(leaves, spec, "cuda")
        if self._refused or kind is None or not self._recordable(tensors):
            return original(*args, **kwargs)
        facts = facts_of(self._unet)
        with self._lock, torch.cuda.device(tensors[0].device):
            if not self._same(facts):
                return original(*args, **kwargs)
            if kind not in self._kept:
                if kind not in self._met:  # libraries make themselves ready, and a kind that comes once is not recorded
                    self._met.add(kind)
                    if len(self._met) > _MOST_KINDS:
                        self._refuse("its calls differ in more than their tensors")
                    return original(*args, **kwargs)
                why = self._failed(kind, original, leaves, spec)
                if why is not None:  # what failed is gone by now, with the maps that it held
                    self._refuse(why)
                    torch.cuda.empty_cache()
                    return original(*args, **kwargs)
            return self._replayed(kind, tensors)

    def elsewhere(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around a call of another component, for which the recordings make room."""
        with self._lock:
            if self._kept:
                self._forget()
                torch.cuda.empty_cache()  # nothing else is put into the pool of a recording
        return original(*args, **kwargs)

    def _recordable(self, tensors: list[Tensor]) -> bool:
        """Whether a call computes numbers on one card and nothing but them is asked of it."""
        if active_fake_mode(*tensors) is not None or torch.cuda.is_current_stream_capturing():
            return False
        devices = {tensor.device for tensor in tensors}
        return len(devices) == 1 and tensors[0].is_cuda and not needs_graph(self._unet, *tensors)

    def _same(self, facts: Any) -> bool:
        """Whether the model is the one that was recorded; what was recorded of another one goes."""
        if facts is None:
            self._refuse("something of others listens to its layers, which a recorded pass would not call")
            return False
        if facts != self._facts:
            if self._kept:
                warnings.warn("cuda_graphs: the model has changed, as by a LoRA: it is recorded anew", stacklevel=4)
            self._forget()
            self._facts = facts
        return True

    def _failed(self, kind: Any, original: Callable[..., Any], leaves: list[Any], spec: Any) -> str | None:
        """Why a call cannot be recorded; None where it was."""
        try:
            self._record(kind, original, leaves, spec)
        except RuntimeError as error:
            # nothing that is cached can be given up while kernels are recorded
            return "there is no room for it" if ran_out(error) else " ".join(str(error).split())[:200]
        return None

    def _record(self, kind: Any, original: Callable[..., Any], leaves: list[Any], spec: Any) -> None:
        if len(self._kept) == _MOST:
            self._kept.popitem(last=False)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.inference_mode(False), torch.no_grad():  # to be written to by calls in any mode
            given = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(given, spec)
        graph = torch.cuda.CUDAGraph()
        casts_kept = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # weights that were cast before the pass are gone after it
        try:
            with recording(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                results, shape = tree_flatten(original(*args, **kwargs))
        finally:
            torch.set_autocast_cache_enabled(casts_kept)
        self._kept[kind] = _Recording([leaf for leaf in given if isinstance(leaf, Tensor)], graph, results, shape)

    def _replayed(self, kind: Any, tensors: list[Tensor]) -> Any:
        self._kept.move_to_end(kind)
        if self._done is not None:  # a call of another stream has taken its results
            self._done.wait()
        results = self._kept[kind].replayed(tensors)
        self._done = self._done or torch.cuda.Event()
        self._done.record()
        return results

    def _refuse(self, why: str) -> None:
        self._refused = True
        self._forget()
        warnings.warn(f"cuda_graphs: the denoiser cannot be recorded ({why}). It runs as it is", stacklevel=4)

    def _forget(self) -> None:
        self._kept.clear()
        self._met.clear()
        self._pool = self._facts = None
