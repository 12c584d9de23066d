"""Passes of the denoiser followed once by torch.jit.trace, and run from its list of operators without Python.

The first call of a kind runs as it is, the second is followed, and every later one runs what was written down; what a
kind is, :mod:`alike_calls` says. A LoRA, an adapter's strength or another size has it followed anew. Under autocast,
where gradients are asked for and where a pass cannot be followed, it runs as it is. Fidelity: ``rounding``, as torch
may put operators together. Source: diffusers' memory and speed guide.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import autocast_dtype
from ..compat.private import followed_by_jit, tree_flatten, tree_unflatten
from ..errors import NoSiteError
from ..memory.fake_mode import active_fake_mode
from ..models.anatomy import Anatomy
from ..patches import Patch, wrap
from ..settings import Settings
from ..weights import needs_graph
from .alike_calls import facts_of, kind_of

_MOST_KINDS = 32
"""Of calls, among which some come again: a denoiser whose every call is another is not followed."""


def traced(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run the denoiser's passes as torch.jit.trace wrote them down.

    Raises:
        NoSiteError: the target has no denoiser.
    """
    if anatomy.denoiser is None or anatomy.denoiser_module is None:
        raise NoSiteError("traced: the model has no denoiser to trace")
    passes = _Passes(anatomy.denoiser_module)
    for entry in anatomy.entries[anatomy.denoiser]:
        yield wrap(anatomy.components[anatomy.denoiser], entry, passes.called, "traced")


class _Tensors(nn.Module):
    """A call that takes and gives tensors only: of ``leaves`` those that are none stay."""

    def __init__(self, unet: nn.Module, original: Callable[..., Any], leaves: list[Any], spec: Any) -> None:
        super().__init__()
        self.unet = unet  # whose weights are then no constants
        self._original, self._spec = original, spec
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.results: Any = None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [*self._leaves]
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        found, self.results = tree_flatten(self._original(*args, **kwargs))
        return tuple(found)


class _Passes:
    """The passes that were followed, by kind."""

    def __init__(self, unet: nn.Module) -> None:
        self._unet = unet
        self._kept: dict[Any, tuple[Callable[..., Any], Any]] = {}
        self._met: set[Any] = set()
        self._facts: Any = None
        self._refused = False
        self._lock = threading.Lock()

    def called(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around a call of the denoiser."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kind = None if self._refused else self._kind(leaves, tensors, spec)
        if kind is None:
            return original(*args, **kwargs)
        with self._lock:
            if not self._ready(kind, original, leaves, tensors, spec):
                return original(*args, **kwargs)
            function, results = self._kept[kind]
        found = function(*tensors)
        return tree_unflatten(list(found), results)

    def _kind(self, leaves: list[Any], tensors: list[Tensor], spec: Any) -> Any:
        """None where a call cannot be followed, or compute by what was."""
        if not tensors or active_fake_mode(*tensors) is not None or followed_by_jit():
            return None
        if autocast_dtype(tensors[0].device.type) is not None or needs_graph(self._unet, *tensors):
            return None
        return kind_of(leaves, spec, tensors[0].device.type)

    def _ready(
        self, kind: Any, original: Callable[..., Any], leaves: list[Any], tensors: list[Tensor], spec: Any
    ) -> bool:
        """Whether a call of this ``kind`` was followed, now or before."""
        facts = facts_of(self._unet)
        if facts is None:
            return self._refuse("something of others listens to its layers, which would not be called")
        if facts != self._facts:
            if self._kept:
                warnings.warn("traced: the model has changed, as by a LoRA: it is traced anew", stacklevel=4)
            self._kept.clear()
            self._met.clear()
            self._facts = facts
        if kind in self._kept:
            return True
        if kind not in self._met:  # one that comes once is not worth following
            self._met.add(kind)
            if len(self._met) > _MOST_KINDS:
                self._refuse("its calls differ in more than their tensors")
            return False
        try:
            self._kept[kind] = _followed(_Tensors(self._unet, original, leaves, spec), tensors)
        except RuntimeError as error:
            return self._refuse(" ".join(str(error).split())[:200])
        return True

    def _refuse(self, why: str) -> bool:
        self._refused = True
        self._kept.clear()
        warnings.warn(f"traced: the denoiser cannot be traced ({why}). It runs as it is", stacklevel=5)
        return False


def _followed(call: _Tensors, tensors: list[Tensor]) -> tuple[Callable[..., Any], Any]:
    """What torch has written down of a call, and the tree of its results."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python's values that become constants, which is what a kind is for
        function = torch.jit.trace(call, tuple(tensors), check_trace=False)
    return function, call.results
