"""Components that are moved whole and stay: on the device, or the decoder in host memory.

Source: consciencia's decoder on the CPU. Fidelity: ``bitwise``; a decoder that is widened on the CPU ``rounding``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...memory import host_account, to_host
from ...memory.accounts import mark_host, unmark_host
from ...memory.segments import begin_stage
from ...memory.threads import place_of, turn
from ...streaming.device_io import run_at
from ...streaming.layers import place_bytes
from ...streaming.pool import Pool
from ...weight_parts import Link, is_wrapper, links_of
from ...weights import all_tensors, first_tensor, map_result, map_tensors, plain_weights, set_data


def run_on_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``original`` on the CPU in fp32; its weights have been widened before.

    Args:
        original: a method of the component.
        args, kwargs: its arguments, on any device.

    Returns:
        The result, in the type of the input.
    """
    first = first_tensor((args, kwargs))
    dtype = first.dtype if first is not None else torch.float32
    widen = functools.partial(map_tensors, convert=lambda t: t.float() if t.is_floating_point() else t)
    with host_account():
        args, kwargs = widen((args, kwargs))
        result = run_at(torch.device("cpu"), original, *args, **kwargs)
    return map_result(result, lambda t: t.to(dtype) if t.is_floating_point() else t)


def place(components: list[nn.Module], device: torch.device) -> Callable[[], None]:
    """Move all components to ``device``; return the function that undoes this.

    On a GPU each component is one buffer, because thousands of tensors leave unusable gaps.

    Args:
        components: models to move.
        device: where to.

    Returns:
        A function that moves them back and restores every tensor bit for bit.
    """
    if device.type != "cuda":
        return _move(components, lambda contents: [data.to(device) for data in contents])
    with contextlib.ExitStack() as stack:
        stack.callback(_move(components, lambda contents: [data.cpu() for data in contents]))  # frees the device first
        stack.callback(_move(components, functools.partial(_copy_to_buffer, device=device)))
        return stack.pop_all().close


def _copy_to_buffer(contents: list[Tensor], device: torch.device, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Copies of ``contents``, in another type on request."""
    likes = [torch.empty_like(data, device="meta", dtype=dtype) for data in contents]
    views = Pool(sum(map(place_bytes, likes)), device).views(likes, 0)
    for view, data in zip(views, contents, strict=True):
        view.copy_(data)
    return views


def convert_in_one_buffer(
    component: nn.Module, device: torch.device, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Convert the component like ``component.to``; afterwards it is one buffer as before."""
    wanted = [dtype for dtype in (*args, *kwargs.values()) if isinstance(dtype, torch.dtype)]
    tensors = [tensor for tensor in plain_weights(component) if tensor.is_floating_point()]
    if any(tensor.dtype != dtype for dtype in wanted for tensor in tensors):
        with turn({place_of(device)}):
            begin_stage(device)
            contents = [tensor.data for tensor in tensors]
            for tensor, data in zip(tensors, _copy_to_buffer(contents, device, *wanted), strict=True):
                set_data(tensor, data)
    return original(*args, **kwargs)


def widen_on_host(components: list[nn.Module]) -> Callable[[], None]:
    """Move everything to host memory, with 16-bit floats widened to fp32; return the function that undoes this."""

    def widen(data: Tensor) -> Tensor:
        data = data if data.device.type == "cpu" else to_host(data, pin=False)
        with host_account():
            data = data.float() if data.is_floating_point() else data
        mark_host(data)
        return data

    return _move(components, lambda contents: list(map(widen, contents)))


def _move(components: list[nn.Module], move: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[], None]:
    """Give the tensors of each component what ``move`` makes of their contents; returns the undoing.

    What a quantised weight has beside itself is exchanged and stays where it was, because models may share it.
    """
    places: list[tuple[Tensor, torch.device, torch.dtype]] = []
    links: list[tuple[Link, Tensor]] = []
    same: list[Link] = []

    def undo() -> None:
        for tensor, device, dtype in places:
            unmark_host(tensor.data)
            set_data(tensor, tensor.data.to(device, dtype))
        for link, lent in links:
            link.exchange(lent, link.value)
        _tie(same)

    try:
        for component in components:
            stored = {id(tensor) for tensor, _, _ in places}
            tensors = [tensor for tensor in all_tensors(component) if id(tensor) not in stored]
            found = [link for module in component.modules() for link in links_of(module)]
            before = [(tensor, tensor.device, tensor.dtype) for tensor in tensors]
            made = {id(tensor): tensor for tensor in all_tensors(component)}
            made.update(zip(map(id, tensors), move([tensor.data for tensor in tensors]), strict=True))
            beside = _beside(found)
            for place in before:
                if id(place[0]) not in beside:
                    set_data(place[0], made[id(place[0])])
                    places.append(place)
                    made[id(place[0])] = place[0]
            same += found
            _tie(same)
            links += _exchange(found, made)
    except BaseException:
        undo()
        raise
    return undo


def _beside(links: Iterable[Link]) -> set[int]:
    """Ids of the tensors that stay where they are."""
    return {id(part) for link in links if not is_wrapper(link.value) for part in link.parts}


def _exchange(links: Iterable[Link], made: Mapping[int, Tensor]) -> list[tuple[Link, Tensor]]:
    """Put tensors of the parts ``made`` where the links' own are, if they are elsewhere; returns these."""
    exchanged = []
    for link in links:
        if link.memory is None and any(made[id(part)].device != link.value.device for part in link.parts):
            exchanged.append((link, link.made_of(made)))
            link.exchange(link.value, exchanged[-1][1])
    return exchanged


def _tie(links: Iterable[Link]) -> None:
    """Make these the memory of their weights again."""
    for link in links:
        if link.memory is not None:
            set_data(link.value, link.memory.data)
