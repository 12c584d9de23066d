"""Plans of pipelines whose call cannot be rehearsed: made at the first call of each model, from its real arguments.

Until its denoiser is called, a pipeline streams all weights layer by layer. The first call of the denoiser plans the
whole run: the step from its arguments, the decode from its latents.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
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
        record = _add_run(anatomy, record, alike, _decode_row(anatomy, request, row, args, kwargs, request.batch))
    return dataclasses.replace(record, order=tuple(range(len(record.rows))))


def add_larger_call(
    anatomy: Anatomy,
    request: Request,
    record: Rehearsal,
    row: Row,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    by_name: Callable[[Any, Any], Any],
) -> Rehearsal:
    """Return ``record`` with a call that is larger than planned; a larger call of the denoiser makes its decode larger.

    Args:
        anatomy, request: parts of the target, and what was planned for.
        record: the calls that were planned.
        row: the call.
        args, kwargs: its arguments.
        by_name: as for :meth:`Rehearsal.add_larger`.
    """
    decodes = [known for known in record.rows if known.method == "decode"]
    if row.method == "decode":
        row = dataclasses.replace(row, size=_decoded_size(row, decodes))
    again = record.add_larger(row, by_name)
    steps = [known for known in record.rows if known.component == record.denoiser]
    if row.component != record.denoiser or not decodes:
        return again
    decoded = max(decodes, key=lambda known: known.given_bytes).tensors[0].shape
    pictures = math.ceil(decoded[0] * _rows(row) / max(map(_rows, steps)))
    decode = _decode_row(anatomy, request, row, args, kwargs, pictures, decoded[2] if len(decoded) == 5 else 1)
    larger = decode is not None and all(decode.given_bytes > known.given_bytes for known in decodes)
    return again.add_larger(decode) if larger and decode is not None else again


def _decoded_size(row: Row, known: list[Row]) -> tuple[int, ...]:
    """Height and width of the picture of a decode, as ``known`` ones are larger than their latents."""
    latents = row.tensors[0].shape[-2:]
    sizes = [(one.size, one.tensors[0].shape[-2:]) for one in known if len(one.size) == 2]
    return tuple(side * size // before for side, size, before in zip(latents, *sizes[0], strict=True)) if sizes else ()


def _rows(row: Row) -> int:
    """Rows of the batch in a denoiser's call: those of its first map or sequence of tokens."""
    return next((given.shape[0] for given in row.tensors if len(given.shape) > 2), 1)


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


def size_of_calls(record: Rehearsal, batch: int) -> dict[str, int]:
    """Return height, width, number and frames of the largest pictures that are decoded, as far as they are known.

    Args:
        record: the calls.
        batch: pictures at a time, of which an autoencoder may decode one after the other.
    """
    decoded = [row.tensors[0].shape for row in record.rows if row.method == "decode"]
    frames = [latents[2] for latents in decoded if len(latents) == 5]
    size = record.size
    if size is None:
        return {}
    more = {"frames": max(frames)} if frames else {}
    return {"height": size[0], "width": size[1], "batch": max([batch, *(latents[0] for latents in decoded)]), **more}


def _decode_row(
    anatomy: Anatomy,
    request: Request,
    row: Row,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    pictures: int,
    frames: int | None = None,
) -> Row | None:
    """The decode of the latents in a call of the denoiser; None if the autoencoder, or the latents, are unknown.

    Args:
        pictures: number of pictures at a time.
        frames: frames of packed latents, as far as they are known.
    """
    name = anatomy.autoencoder
    size = None if name is None else _latent_size(anatomy, request, row, args, kwargs, frames)
    if name is None or size is None:
        return None
    frames, height, width = size
    shape = (pictures, latent_channels(anatomy), *((frames,) if has_frames(anatomy) else ()), height, width)
    dtype, factor = dtype_of(anatomy, name), scale_factor(anatomy)
    decode = row_of(name, "", "decode", dtype, (torch.empty(shape, dtype=dtype, device="meta"),), {})
    pixels = 3 * pictures * height * width * factor**2
    return dataclasses.replace(
        decode,
        held=_held(row.given_bytes),
        output_bytes=pixels * dtype.itemsize,
        size=(height * factor, width * factor),
    )


def _latent_size(
    anatomy: Anatomy, request: Request, row: Row, args: tuple[Any, ...], kwargs: dict[str, Any], frames: int | None
) -> tuple[int, int, int] | None:
    """Frames, height and width of the latents in a call: a map, or packed as tokens, of which there may be more."""
    found = map_in_call(anatomy.components[row.component], args, kwargs)
    if found is not None:
        return found.frames, *found.size()
    tensors = (leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor))
    tokens = next((tensor for tensor in tensors if tensor.dim() == 3), None)
    if tokens is None or (has_frames(anatomy) and frames != 1):
        return None
    area, factor = tokens.shape[1] * tokens.shape[2] // latent_channels(anatomy), scale_factor(anatomy)
    height, width = request.height // factor, request.width // factor
    if height * width == area:
        return 1, height, width
    rows, columns = _grid(args, kwargs, tokens.shape[1])
    side = math.isqrt(max(0, area // (rows * columns) - 1)) + 1
    return 1, side * rows, side * columns


def _grid(args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> tuple[int, int]:
    """Rows and columns of packed tokens, by the positions or the sizes among the arguments; (1, 1) if none has them."""
    leaves = tree_flatten((args, kwargs))[0]
    positions = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[-1] in (3, 4))
    found = [(leaf[..., 1:3].reshape(-1, 2).amax(0) + 1).int().tolist() for leaf in positions]
    found += [leaves[place : place + 2] for place in range(len(leaves) - 1)]
    whole = (pair for pair in found if all(type(side) is int for side in pair))
    rows, columns = next((pair for pair in whole if pair[0] * pair[1] == tokens), (1, 1))
    return rows, columns
