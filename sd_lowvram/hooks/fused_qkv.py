"""Queries, keys and values of a self-attention by one product, keys and values of a cross-attention by one.

Their weights come to lie one behind the other in one place, of which each layer's own is a part: nothing is held twice,
and what is merged into a weight is in the product too. Layers are called as they are, so that what a LoRA or a host
does on the way is done; what the first of them asks of torch's ``linear`` is answered for all that come after it with
the same input. Weights that were replaced since are laid together anew.

On two threads of a CPU it gains nothing: a guided step of SD1.5 at 256x256 took 4.09 s without and 4.10 s with it, in
medians of five pairs, with the same bits. No plan takes it by itself.

Fidelity: ``rounding`` (a wider product may be added up in another order). Source: diffusers' fused projections.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import NoSiteError, SettingsError
from ..memory.fake_mode import active_fake_mode
from ..models.anatomy import Anatomy, has, layer
from ..patches import Change, Patch, wrap
from ..settings import Settings
from ..streaming.host_weights import in_files
from ..streaming.layers import contents
from ..weights import same_bits, set_data
from .packed_weights import moves_weights

_CONTEXTS = ("encoder_hidden_states", "context")


def fused_qkv(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch | Change]:
    """Make queries, keys and values of the denoiser's attentions by as few products as can be; what cannot be made so
    is left as it is, and its count told.

    Raises:
        NoSiteError: the denoiser has no attention whose weights can lie together.
        SettingsError: weights move or are widened, so that they do not stay where they were laid.
    """
    refuse_moved(settings)
    found = [(attention, _layers(attention)) for attention in _attentions(anatomy)]
    fused = [(attention, layers) for attention, layers in found if layers]
    if not fused:
        raise NoSiteError(
            "fused products: the model has no denoiser with attentions whose keys and values are plain linear layers"
        )
    if len(fused) < len(found):
        left = len(found) - len(fused)
        warnings.warn(
            f"fused_qkv: {left} of {len(found)} attentions are left as they are: their projections are no plain linear "
            "layers of one type, without bias",
            stacklevel=2,
        )
    laid = _Laid()
    yield Change(functools.partial(laid.lay_all, [layers for _, layers in fused]), hook="laid_together")
    for attention, layers in fused:
        products = _Products(layers, laid)
        yield wrap(attention, "forward", products.attend, "fused_qkv")
        for number, projection in enumerate(layers):
            yield wrap(projection, "forward", functools.partial(products.project, number), "fused_products")


def refuse_moved(settings: Settings) -> None:
    """Raise SettingsError where ``settings`` do not leave weights where they were laid."""
    name = "offload" if settings.offload not in (None, "none") else ""
    if not name and moves_weights(settings):
        name = "weight_storage" if settings.weight_storage else "precision"
    if name:
        raise SettingsError(
            f"fused_qkv cannot go with {name}={getattr(settings, name)!r}, where weights do not stay in one place: "
            "leave one of them off"
        )


def _attentions(anatomy: Anatomy) -> list[nn.Module]:
    inside = {*anatomy.unet.modules()} if anatomy.unet is not None else set()
    modules = [site.module for site in anatomy.attentions if site.module in inside]
    return [module for module in modules if has(module, "to_q", "to_k", "to_v")]


def _layers(attention: Any) -> list[nn.Linear]:
    """The layers of query, key and value that can be one product; without the query's where its input is of another
    width; none where there are no two."""
    layers = [layer(one) for one in (attention.to_q, attention.to_k, attention.to_v)]
    if type(getattr(attention, "processor", None)).__name__.startswith("Fused"):  # diffusers' own, which call none
        return []
    for chosen in (layers, layers[1:]):
        weights = [getattr(one, "weight", None) for one in chosen]
        if all(isinstance(one, nn.Linear) and one.bias is None for one in chosen) and _are_alike(weights):
            return chosen
    return []


def _are_alike(weights: Sequence[Any]) -> bool:
    """Whether they are plain weights that differ in nothing but their rows."""
    kinds = {(one.dtype, one.device, tuple(one.shape[1:])) for one in weights if isinstance(one, Tensor)}
    plain = all(isinstance(one, nn.Parameter) and one.dim() == 2 and one.is_floating_point() for one in weights)
    return plain and len(kinds) == 1


def _lie_together(weights: Sequence[Tensor]) -> bool:
    """Whether each lies right behind the one before it."""
    first = weights[0]
    place, end = first.untyped_storage()._cdata, first.storage_offset()
    for weight in weights:
        here = weight.untyped_storage()._cdata == place and weight.storage_offset() == end
        if not here or weight.shape[1:] != first.shape[1:] or weight.dtype != first.dtype or not weight.is_contiguous():
            return False
        end += weight.numel()
    return True


class _Laid:
    """Weights that were laid together, each with what it held in a file, if it did."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor | None]] = {}

    def lay_all(self, groups: Sequence[Sequence[nn.Linear]]) -> Callable[[], None]:
        """Lay the weights of each group together; returns the undoing."""
        with contextlib.ExitStack() as undoing:
            undoing.callback(self._undo)
            for layers in groups:
                self.lay([one.weight for one in layers])
            return undoing.pop_all().close

    def lay(self, weights: Sequence[Tensor]) -> None:
        """Lay ``weights`` together, if nothing stays behind: parts of a larger place would be held twice."""
        if _lie_together(weights) or not _are_alike(weights):
            return
        mapped, total = in_files(weights), sum(one.nbytes for one in weights)
        if any(one.untyped_storage().nbytes() > total for one, ours in zip(weights, mapped, strict=True) if not ours):
            return
        real = active_fake_mode(*weights) is None
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.cat([one.data for one in weights])
            for weight, part, ours in zip(weights, whole.split([len(one) for one in weights]), mapped, strict=True):
                self._tensors.setdefault(id(weight), (weight, weight.data if ours and real else None))
                set_data(weight, part)

    def _undo(self) -> None:
        with torch.inference_mode(False):
            for weight, original in self._tensors.values():
                if weight.untyped_storage().nbytes() == weight.nbytes:
                    continue  # somebody gave it contents of its own
                intact = original is not None and weight.device == original.device and same_bits(weight.data, original)
                set_data(weight, original if intact and original is not None else weight.data.clone())
            self._tensors.clear()


class _Answer(NamedTuple):
    """What a projection gives for ``x``, as long as its weight has the contents that it had."""

    x: Tensor
    weight: Any
    result: Tensor


class _Products:
    """The projections of one attention: two or three layers whose weights lie together."""

    def __init__(self, layers: Sequence[nn.Linear], laid: _Laid) -> None:
        self._layers, self._laid = layers, laid
        self._seen: Any = None
        self._first: int | None = None
        self._answers: dict[int, _Answer] = {}

    def attend(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around a call of the attention."""
        context = [*args[1:2], *(kwargs.get(name) for name in _CONTEXTS)]
        alone = all(one is None for one in context)
        self._first = 0 if alone or len(self._layers) == 2 else 1
        weights: list[Tensor] = [one.weight for one in self._layers]
        if contents(weights) != self._seen:
            self._laid.lay(weights)
            self._seen = contents(weights)
        try:
            return original(*args, **kwargs)
        finally:
            self._first = None
            self._answers.clear()

    def project(self, number: int, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Around a call of one of the layers."""
        if self._first is None:
            return original(*args, **kwargs)
        with _Linear(functools.partial(self._linear, number)):
            return original(*args, **kwargs)

    def _linear(self, number: int, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        known = self._answers.pop(number, None)
        if known is not None and known.x is input and known.weight == contents([weight]) and bias is None:
            return known.result
        weights: list[Tensor] = [one.weight for one in self._layers[number:]]
        ours = number == self._first and weight is weights[0] and bias is None
        if not ours or _learns(input, *weights) or not _lie_together(weights):
            return F.linear(input, weight, bias)
        rows = [len(one) for one in weights]
        whole = weight.detach().as_strided((sum(rows), weight.shape[1]), weight.stride())
        results: list[Tensor] = list(F.linear(input, whole).split(rows, dim=-1))
        for place, one in enumerate(weights[1:], 1):
            self._answers[number + place] = _Answer(input, contents([one]), results[place])
        return results[0]


def _learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class _Linear(TorchFunctionMode):
    """Answers ``linear`` with ``answer``. The layer itself is called, so that whatever its host does to weights on the
    way (a LoRA, a cast) is done: the weight that comes decides."""

    def __init__(self, answer: Callable[..., Tensor]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._answer if func is F.linear else func)(*args, **(kwargs or {}))
