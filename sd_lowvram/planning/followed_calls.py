"""A warning, given once, that autograd stores maps until the backward, which no plan counts."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from ..memory.accounts import tracing
from ..models.anatomy import Anatomy
from ..patches import Patch, wrap
from ..weights import needs_graph


def told_of_autograd(anatomy: Anatomy) -> Iterator[Patch]:
    """Yield patches that warn at the first call of a component under autograd."""
    reported: set[str] = set()
    for name, component in anatomy.components.items():

        def call(component: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not reported and not tracing() and needs_graph(component, args, kwargs):
                reported.add("once")
                warnings.warn(
                    f"{type(component).__name__} is called with gradients on: for the backward autograd keeps maps of "
                    "its layers, which the plan does not count, so the call may take more than the budget. Where no "
                    "gradients are wanted, call it within torch.no_grad()",
                    stacklevel=3,
                )
            return original(*args, **kwargs)

        for entry in anatomy.entries[name]:
            yield wrap(component, entry, functools.partial(call, component), "told_of_autograd")
