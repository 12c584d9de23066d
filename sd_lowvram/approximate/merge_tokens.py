"""Similar tokens of the picture go through self-attention as one.

Of every two by two tokens one stays. Of the rest, the tokens most similar to a staying one take its result.
Merged are the self-attentions of the largest maps, which take most of the time; feed-forward and cross-attention see
all tokens. Source of the idea: token merging for Stable Diffusion (Bolya and Hoffman 2023). Ours takes no mean of
merged tokens, whose sums on a GPU come in no fixed order: the same seed gives the same bits. Fidelity: ``approximate``.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConflictError, NoSiteError
from ..models.anatomy import Anatomy
from ..models.interfaces import MapAttention
from ..patches import Patch, wrap
from ..settings import Settings
from ..weights import needs_graph

_CONTEXTS = ("encoder_hidden_states", "context", "attention_mask", "mask", "value")
_SCORES = 1 << 24
"""Elements of a table of likeness that exist at a time."""


def merge_tokens(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Merge up to ``settings.merge_tokens`` percent of the tokens in self-attention of the denoiser's largest maps.

    Args:
        anatomy: the first attention of its transformer blocks is patched.
        settings: ``merge_tokens`` is the percentage.
        device: not read.

    Yields:
        A patch for each entry of the denoiser, and one for each self-attention.

    Raises:
        NoSiteError: the target has no transformer block.
        ConflictError: it has self-attention that depends on where tokens lie.
    """
    denoiser, blocks = anatomy.denoiser, [site.module for site in anatomy.transformer_blocks]
    if denoiser is None or not blocks:
        raise NoSiteError("merge tokens: the model has no transformer block")
    by_place = (module for block in blocks if isinstance(module := block.get_submodule("attn1"), MapAttention))
    if (in_place := next(by_place, None)) is not None:
        raise ConflictError(
            f"merge_tokens cannot go with the {type(in_place).__name__} of this UNet, which needs every token at its "
            "place: leave merge_tokens off"
        )
    merging = _Merging((settings.as_dict()["merge_tokens"] or 0) / 100)
    for entry in anatomy.entries[denoiser]:
        yield wrap(anatomy.components[denoiser], entry, merging.step, "merge_tokens")
    for attention in (block.get_submodule("attn1") for block in blocks):
        yield wrap(attention, "forward", functools.partial(merging.attend, attention), "merge_tokens")


class _Merging:
    """The size of the maps of the denoiser's call that is under way."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._latents: tuple[int, int] | None = None
        self._most = 0

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around a call of the denoiser."""
        sample = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        self._latents = tuple(sample.shape[-2:]) if sample is not None and sample.ndim == 4 else None  # type: ignore[assignment]
        self._most = 0
        return original(*args, **kwargs)

    def attend(
        self, attention: nn.Module, original: Callable[..., Tensor], tokens: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Around a call of a self-attention with ``tokens`` (N, tokens, C)."""
        self._most = max(self._most, tokens.shape[1])
        size = _size_of_map(self._latents, tokens.shape[1]) if tokens.shape[1] == self._most else None
        other = [*args[:1], *(kwargs.get(name) for name in _CONTEXTS)]
        if size is None or any(value is not None for value in other) or needs_graph(attention, tokens):
            return original(tokens, *args, **kwargs)
        merged = merge_by_likeness(tokens, size, self._share)
        return merged.spread(original(merged.tokens, *args, **kwargs))


def _size_of_map(latents: tuple[int, int] | None, tokens: int) -> tuple[int, int] | None:
    """Height and width of a map of so many tokens; None: it is none of the latents, halved so many times."""
    if latents is None:
        return None
    sizes = ((-(-latents[0] // factor), -(-latents[1] // factor)) for factor in (1, 2, 4, 8))
    return next((size for size in sizes if math.prod(size) == tokens), None)


@dataclass(frozen=True)
class Merged:
    """Tokens after merging.

    Attributes:
        tokens: (N, fewer, C).
        taken_from: (N, all): for each original token, the index among ``tokens`` of its result.
    """

    tokens: Tensor
    taken_from: Tensor

    def spread(self, results: Tensor) -> Tensor:
        """Return the results of merged tokens for every original token.

        Args:
            results: (N, fewer, C).

        Returns:
            (N, all, C).
        """
        return results.gather(1, self.taken_from[..., None].expand(-1, -1, results.shape[2]))


def merge_by_likeness(tokens: Tensor, size: tuple[int, int], share: float) -> Merged:
    """Merge a ``share`` of ``tokens`` (N, height * width, C) into the tokens that are most similar to them.

    Args:
        tokens: (N, height * width, C).
        size: height and width of their map.
        share: part of the tokens to merge, 0 to 0.75.

    Returns:
        The merged tokens, and for each original token the one that stands for it.
    """
    batch, count, channels = tokens.shape
    staying, merging = _choose(*size, tokens.device)
    fewer = min(int(count * share), len(merging))
    likeness, nearest = _nearest(F.normalize(tokens, dim=-1), staying, merging)
    order = likeness.argsort(dim=1, descending=True, stable=True)
    gone, left = order[:, :fewer], order[:, fewer:]
    places = torch.cat([staying.expand(batch, -1), merging[left]], dim=1)
    stays = tokens.gather(1, places[..., None].expand(-1, -1, channels))
    own = torch.arange(places.shape[1], device=tokens.device).expand(batch, -1)
    taken_from = torch.empty(batch, count, dtype=torch.long, device=tokens.device)
    taken_from = taken_from.scatter(1, places, own).scatter(1, merging[gone], nearest.gather(1, gone))
    return Merged(stays, taken_from)


def _nearest(directions: Tensor, staying: Tensor, merging: Tensor) -> tuple[Tensor, Tensor]:
    """Similarity of each token of ``merging`` to the most similar one of ``staying``, and the index of that one."""
    targets = directions[:, staying].transpose(1, 2)
    rows = max(1, _SCORES // (len(directions) * len(staying)))
    nearest = [(directions[:, part] @ targets).max(dim=2) for part in merging.split(rows)]
    return torch.cat([best.values for best in nearest], dim=1), torch.cat([best.indices for best in nearest], dim=1)


def _choose(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of the tokens that stay, one of every two by two, drawn the same way each time; and of the rest."""
    staying, merging = _draw(height, width)
    return torch.tensor(staying, device=device), torch.tensor(merging, device=device, dtype=torch.long)


@functools.lru_cache(maxsize=8)
def _draw(height: int, width: int) -> tuple[list[int], list[int]]:
    draw = random.Random(0).randrange
    cells = itertools.product(range(0, height, 2), range(0, width, 2))
    staying = [min(y + draw(2), height - 1) * width + min(x + draw(2), width - 1) for y, x in cells]
    return staying, sorted({*range(height * width)} - {*staying})
