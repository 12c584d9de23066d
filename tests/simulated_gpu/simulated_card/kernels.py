"""Kernels: what torch registers for CUDA is replaced by the CPU's operator over the same bytes, in all threads.

Only operators that have a kernel of their own for CUDA are replaced, so that ATen's own code runs above them: what it
allocates, casts, and copies on the way is what it does on a card. Convolutions and fused attention, which a card leaves
to libraries, allocate as those do.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .card import MIB, Card

_NATIVE = {
    "as_strided", "empty.memory_format", "empty_strided", "is_set_to", "record_stream", "resize_", "set_",
    "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "unfold", "view",
    "view_as_complex", "view_as_real", "_efficientzerotensor", "_fused_sdp_choice", "_local_scalar_dense",
    "_nested_view_from_buffer", "_reshape_alias",
}  # fmt: skip
"""They launch nothing: allocations, views, and a copy of one number to the host."""

Workspace = Literal["none", "nhwc", "fixed"]
_FIXED_WORKSPACE = 128 * MIB
_PRODUCTS = frozenset({torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.baddbmm})
_OF_CONTIGUOUS = frozenset({torch.ops.aten.native_layer_norm, torch.ops.aten._softmax})
"""They take a contiguous copy of an input that is not."""
_SMALL = 64 * 1024
"""Bytes of a tensor that is computed even where only shapes are asked for: timesteps, say, which decide what runs."""

_aten = torch.ops.aten


class Kernels:
    """The kernels of a card.

    Attributes:
        workspace: what the convolution library takes besides inputs and output: nothing, for 16-bit maps in the plain
            order copies of all of them in its own, or 128 MiB.
        attention_share: what cuDNN's attention takes for itself, over the bytes of its tensors.
        matrix_bytes: what the library for matrix products takes at its first one on a stream, and keeps until it is
            forgotten; with the first one that adds a bias it takes a MiB more, as an H100 has shown.
        outputs_first: whether a convolution makes its output before the copies of its inputs, which versions of torch
            and its libraries do in the one order or the other.
        computes: whether contents are computed and copied; else memory is taken for them, and that is all, but that
            what is made small of them is zero or true, as whether they are all numbers. Models of full size run in
            seconds so.
        brought: bytes that were copied to the card.
        waited: copies that were left out for ``computes`` and which the host would have waited for.
    """

    def __init__(self, card: Card) -> None:
        self._card = card
        self._captured: list[Callable[[int], None]] = []
        self._library = torch.library.Library("aten", "IMPL")
        self.workspace: Workspace = "nhwc"  # as an H100 has shown
        self.matrix_bytes, self.attention_share = 0, 0.0
        self._workspaces: dict[tuple[int, int], list[Tensor]] = {}
        self.outputs_first = False
        self.computes = True
        self.brought = self.waited = 0
        self._own = threading.local()
        torch._C._cuda_clearCublasWorkspaces = self.forget
        card.on_replay(lambda number, stream: self._captured[number](stream))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced
            for registered in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
                space, _, name = registered.partition("::")
                operator = _operator(name) if space == "aten" and name not in _NATIVE else None
                if operator is not None:
                    self._replace(name, functools.partial(self._run, operator))
            self._replace("copy_", self._copy)
            self._replace("equal", self._equal)
            self._replace("convolution", self._convolution)
            self._replace("_scaled_dot_product_flash_attention", self._flash)
            self._replace("_scaled_dot_product_efficient_attention", self._efficient)
            self._replace("_scaled_dot_product_cudnn_attention", self._cudnn)

    def _replace(self, name: str, function: Callable[..., Any]) -> None:
        self._library.impl(name, functools.partial(self._timed, function), "CUDA", allow_override=True)

    def _timed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if getattr(self._own, "inside", False):  # one kernel may call another
            return function(*args, **kwargs)
        self._own.inside = True
        device = next((leaf.device for leaf in tree_leaves((args, kwargs)) if _is_on_card(leaf)), None)
        there = contextlib.nullcontext() if device is None else torch.cuda.device(device)
        start = time.thread_time()
        tracing = torch._C._get_tracing_state()
        if tracing is not None:  # torch refuses the call, even with None, where tracing is excluded
            torch._C._set_tracing_state(None)  # of a card's kernel torch.jit.trace sees the call alone
        try:
            with there:
                return function(*args, **kwargs)
        finally:
            if tracing is not None:
                torch._C._set_tracing_state(tracing)
            self._own.seconds = self.seconds + time.thread_time() - start
            self._own.inside = False

    @property
    def seconds(self) -> float:
        """Of the processor, that kernels took in this thread, which on a card would have gone on meanwhile."""
        return getattr(self._own, "seconds", 0.0)

    # Any operator

    def _run(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if operator.overloadpacket in _OF_CONTIGUOUS:
            args = args[0].contiguous(), *args[1:]
        reads, writes = _accessed(operator, args, kwargs)
        twins = self._twins(*reads, *writes)
        host_args, host_kwargs = twins.of(args), {name: twins.of(value) for name, value in kwargs.items()}
        result = self._launch(lambda: operator(*host_args, **host_kwargs), twins, reads, writes)
        if operator.overloadpacket is torch.ops.aten.upsample_nearest2d:
            args[0].contiguous(memory_format=_suggested(args[0]))
        if self.matrix_bytes and operator.overloadpacket in _PRODUCTS:
            self._take_workspaces(operator.overloadpacket is torch.ops.aten.addmm)
        return result

    def _take_workspaces(self, with_bias: bool) -> None:
        index = torch.cuda.current_device()
        taken = self._workspaces.setdefault((index, torch._C._cuda_getCurrentRawStream(index)), [])
        for size in (self.matrix_bytes, MIB)[len(taken) : 1 + with_bias]:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))

    def forget(self) -> None:
        """As in a new process: the library for matrix products has not been used."""
        self._workspaces.clear()

    def _twins(self, *tensors: Tensor | None) -> _Twins:
        computes = self.computes or all(one is None or one.nbytes <= _SMALL for one in tensors)
        return _Twins("cpu" if computes else "meta")

    def _launch(
        self, compute: Callable[[], Any], twins: _Twins, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> Any:
        """Run ``compute``, which has twins for the device's tensors; what it makes is made on the device too."""
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        made: list[tuple[Tensor, Tensor]] = []
        grown: list[tuple[Tensor, Tensor]] = []

        def up(result: Any) -> Any:
            if not isinstance(result, Tensor):
                return result
            known = twins.original(result)
            if known is not None:
                if known.shape != result.shape:  # an `out` that was empty
                    known.resize_(result.shape)
                    grown.append((result, twins.down(known)))
                    grown[-1][1].copy_(result)
                return known
            out = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="cuda")
            made.append((out, twins.down(out)))
            made[-1][1].copy_(result)
            if not twins.hold_contents and out.nbytes <= _SMALL:
                twin(out).fill_(out.dtype == torch.bool)
            return out

        if not self._card.capturing(stream):
            self._touch(stream, reads, False)
            self._card.begin_kernel(stream)
            results = tree_map(up, compute())
            self._touch(stream, (*writes, *(out for out, _ in made)), True)
            return results
        reads, writes = [t for t in reads if t.is_cuda], [t for t in writes if t.is_cuda]
        before = [(twin(tensor), twin(tensor).clone()) for tensor in writes]
        results = tree_map(up, compute())  # for the shapes: a capture computes nothing
        for now, then in before:
            now.copy_(then)
        spans = [_span(tensor) for tensor in reads], [_span(tensor) for tensor in (*writes, *(out for out, _ in made))]
        twins.let_go()  # their bytes are other tensors' within the capture, as soon as torch gives them away
        self._card.capture_kernel(stream, len(self._captured))
        rooms = [host for _, host in made]
        self._captured.append(functools.partial(self._replay, compute, twins, rooms, grown, spans))
        return results

    def _replay(
        self, compute: Callable[[], Any], twins: _Twins, rooms: Sequence[Tensor],
        grown: Sequence[tuple[Tensor, Tensor]], spans: Any, stream: int,
    ) -> None:  # fmt: skip
        """A captured kernel once more, into the same rooms."""
        for writes, places in enumerate(spans):
            for place in places if self._card.logging else ():
                self._card.access(stream, *place, bool(writes))
        self._card.begin_kernel(stream)
        with torch.inference_mode():
            results = [leaf for leaf in tree_leaves(compute()) if isinstance(leaf, Tensor) and not twins.has(leaf)]
            for room, result in zip(rooms, results, strict=True):
                room.copy_(result)
            for result, room in grown:
                room.copy_(result)

    def _touch(self, stream: int, tensors: Sequence[Tensor], writes: bool) -> None:
        if self._card.logging:
            for tensor in tensors:
                if tensor.is_cuda and tensor.numel():
                    self._card.access(stream, *_span(tensor), writes)

    # Those that a card does in its own way

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Between devices torch's own copy, over the runtime's; within the card a kernel."""
        if target.device != source.device:
            self.brought += source.nbytes if target.is_cuda else 0
            if not self.computes and source.nbytes > _SMALL:
                self.waited += not non_blocking
                return target
            copied: Tensor = _aten.copy_.default._op_dk(
                torch._C.DispatchKey.CompositeExplicitAutograd, target, source, non_blocking
            )
            return copied
        twins = self._twins(source, target)
        to, come = twins.of((target, source))
        self._launch(lambda: to.copy_(come), twins, [source], [target])
        return target

    def _equal(self, one: Tensor, other: Tensor) -> bool:
        """Of contents that are not there, that they could be."""
        if self._twins(one, other).hold_contents:
            return bool(self._run(_aten.equal.default, one, other))
        return one.shape == other.shape

    def _convolution(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any,
        transposed: bool, output_padding: Any, groups: int,
    ) -> Tensor:  # fmt: skip
        """As cuDNN: inputs in the layout that either of them has, and what the library takes for itself."""
        last = torch.channels_last if input.ndim == 4 else torch.contiguous_format
        format = last if _has_format(input, last) or _has_format(weight, last) else torch.contiguous_format
        formatted = [one.contiguous(memory_format=format) for one in (input, weight) if not self.outputs_first]
        input, weight = formatted or (input, weight)
        twins = self._twins(input, weight)
        operands = twins.of((input, weight, bias))
        where = stride, padding, dilation, transposed, output_padding, groups
        reads = [tensor for tensor in (input, weight, bias) if tensor is not None]
        out: Tensor = self._launch(
            lambda: _aten.convolution.default(*operands, *where).contiguous(memory_format=format), twins, reads, []
        )
        formatted = formatted or [one.contiguous(memory_format=format) for one in (input, weight)]
        self._take(input.nbytes + weight.nbytes + out.nbytes, input.element_size(), format)
        return out

    def _take(self, copies: int, element_size: int, format: torch.memory_format) -> None:
        """Of the allocator, and give it back: what the library asks for when inputs and output are there."""
        size = 0
        if self.workspace == "fixed":
            size = _FIXED_WORKSPACE
        elif self.workspace == "nhwc" and element_size == 2 and format is torch.contiguous_format:
            size = copies
        if size:
            torch.empty(size, dtype=torch.uint8, device="cuda")

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: Any) -> Any:
        twins = self._twins(q, k, v)
        hosts = twins.of((q, k, v, mask))

        def compute() -> Tensor:
            if not twins.hold_contents:  # what it makes on the way takes no memory, and time
                return torch.empty_like(hosts[0].transpose(1, 2).contiguous()).transpose(1, 2)
            out = _aten._scaled_dot_product_attention_math(*hosts, 0.0, causal, scale=scale)[0]
            return out.transpose(1, 2).contiguous().transpose(1, 2)

        out = self._launch(compute, twins, [one for one in (q, k, v, mask) if one is not None], [])
        return out, torch.empty(q.shape[:3], dtype=torch.float32, device="cuda")

    def _flash(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, debug: bool = False, *,
        scale: float | None = None,
    ) -> Any:  # fmt: skip
        out, sums = self._attention(q, k, v, None, causal, scale)
        seed = torch.empty(2, dtype=torch.uint64, device="cuda")
        return out, sums, None, None, q.shape[2], k.shape[2], seed, seed, torch.empty(0, dtype=q.dtype, device="cuda")

    def _efficient(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sums: bool, dropout: float = 0.0,
        causal: bool = False, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        seed = torch.empty((), dtype=torch.int64)
        return (*self._attention(q, k, v, bias, causal, scale), seed, seed)

    def _cudnn(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sums: bool, dropout: float = 0.0,
        causal: bool = False, debug: bool = False, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        out, rows = self._attention(q, k, v, bias, causal, scale)
        size = int(self.attention_share * (q.nbytes + k.nbytes + v.nbytes + out.nbytes))
        torch.empty(size, dtype=torch.uint8, device="cuda")
        seed = torch.empty((), dtype=torch.int64)
        return out, rows, None, None, q.shape[2], k.shape[2], seed, seed, torch.empty(0, device="cuda")


def _is_on_card(leaf: Any) -> bool:
    return (isinstance(leaf, Tensor) and leaf.is_cuda) or (isinstance(leaf, torch.device) and leaf.type == "cuda")


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet, None), overload or "default", None)


def twin(tensor: Tensor) -> Tensor:
    """A CPU tensor over the bytes of ``tensor``."""
    twin = torch.empty(0, dtype=tensor.dtype)
    if tensor.numel() == 0:
        return twin.as_strided(tensor.shape, tensor.stride())
    address, size = _span(tensor)
    bytes_there = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
    return twin.set_(bytes_there.untyped_storage(), 0, tensor.shape, tensor.stride())


class _Twins:
    """Twins of some tensors of the device, and the way back."""

    def __init__(self, device: str) -> None:
        """
        Args:
            device: "cpu", over the same bytes; or "meta", of the same shape only.
        """
        self._pairs: list[tuple[Tensor, Tensor | None]] = []
        self._device = torch.device(device)

    @property
    def hold_contents(self) -> bool:
        return self._device.type == "cpu"

    def of(self, value: Any) -> Any:
        return tree_map(self._of_leaf, value)

    def down(self, tensor: Tensor) -> Tensor:
        """A twin of ``tensor``, which is not looked up."""
        if self.hold_contents:
            return twin(tensor)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def _of_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and (leaf.is_cuda or not self.hold_contents):
            self._pairs.append((self.down(leaf), leaf))
            return self._pairs[-1][0]
        if isinstance(leaf, torch.device):
            return self._device
        return None if isinstance(leaf, torch.Generator) else leaf

    def original(self, host: Tensor) -> Tensor | None:
        return next((tensor for one, tensor in self._pairs if one is host), None)

    def has(self, host: Tensor) -> bool:
        return any(one is host for one, _ in self._pairs)

    def let_go(self) -> None:
        """Keep the twins alone."""
        self._pairs = [(host, None) for host, _ in self._pairs]


def _accessed(operator: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads, and those that it writes."""
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for number, argument in enumerate(operator._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if type(tensor) in (Tensor, torch.nn.Parameter):
                found[writes].append(tensor)
    return found


def _span(tensor: Tensor) -> tuple[int, int]:
    """The address and the number of bytes from the first element to the last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size() if tensor.numel() else 0


def _suggested(tensor: Tensor) -> torch.memory_format:
    """As ATen takes it from the strides, of a part of a map too."""
    channels_first = tensor.ndim != 4 or tensor.stride(1) != 1 or tensor.shape[1] == 1
    return torch.contiguous_format if channels_first else torch.channels_last


def _has_format(tensor: Tensor, format: torch.memory_format) -> bool:
    return tensor.is_contiguous(memory_format=format) and not tensor.is_contiguous()


class HostWatch(TorchDispatchMode):
    """Writes down what this thread's CPU operators read and write of pinned memory."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if self._card.logging and not _only_views(func) and not _is_the_streams(func, args):
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensors, writes in zip(_accessed(func, args, kwargs), (False, True), strict=True):
            for tensor in tensors:
                if tensor.device.type == "cpu" and tensor.numel():
                    self._card.host_access(*_span(tensor), writes)


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether it is made of other operators, which are seen by themselves."""
    name, key = func.name(), "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


@functools.cache
def _only_views(func: Any) -> bool:
    """Whether it touches no contents: views and allocations."""
    if func._schema.name in ("aten::empty_like", "aten::is_pinned", "aten::record_stream"):
        return True
    returns = [one.alias_info for one in func._schema.returns]
    return bool(returns) and all(info is not None and not info.is_write for info in returns)


def _is_the_streams(func: Any, args: Any) -> bool:
    """Whether it is a copy between host and device that the runtime sees by itself, as no layout or type changes."""
    if func._schema.name != "aten::copy_" or args[0].device == args[1].device:
        return False
    return args[0].dtype == args[1].dtype and args[0].is_contiguous() and args[1].is_contiguous()
