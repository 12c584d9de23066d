"""Equal transformer blocks in a row, of which a short trace runs two: SDXL has ten in a row, seven times over.

On fake tensors the second costs what all after it cost: it takes what a block of its kind gave, and so do they. The
first may take a map of another layout.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .patches import set_patch, wrap
from .repeats import standing_for
from .weights import own_tensors

_ROWS = "transformer_blocks"
"""The list that transformers of every family hold their blocks in, and call one after the other."""


@contextlib.contextmanager
def equal_blocks_once(component: nn.Module) -> Iterator[None]:
    """Inside, of equal transformer blocks in a row the first two run; peaks and counted work stay what they are."""
    with contextlib.ExitStack() as stack:
        for row in _rows(component):
            second = _Second(len(row) - 1)
            stack.callback(set_patch(wrap(row[1], "forward", second.run, "short trace")))
            for block in row[2:]:
                stack.callback(set_patch(wrap(block, "forward", second.repeat, "short trace")))
        yield


class _Second:
    """A block that runs for ``passes`` equal ones."""

    def __init__(self, passes: int) -> None:
        self._passes = passes
        self._given: Callable[[], Tensor] | None = None

    def run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with standing_for(self._passes):
            out: Tensor = original(*args, **kwargs)
        shape, stride, dtype, device = out.shape, out.stride(), out.dtype, out.device
        self._given = lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return out

    def repeat(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self._given is not None
        return self._given()


def _rows(component: nn.Module) -> Iterator[list[nn.Module]]:
    """Equal blocks that follow each other, at least three."""
    for name, blocks in component.named_modules():
        if name.split(".")[-1] == _ROWS and isinstance(blocks, nn.ModuleList):
            for _, group in itertools.groupby(blocks, _facts):
                row = list(group)
                if len(row) >= 3:
                    yield row


def _facts(block: nn.Module) -> list[Any]:
    """Of classes, numbers and shapes: what a pass on fake tensors hangs on."""
    return [
        (
            type(module),
            [(name, value) for name, value in vars(module).items() if isinstance(value, (int, float, str))],
            type(getattr(module, "processor", None)),
            [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in own_tensors(module)],
        )
        for module in block.modules()
    ]
