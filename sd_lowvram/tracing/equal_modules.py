"""Calls of equal modules, of which a short trace runs the first: a UNet's levels repeat their blocks, SDXL's ten times.

Peaks, counted work and spans are those of a whole trace; what is left out is the timeline within the repeated calls.
Weights that are streamed come and go in calls that are left out, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Hashable, Iterator

from torch import nn

from ..patches import roles_of, set_patch, wrap
from ..weights import own_tensors
from .effects import once, repeated_once

Equals = dict[nn.Module, tuple[int, list[nn.Module]]]


def equal_modules(component: nn.Module) -> Equals:
    """Modules in lists and sequences of which ``component`` has several equal ones, each with a number for its kind and
    the modules in it."""
    lists = (module for module in component.modules() if isinstance(module, (nn.ModuleList, nn.Sequential)))
    members = {member for one in lists for member in one if any(True for _ in member.children())}
    kinds = {member: _facts(member) for member in members}
    seen = Counter(kinds.values())
    numbers = {kind: number for number, kind in enumerate(seen)}
    return {member: (numbers[kind], list(member.modules())) for member, kind in kinds.items() if seen[kind] > 1}


@contextlib.contextmanager
def equal_calls_once(modules: Equals) -> Iterator[None]:
    """Inside, traces run calls of these modules once for each kind and shape of the arguments."""
    with contextlib.ExitStack() as stack:
        for module, kind in [(one, (number, *map(roles_of, inside))) for one, (number, inside) in modules.items()]:
            stack.callback(set_patch(wrap(module, "forward", functools.partial(once, kind, module), "short trace")))
        stack.enter_context(repeated_once())
        yield


def _facts(block: nn.Module) -> Hashable:
    """Of classes, numbers and shapes: what a pass on fake tensors hangs on."""
    return tuple(
        (
            type(module),
            tuple((name, value) for name, value in vars(module).items() if isinstance(value, (int, float, str))),
            type(getattr(module, "processor", None)),
            tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in own_tensors(module)),
        )
        for module in block.modules()
    )
