"""GroupNorm with SiLU, and GEGLU, as one kernel each, in residual blocks and feed-forward layers.

Layers are called as they are; what they ask of torch's group_norm is answered by the kernel, SiLU with it. Calls that
the kernels cannot take (another type or device, autocast, gradients, a block of another kind) run as the model has
them. So do exact tiles: a kernel for strips was faster by itself, and made decodes on an H100 a fifth slower.

Denoiser and autoencoder are decided apart: at a decoder's maps the kernels can be several times as fast on a GPU on
which they are slower at a denoiser's.

Fidelity: ``rounding``. Sources: those of the kernels, in kernels/triton/.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compat import autocast_dtype
from ...errors import NoSiteError
from ...kernels.triton.support import FUSED_AUTOENCODER, FUSED_DENOISER, takes, why_not
from ...models import autoencoder
from ...models.anatomy import Anatomy, Residual, geglu_of
from ...patches import Answered, Patch, wrap
from ...settings import Settings
from ...weights import needs_graph
from ..arguments import time_and_more
from ..offers import Offer, OfferKind, Target

Look = Callable[..., Residual | None]


def fused_kernels(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run norms and activations of the target by Triton's kernels. If these cannot run, warn and leave all as it is.

    Args:
        anatomy: residual blocks of its denoiser and autoencoder, and its GEGLUs, are patched.
        settings: not read beyond the knob itself.
        device: device that computes.

    Yields:
        One patch of ``forward`` for each residual block and each GEGLU.

    Raises:
        NoSiteError: the target has no residual block and no GEGLU, or for the autoencoder's knob alone no autoencoder.
    """
    blocks, gates = _denoiser_sites(anatomy) if settings.fused_kernels else ([], [])
    blocks += _autoencoder_sites(anatomy) if in_autoencoder(settings) else []
    if not blocks and not gates:
        if anatomy.vae is not None and settings.vae_fused_kernels is False:
            return
        if not settings.fused_kernels:
            raise NoSiteError("fused kernels of the autoencoder: the target has no autoencoder with residual blocks")
        raise NoSiteError("fused kernels: the model has no residual block with SiLU and no GEGLU")
    why = why_not(device)
    if why is not None:
        warnings.warn(f"fused_kernels: {why}. The model's own layers run instead", stacklevel=2)
    for block, look in blocks:
        yield wrap(block, "forward", functools.partial(_fused_block, look, block), "fused_kernels")
    for gate in gates:
        yield wrap(gate, "forward", functools.partial(_fused_gate, gate), "fused_kernels")


def in_autoencoder(settings: Settings) -> bool:
    """True if the autoencoder has fused kernels: its own knob decides, otherwise the one of all models."""
    own = settings.vae_fused_kernels
    return bool(settings.fused_kernels if own is None else own)


def kernels_in(settings: Settings, autoencoder: bool) -> tuple[str, ...]:
    """Prefixes of the names of the measured kernels that run in the autoencoder, or in the other models."""
    if autoencoder:
        return FUSED_AUTOENCODER if in_autoencoder(settings) else ()
    return FUSED_DENOISER if settings.fused_kernels else ()


def offers(target: Target) -> Iterator[Offer]:
    """Offer fused kernels to denoiser and autoencoder, each if it has sites and they are known to be faster there."""
    anatomy = target.anatomy
    in_decoder = bool(_autoencoder_sites(anatomy))
    decodes_faster = in_decoder and target.is_faster(*FUSED_AUTOENCODER)
    if anatomy.residual_blocks and target.is_faster(*FUSED_DENOISER) and any(_denoiser_sites(anatomy)):
        without = {"vae_fused_kernels": False} if in_decoder and not decodes_faster else {}
        yield Offer(OfferKind.ALWAYS, {"fused_kernels": True, **without})
    if decodes_faster:
        yield Offer(OfferKind.ALWAYS, {"vae_fused_kernels": True}, goes_with=_leaves_open)


def _leaves_open(settings: Settings) -> bool:
    return settings.fused_kernels is None


def _denoiser_sites(anatomy: Anatomy) -> tuple[list[tuple[nn.Module, Look]], list[nn.Module]]:
    """Residual blocks with SiLU, each with the function that finds its parts, and GEGLU layers."""
    blocks = [(site.module, anatomy.family.residual) for site in anatomy.residual_blocks]
    gates = [gate for site in anatomy.feed_forwards if (gate := geglu_of(site.module)) is not None]
    return [(block, look) for block, look in blocks if _is_plain(look(block))], gates


def _autoencoder_sites(anatomy: Anatomy) -> list[tuple[nn.Module, Look]]:
    """Residual blocks with SiLU, each with the function that finds its parts."""
    look = autoencoder.residual
    return [(block, look) for block in autoencoder.residual_blocks(anatomy.vae) if _is_plain(look(block))]


def _is_plain(parts: Residual | None) -> bool:
    return parts is not None and (parts.act is F.silu or isinstance(parts.act, nn.SiLU))


def _runs(module: nn.Module, *tensors: Any) -> bool:
    """True if the kernels serve a call with ``tensors``."""
    first = tensors[0]
    plain = isinstance(first, Tensor) and takes(first) and autocast_dtype(first.device.type) is None
    return plain and not needs_graph(module, *tensors)


def _fused_block(
    look: Look,
    block: nn.Module,
    original: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    **kw: Any,
) -> Tensor:
    time, *more = time_and_more(args, kw)
    parts = look(block, *more) if x.dim() == 4 and _runs(block, x, time) else None
    if parts is None or not _is_plain(parts):
        return original(x, *args, **kw)
    hidden: Tensor = parts.conv1(_norm_and_activate(parts.norm1, x))
    shift = parts.shift(time)
    hidden = hidden if shift is None else hidden + shift
    hidden = _norm_and_activate(parts.norm2, hidden)
    hidden = parts.conv2(hidden)
    hidden = (x if parts.shortcut is None else parts.shortcut(x)) + hidden
    return hidden if parts.scale == 1 else hidden / parts.scale


def _fused_gate(gate: Any, original: Callable[..., Tensor], x: Tensor, *args: Any, **kw: Any) -> Tensor:
    if args or kw or not _runs(gate, x):
        return original(x, *args, **kw)
    from ...kernels.triton.geglu import geglu, reference

    product = gate.proj(x)
    return geglu(product) if takes(product) else reference(product)


def _norm_and_activate(norm: nn.Module, x: Tensor) -> Tensor:
    """SiLU of the normed map, by the kernel where the layer asks torch for a group norm."""
    fused = False

    def normalise(
        input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        nonlocal fused
        if not takes(input):
            return F.group_norm(input, num_groups, weight, bias, eps)
        from ...kernels.triton.group_norm import group_norm

        fused = True
        return group_norm(input, num_groups, weight, bias, eps)

    with Answered({F.group_norm: normalise}):
        normed: Tensor = norm(x)
    return normed if fused else F.silu(normed)
