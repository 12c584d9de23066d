"""The streaming engine: copies blocks of weights to the device while the device computes.

Resident blocks stay on the device while their models are in use; streamed blocks pass through a ring. Residents and
ring are one buffer (:mod:`pool`). The ring may also *follow the activations*: its size then differs from moment to
moment. Each streamed block then has its own allocation, from its fetch until another block is called.

A weight is *lent* while ``tensor.data`` is a view of the buffer. A streamed weight is lent from the call of its layer
until another block is called. Residents are lent until the run ends: each from its call in the first run, all together
from the beginning of later runs. At all other times ``tensor.data`` is the host copy, so a program that changes or
saves weights between runs sees complete weights in host memory.

A block is fetched as soon as no layer needs the bytes that it will occupy. The order of the blocks is the order in
which an earlier run used them; fetches run ahead in that order, into the next step too. A run in another order works,
but waits for its copies.

Under autograd the ring is not used, because its bytes are overwritten before the backward. Each layer computes with
copies, which the backward makes again (:mod:`followed`); on a CPU it computes with the host weights themselves.

Source: basujindal's split model and diffusers' group offloading for the idea; the ring of bytes is ours.
Fidelity: ``bitwise``, but ``rounding`` for layers that are split by rows.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConflictError
from ..memory.accounts import actual_device, weights_account
from ..memory.fake_mode import active_fake_mode
from ..memory.segments import has_run_short, release_segments
from ..memory.threads import place_of, turn
from ..patches import Patch, set_patch, take_off, wrap
from ..weight_parts import Link, links_of
from ..weights import needs_graph
from . import weight_scopes as lending
from .buffer import BlockState, DeviceBuffer
from .device_io import look_up, refuse_unseen, run_at
from .followed import exchange_weights
from .host_weights import HostWeights
from .layers import Layer, all_modules, contents, layers_of, signature
from .layout import DeviceLayout, ResidencyPolicy, lay_down
from .split_rows import run_in_parts


class ActiveStreams:
    """The streams whose weights are on the device now: one, or several if one runs inside another."""

    def __init__(self) -> None:
        self._present: list[Stream] = []

    def take(self, stream: Stream) -> None:
        """Evict every other stream that is not running, and note that ``stream`` is on the device."""
        for other in self._present:
            if other is not stream and not other.running:
                other.evict()
                release_segments(other._device)
        self._present = [other for other in self._present if other.running and other is not stream] + [stream]


class Stream:
    """Stream the weights of one model, or of several that take turns within a step (a ControlNet and its UNet)."""

    def __init__(
        self,
        components: Mapping[str, nn.Module],
        device: torch.device,
        policy: ResidencyPolicy,
        turns: ActiveStreams,
        repeats: bool = False,
    ) -> None:
        """
        Args:
            components: the models by name, in the order in which a step runs them.
            device: the device on which they compute.
            policy: how many bytes the device may hold, and which weights stay.
            turns: shared with the other streams of the target.
            repeats: True if the models run step after step, so that the next step's weights are worth fetching.
        """
        self._components = dict(components)
        self._device = device
        self._policy = policy
        self._turns = turns
        self._repeats = repeats
        self._host_weights = HostWeights(device)
        # (id(module), entry) -> patch of a layer that was there when the hooks were attached
        self._patches = {(id(layer.module), layer.entry): self._patch(layer) for layer in layers_of(self._components)}
        self._later: dict[tuple[int, str], Patch] = {}  # the same for layers that a host has added since
        self._taken_off: set[tuple[int, str]] = set()  # keys of _patches that are off: a LoRA wraps their layers
        self._orders: dict[str, list[str]] = {}  # model -> names of its layers in the order in which a run called them
        self._modules: list[nn.Module] = []  # of the models at the last survey
        self._quantised: list[nn.Module] = []  # those of them that hold quantised weights in parts
        self._tables: list[tuple[Link, Tensor]] = []  # shared tables, and what takes their place while attached
        self._known: list[Any] | None = None  # signature of the models at the last survey; None: survey again
        self._tensors: list[Tensor] = []  # weights of all layers, each once, streamed ones first
        self._contents: list[Any] = []  # their storages and versions at that survey; empty: written to since
        self._roles: dict[int, tuple[BlockState, ...] | None] = {}  # id(module) -> blocks; None: a table
        self._looked_at: set[int] = set()  # ids of modules whose order was looked at after a run
        self._buffer = self._buffer_of(lay_down((), policy, {}))
        self._thread: int | None = None  # the thread that runs the models now
        self._followed = False  # autograd follows the run: layers get copies, and the ring is not used
        self._layers: dict[int, Layer] = {}  # id(module) -> layer
        self._forget: Callable[[], None] = lambda: None  # frees recordings, which read the buffer
        self._called: dict[int, None] = {}  # ids of the modules of blocks that were called in this run, in order

    # Attaching

    def patches(self) -> Iterator[Patch]:
        """Yield a patch for every layer of the models; layers that are added later are patched by the stream itself."""
        yield from self._patches.values()

    def offload(self) -> Callable[[], None]:
        """Move all weights to host memory and make the schedule; return the function that undoes this.

        Raises:
            BudgetError: a block is larger than the device buffer may be.
            ConflictError: weights that cannot be streamed.
        """
        try:
            self._survey()
        except BaseException:
            self._undo()
            raise
        return self._undo

    def _undo(self) -> None:
        self.evict()
        for patch in self._later.values():
            take_off(patch)
        self._later.clear()
        self._known = None
        self._host_weights.undo()
        for link, table in self._tables:
            link.exchange(table, link.value)
        self._tables.clear()

    def _patch(self, layer: Layer) -> Patch:
        return wrap(layer.module, layer.entry, functools.partial(self._run_layer, layer.module), "offload")

    # Running

    @property
    def running(self) -> bool:
        return self._thread is not None

    @property
    def device_bytes(self) -> int:
        """Bytes of weights on the device now."""
        return self._layout.bytes if self._layout.open else 0

    @property
    def _layout(self) -> DeviceLayout:
        return self._buffer.layout

    def _buffer_of(self, layout: DeviceLayout) -> DeviceBuffer:
        return DeviceBuffer(layout, self._host_weights, self._repeats, self._note_write)

    def _note_write(self) -> None:
        self._contents = []

    def run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call one of the models; a call from another thread waits until this one has ended."""
        if self._thread == threading.get_ident():
            return original(*args, **kwargs)
        refuse_unseen(next(iter(self._components.values())))
        with turn({place_of(self._device)}):
            try:
                self._followed = any(needs_graph(part, args, kwargs) for part in self._components.values())
                self._begin()
                self._thread = threading.get_ident()
                result = run_at(self._device, original, *args, **kwargs)
                self._end()
            except BaseException:
                self.abandon()
                raise
            finally:
                self._thread, self._followed = None, False
        return result

    def _run_layer(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._thread != threading.get_ident():  # a host calls a part of the model by itself
            return self.run(functools.partial(self._run_layer, module, original), *args, **kwargs)
        blocks = self._roles.get(id(module))
        if not blocks or self._followed:
            return self._run_unstreamed(module, original, *args, **kwargs)
        self._called[id(module)] = None
        if len(blocks) > 1:
            return self._run_in_parts(module, blocks, original, *args, **kwargs)
        self._buffer.enter(blocks[0])
        try:
            return original(*args, **kwargs)
        finally:
            self._buffer.leave(blocks[0])

    def _run_unstreamed(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a layer that stays or is unknown, a table, or any layer under autograd."""
        if id(module) not in self._roles:
            return original(*args, **kwargs)
        if self._roles[id(module)] is None:
            return look_up(self._device, original, *args, **kwargs)
        if self._followed:
            return self._run_followed(module, original, *args, **kwargs)
        return original(*args, **kwargs)

    def _run_followed(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        device = actual_device(self._device)
        away = [tensor for tensor in self._layers[id(module)].tensors if tensor.device != device]
        if not away:
            return original(*args, **kwargs)
        if self._layers[id(module)].links:
            raise ConflictError(
                f"{self._layers[id(module)].name} holds quantised weights, which are streamed without gradients: call "
                'the model under torch.no_grad(), or use Settings(offload="none")',
                plainly="quantised weights are streamed without gradients: leave offload off to train",
            )
        with exchange_weights(module, away, functools.partial(_copy_with_grad, device=device)):
            return original(*args, **kwargs)

    def _run_in_parts(self, module: nn.Module, blocks: tuple[BlockState, ...], original: Any, *inputs: Any) -> Tensor:
        rows = [(block, self._layout.blocks[block.number].rows or (0, 0)) for block in blocks]
        parts = [(span, self._part(block, span)) for block, span in rows]
        return run_in_parts(module, parts, original, *inputs)

    @contextlib.contextmanager
    def _part(self, block: BlockState, rows: tuple[int, int]) -> Iterator[None]:
        """Lend one part of a split layer within a ``with`` block; hooks that widen weights widen each part alone."""
        self._buffer.enter(block)
        try:
            with lending.lend_per_call(rows):
                yield
        finally:
            self._buffer.leave(block)
            self._buffer.take_back(block)

    def _begin(self) -> None:
        self._turns.take(self)
        self._survey()
        if self._followed:
            self.evict()
            return
        self._buffer.begin(self._device, self._is_fake())
        self._called = {}

    def _end(self) -> None:
        if self._followed:
            return
        if self._learn() or (self._layout.rooms and has_run_short(self._device)):
            self.evict()
        else:
            self._buffer.end()

    # Recording a run

    def before_evicting(self, forget: Callable[[], None]) -> None:
        """Call ``forget`` before the device memory is freed: recordings of runs read it."""
        self._forget = forget

    def state(self) -> tuple[int, ...] | None:
        """Prepare a run as any other is prepared; return what it finds on the device, as :attr:`DeviceBuffer.state`."""
        self._turns.take(self)
        self._survey()
        return self._buffer.state

    def recorded(self) -> contextlib.AbstractContextManager[None]:
        """Record the run that is called within the block; see :meth:`DeviceBuffer.recorded`."""
        return self._buffer.recorded()

    def replayed(self) -> contextlib.AbstractContextManager[None]:
        """Replay a recorded run within the block; see :meth:`DeviceBuffer.replayed`."""
        return self._buffer.replayed()

    def abandon(self) -> None:
        """Return every weight to host memory after an error, and free the device."""
        self._layout.hand_back()
        self.evict()

    def evict(self) -> None:
        """Free all device memory of the stream as soon as its copies are done."""
        self._forget()
        self._buffer.evict()

    # Looking at the models

    def _survey(self) -> None:
        """Look at the models again: hosts add layers, merge LoRAs, move and convert weights between runs."""
        facts = signature(self._modules, self._quantised)
        if facts == self._known and (not self._contents or contents(self._tensors) == self._contents):
            if not self._contents:  # the weights were written to on the device, and have been copied back since
                self._contents = contents(self._tensors)
            return
        self.evict()
        self._known = None  # after an error from here on, the next run surveys again
        self._modules = all_modules(self._components.values())
        self._quantised = [module for module in self._modules if any(True for _ in links_of(module))]
        self._own_tables()
        facts = signature(self._modules, self._quantised)
        layers = layers_of(self._components)
        self._buffer = self._buffer_of(lay_down(layers, self._policy, self._orders))
        self._roles, self._looked_at = self._buffer.roles(), set()
        self._layers = {id(layer.module): layer for layer in self._layout.layers()}
        self._follow(layers)
        self._tensors = self._sort_tensors(layers)
        self._host_weights.add(self._tensors)  # weights copied in every step are pinned before those copied once
        self._known, self._contents = facts, contents(self._tensors)

    def _own_tables(self) -> None:
        """Give each quantised weight a table of its own while it is streamed; other models may run with the shared."""
        own = {id(table) for _, table in self._tables}
        for link in (link for module in self._quantised for link in links_of(module)):
            if link.is_shared and id(link.value) not in own:
                self._tables.append((link, link.value.detach().to("cpu", copy=True)))
                link.exchange(link.value, self._tables[-1][1])

    def _sort_tensors(self, layers: list[Layer]) -> list[Tensor]:
        """All tensors of ``layers`` once, in the order in which they are pinned."""
        whole = [tensor for layer in layers for tensor in layer.tensors]
        apart = not self._host_weights.can_pin(whole)
        same = (link.value for layer in layers for link in layer.links if link.memory is not None)
        tensors = *self._layout.streamed_tensors(apart), *whole, *same
        return list({id(tensor): tensor for tensor in tensors}.values())

    def _follow(self, layers: list[Layer]) -> None:
        """Patch new layers, and take the patches off layers that are gone or that a LoRA has wrapped."""
        wanted = {(id(layer.module), layer.entry): layer for layer in (*layers, *self._layout.layers())}
        for key in [key for key in self._later if key not in wanted]:
            take_off(self._later.pop(key))
        for key, patch in self._patches.items():
            if key not in wanted:
                take_off(patch)
                self._taken_off.add(key)
            elif key in self._taken_off:  # a LoRA that wrapped its layer is gone
                set_patch(patch)
                self._taken_off.remove(key)
        for key, layer in wanted.items():
            if key not in self._patches and key not in self._later:
                self._later[key] = self._patch(layer)
                set_patch(self._later[key])

    def _learn(self) -> bool:
        """Store the order in which a first run called the layers; return True if it is new."""
        if self._is_fake() or self._policy.kind == "whole" or self._called.keys() <= self._looked_at:
            return False
        self._looked_at |= self._called.keys()
        news = False
        streamed = dict.fromkeys(layer.name for block in self._layout.blocks for layer in block.layers)
        orders: dict[str, list[str]] = {}
        for layer in map(self._layers.__getitem__, self._called):
            orders.setdefault(layer.component, []).append(layer.name)
        for component, order in orders.items():
            if set(order) <= set(self._orders.get(component, ())):
                continue
            self._orders[component] = order
            before = [name for name in streamed if name in set(order)]
            news = news or (order != before and bool(self._layout.streamed))  # resident weights need no order
        if news:
            self._known = None
        return news

    def _is_fake(self) -> bool:
        return active_fake_mode(*self._tensors[:1]) is not None


def _copy_with_grad(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on ``device`` that autograd follows. If ``tensor`` is pinned, the host does not wait for it."""
    with weights_account():
        return tensor.to(device, non_blocking=True)
