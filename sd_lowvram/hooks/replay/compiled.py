"""torch.compile of the model: one function for each kind of block, which equal blocks share, or one for the whole.

Blocks are compiled at their first call. A new size, batch or LoRA is compiled at its first call too, and the log says
so. Under autograd, in traces, and if the compiler fails, blocks run as they are. Fidelity: ``rounding``. Sources:
diffusers' memory and speed guide; PyTorch's recipe of regional compilation.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import progress
from ...cache import place_of, recall, remember
from ...compat.private import compiled_graphs, is_compilers, tree_flatten
from ...devices.compiling import compiling_of
from ...errors import ConflictError, NoSiteError
from ...kernels import compiler
from ...knob import Act
from ...memory.fake_mode import active_fake_mode
from ...models import autoencoder
from ...models.anatomy import Anatomy
from ...patches import Patch, is_foreign, wrap
from ...progress import log_event
from ...settings import Settings
from ...streaming.layers import is_compiled as is_compiled_module
from ...weights import loaded_dtype, needs_graph, own_tensors
from ..offers import Offer, OfferKind, Target


def compiled(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run compiled code: for blocks of denoiser and autoencoder (``regional``), or for denoiser, encoder and decoder
    (``whole``). If nothing can be compiled, warn and leave all as it is.

    Args:
        anatomy: its residual and transformer blocks, or whole models, are compiled at their first call.
        settings: ``compile`` is "regional" or "whole".
        device: device that computes.

    Yields:
        A patch of ``forward`` for each compiled part, and one for each entry of its component.

    Raises:
        NoSiteError: the target has neither.
        ConflictError: the target is compiled already.
    """
    if checked(anatomy, settings, device).compile == "off":
        return
    components = [(name, modules) for name, modules in parts(anatomy, settings.compile == "whole") if modules]
    if not components:
        raise NoSiteError(f"compile={settings.compile!r}: the model has no denoiser and no autoencoder to compile")
    for name, component in anatomy.components.items():
        if any(map(is_compiled_module, component.modules())):
            raise ConflictError(
                f"{name} is compiled by torch.compile already: leave compile off, or optimize it uncompiled"
            )
    for name, modules in components:
        kinds = _Kinds(device)
        for module in modules:
            yield wrap(module, "forward", kinds.around(module), "compiled")
        for entry in anatomy.entries[name]:
            yield wrap(anatomy.components[name], entry, kinds.entered, "compiler")


def checked(anatomy: Anatomy, settings: Settings, device: torch.device) -> Settings:
    """Return ``settings``; or, if nothing can be compiled for ``device``, warn and return them with ``compile`` off.

    Args:
        anatomy: not read.
        settings: as requested.
        device: device that computes.
    """
    why = compiler.why_not(device) if is_compiled(settings) else None
    if why is None:
        return settings
    warnings.warn(f"compile: {why}. The model runs as it is", stacklevel=2)
    return dataclasses.replace(settings, compile="off")


def offers(target: Target) -> Iterator[Offer]:
    """Offer compiled blocks with channels last, if this was measured to be faster on the device."""
    machine = compiling_of(target.rates, target.device)
    blocks = target.anatomy.residual_blocks or target.anatomy.transformer_blocks
    if machine is None or machine.gain <= 1 or not blocks or target.fixed.compile is not None:
        return
    if target.fixed.channels_last is not False and compiler.why_not(target.device) is None:
        yield Offer(OfferKind.WHOLE, {"compile": "regional", "channels_last": True})


def is_compiled(settings: Settings) -> bool:
    """True if ``settings`` request compiled code."""
    return settings.compile in ("regional", "whole")


def is_followed(settings: Settings) -> bool:
    """True if ``settings`` request code made from the model's Python: compiled, or traced."""
    return is_compiled(settings) or bool(settings.traced)


def knobs_outside_graph(settings: Settings) -> list[str]:
    """Knobs of ``settings`` whose hooks cannot be part of a graph: parked maps, weights lent for a call.

    A model with such hooks runs uncompiled, whoever compiled it, within the memory of its plan."""
    return [name for name, knob, value in settings.decided() if Act.KEEPS_STATE in knob.acts_of(value)]


def parts(anatomy: Anatomy, whole: bool) -> Iterator[tuple[str, list[nn.Module]]]:
    """Parts of each component that are compiled; encoder and decoder of an autoencoder are separate parts.

    Args:
        anatomy: of the target.
        whole: True for models as one piece, False for their blocks.

    Yields:
        Name of the component and the modules to compile, for denoiser, encoder and decoder in turn.
    """
    if anatomy.denoiser is not None and anatomy.denoiser_module is not None:
        blocks = [site.module for site in (*anatomy.residual_blocks, *anatomy.transformer_blocks)]
        yield anatomy.denoiser, _free([anatomy.denoiser_module] if whole else blocks)
    vae: Any = anatomy.vae
    if anatomy.autoencoder is not None and autoencoder.dissect(vae) is not None:
        blocks = autoencoder.residual_blocks(vae)
        for part in (vae.encoder, vae.decoder):
            inside = set(part.modules())
            yield anatomy.autoencoder, _free([part] if whole else [block for block in blocks if block in inside])


def kinds_of(anatomy: Anatomy, whole: bool = False) -> dict[str, frozenset[Any]]:
    """The kinds of block that are compiled in each stage of a run.

    Args:
        anatomy: of the target.
        whole: as for :func:`parts`.

    Returns:
        Kinds by the name of the stage; blocks of one kind share compiled code.
    """
    names = ("denoise", "encode", "decode") if anatomy.denoiser is not None else ("encode", "decode")
    kinds = (frozenset(map(_kind, modules)) for _, modules in parts(anatomy, whole))
    return dict(zip(names, kinds, strict=False))


def were_compiled(kinds: frozenset[Any], device: torch.device) -> bool:
    """True if a process has compiled these parts for such a device, and left files in the cache."""
    return recall(_mark(kinds, device)) is not None


def _mark(kinds: Iterable[Any], device: torch.device) -> Path | None:
    return place_of("compiled-kinds", lambda: (sorted(map(repr, kinds)), device.type))


def _free(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules whose forward no other code has replaced."""
    return [module for module in modules if not is_foreign(module, "forward")]


class _Kinds:
    """The kinds of block in a part of the model, and what of them is compiled by now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kinds: set[Any] = set()
        self._met: set[Any] = set()
        self._shapes: set[Any] = set()
        self._failed = False

    def around(self, module: nn.Module) -> Callable[..., Any]:
        """The replacement for the forward of ``module``."""
        kind = _kind(module)
        self._kinds.add(kind)
        return functools.partial(self._call_module, module, kind)

    def entered(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call of the component; log what is compiled after the first call."""
        if not _runs((args, kwargs)):
            return original(*args, **kwargs)
        before, met, start = compiled_graphs(), len(self._met), time.perf_counter()
        with compiler.compiling():
            result = original(*args, **kwargs)
        fresh = compiled_graphs() - before
        if fresh and met and met == len(self._met):
            shapes = tuple(leaf.shape for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor))
            why = "its layers have changed, as by a LoRA" if shapes in self._shapes else "for another size or batch"
            seconds = time.perf_counter() - start
            log_event(__name__, f"compile: {fresh} pieces of code were compiled again in {seconds:.0f} s: {why}")
        if self._met:
            self._shapes.add(tuple(leaf.shape for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)))
        return result

    def _call_module(
        self, module: nn.Module, kind: Any, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._failed or not _runs((args, kwargs)) or needs_graph(module, args, kwargs):
            return original(*args, **kwargs)
        if kind not in self._met:
            progress.report("compile", len(self._met), len(self._kinds))
        try:
            result = compiler.compile_private(type(module).forward, kind)(module, *args, **kwargs)
        except Exception as error:
            if not is_compilers(error):
                raise
            self._failed = True
            message = " ".join(str(error).split())[:200]
            log_event(__name__, f"compile: torch's compiler fails here ({message}). The model runs as it is")
            return original(*args, **kwargs)
        if kind not in self._met:
            self._met.add(kind)
            if self._met == self._kinds:
                remember(_mark(self._kinds, self._device), True)
            progress.report("compile", len(self._met), len(self._kinds))
        return result


def _kind(block: nn.Module) -> Any:
    """Key of a block: classes, numbers, shapes and types of everything inside."""
    return tuple(
        (
            type(module),
            tuple((name, value) for name, value in vars(module).items() if isinstance(value, (int, float, str))),
            tuple((tuple(tensor.shape), loaded_dtype(tensor)) for tensor in own_tensors(module)),
        )
        for module in block.modules()
    )


def _runs(arguments: Any) -> bool:
    """True if a call computes numbers and is not traced."""
    tensors = [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, Tensor)]
    return active_fake_mode(*tensors) is None
