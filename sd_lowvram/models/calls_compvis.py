"""Inputs of CompVis' UNets and their descendants in a step, derived from their layers."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .anatomy import Anatomy, layer
from .calls import Shape, StepInputs
from .interfaces import CompVisUNet
from .latents import dtype_of, latent_channels, latent_size

_TOKENS = 77
_TEXT_WIDTH = 768

TEXT = re.compile("t5|txt|text|context|cap|cond|cross|y_embed|attn2.to_k")
POOLED = re.compile("vec|pooled|clip|y_embed|label|adm")
"""Names of the layers that take the text, and its pooled form, in transformers of hosts."""
_QUERIES = ("to_q", "q_proj", ".q")


def step_inputs(anatomy: Anatomy, shape: Shape) -> StepInputs:
    """Inputs of a sampler's step. Hosts append further channels (``c_concat``) to those of the latents."""
    unet: Any = anatomy.denoiser_module
    size, channels = latent_size(anatomy, shape), latent_channels(anatomy)
    empty = functools.partial(torch.empty, dtype=dtype_of(anatomy, anatomy.denoiser or ""))
    extra_channels = layer(unet.input_blocks[0][0]).in_channels - channels
    return StepInputs(
        latents=empty(shape.batch, channels, *size),
        timestep=torch.tensor(1),
        text=empty(shape.rows, _TOKENS, _text_width(unet)),
        beside=empty(shape.rows, extra_channels, *size) if extra_channels else None,
        labels=_labels(unet, shape.rows, empty),
    )


def predict(unet: CompVisUNet, x: Tensor, inputs: StepInputs) -> Tensor:
    """The UNet's prediction (rows, C, h, w)."""
    extra: dict[str, Any] = {} if inputs.labels is None else {"y": inputs.labels}
    if "transformer_options" in arguments(type(unet)):
        extra["transformer_options"] = {}
    prediction: Tensor = unet(x, inputs.timestep.expand(len(x)), context=inputs.text, **extra)
    return prediction


def arguments(kind: Any) -> frozenset[str]:
    """The names of what a module's forward takes."""
    code = getattr(kind.forward, "__code__", None)
    return frozenset() if code is None else frozenset(code.co_varnames[: code.co_argcount])


def _text_width(unet: nn.Module) -> int:
    crosses = (module.attn2 for module in unet.modules() if getattr(module, "attn2", None) is not None)
    cross: Any = next(crosses, None)
    return _TEXT_WIDTH if cross is None else int(layer(cross.to_k).in_features)


def _labels(unet: Any, rows: int, empty: Any) -> Tensor | None:
    """Labels that the UNet adds to the time: a vector (SDXL, unCLIP), or a noise level's number (the x4 upscaler)."""
    embedding = getattr(unet, "label_emb", None)
    if isinstance(embedding, nn.Embedding):
        return torch.zeros(rows, dtype=torch.long)
    first = next(linears(embedding), None)
    return None if first is None else empty(rows, int(layer(first).in_features))


def linears(module: nn.Module | None) -> Iterator[Any]:
    """The linear layers in ``module``, which may be None."""
    yield from (layer for layer in (module.modules() if module is not None else ()) if hasattr(layer, "in_features"))


def input_widths(module: nn.Module, names: re.Pattern[str]) -> list[int]:
    """Widths that linear layers take whose path has one of ``names``, the outermost first; queries are left out."""
    found = [
        (path.count("."), int(linear.in_features))
        for path, linear in module.named_modules()
        if hasattr(linear, "in_features") and names.search(path) and not path.endswith(_QUERIES)
    ]
    return list(dict.fromkeys(width for _, width in sorted(found, key=lambda pair: pair[0])))
