"""Passes of the denoiser recorded as CUDA graphs and replayed, so that the processor launches no single kernels.

A call copies its arguments into the recording's tensors and replays it. :mod:`captured_calls` decides when a pass is
recorded. All recordings share one memory pool, which is freed when another component runs.
Fidelity: ``bitwise``, by the same kernels. Source: PyTorch's notes on CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.private import tree_flatten, tree_unflatten
from ...devices.this_machine import RECORDED
from ...errors import NoSiteError, SettingsError
from ...memory.limit import note_pool
from ...memory.pinned import recording
from ...models.anatomy import Anatomy
from ...patches import Patch, wrap
from ...settings import Settings
from ..offers import Offer, OfferKind, Target
from .captured_calls import Call, CapturedCalls, Replay, addresses
from .compiled import is_followed


def cuda_graphs(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Record the denoiser's passes and replay them, until another component runs.

    Args:
        anatomy: its denoiser is recorded.
        settings: not read beyond the knob itself.
        device: a CUDA device.

    Yields:
        A patch for each entry of every component: the denoiser's replays, all else frees the recordings. So does a
        change of the autoencoder's type.

    Raises:
        NoSiteError: the target has no denoiser.
        SettingsError: the device has no CUDA graphs, or the model runs with a ControlNet.
    """
    checked(anatomy, settings, device)
    if anatomy.denoiser is None or anatomy.denoiser_module is None:
        raise NoSiteError("cuda graphs: the model has no denoiser to record")
    recordings = Recordings(anatomy.denoiser_module)
    for name, component in anatomy.components.items():
        around = recordings.called if name == anatomy.denoiser else recordings.elsewhere
        for entry in anatomy.entries[name]:
            yield wrap(component, entry, around, "cuda_graphs", "" if name == anatomy.denoiser else "giving up")
    if anatomy.vae is not None:  # SDXL's pipelines widen it before a decode, outside of its entries
        yield wrap(anatomy.vae, "to", recordings.elsewhere, "cuda_graphs", "giving up")


def offers(target: Target) -> Iterator[Offer]:
    """Offer recording if it is known to be faster on the device. Hosts are left out: their code runs between the
    denoiser's layers, and a recorded pass would skip it.
    """
    anatomy = target.anatomy
    if anatomy.denoiser is None or anatomy.family.hosted or anatomy.kept or is_followed(target.fixed):
        return
    open_ = target.fixed.cuda_graphs is None and unrecordable(anatomy, target.device) is None
    if open_ and target.is_faster(RECORDED):
        yield Offer(OfferKind.WHOLE, {"cuda_graphs": True})


def unrecordable(anatomy: Anatomy, device: torch.device, knob: str = "cuda_graphs") -> str | None:
    """Return the reason why ``knob`` cannot record passes on ``device``; None where it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{knob} are recorded on NVIDIA GPUs, and this runs on {device.type}: leave them off"
    if any(name.startswith("controlnet") for name in anatomy.components):
        return f"{knob} cannot go with a ControlNet, which takes its turn with the denoiser: leave one of them off"
    return None


def checked(anatomy: Anatomy, settings: Settings, device: torch.device) -> Settings:
    """Return ``settings`` if recorded passes are not requested, or can be recorded.

    Args:
        anatomy: of the target.
        settings: as requested.
        device: device that computes.

    Raises:
        SettingsError: they request recorded passes, and the device or the model has none.
    """
    if settings.cuda_graphs and (why := unrecordable(anatomy, device)) is not None:
        raise SettingsError(why)
    return settings


class Recordings(CapturedCalls):
    """Recorded calls of a model, whose results are copied from the memory that they share."""

    knob, done = "cuda_graphs", "recorded"
    most = 4  # each has inputs of its own, while their pool is shared

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._pool: Any = None
        self._end: Any = None

    def takes(self, tensors: list[Tensor]) -> bool:
        """True if a call computes on one GPU, and no recording is in progress."""
        one = tensors[0].is_cuda and len({tensor.device for tensor in tensors}) == 1
        return one and not torch.cuda.is_current_stream_capturing()

    def reads_valid_memory(self) -> bool:
        """True if every tensor that a recording reads is where it was: the launch need not wait for the comparison of
        all modules, which takes 5 to 40 ms of the host."""
        return addresses(self._tensors) == self._addresses

    def elsewhere(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Free the recordings before a call of another component."""
        with self._lock:
            if self._replays:
                self.forget()
        return original(*args, **kwargs)

    def forget(self) -> None:
        had = self._pool is not None
        super().forget()
        self._pool = None
        if had:
            torch.cuda.empty_cache()  # the allocator gives memory of a recording's pool to nothing else

    def capture(self, call: Call) -> Replay:
        device = call.tensors[0].device
        with torch.cuda.device(device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
                note_pool(self._pool, self._model)
            # Outside inference mode no inference tensor can be written to.
            with torch.inference_mode(False), torch.no_grad():
                leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
            graph, results, spec = self._record(call, leaves)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return lambda tensors: self._replay(device, inputs, tensors, graph, results, spec)

    def _record(self, call: Call, leaves: list[Any]) -> tuple[Any, list[Any], Any]:
        graph = torch.cuda.CUDAGraph()
        had_cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a replay would read casts of weights that autocast has freed
        current = torch.cuda.stream(torch.cuda.current_stream())  # torch does not return to it from a failed capture
        capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        try:
            with recording(), current, capture:
                results, spec = tree_flatten(call.run(leaves))
        finally:
            torch.set_autocast_cache_enabled(had_cache)
        return graph, results, spec

    def _replay(
        self,
        device: torch.device,
        inputs: list[Tensor],
        tensors: list[Tensor],
        graph: Any,
        results: list[Any],
        spec: Any,
    ) -> Any:
        with torch.cuda.device(device):
            if self._end is not None:  # a call of another stream has taken its results
                self._end.wait()
            for place, tensor in zip(inputs, tensors, strict=True):
                place.copy_(tensor)
            graph.replay()
            found = [one.clone() if isinstance(one, Tensor) else one for one in results]
            self._end = self._end or torch.cuda.Event()
            self._end.record()
        return tree_unflatten(found, spec)
