"""Blocks of diffusion transformers, in which tokens see each other in attention alone: how one is called with some of
its tokens.

A block is called as it is, by its own forward: what is given to it is cut, and its layers stay the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Cut = Callable[[Any, "Rows"], Any]
"""Function from an argument of a block, and rows of its tokens, to the argument for these rows."""

Mask = Callable[[Mapping[str, Any], "Rows"], "Tensor | None"]
"""Function from a block's arguments, and rows of its queries, to the mask of these rows and all keys."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a block's tokens.

    Attributes:
        start, stop: rows of the picture's tokens.
        words: number of the text's tokens, from its first, that are called with them.
        texts: number of all tokens of the text.
    """

    start: int
    stop: int
    words: int
    texts: int

    def select_joined(self, tensor: Tensor, dim: int) -> Tensor:
        """Select these rows of a tensor in which the text precedes the picture."""
        picture = tensor.narrow(dim, self.texts + self.start, self.stop - self.start)
        return torch.cat([tensor.narrow(dim, 0, self.words), picture], dim) if self.texts else picture


@dataclass(frozen=True)
class JointBlock:
    """A transformer block, and how its forward is called with some of its tokens.

    Attributes:
        picture: name of the argument that is cut, tokens (N, tokens, C).
        text: name of the argument with the tokens of the text (N, words, C); "" if there is none.
        cut: functions that cut other arguments with an entry for each token, by name.
        by_rows: name of the diffusers processor in which a query's row does not depend on other queries. With any other
            processor the block is left alone.
        mask: function that makes the attention's mask, if the block would make it from ``masked_by``, which is then
            left out.
        attentions: the attentions that the block calls, in order.
        text_last: True if the text follows the picture among queries and keys.
        besides: layers that keys and values do not need.
    """

    picture: str
    text: str
    cut: Mapping[str, Cut]
    attentions: tuple[Any, ...]
    by_rows: str
    masked_by: str = ""
    mask: Mask = lambda arguments, rows: None
    text_last: bool = False
    besides: tuple[nn.Module, ...] = ()

    def is_plain(self, arguments: Mapping[str, Any]) -> bool:
        """True if neither the call nor a processor lets tokens interact in another way."""
        is_served = all(type(attention.processor).__name__ == self.by_rows for attention in self.attentions)
        modulations = (arguments.get(name) for name in ("temb_mod", "temb_mod_img", "temb_mod_txt"))
        by_token = any(
            isinstance(modulation, Tensor) and modulation.ndim == 3 and modulation.shape[1] > 1
            for modulation in modulations
        )
        return is_served and not by_token and not arguments.get("joint_attention_kwargs")

    def texts(self, arguments: Mapping[str, Any]) -> int:
        """Tokens of the text."""
        return int(arguments[self.text].shape[1]) if self.text else 0

    def part(self, arguments: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
        """Return the block's arguments for some rows.

        Args:
            arguments: of the whole call, by name.
            rows: the rows.
        """
        some = dict(arguments)
        some[self.picture] = arguments[self.picture][:, rows.start : rows.stop]
        if self.text:
            some[self.text] = arguments[self.text][:, : rows.words]
        some |= {name: cut(arguments[name], rows) for name, cut in self.cut.items() if arguments.get(name) is not None}
        return some | ({self.masked_by: None} if self.masked_by else {})

    def queries(self) -> list[nn.Module]:
        """The layers that make queries alone; empty where one layer makes all."""
        return _layers(self.attentions, ("to_q", "add_q_proj"))

    def keys(self) -> list[nn.Module]:
        """The layers that make keys and values alone."""
        return _layers(self.attentions, ("to_k", "to_v", "add_k_proj", "add_v_proj"))


def _layers(attentions: tuple[Any, ...], names: tuple[str, ...]) -> list[nn.Module]:
    layers = (getattr(attention, name, None) for attention in attentions for name in names)
    return [layer for layer in layers if isinstance(layer, nn.Module)]


def join_positions(positions: tuple[Tensor, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
    """Cosine and sine (words + tokens, width) of some rows."""
    cosine, sine = positions
    return rows.select_joined(cosine, 0), rows.select_joined(sine, 0)


def select_tokens(tensor: Tensor, rows: Rows) -> Tensor:
    """Some tokens of (N, tokens, ...)."""
    return tensor[:, rows.start : rows.stop]
