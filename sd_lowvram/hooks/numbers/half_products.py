"""Matrix products in fp16, all else in float32: for transformers made for bf16, on GPUs without bf16 (Turing).

The residual stream of such models exceeds the range of fp16; the factors of linear layers and attention seldom do. So a
linear layer's input, weight and bias are cast for its call and its result is widened again, and so are queries, keys
and values. Norms, sums and all other layers compute in float32. Weights are stored and streamed as they were loaded.

The result of each call is checked. If it contains NaN or infinity, the call is repeated and each layer is checked: a
layer that overflows computes in float32 from then on, and so does all attention if any overflows. The layers are stored
in the cache folder by kind of model, and the next run starts with them.

Source: ours; users of such GPUs report that only the residual stream overflows. Fidelity: ``approximate``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...cache import place_of, recall, remember
from ...compat.private import FakeTensor, tree_flatten
from ...errors import NotFiniteError
from ...kernels.attention.torch_kernels import TORCHS_ATTENTION
from ...memory.repeats import exclude_from_counts
from ...patches import Answered, Patch, wrap
from ...progress import log_event
from ...weights import cast_activations
from ..pieces.overflow import is_finite

_MOST_CAST = 1 << 26
"""Elements of a weight; the transformers' own layers have fewer."""

_ATTENTION = "attention"
"""Stands among the names of layers for every attention."""


def products_that_overflow(component: nn.Module) -> Callable[[str], bool] | None:
    """Return a function from a module's path to True if its products overflowed in earlier runs of this kind of model.

    None if nothing overflowed."""
    products = HalfProducts("", component)
    if not products.wide:
        return None
    attention = _ATTENTION in products.wide
    return lambda path: attention if _plain(path) not in products.layers else _plain(path) in products.wide


class HalfProducts:
    """The products of one component, and which of them overflow in fp16.

    Attributes:
        layers: linear ones by their path.
        wide: paths of those that overflow, and ``"attention"``; they are remembered at ``place``.
    """

    def __init__(self, name: str, component: nn.Module) -> None:
        self._name = name
        self._component = component
        self.layers = {
            _plain(path): module
            for path, module in component.named_modules()
            if isinstance(module, nn.Linear) and "lora_" not in path
        }
        self.place = place_of("overflows", self._kind)
        self.wide: set[str] = {*(recall(self.place) or ())}
        self._looks = False

    def _kind(self) -> Any:
        layers = ((path, layer.in_features, layer.out_features) for path, layer in self.layers.items())
        return type(self._component).__qualname__, sorted(layers)

    def patches(self, entries: Sequence[str]) -> Iterator[Patch]:
        """Around each linear layer, and around the ``entries`` of the component.

        Args:
            entries: names of the component's methods that a run calls.

        Yields:
            A patch for each linear layer, and one for each entry.
        """
        for path, layer in self.layers.items():
            yield wrap(layer, "forward", functools.partial(self._product, path), "precision")
        for entry in entries:
            yield wrap(self._component, entry, self._run, "precision")

    def _run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast_activations((args, kwargs), torch.float32)
        with TORCHS_ATTENTION.to(self._attend):
            result = original(*args, **kwargs)
            if self._looks or _is_all_finite(result):
                return result
            del result
            before, self._looks = self.wide.copy(), True
            try:
                result = original(*args, **kwargs)
            finally:
                self._looks = False
        if not _is_all_finite(result):
            raise NotFiniteError(
                f"{self._name}: its output has NaN or infinity in float32 too: its weights or its input are "
                "damaged; load it again"
            )
        if overflowed := self.wide - before:  # empty if a fault of the machine has passed
            remember(self.place, sorted(self.wide))
            message = f"{len(overflowed)} of its products overflowed in fp16 and are made in float32 from now on"
            log_event(__name__, f"{self._name}: {message}")
        return result

    def _product(self, path: str, original: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """A linear layer (..., in) to (..., out), which is float32."""

        def run(dtype: torch.dtype) -> Tensor:
            with Answered({F.linear: functools.partial(_linear, dtype)}):
                result: Tensor = original(x.to(dtype), *args, **kwargs)
            return result.float()

        return self._narrow(path, run, x)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """torch's scaled_dot_product_attention, which is float32."""

        def run(dtype: torch.dtype) -> Tensor:
            mask = attn_mask
            if mask is not None and mask.is_floating_point():  # a row of -inf would give NaN
                mask = mask.clamp(min=torch.finfo(dtype).min).to(dtype)
            q, k, v = (tensor.to(dtype) for tensor in (query, key, value))
            result: Tensor = F.scaled_dot_product_attention(q, k, v, mask, *args, **kwargs)
            return result.float()

        return self._narrow(_ATTENTION, run, query)

    def _narrow(self, name: str, run: Callable[[torch.dtype], Tensor], x: Tensor) -> Tensor:
        """``run`` in fp16, or in float32 where that overflows. A plan has the memory of both and the time of fp16."""
        fake = isinstance(x, FakeTensor)
        if fake:
            with exclude_from_counts():
                run(torch.float32)
        elif name in self.wide:
            return run(torch.float32)
        result = run(torch.float16)
        if fake or not self._looks or is_finite(result):
            return result
        result = run(torch.float32)
        if is_finite(result):
            self.wide.add(name)
        return result


def _plain(path: str) -> str:
    """A layer's path without a LoRA around it."""
    return path.replace(".base_layer", "")


def _is_all_finite(result: Any) -> bool:
    tensors = (
        tensor for tensor in tree_flatten(result)[0] if isinstance(tensor, Tensor) and tensor.is_floating_point()
    )
    return all(isinstance(tensor, FakeTensor) or is_finite(tensor) for tensor in tensors)


def _linear(dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` times ``weight`` in ``dtype``; of a table of words never the whole is cast at once."""
    rows = max(1, _MOST_CAST // weight.shape[1])
    parts = weight.split(rows)
    biases = [None] * len(parts) if bias is None else bias.split(rows)
    products = [
        F.linear(x.to(dtype), w.to(dtype), None if b is None else b.to(dtype))
        for w, b in zip(parts, biases, strict=True)
    ]
    return products[0] if len(products) == 1 else torch.cat(products, -1)
