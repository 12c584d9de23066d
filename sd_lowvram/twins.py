"""A model's twin: the same modules with fake weights, on which settings can be tried and traced at no cost.

The target itself is not touched, whatever is attached to it; the twin is a copy without our hooks.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .memory.fakes import fake_of
from .models import anatomy_of_components
from .models.anatomy import Anatomy
from .patches import unpatched
from .session import Attachment
from .settings import Settings
from .streaming.timing import Timing
from .weights import all_tensors, loaded_dtype


def twin(anatomy: Anatomy, mode: FakeTensorMode) -> Anatomy:
    """Copies of the components in which every tensor is a fake one of ``mode``; shared tensors stay shared."""
    components = list(anatomy.components.values())
    with mode:
        memo: dict[int, Any] = {id(tensor): fake_of(_as_loaded(tensor)) for tensor in all_tensors(*components)}
    with _bare(components):
        copies = {name: copy.deepcopy(component, memo) for name, component in anatomy.components.items()}
    return anatomy_of_components(anatomy.family, copies)


@contextlib.contextmanager
def tried(
    anatomy: Anatomy, name: str, settings: Settings, device: torch.device, timing: Timing | None = None
) -> Iterator[None]:
    """Within the block the component ``name`` of a twin runs with ``settings``, also one that is no target by itself
    (a ControlNet, a safety checker)."""
    part = anatomy_of_components(anatomy.family, {name: anatomy.components[name]})
    attachment = Attachment(part, settings, device, timing)
    attachment.apply()
    try:
        yield
    finally:
        attachment.undo()


def _as_loaded(tensor: Tensor) -> Tensor:
    """``tensor``, or where a hook has changed its type, one without contents of the type that it had."""
    dtype = loaded_dtype(tensor)
    if dtype == tensor.dtype:
        return tensor
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    return nn.Parameter(meta, requires_grad=False) if isinstance(tensor, nn.Parameter) else meta


@contextlib.contextmanager
def _bare(components: list[nn.Module]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for component in components:
            for module in component.modules():
                stack.enter_context(unpatched(module))
        yield
