"""The peak of a run, known before it: the real modules run on fake tensors, and every storage is followed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..compat.private import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    decompose,
    operators_of,
    tree_flatten,
    tree_map,
)
from ..devices.overhead import NONE, Overhead
from ..memory.accounts import current_account, is_host, traced_device, traces_cpu
from ..memory.fake_mode import CPU, active_fake_mode
from ..memory.repeats import notify_follower
from ..memory.reserved import Reserved, count_reserved
from ..memory.threads import Redirected, pause_models
from ..streaming.timing import ModuleSpan
from ..weight_parts import is_wrapper, parts_of
from .collector import no_collection
from .equal_calls import EqualCalls
from .fake_tensors import Registry, fake_of, modules_of, replace_by_fakes
from .flop_counter import (
    ModuleWork,
    argument_bytes,
    attention_flops,
    group_elements,
    is_wide,
    is_wide_attention,
    library_bytes,
    nbytes,
    packed_weight_bytes,
)
from .layout_rules import recipe_of
from .ledger import Ledger, Timeline
from .op_cache import Recipe, make, recipe_for, signature
from .operators import Operator, describe
from .sdpa import traced_attention
from .uncompiled import Uncompiled, prevent_compiling

aten = torch.ops.aten
_LIFTS = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default})
_DEVICE = torch.ops.prim.device.default
_EXCHANGES = aten._has_compatible_shallow_copy_type.default
"""Asked whenever a tensor gets the contents of another one, such as a weight those in the buffer."""
_operators: dict[Any, Operator] = {}
_recipes: dict[bool, dict[tuple[Any, ...] | None, Recipe]] = {True: {}, False: {}}
_MOST_RECIPES = 100_000


@dataclass(frozen=True)
class Figures:
    """Memory of a run, in bytes, and its work.

    Attributes:
        peak_bytes: most bytes of tensors on the device at one moment: weights, inputs, activations, and what the
            kernels are known to hold unseen. No overhead (context, workspaces of libraries, rounding).
        host_peak_bytes: most bytes in host memory: host weights of offloaded weights, parked activations.
        activation_peak_bytes: most bytes on the device of what was made during the run; the weights, streamed copies
            of weights, and the inputs are not in it, the output is.
        weights_bytes: parameters and buffers on the device when the run starts, and other tensors that the callable
            brought along.
        input_bytes: the tensors among the arguments.
        largest_bytes: the largest single allocation on the device during the run.
        allocated_peak_bytes: most bytes of what was made during the run, in all accounts together: what
            ``measured_peak`` reports, and the allocator sees where the device is the CPU.
        flops: floating-point operations of matrix products, convolutions and attention; a multiply-add counts two.
        wide_flops: the part of ``flops`` in products and attention as wide as in today's transformers.
        moved_bytes: bytes that the operators read and write, each operator by itself.
        product_bytes: the part of ``moved_bytes`` of the operators that are counted in ``flops``.
        copied_bytes: bytes copied between device and host.
        operators: number of operators, without views: on a GPU, about the number of kernel launches.
        packed_bytes: weights of convolutions and products, which a CPU reorders at every call.
        group_elements: elements in one group of torch's GroupNorm, which a GPU reads with one thread block.
        reserved_bytes: bytes that torch's caching allocator reserves on a GPU, in segments, for ``activation_bytes``
            and the libraries' workspaces (on a CPU the former). With more free memory torch reserves more, and frees it
            before it fails.
        repeated_bytes: the same for a step that finds the outputs of the previous step between freed tensors; for other
            calls ``reserved_bytes``.
        recorded_bytes: the same if nothing can be freed, as while kernels are recorded.
        kept_bytes: the same for such a step if nothing needs to be freed, as with more free memory.
        segment_bytes: one segment for all tensors over 1 MiB of such a step; 0 if it needs more, and for other calls.
        spans: operations, bytes moved and operators in order, module by module.
    """

    peak_bytes: int
    host_peak_bytes: int
    activation_peak_bytes: int
    weights_bytes: int
    input_bytes: int
    largest_bytes: int
    allocated_peak_bytes: int
    flops: int
    wide_flops: int
    moved_bytes: int
    product_bytes: int
    copied_bytes: int
    operators: int
    packed_bytes: int
    group_elements: int
    reserved_bytes: int
    repeated_bytes: int
    recorded_bytes: int
    kept_bytes: int
    segment_bytes: int
    spans: tuple[ModuleSpan, ...] = field(repr=False)

    @property
    def activation_bytes(self) -> int:
        """Most bytes on the device without weights."""
        return self.activation_peak_bytes + self.input_bytes

    @property
    def allocated_bytes(self) -> int:
        """Most bytes of inputs and what is made, in both accounts: what a CPU's allocator sees."""
        return self.allocated_peak_bytes + self.input_bytes


@dataclass(frozen=True)
class MemoryTrace(Figures):
    """The figures of a run, and the course of it.

    Attributes:
        timeline: the allocations in their order.
        output: what the callable returned, as fake tensors.
    """

    timeline: Timeline = field(repr=False)
    output: Any = field(repr=False)


def trace(module_or_callable: Callable[..., Any], /, *inputs: Any, **kwargs: Any) -> MemoryTrace:
    """Run ``module_or_callable(*inputs, **kwargs)`` on fake tensors and return the memory that the run would hold.

    Nothing is computed, and no memory of that size is allocated. Tensors in the arguments and in the modules may be
    real, fake or ``meta``. Parameters and buffers are replaced by fake ones during the run and restored afterwards,
    also after an error. All fake tensors are on the CPU, whatever the model's device; host memory is counted through
    ``park``, ``host_empty`` and ``host_account``. Gradients are off, whatever the caller's mode: to trace a training
    step, let the callable turn them on (``torch.enable_grad``). The kernels are those of a GPU, unless inside
    ``kernels_of("cpu")``. A module with our hooks is traced between two calls of it in other threads; a module without
    hooks must not run in another thread meanwhile.

    Modules are found if they are the callable, the owner of the bound method, among the arguments, or in the closure.
    torch cannot convert modules of fake parameters in place: the callable must not call ``Module.to`` or ``half``.

    Args:
        module_or_callable: the callable.
        inputs: its arguments; only shapes and types of tensors count.
        kwargs: its keyword arguments.

    Returns:
        Bytes at the peak and of the largest allocation, the same in host memory, operations, bytes read and written,
        and a timeline with the paths of modules.

    Raises:
        Exception: whatever the callable raises, and torch's DataDependentOutputException if a value decides what
            runs.
    """
    return trace_equals_once(module_or_callable, inputs, kwargs, {})


def trace_equals_once(
    module_or_callable: Callable[..., Any],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    equals: Mapping[nn.Module, int],
    overhead: Overhead = NONE,
    repeats: bool = False,
    again: bool = False,
    most_copied: float = math.inf,
    joins: bool = True,
) -> MemoryTrace:
    """Trace a call like :func:`trace`, but run equal calls of some modules once; the timeline leaves out the repeated
    ones.

    Args:
        module_or_callable: the callable.
        inputs, kwargs: its arguments.
        equals: modules with a number for their kind (:func:`equal_calls.equal_modules`).
        overhead: the overhead whose workspaces are counted in the reserved bytes.
        repeats: True if the call is a step and more steps follow.
        again: True if the reserved bytes must also hold another such call, with the remains of this one.
        most_copied: limit of bytes copied between the accounts; the trace stops beyond it.
        joins: False: one segment for the large tensors of a step is not searched for.

    Returns:
        As :func:`trace`, with the figures of all calls.

    Raises:
        TooManyCopiesError: more bytes are copied.
    """
    leaves = tree_flatten((inputs, kwargs))[0]
    modules = modules_of(module_or_callable, *leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    parameters = (parameter for module in modules for parameter in module.parameters())
    fakes = (parameter for parameter in parameters if isinstance(parameter, FakeTensor))
    active = active_fake_mode(*tensors, *itertools.islice(fakes, 1))
    mode = active or FakeTensorMode(allow_non_fake_inputs=True)
    tracer = _Tracer(mode, overhead, most_copied, bool(equals))
    alone = contextlib.nullcontext() if active else pause_models(modules)  # no other thread runs a model of fakes
    with (
        alone,
        torch.no_grad(),
        mode,
        traced_device(CPU),
        no_collection(),
        replace_by_fakes(modules, tracer.fake_weight),
    ):
        ledger = tracer.ledger
        inputs, kwargs = tree_map(tracer.fake_input, (inputs, kwargs))
        weights_bytes, input_bytes = ledger.live["weights"], ledger.live["device"]
        with tracer.following(modules, equals), prevent_compiling():
            output = module_or_callable(*inputs, **kwargs)
    ledger.close()
    activations = ledger.activation_peak + input_bytes
    estimate = repeated = Reserved(activations, activations)
    if not traces_cpu():
        estimate = repeated = count_reserved(ledger.allocations, overhead.matrix_bytes, again, joins=joins)
        if repeats and not again:
            repeated = count_reserved(ledger.allocations, overhead.matrix_bytes, True, estimate.least, joins)
    return MemoryTrace(
        peak_bytes=ledger.peak,
        host_peak_bytes=ledger.host_peak,
        activation_peak_bytes=ledger.activation_peak,
        weights_bytes=weights_bytes + ledger.met,
        input_bytes=input_bytes,
        largest_bytes=ledger.largest,
        allocated_peak_bytes=ledger.born_peak,
        **tracer.work.totals(),
        reserved_bytes=estimate.least,
        repeated_bytes=max(repeated.least, estimate.least),
        recorded_bytes=estimate.kept,
        kept_bytes=max(repeated.kept, estimate.kept),
        segment_bytes=repeated.segment,
        timeline=ledger.timeline,
        spans=tuple(span for span in tracer.work.spans if span.operators),
        output=output,
    )


class _Tracer(Uncompiled):
    """Dispatch mode that sees every operator before the fake mode, and books its results."""

    def __init__(self, mode: FakeTensorMode, overhead: Overhead, most_copied: float, equals: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger(equals)
        self.work = ModuleWork(most_copied)
        self._mode = mode
        self._overhead = overhead
        self._recipes = _recipes[traces_cpu()]
        self._places: dict[int, tuple[Registry, str]] = {}
        self._met: dict[int, tuple[Tensor, Tensor]] = {}

    def fake_weight(self, real: Tensor, registry: Registry, name: str) -> Tensor:
        """The fake of a parameter or buffer; of a tensor that modules share, the same one."""
        if id(real) in self._places:
            return self._fake_of(real)
        self._places[id(real)] = registry, name
        parts = parts_of(real)
        fake = real if all(isinstance(part, FakeTensor) for part in parts) else fake_of(real, self._mode)
        for part, its_fake in zip(parts, parts_of(fake), strict=True):
            self.ledger.book(its_fake, "host" if is_host(part) else "weights", born=False)
        return fake

    def fake_input(self, leaf: Any) -> Any:
        """The fake of an argument, if it is a tensor."""
        if not isinstance(leaf, Tensor):
            return leaf
        fake = self._fake_of(leaf)
        self.ledger.book(fake, "host" if is_host(leaf) else "device", born=False)
        return fake

    def _fake_of(self, real: Tensor) -> Tensor:
        """The fake of a tensor, the same one each time; for a weight its current replacement."""
        if id(real) in self._places:
            registry, name = self._places[id(real)]
            return cast(Tensor, registry[name])
        if id(real) not in self._met:
            self._met[id(real)] = real, real if isinstance(real, FakeTensor) else fake_of(real, self._mode)
        return self._met[id(real)][1]

    @contextlib.contextmanager
    def following(self, modules: list[nn.Module], equals: Mapping[nn.Module, int]) -> Iterator[None]:
        """Count operators within the block, and set the ledger's path to the module that runs."""
        once = EqualCalls(self.ledger, self.work, self._mode).run_once(equals)
        paths, attention = _module_paths(self.ledger, modules), traced_attention(self._count_attention)
        with paths, _resizes(self.ledger), attention, once as follower, notify_follower(follower), self:
            yield

    def _count_attention(self, kernel: str, hidden: int, args: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
        self.ledger.operator = f"attention.{kernel}"
        with self.ledger.holding(hidden):
            pass
        if kernel == "cudnn":
            self.ledger.passing(self._overhead.attention_workspace(argument_bytes(args, out)))
        held = self.ledger.live["device"] + hidden
        flops = attention_flops(args, out)
        self.work.count(
            self.ledger.path, flops, argument_bytes(args, out), held_bytes=held, wide=is_wide_attention(args)
        )

    supports_higher_order_operators = True  # read by torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is _EXCHANGES and types == (FakeTensor,):
            return decompose(func, *args)
        operator = _operators.get(func)
        if operator is None:
            if isinstance(func, HigherOrderOperator):  # flex attention: by the operators that it is made of
                with self:
                    return operators_of(func)(*args, **(kwargs or {}))
            operator = _operators[func] = describe(func)
        kwargs = kwargs or {}
        by_others = _made_of_others(func, operator, types, args)
        if by_others is not None:
            with self:
                return by_others(*args, **kwargs)
        key = self._signature(func, operator, args, kwargs)
        if key is None and func not in _LIFTS:
            args = self._fake_arguments(args)
            key = self._signature(func, operator, args, kwargs)
        result, recipe = self._run(func, operator, key, args, kwargs)
        if not operator.view:
            self._take_in(operator, recipe, args, result)
        return result

    def _take_in(self, operator: Operator, recipe: Recipe, args: tuple[Any, ...], result: Any) -> None:
        """Book what an operator made, and count its work."""
        self.ledger.operator = operator.name
        workspace = self._overhead.workspace(recipe.moved) if operator.convolves else 0
        with self.ledger.holding(recipe.hidden):
            self._book(result)
            self.ledger.passing(workspace)
        if operator.moves:
            held = self.ledger.live["device"] + recipe.hidden
            work = recipe.flops, recipe.moved, recipe.packed, held, recipe.besides, recipe.wide, recipe.group_elements
            self.work.count(self.ledger.path, *work)
        if operator.copies:
            self._count_crossing(args, result)

    def _signature(self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Key of a recipe; None if there cannot be one."""
        return signature(func, args, kwargs) if operator.repeatable and self._mode.shape_env is None else None

    def _run(
        self, func: Any, operator: Operator, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Recipe]:
        """The fake results, by a recipe where there is one."""
        recipe = self._recipes.get(key)
        if recipe is not None:
            return make(recipe, self._mode, args), recipe
        known_recipe = None if key is None else recipe_of(func, args, kwargs, operator.view)
        result = func(*args, **kwargs) if known_recipe is None else make(known_recipe, self._mode, args)
        recipe = _recipe(func, operator, args, result)
        if key is not None and (recipe.made is not None or result is args[0]):
            if len(self._recipes) >= _MOST_RECIPES:  # a bound, because hosts run for days
                self._recipes.clear()
            self._recipes[key] = recipe
        return result, recipe

    def _count_crossing(self, args: tuple[Any, ...], result: Tensor) -> None:
        source = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else args[0]
        if (self.ledger.account_of(source) == "host") != (self.ledger.account_of(result) == "host"):
            self.work.count_copy(self.ledger.path, nbytes(result))

    def _book(self, result: Any) -> None:
        if isinstance(result, Tensor):
            self.ledger.book(result, current_account())
        elif isinstance(result, (list, tuple)):
            for part in result:
                self._book(part)

    def _fake_arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments in which tensors that the callable brought along are fake too."""
        for arg in args:
            if isinstance(arg, Tensor):
                if not isinstance(arg, FakeTensor):
                    break
            elif isinstance(arg, (list, tuple)) and any(
                isinstance(part, Tensor) and not isinstance(part, FakeTensor) for part in arg
            ):
                break
        else:
            return args
        return cast("tuple[Any, ...]", tree_map(self._brought_along, args))

    def _brought_along(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        is_known = id(leaf) in self._met or id(leaf) in self._places
        fake = self._fake_of(leaf)
        if not is_known:
            self.ledger.book_existing(fake, "host" if is_host(leaf) else "weights")
        return fake


def _made_of_others(func: Any, operator: Operator, types: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """A function that does what an operator does by others; None for one that is followed as it is."""
    if operator.made_of is not None:
        return operator.made_of
    plain = types == (FakeTensor,)
    wrapper = None if plain else next((arg for arg in args if isinstance(arg, Tensor) and is_wrapper(arg)), None)
    if wrapper is not None:  # its own code runs operators on its parts
        dispatch = type(wrapper).__torch_dispatch__
        return lambda *args, **kwargs: dispatch(func, types, args, kwargs)
    return functools.partial(decompose, func) if operator.composite else None


def _recipe(func: Any, operator: Operator, args: tuple[Any, ...], result: Any) -> Recipe:
    itself = bool(args) and result is args[0]
    recipe = None if itself or not args else recipe_for(result, args[0], view=operator.view)
    container = type(result) if isinstance(result, (list, tuple)) else None
    if operator.view or not operator.moves:
        return Recipe(recipe, container)
    hidden = 0 if operator.hidden is None else operator.hidden(args, result)
    flops = 0 if operator.flops is None else operator.flops(args, result)
    besides = 0 if traces_cpu() else library_bytes(func, args, result, hidden)
    return Recipe(
        recipe,
        container,
        hidden,
        flops,
        moved=argument_bytes(args, result),
        packed=packed_weight_bytes(func, args),
        besides=besides,
        wide=is_wide(func, args),
        group_elements=group_elements(func, args),
    )


@contextlib.contextmanager
def _module_paths(ledger: Ledger, modules: list[nn.Module]) -> Iterator[None]:
    """Set ``ledger.path`` to the dotted name of the module that runs in this thread, within the block."""
    names: dict[nn.Module, str] = {}
    for root in modules:
        for name, module in root.named_modules(prefix=type(root).__name__ if len(modules) > 1 else ""):
            names.setdefault(module, name)
    here, running = threading.get_ident(), list[tuple[nn.Module, str]]()

    def enter_module(module: nn.Module, _args: Any) -> None:
        if threading.get_ident() == here:  # torch calls global hooks for the modules of all threads
            running.append((module, ledger.path))
            ledger.path = names.get(module, type(module).__name__)

    def leave_module(module: nn.Module, _args: Any, _output: Any) -> None:
        while running and threading.get_ident() == here:  # modules that raised an exception are still on top
            top, ledger.path = running.pop()
            if top is module:
                break

    handles = [register_module_forward_pre_hook(enter_module), register_module_forward_hook(leave_module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_resize = Redirected(torch.UntypedStorage, "resize_")


@contextlib.contextmanager
def _resizes(ledger: Ledger) -> Iterator[None]:
    """Report storages that are resized without an operator to ``ledger``, within the block."""

    def report_resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = storage.resize_(size)
        ledger.note_resize(storage)
        return result

    with _resize.to(report_resize):
        yield
