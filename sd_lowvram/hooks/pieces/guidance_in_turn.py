"""The halves of a guided batch, conditional and unconditional, one after the other inside each module of the UNet, or
each block of a transformer that guides in one batch.

Source: ours; pictures of a batch do not see each other. Fidelity: ``rounding``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.private import tree_flatten, tree_unflatten
from ...errors import NoSiteError
from ...models.anatomy import Anatomy
from ...models.joint import JointBlock
from ...patches import Patch, wrap
from ...settings import Settings
from ...streaming.weight_scopes import repeated_calls
from ...weights import needs_graph, place_part
from ..arguments import are_watched, batch_of, given_by_name, holds_last_pictures, part_of, shares
from ..offers import Offer, OfferKind, Target
from ..parking.offloaded_tensor import OffloadedMap

Rows = Callable[[tuple[Any, ...], dict[str, Any]], int]
"""Function from a module's arguments to the rows of its batch; 1 if the module needs the whole batch."""


def guidance_in_turn(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Divide every batch inside each residual block, transformer and sampler of a UNet, or each block of a transformer.

    The parts are halves, or single pictures if the number of rows is odd. Where the host names the conditions of a
    batch (ComfyUI, Forge), there is one part for each. Modules that look at several rows together (perturbed attention
    guidance), or let a host's nodes do so, see the whole batch.

    Args:
        anatomy: modules of its UNet's path, or its joint blocks, are patched.
        settings: not read beyond the knob itself.
        device: not read.

    Yields:
        One patch of ``forward`` for each module.

    Raises:
        NoSiteError: the target has no UNet, and no transformer that is called with both rows of a guided picture.
    """
    for module, rows in _unet_sites(anatomy) if anatomy.unet_path is not None else _transformer_sites(anatomy):
        yield wrap(module, "forward", functools.partial(_run_by_halves, rows, module), "guidance_in_turn")


def offers(target: Target) -> Iterator[Offer]:
    """Offer parts at level 3. A transformer with both rows in one batch may also go back to whole batches, late."""
    in_one_batch = bool(target.anatomy.joint_blocks) and target.anatomy.passes > 1
    if target.anatomy.unet_path is not None or in_one_batch:
        yield Offer(OfferKind.LADDER, {"guidance_in_turn": True}, level=3, stages=("denoise",))
    if in_one_batch:  # each half copies a block's weights again if they do not fit the buffer together
        yield Offer(OfferKind.LATE, {"guidance_in_turn": False}, level=4, stages=("denoise",))


def _unet_sites(anatomy: Anatomy) -> Iterator[tuple[nn.Module, Rows]]:
    path = anatomy.unet_path
    assert path is not None
    tail = path.tail if len(path.tail) == 1 else ()  # code between several tail modules needs the whole batch
    attentions = {site.module for site in anatomy.attentions}
    for module in (*path.modules, *tail):
        inside = [child for child in module.modules() if child in attentions]
        yield module, functools.partial(_rows_of_map, anatomy.family.mixes_rows, inside)


def _transformer_sites(anatomy: Anatomy) -> Iterator[tuple[nn.Module, Rows]]:
    if not anatomy.joint_blocks:
        raise NoSiteError("guidance in turn: the model has no UNet, and no transformer whose blocks are known")
    if anatomy.passes == 1:
        how = "guides by a second call" if anatomy.calls > 1 else "does not guide by a second row"
        raise NoSiteError(f"guidance in turn: the pipeline {how}, so a call of its transformer has one row a picture")
    for site in anatomy.joint_blocks:
        yield site.module, functools.partial(_rows_of_tokens, anatomy.family.joint, site.module)


def _rows_of_map(
    mixes_rows: Callable[[Any], bool], attentions: list[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    mixed = any(map(mixes_rows, attentions)) or are_watched(args, kwargs)
    return 1 if mixed else batch_of(args, kwargs)


def _rows_of_tokens(
    look: Callable[[nn.Module], JointBlock | None], block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    parts, arguments = look(block), given_by_name(block, args, kwargs)
    return len(arguments[parts.picture]) if parts is not None and parts.is_plain(arguments) else 1


def _run_by_halves(rows: Rows, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    batch = rows(args, kwargs)
    if batch == 1 or needs_graph(module, args, kwargs):
        return original(*args, **kwargs)
    parts = shares(args, kwargs, batch)
    joined = _JoinedOutput(batch, parts)
    with repeated_calls():
        # Parking is asynchronous: the half of the skips that was parked last may still be on the device. Run first,
        # its pictures find them there without a copy.
        for number in range(parts)[:: -1 if holds_last_pictures(args, kwargs) else 1]:
            part_args, part_kwargs = part_of(args, kwargs, batch, number, parts)
            joined.add(number, original(*part_args, **part_kwargs))
            del part_args, part_kwargs
    return joined.result()


class _JoinedOutput:
    """Puts what the parts of a batch gave, in whatever order, into one result of the same structure."""

    def __init__(self, batch: int, parts: int) -> None:
        self._batch, self._parts = batch, parts
        self._leaves: list[Any] = []
        self._structure: Any = None

    def add(self, number: int, part: Any) -> None:
        leaves, self._structure = tree_flatten(part)
        self._leaves = self._leaves or [None] * len(leaves)
        for place, leaf in enumerate(leaves):
            before = self._leaves[place]
            if isinstance(leaf, Tensor):
                self._leaves[place] = place_part(before, leaf, 0, self._batch * number // self._parts, self._batch)
            else:
                self._leaves[place] = {**(before or {}), number: leaf} if isinstance(leaf, OffloadedMap) else leaf

    def result(self) -> Any:
        joined = [
            OffloadedMap.join([leaf[number] for number in sorted(leaf)]) if isinstance(leaf, dict) else leaf
            for leaf in self._leaves
        ]
        return tree_unflatten(joined, self._structure)
