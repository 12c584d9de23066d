"""Inputs follow weights to their device, and results go back to where the inputs came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.private import FakeTensor
from ..errors import LowVRAMError
from ..memory import host_account, to_device
from ..memory.accounts import actual_device, tracing
from ..weights import all_tensors, first_tensor, map_result, map_tensors


def refuse_unseen(component: nn.Module) -> None:
    """Refuse a trace that would move real weights of a model it has not found.

    Args:
        component: a model whose weights are streamed.

    Raises:
        LowVRAMError: a trace calls ``component``, whose weights it has not exchanged for fake ones.
    """
    if tracing() and not all(isinstance(tensor, FakeTensor) for tensor in all_tensors(component)):
        raise LowVRAMError(
            f"{type(component).__name__} streams its weights and is hidden from trace(): give it among the arguments"
        )


def run_at(device: torch.device, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``original`` with its inputs on ``device``; return the result on the device of the first input.

    Args:
        device: device that computes.
        original: a method of a model.
        args, kwargs: its arguments, on any device.
    """
    first = first_tensor((args, kwargs))
    home = first.device if first is not None else device
    args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(actual_device(device)))
    return send_tensors(original(*args, **kwargs), home)


def send_tensors(result: Any, home: torch.device) -> Any:
    """Return ``result`` with its tensors on ``home``."""
    return map_result(result, lambda tensor: tensor.to(home))


def look_up(device: torch.device, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Return rows of a table in host memory on ``device``; only these rows are copied, and gradients are copied back.

    Args:
        device: device that computes.
        original: the table's lookup.
        args, kwargs: its arguments, with the indices of the rows.
    """
    with host_account():
        args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to("cpu"))
        rows = original(*args, **kwargs)
    return rows.to(actual_device(device)) if rows.requires_grad else to_device(rows, device)
