"""Equal transformer blocks in a row, of which a short trace runs two: SDXL has ten in a row, seven times over.

On fake tensors the second costs what all after it cost: it takes what a block of its kind gave, and so do they. The
first may take a map of another layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .memory.work import Span
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


def has_equal_blocks(component: nn.Module) -> bool:
    """Whether a short trace of ``component`` is shorter than a whole one."""
    return any(True for _ in _rows(component))


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


def in_full(component: nn.Module, spans: Sequence[Span]) -> list[Span]:
    """What each module does, from a short trace: the second block's work divided among all that it stands for."""
    names = {module: name for name, module in component.named_modules()}
    rows = {names[row[1]]: [names[block] for block in row[1:]] for row in _rows(component)}
    found: list[Span] = []
    for second, group in itertools.groupby(spans, lambda span: next(filter(_is_above(span.path), rows), "")):
        parts = list(group)
        for name in rows.get(second, ("",)):
            found += [_share(span, name + span.path[len(second) :], len(rows.get(second, ("",)))) for span in parts]
    return found


def _is_above(path: str) -> Callable[[str], bool]:
    return lambda name: path == name or path.startswith(f"{name}.")


def _share(span: Span, path: str, parts: int) -> Span:
    """One of ``parts`` equal parts of ``span``, elsewhere."""
    sums = dataclasses.asdict(span)
    return Span(path, **{name: value // parts for name, value in sums.items() if name != "path"})


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
