"""Plans of pipelines whose call cannot be rehearsed: made at the first call of each model, from its real arguments.

Until its denoiser is called, a pipeline streams all weights layer by layer. The first call of the denoiser plans the
whole run: the step from its arguments, the decode from its latents.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.private import tree_flatten, tree_map
from ..models import unknown
from ..models.anatomy import Anatomy, has
from ..models.calls import CONTROL, map_in_call
from ..models.latents import dtype_of, has_frames, latent_channels, scale_factor
from ..models.recorded import MOST_VALUES, Given, Rehearsal, Row, row_of
from ..settings import Settings
from ..weights import weight_bytes
from .request import Request


def await_calls(target: Any, error: Exception) -> Rehearsal | None:
    """Return a record in which all models of a pipeline wait for their first call; None if it cannot be called.

    Args:
        target: the pipeline.
        error: what its rehearsal raised.
    """
    parts = unknown.components_of(target)
    if not parts or not callable(target):
        return None
    others = {name: part for name, part in parts.items() if not _is_autoencoder(part)}
    denoiser = unknown.family_of(target).denoiser
    denoiser = denoiser or max(others, key=lambda name: weight_bytes(others[name]), default="")
    last = sorted(parts, key=lambda name: (_is_autoencoder(parts[name]), name == denoiser))
    why = " ".join(f"{type(error).__name__}: {error}".split())
    return Rehearsal((), (), ((denoiser,),) if denoiser else (), denoiser, tuple(last), f"{why:.300}")


def _is_autoencoder(part: nn.Module) -> bool:
    return has(part, "encode", "decode")


def until_denoiser(request: Request, settings: Settings) -> Settings:
    """Return ``settings`` with the least memory for weights, as long as the denoiser waits for its first call."""
    record = request.rehearsal
    waits = record is not None and record.denoiser in record.waiting
    return settings.filled(offload="layer") if waits else settings


def row_of_call(
    anatomy: Anatomy, name: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], reads: bool
) -> Row:
    """Return the row of a model's first call.

    Args:
        anatomy: parts of the target.
        name: name of the model.
        entry: the method that is called.
        args, kwargs: its arguments.
        reads: True to record the values of small tensors, wherever they are.
    """
    if reads:
        args, kwargs = tree_map(_on_cpu, (args, kwargs))
    row = row_of(name, "", entry, dtype_of(anatomy, name), args, kwargs, reads)
    return dataclasses.replace(row, held=_held(row.given_bytes), after_bytes=2 * row.given_bytes)


def _on_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) and leaf.numel() <= MOST_VALUES else leaf


def _held(given_bytes: int) -> tuple[Given, ...]:
    """Bytes that a pipeline holds besides: those of the arguments again, for latents and the last predictions."""
    return (Given((given_bytes,), torch.uint8),)


def add_first_call(
    anatomy: Anatomy, request: Request, row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Rehearsal:
    """Return the record of ``request`` with a model's first call.

    The denoiser's call adds those of other models of its class, which take its place in later steps, and the decode.
    No other model is waited for then, except an autoencoder of which nothing is known.

    Args:
        anatomy: parts of the target.
        request: the request, with the record.
        row: the call.
        args, kwargs: its arguments.
    """
    record, name, parts = request.rehearsal, row.component, anatomy.components
    assert record is not None
    waiting = [other for other in record.waiting if other in parts and (other != name or row.method == "encode")]
    alike = [other for other in waiting if type(parts[other]) is type(parts[name])]
    steps = (*record.steps, (name,)) if record.denoiser in alike else record.steps
    record = dataclasses.replace(record, rows=(*record.rows, row), steps=steps, waiting=tuple(waiting))
    if name == record.denoiser:
        record = _add_run(anatomy, record, alike, _decode_row(anatomy, request, row, args, kwargs))
    return dataclasses.replace(record, order=tuple(range(len(record.rows))))


def _add_run(anatomy: Anatomy, record: Rehearsal, twins: list[str], decode: Row | None) -> Rehearsal:
    """Add to the denoiser's call, the last of ``record``, what follows from it."""
    row = record.rows[-1]
    helpers = dict.fromkeys(known.component for known in record.rows if known.component.startswith(CONTROL))
    rows = *record.rows, *(dataclasses.replace(row, component=twin) for twin in twins), *filter(None, [decode])
    later = (name for name in record.waiting if _is_autoencoder(anatomy.components[name]))
    return dataclasses.replace(
        record,
        rows=rows,
        steps=((*helpers, row.component), *((twin,) for twin in twins)),
        waiting=tuple(name for name in later if decode is None or name != decode.component),
    )


def size_of_calls(record: Rehearsal) -> dict[str, int]:
    """Return height and width of the picture that first calls make, as far as they are known."""
    size = record.size if record.why else None
    return {} if size is None else {"height": size[0], "width": size[1]}


def _decode_row(
    anatomy: Anatomy, request: Request, row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Row | None:
    """The decode of the latents in a call of the denoiser; None if the autoencoder, or the latents, are unknown."""
    name = anatomy.autoencoder
    size = None if name is None else _latent_size(anatomy, request, row, args, kwargs)
    if name is None or size is None:
        return None
    frames, height, width = size
    shape = (request.batch, latent_channels(anatomy), *((frames,) if has_frames(anatomy) else ()), height, width)
    dtype, factor = dtype_of(anatomy, name), scale_factor(anatomy)
    decode = row_of(name, "", "decode", dtype, (torch.empty(shape, dtype=dtype, device="meta"),), {})
    pixels = 3 * request.batch * height * width * factor**2
    return dataclasses.replace(
        decode,
        held=_held(row.given_bytes),
        output_bytes=pixels * dtype.itemsize,
        size=(height * factor, width * factor),
    )


def _latent_size(
    anatomy: Anatomy, request: Request, row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, int, int] | None:
    """Frames, height and width of the latents in a call: a map, or packed as tokens, of which there may be more."""
    found = map_in_call(anatomy.components[row.component], args, kwargs)
    if found is not None:
        return found.frames, *found.size()
    tensors = (leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor))
    tokens = next((tensor for tensor in tensors if tensor.dim() == 3), None)
    if tokens is None or has_frames(anatomy):
        return None
    area, factor = tokens.shape[1] * tokens.shape[2] // latent_channels(anatomy), scale_factor(anatomy)
    height, width = request.height // factor, request.width // factor
    side = math.isqrt(max(0, area - 1)) + 1
    return (1, height, width) if height * width == area else (1, side, side)
