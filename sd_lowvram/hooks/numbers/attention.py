"""Attention by the backend of the settings, under the host's own processors.

Within the forward of each attention site, calls of torch's scaled_dot_product_attention go to our one function of
(q, k, v, mask, scale). The processor itself stays the host's, so LoRA, IP-Adapter (two calls), PAG and fused
projections keep working. A diffusion transformer is one site: chunks of its tokens answer for that function inside of
it, before ours. In families whose attention does not call that function, the anatomy has a forward that does,
of the same layers. Fidelity: ``rounding``. Sources: those of the backends, in kernels/attention/.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...compat import autocast_dtype
from ...compat.private import BUILTIN_ATTENTION
from ...devices.info import dtype_on
from ...devices.this_machine import knows_cudnn_attention
from ...errors import LowVRAMError, NoSiteError
from ...kernels.attention import registry as kernels
from ...kernels.attention.choice import choose_backend, default_backends
from ...kernels.attention.problem import Problem, has_bf16, problem_of
from ...kernels.attention.torch_kernels import TORCHS_ATTENTION, own_kernel, why_not
from ...models.anatomy import Anatomy, Family, Site, layer
from ...models.latents import dtype_of
from ...patches import Patch, wrap
from ...settings import Settings
from ..offers import Offer, OfferKind, Target

_SUCCESSORS = {
    "AttnProcessor": "AttnProcessor2_0",
    "SlicedAttnProcessor": "AttnProcessor2_0",
    "XFormersAttnProcessor": "AttnProcessor2_0",
    "AttnAddedKVProcessor": "AttnAddedKVProcessor2_0",
    "SlicedAttnAddedKVProcessor": "AttnAddedKVProcessor2_0",
    "XFormersAttnAddedKVProcessor": "AttnAddedKVProcessor2_0",
}
"""diffusers' processors that never call torch's function, and those that do the same by calling it."""

_ran: weakref.WeakKeyDictionary[nn.Module, Counter[str]] = weakref.WeakKeyDictionary()


def attention(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run every attention of denoiser, ControlNet and a UNet's VAE through the backend that ``settings`` ask for.

    Args:
        anatomy: its attentions are patched.
        settings: ``attention`` names the backend, ``attention_mib`` bounds the scores that it holds at once.
        device: device that computes; the backend must run there.

    Yields:
        One patch of ``forward`` for each attention.

    Raises:
        NoSiteError: the target has no attention.
        SettingsError: the backend cannot run on ``device``, or has not proved deterministic there; later, in the
            forward, where a forced kernel cannot run a layer.
    """
    if not anatomy.attentions:
        raise NoSiteError("attention: the model has no attention of a UNet, ControlNet, VAE or known transformer")
    backend, score_bytes = choose_backend(settings, device), kernels.score_bytes(settings)
    for site in anatomy.attentions:
        _ran[site.module] = Counter()
        around = functools.partial(_forward, site, anatomy.family, backend, score_bytes)
        yield wrap(site.module, "forward", around, hook="attention")


def offers(target: Target) -> Iterator[Offer]:
    """Offer registered backends first; else a choice among torch's kernels, if it makes a difference."""
    anatomy = target.anatomy
    if not anatomy.attentions or target.fixed.attention is not None or target.fixed.deterministic:
        return
    for name in itertools.takewhile(lambda name: name != "sdpa", default_backends(target.device)):
        yield Offer(OfferKind.ALWAYS, {"attention": name})
    if is_worth_choosing(anatomy, target.device):
        yield Offer(OfferKind.ALWAYS, {"attention": "sdpa"})


def is_worth_choosing(anatomy: Anatomy, device: torch.device) -> bool:
    """Return True if ``attention="sdpa"`` differs from what the model does by itself.

    It does not if every processor calls torch's function, and torch uses a kernel that holds no scores and whose memory
    is known. A plan then leaves attention alone, including unknown processors.

    Args:
        anatomy: its attentions, with the processors that they have now.
        device: device that computes, which may be absent.

    Returns:
        True if a plan should set the knob.
    """
    if anatomy.joint_blocks:  # torch's kernels run their widths and masks, but some GPUs do not compute in bf16
        return dtype_of(anatomy, anatomy.denoiser or "") == torch.bfloat16 and not has_bf16(device)
    if anatomy.family.attend is not None or device.type not in ("cpu", "cuda"):
        return True
    return any(_is_of_old(site.module) or not _is_well_served(site.module, device) for site in anatomy.attentions)


def _is_of_old(attention: Any) -> bool:
    return type(getattr(attention, "processor", None)).__name__ in _SUCCESSORS


def _is_well_served(attention: Any, device: torch.device) -> bool:
    """True if the kernel that torch chooses holds no scores, and its memory is known."""
    width = int(layer(attention.to_q).out_features) // int(attention.heads)
    here = device.type == "cpu" or torch.cuda.is_available()
    problem = Problem(1, int(attention.heads), 1, 1, width, width, dtype_on(device), device, real=here)
    if own_kernel(problem) == "cudnn" and not knows_cudnn_attention(device):
        return False
    return any(why_not(kernel, problem) is None for kernel in ("flash", "efficient"))


def kernel_counts(sites: Iterable[Site]) -> Counter[str]:
    """Number of runs of each kernel in these sites since the hook was last attached to them.

    Args:
        sites: attentions, as in ``anatomy.attentions``.

    Returns:
        Counts by the name of the kernel ("flash", "efficient", ...); empty before the first call.
    """
    return sum((_ran.get(site.module, Counter()) for site in sites), Counter())


def _forward(
    site: Site,
    family: Family,
    backend: str,
    score_bytes: int,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The site's forward with its attention redirected; of several attachments the last one's, the outermost."""
    if site.module in _entered.get():
        return forward(*args, **kwargs)
    with _modern_processor(site.module) as scale, _entering(site.module):
        redirect = Redirect(backend, score_bytes, family.upcasts(site.module), scale)
        attend = forward if family.attend is None else functools.partial(family.attend, site.module, forward)
        with redirect:
            result = attend(*args, **kwargs)
    if not redirect.calls:
        raise _describe_unreached(site, backend)
    _ran.setdefault(site.module, Counter()).update(redirect.ran)
    return result


def _describe_unreached(site: Site, backend: str) -> LowVRAMError:
    """The sentence for a site that computes attention in another way: which way, and what to set instead."""
    plainly = f"{site.name} computes attention in a way of its own, so attention {backend} cannot reach it: leave the "
    plainly += "attention setting undecided"
    if hasattr(site.module, "processor"):
        return LowVRAMError(
            f"{site.name}: {type(site.module.processor).__name__} computes attention without torch's "
            f"scaled_dot_product_attention, so attention={backend!r} cannot reach it. Set a processor that calls it, "
            "such as AttnProcessor2_0, or leave the attention setting undecided",
            plainly=plainly,
        )
    return LowVRAMError(
        f"{site.name}: {type(site.module).__name__} computes attention without torch's scaled_dot_product_attention, "
        f"so attention={backend!r} cannot reach it. Set diffusers' own processors (set_attn_processor) and backend "
        "'native' there, or leave the attention setting undecided",
        plainly=plainly,
    )


_entered: ContextVar[frozenset[nn.Module]] = ContextVar("modules in a redirected forward", default=frozenset())


@contextlib.contextmanager
def _entering(module: nn.Module) -> Iterator[None]:
    token = _entered.set(_entered.get() | {module})
    try:
        yield
    finally:
        _entered.reset(token)


@contextlib.contextmanager
def _modern_processor(module: nn.Module) -> Iterator[float | None]:
    """Stand in for a processor of before torch 2.0; yields the scale that it read from the module, else None."""
    here = vars(module)
    old = here.get("processor")
    successor = _SUCCESSORS.get(type(old).__name__)
    if successor is None or not type(old).__module__.startswith("diffusers."):
        yield None
        return
    from diffusers.models import attention_processor

    stand_in = here["processor"] = getattr(attention_processor, successor)()
    try:
        yield getattr(module, "scale", None)
    finally:
        if here.get("processor") is stand_in:
            here["processor"] = old


@dataclass(eq=False)
class Redirect(TorchFunctionMode):
    """Replaces torch's scaled_dot_product_attention by ours while entered.

    Attributes:
        backend: name of the backend; ``score_bytes`` limits backends that work in blocks.
        upcast: compute the scores in float32.
        scale: scale of the scores, for calls without one.
        calls: number of calls; ``ran`` counts the kernels of calls that were not traced.
    """

    backend: str
    score_bytes: int
    upcast: bool = False
    scale: float | None = None
    calls: int = 0
    ran: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()
        self._busy = False
        self._answering = contextlib.ExitStack()

    def __enter__(self) -> Redirect:
        # A TorchFunctionMode does not see calls of a function that replaces torch's own, be it a trace's or another
        # program's. Then the attention is replaced too, as a mode would slow down each access to a shape in a trace.
        if TORCHS_ATTENTION.is_redirected() or TORCHS_ATTENTION.function() is not BUILTIN_ATTENTION:
            self._answering.enter_context(TORCHS_ATTENTION.to(self.attend))
        else:
            self._answering.push(super().__exit__)
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._answering.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.attend if func is BUILTIN_ATTENTION and not self._busy else func)(*args, **(kwargs or {}))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Answer torch's scaled_dot_product_attention: 4-D tensors of inference go to the backend, all else to torch.

        Args:
            query: (batch, heads, queries, width).
            key: (batch, heads, keys, width).
            value: (batch, heads, keys, value width).
            attn_mask: bool (True attends) or additive, broadcastable to (batch, heads, queries, keys).
            dropout_p: with dropout the call goes to torch.
            is_causal: True for a lower triangular mask in place of ``attn_mask``.
            scale: of the scores; None: that of the redirect, else width**-0.5.
            enable_gqa: True if heads of keys and values are shared by several heads of queries.

        Returns:
            (batch, heads, queries, value width), in the type of ``query``.
        """
        self.calls += 1
        scale = self.scale if scale is None else scale
        self._busy = True
        try:
            if query.dim() != 4 or dropout_p or _trains(query, key, value, attn_mask):
                self.ran["torch"] += 1
                more = {"enable_gqa": True} if enable_gqa else {}  # torch 2.1 to 2.4 know no such argument
                return BUILTIN_ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)
            if is_causal:
                shape = query.shape[-2], key.shape[-2]
                attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
            if enable_gqa:
                key, value = (
                    heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1) for heads in (key, value)
                )
            with _autocast_inputs(query, key, value, attn_mask) as (q, k, v, mask):
                return self._run(q, k, v, mask, scale)
        finally:
            self._busy = False

    def _run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        problem = problem_of(q, k, v, mask, self.upcast)
        if problem.real:
            self.ran[kernels.kernel_name(self.backend, problem, self.score_bytes)] += 1
        return kernels.attend(self.backend, q, k, v, mask, scale, upcast=self.upcast, score_bytes=self.score_bytes)


def _trains(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


@contextlib.contextmanager
def _autocast_inputs(*tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """The tensors in the type that autocast gives torch's own attention; inside, autocast is off."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    dtype = autocast_dtype(device)
    if dtype is None:
        yield tensors
        return
    cast = (torch.float16, torch.bfloat16, torch.float32)
    with torch.autocast(device, enabled=False):
        yield tuple(tensor.to(dtype) if tensor is not None and tensor.dtype in cast else tensor for tensor in tensors)
