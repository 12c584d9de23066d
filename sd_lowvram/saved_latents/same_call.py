"""Digests of everything that determines the picture of a pipeline's call: equal digests mean the same picture."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch

from ..files import __version__
from .state import configuration

_NOT_OF_THE_PICTURE = ("callback_on_step_end", "callback_on_step_end_tensor_inputs", "output_type", "return_dict")
_SAMPLE = 256
"""Elements of each weight that are looked at: those of its first row."""


def digests_of_arguments(arguments: inspect.BoundArguments) -> dict[str, str]:
    """A digest for each argument of a pipeline's call, those that it leaves at their defaults among them."""
    arguments.apply_defaults()
    return {name: digest(value) for name, value in arguments.arguments.items() if name not in _NOT_OF_THE_PICTURE}


def digests_of_pipeline(pipe: Any) -> dict[str, str]:
    """Digests of what ``pipe`` computes with: its models and its scheduler, and the libraries' versions."""
    import diffusers

    parts = pipe.components.items()
    models = {name: _model(part) for name, part in parts if isinstance(part, torch.nn.Module)}
    scheduler = [type(pipe.scheduler).__name__, configuration(pipe.scheduler)]
    versions = [__version__, torch.__version__, diffusers.__version__]
    return models | {
        "pipeline": digest(type(pipe).__name__),
        "scheduler": digest(scheduler),
        "version": digest(versions),
    }


def _model(module: torch.nn.Module) -> str:
    """A digest of the first row of each of its weights, with their names, and of the strengths of its LoRAs.

    Reading a whole model would take longer than running it; no two published models are equal in every first row.
    """
    rows = {name: weight.detach()[:1].reshape(-1)[:_SAMPLE] if weight.dim() else weight for name, weight in
            module.named_parameters()}  # fmt: skip
    loras = {name: [repr(getattr(module, "scaling", None)), repr(getattr(module, "active_adapters", None))]
             for name, module in module.named_modules() if hasattr(module, "base_layer")}  # fmt: skip
    return digest([rows, loras])


def digest(value: Any) -> str:
    """A digest of a nest of plain values, tensors, generators (their states), arrays and pictures. What is none of
    these has the digest of its ``repr``, which may be another in another process."""
    hashed = hashlib.sha256()
    _add(hashed, value)
    return hashed.hexdigest()


def _add(hashed: Any, value: Any) -> None:
    kind = type(value).__name__
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, Mapping):
        hashed.update(f"mapping {len(value)};".encode())
        for name, item in value.items():
            _add(hashed, str(name))
            _add(hashed, item)
    elif isinstance(value, list | tuple):
        hashed.update(f"list {len(value)};".encode())
        for item in value:
            _add(hashed, item)
    elif isinstance(value, torch.Tensor):
        hashed.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        hashed.update(value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif hasattr(value, "tobytes"):  # an array, or a picture of PIL
        form = [str(getattr(value, name, None)) for name in ("mode", "size", "dtype", "shape")]
        hashed.update(f"{kind} {form};".encode() + value.tobytes())
    else:
        plain = value is None or isinstance(value, bool | int | float | str)
        hashed.update(f"{kind} {json.dumps(value) if plain else repr(value)};".encode())
