"""The tensors that modules own: walking them, lending them converted ones for a call, moving inputs along."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .compat.private import tree_flatten, tree_map
from .weight_parts import is_quantised, is_wrapper, links_of, registered

Convert = Callable[[Tensor], Tensor]


def own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers that ``module`` itself holds, without those of its children; of a quantised
    weight, the tensors with its bytes.
    """
    quantised = False
    for held in (module._parameters, module._buffers):
        for tensor in held.values():
            if tensor is not None:
                special = is_quantised(tensor)
                quantised = quantised or special
                if not special or not is_wrapper(tensor):
                    yield tensor
    if quantised:
        yield from (part for link in links_of(module) for part in link.parts)


def plain_weights(*modules: nn.Module) -> list[Tensor]:
    """Parameters and buffers of whole modules without the quantised ones, whose types nothing may change."""
    inside = (module for root in modules for module in root.modules())
    tensors = {id(tensor): tensor for _, _, tensor in registered(*inside) if not is_quantised(tensor)}
    return list(tensors.values())


def all_tensors(*modules: nn.Module) -> list[Tensor]:
    """Parameters and buffers of whole modules; tied ones once."""
    tensors = {id(tensor): tensor for root in modules for module in root.modules() for tensor in own_tensors(module)}
    return list(tensors.values())


def weight_bytes(*modules: nn.Module) -> int:
    """Bytes of all parameters and buffers; tied ones counted once."""
    return sum(tensor.nbytes for tensor in all_tensors(*modules))


def draw_weights(model: nn.Module, device: torch.device, seed: int = 0) -> nn.Module:
    """Move ``model`` from the meta device to ``device`` with random weights.

    Matrices are drawn by a generator of its own, biases are zero, other vectors one. Buffers are left unfilled.

    Args:
        model: a model on the meta device.
        device: where to.
        seed: of the generator.

    Returns:
        The model.
    """
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                bound = (3 / weight[0].numel()) ** 0.5
                weight.uniform_(-bound, bound, generator=generator)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Give ``tensor`` other contents and keep the object itself, so that whoever holds it sees them too.

    It stays an ordinary tensor, or one of ``torch.inference_mode``, whatever mode this is called in.

    Args:
        tensor: the tensor; its object stays, so that every holder sees the new contents.
        data: the new contents.
    """
    data = ordinary_as(tensor, data)
    with torch.no_grad():
        tensor.data = data


def ordinary_as(tensor: Tensor, data: Tensor) -> Tensor:
    """Return ``data`` as an ordinary tensor if ``tensor`` is one, else as an inference tensor.

    torch does not let either have contents of the other kind, or stops counting writes to them.

    Args:
        tensor: the tensor that will get the contents.
        data: the contents.
    """
    if data.is_inference() == tensor.is_inference():
        return data
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        place = data.storage_offset(), data.size(), data.stride()
        return data.new_empty(0).set_(data.untyped_storage(), *place)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True if two tensors on one device have the same bits: NaN equals itself, and 0 differs from -0."""
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)))


def is_channels_last(tensor: Tensor) -> bool:
    """True if a map (N, C, H, W) is stored channels last, and not in both orders at once."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def room(shape: Sequence[int], like: Tensor) -> Tensor:
    """Allocate an uninitialised tensor.

    Args:
        shape: its shape.
        like: a part of what will fill it; type, device and memory format are taken from it.
    """
    wanted = torch.channels_last if is_channels_last(like) else torch.contiguous_format
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=wanted)


def place_part(out: Tensor | None, part: Tensor, dim: int, start: int, total: int) -> Tensor:
    """Write ``part`` to ``out`` from ``start`` along ``dim``, and return ``out``.

    A new tensor with ``total`` elements along ``dim`` is made for a first part, or if ``out`` has another type or
    shape.

    Args:
        out: the tensor so far; None before the first part.
        part: what to write.
        dim: the dimension of the parts.
        start: first index of the part.
        total: length of the whole along ``dim``.
    """
    shape = [*part.shape]
    shape[dim] = total
    if out is None or out.dtype != part.dtype or [*out.shape] != shape:
        out = room(shape, part)
    out.narrow(dim, start, part.shape[dim]).copy_(part)
    return out


def wrap_gguf(plain: Tensor, gguf: Tensor) -> None:
    """Wrap ``plain``, which has the bytes of ``gguf``, so that diffusers' layers read it as a GGUF tensor."""
    plain.quant_type = gguf.quant_type  # type: ignore[attr-defined]
    plain.as_tensor = weakref.ref(plain)  # type: ignore[attr-defined]  # called, it gives the tensor


_LOADED = "_sd_lowvram_loaded"


def remember_loaded(tensor: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """Record the type that ``tensor`` was loaded in, before a hook stores it in another; return the function that
    forgets it.

    A plan that is made while hooks are attached starts from the model as it was loaded.
    """
    if _LOADED in vars(tensor):
        return lambda: None
    vars(tensor)[_LOADED] = dtype
    return lambda: vars(tensor).pop(_LOADED, None)


def loaded_dtype(tensor: Tensor) -> torch.dtype:
    """The type of ``tensor`` without our hooks."""
    dtype: torch.dtype = vars(tensor).get(_LOADED, tensor.dtype)
    return dtype


_LAST = "_sd_lowvram_channels_last"


def lay_last(kernel: Tensor) -> Callable[[], None]:
    """Mark ``kernel`` (N, C, H, W) to be copied channels last, whatever its present order; return the function that
    unmarks it.
    """
    vars(kernel)[_LAST] = True
    return lambda: vars(kernel).pop(_LAST, None)


def copied_tensor(tensor: Tensor, data: Tensor) -> Tensor:
    """Return a tensor with the strides that a copy of ``data`` should have.

    Args:
        tensor: the weight.
        data: its contents, or some rows of them.

    Returns:
        ``data`` itself, or a tensor without contents.
    """
    if _LAST not in vars(tensor):
        return data
    return torch.empty_like(data, device="meta", memory_format=torch.channels_last)


def narrows(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if ``target`` cannot represent every value of ``source``.

    torch has no promotion for types of 8 bits; each of them represents only its own values."""
    if 1 in (source.itemsize, target.itemsize):
        return source != target and target.itemsize == 1
    return torch.promote_types(source, target) != target


@contextmanager
def lend_contents(tensors: Iterable[Tensor], convert: Convert) -> Iterator[None]:
    """Replace the contents of every tensor by ``convert`` of them within the block, and restore them in any case.

    Args:
        tensors: the tensors.
        convert: function from their contents to the temporary ones.
    """
    before: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.inference_mode(False):
            for tensor in tensors:
                before.append((tensor, tensor.data))
                set_data(tensor, convert(tensor.data))
        yield
    finally:
        with torch.inference_mode(False):
            for tensor, data in before:
                set_data(tensor, data)


def map_tensors(tree: Any, convert: Convert) -> Any:
    """Return ``tree`` with every tensor converted.

    Args:
        tree: nested lists, tuples, dictionaries or model outputs.
        convert: function from a tensor to its replacement.
    """
    return tree_map(lambda leaf: convert(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def map_result(result: Any, convert: Convert) -> Any:
    """Return what a model returned with every tensor converted; an encoder's distribution, a plain object, in place.

    Args:
        result: as for :func:`map_tensors`, with distributions among the leaves.
        convert: function from a tensor to its replacement.
    """

    def converted(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return convert(leaf)
        if callable(getattr(leaf, "sample", None)):
            held = {name: value for name, value in vars(leaf).items() if isinstance(value, Tensor)}
            vars(leaf).update({name: convert(value) for name, value in held.items()})
        return leaf

    return tree_map(converted, result)


def first_tensor(tree: Any) -> Tensor | None:
    """The first tensor in a nest of arguments."""
    return next((leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)), None)


def needs_graph(module: nn.Module, *trees: Any) -> bool:
    """Return True if autograd records a call of ``module``.

    That is the case if it is enabled, and a weight or a tensor in ``trees`` (nested arguments) requires gradients.

    Args:
        module: the module that is called.
        trees: its arguments.
    """
    if not torch.is_grad_enabled():
        return False
    tensors = (leaf for leaf in tree_flatten(trees)[0] if isinstance(leaf, Tensor))
    return any(tensor.requires_grad for tensor in (*tensors, *module.parameters()))


def ordinary_mode() -> contextlib.AbstractContextManager[object]:
    """A block that autograd does not record, and whose tensors are no inference tensors.

    Nothing is entered where both are so already: two modes take longer than the bookkeeping of a streamed block.
    """
    if not torch.is_inference_mode_enabled() and not torch.is_grad_enabled():
        return contextlib.nullcontext()
    modes = contextlib.ExitStack()
    modes.enter_context(torch.inference_mode(False))
    modes.enter_context(torch.no_grad())
    return modes


def cast_activations(tree: Any, dtype: torch.dtype) -> Any:
    """``tree`` with its floating activations in ``dtype``. Timesteps, with at most one dimension, keep their type."""
    return map_tensors(tree, lambda t: t.to(dtype) if t.is_floating_point() and t.dim() > 1 else t)
