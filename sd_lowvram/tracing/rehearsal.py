"""Rehearsal: run a pipeline's own call on a copy whose models return zeros, in the shapes of their real results.

The record shows before anything is computed which models are called, with what, how often and in which order, and what
the pipeline holds meanwhile. The user's pipeline, its models, their hooks and all random generators stay as they are.

The models of the copy have fake weights (:mod:`.fake_model`). Equal calls are traced once; each of them returns zeros.
A tensor above ``_REAL`` bytes stays fake, so that a video needs no memory. Random numbers are zeros too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    storage_key,
    tree_flatten,
    tree_map,
    without_modes,
)
from ..errors import ran_out
from ..memory.fake_mode import CPU, fake_empty
from ..memory.storage_refs import Deaths
from ..memory.threads import Redirected, pause_models
from ..models.recorded import Given, Rehearsal, Row, row_of, steps_of
from ..models.support import reads_values
from ..patches import unpatched_attributes
from ..units import MIB
from ..weight_parts import is_quantised
from ..weights import weight_bytes
from .copies import copies_of
from .equal_calls import equal_modules
from .fake_model import undo_cast
from .fake_tensors import fake_of, fakes_of
from .tracer import trace_equals_once
from .values import call_with_values

_REAL = 32 * MIB
"""Bytes of the largest tensor that is made as real zeros; a larger one stays fake."""

Texts = tuple["Tensor | list[Tensor] | None", "Tensor | None"]

_METHODS = ("forward", "encode", "decode", "generate", "get_image_features", "get_text_features")
_STEPS, _COUNT = "num_inference_steps", ("num_images_per_prompt", "num_videos_per_prompt")
_log = Redirected(logging.Logger, "handle")
_DENOISERS = ("transformer", "unet", "prior", "decoder")


def rehearse(pipe: Any, /, **call: Any) -> Rehearsal:
    """Return the calls that ``pipe(**call)`` makes of its models; nothing is computed and nothing is changed.

    Args:
        pipe: a pipeline of diffusers, or any callable object with its models by name in ``components``.
        call: the arguments of its call. Of tensors only shapes and types count, unless the pipeline itself reads them.
            Callbacks are left out.

    Raises:
        Exception: whatever the call raises; torch's DataDependentOutputException if a model reads values.
    """
    call = {name: value for name, value in call.items() if not name.startswith("callback")}
    copied = _Copy(pipe)
    full = copied.run(call)
    steps = call.get(_STEPS, getattr(_parameters(pipe).get(_STEPS), "default", None))
    fewer = full
    if isinstance(steps, int) and _STEPS in _parameters(pipe):
        fewer = copied.run_first(call, 2 if steps > 2 else 3 * steps, 2 * steps) or full
    repeated = _step_models(full.counts, fewer.counts)
    steps_by_group = steps_of([row.component for row in full.calls], repeated.__contains__)
    models = copied.originals
    in_order = [name for name in full.counts if name in repeated] or _called_denoisers(full)
    largest = sorted(in_order, key=lambda name: -weight_bytes(models[name]))
    denoiser = next((name for name in largest if not name.startswith("controlnet")), "")
    steps_by_group = steps_by_group or (((denoiser,),) if denoiser else ())
    return replace(full, steps=steps_by_group, denoiser=denoiser)


def _called_denoisers(record: Rehearsal) -> list[str]:
    return [name for name in _DENOISERS if name in record.counts][:1]


def _step_models(full: Counter[str], fewer: Counter[str]) -> set[str]:
    """Models whose number of calls depends on the steps; if no model's does, those that are called most often."""
    if full != fewer:
        return {name for name in full if full[name] != fewer[name]}
    most = max(full.values(), default=0)
    return {name for name, count in full.items() if count > 1 and 2 * count >= most}


def rehearse_filled(
    pipe: Any,
    call: Mapping[str, Any],
    width: int | None,
    height: int | None,
    batch: int,
    steps: int,
    scale: Any,
    texts: Texts = (None, None),
) -> Rehearsal:
    """Return the calls that ``pipe`` makes when it is called with ``call``, and with what it requires besides.

    A pipeline that refuses its call without a picture is given one, and a list of them if it refuses that too. If it
    takes no size, the picture is as large as it has to be for a result of that size. One without text encoders is
    given ``texts``.

    Args:
        pipe: as for :func:`rehearse`.
        call: the user's arguments, which take precedence; it is not changed.
        width, height: of the picture in pixels; None: the pipeline's own.
        batch: pictures at a time.
        steps: denoising steps.
        scale: name and value of the guidance scale; None: the pipeline's own.
        texts: a prompt as the denoiser is given it, a tensor or a list of one, and its pooled form; None: unknown.

    Raises:
        Exception: what the first of these calls raises.
    """
    takes, size = _parameters(pipe), (height or 512, width or 512)
    filled = _fill_call(pipe, call, width, height, batch, steps, scale)
    calls = (given for each in _with_texts(pipe, filled, texts) for given in _with_pictures(pipe, each, size))
    record, given = _first_rehearsal(pipe, ({**given, **call} for given in calls))
    made = record.size
    if not (width is None or height is None or made in (None, (height, width)) or "width" in takes or "image" in call):
        smaller = size[0] ** 2 // made[0], size[1] ** 2 // made[1]
        record = rehearse(pipe, **{**given, "image": torch.zeros(1, 3, *smaller)})
    return replace(record, asked=(call, width, height, batch, steps, scale, texts))


def rehearse_at(pipe: Any, record: Rehearsal, width: int, height: int) -> Rehearsal:
    """Return the calls that ``pipe`` makes for a picture of another size than in ``record``.

    Args:
        pipe: the pipeline.
        record: of :func:`rehearse_filled`.
        width, height: in pixels.
    """
    call, _, _, *others = record.asked
    return rehearse_filled(pipe, call, width, height, *others)


def _first_rehearsal(pipe: Any, calls: Iterable[dict[str, Any]]) -> tuple[Rehearsal, dict[str, Any]]:
    """The record of the first call that does not fail, and that call; the first error if all fail."""
    errors: list[Exception] = []
    for call in calls:
        try:
            return rehearse(pipe, **call), call
        except Exception as error:
            if ran_out(error) or reads_values(error):
                raise
            errors.append(error)
    raise errors[0]


def _with_texts(pipe: Any, call: dict[str, Any], texts: Texts) -> Iterator[dict[str, Any]]:
    """Yield ``call``, then with embeddings in place of the prompt, if the pipeline has no text encoder."""
    yield call
    text, pooled = texts
    readers = (part for name, part in pipe.components.items() if name.startswith("text_encoder"))
    if text is None or any(part is not None for part in readers):
        return
    mask = torch.ones(1, len(text[0]), dtype=torch.bool)
    kinds = {"prompt_embeds": text, "pooled_prompt_embeds": pooled}
    kinds |= dict.fromkeys(("prompt_embeds_mask", "prompt_attention_mask"), mask)
    both = {f"{side}{name}": value for side in ("", "negative_") for name, value in kinds.items() if value is not None}
    given = {name: value for name, value in both.items() if name in _parameters(pipe)}
    yield {name: value for name, value in call.items() if "prompt" not in name} | given


def _with_pictures(pipe: Any, call: dict[str, Any], size: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield ``call``, then with a picture, then with a list of one for each model that looks at one."""
    takes, picture = _parameters(pipe), torch.zeros(1, 3, *size)
    yield call
    images = {name for name in ("image", "control_image") if name in takes}
    if not images:
        return
    yield {**dict.fromkeys(images, picture), **call}
    several = (getattr(part, name, ()) for part in pipe.components.values() for name in ("nets", "adapters"))
    count = max(1, *map(len, several))
    modes = {"control_mode": [0] * count} if "control_mode" in takes else {}
    yield {**call, **dict.fromkeys(images, [picture] * count), **modes}


def _fill_call(
    pipe: Any, call: Mapping[str, Any], width: int | None, height: int | None, batch: int, steps: int, scale: Any
) -> dict[str, Any]:
    """Return ``call`` plus size, number of pictures, steps and guidance, where ``pipe`` has such parameters."""
    takes = _parameters(pipe)
    said: dict[str, Any] = {"width": width, "height": height, _STEPS: steps, "output_type": "pt"}
    said |= dict.fromkeys(_COUNT, batch)
    said |= [scale] if scale else []
    words = takes["max_sequence_length"].default if "max_sequence_length" in takes else 1
    if not any(name.startswith("prompt") for name in call):
        said["prompt"] = "a " * (words if isinstance(words, int) else 1)
        said |= {} if scale else {"negative_prompt": said["prompt"]}  # without one some do not guide
    pixels = (1, 3, height or 512, width or 512)
    if {"strength", "mask_image", "control_image"} & takes.keys() or _is_required(takes.get("image")):
        said["image"] = torch.zeros(pixels)
    said |= {"control_image": torch.zeros(pixels), "mask_image": torch.ones(1, 1, *pixels[2:])}
    said["ip_adapter_image"] = _adapter_pictures(pipe)
    return {name: value for name, value in said.items() if name in takes and value is not None} | dict(call)


def _adapter_pictures(pipe: Any) -> list[Tensor] | None:
    """A picture for each IP-Adapter that a pipeline has loaded; None without any."""
    projections = getattr(getattr(pipe, "unet", None), "encoder_hid_proj", None)
    layers = getattr(projections, "image_projection_layers", ())
    side = getattr(getattr(getattr(pipe, "image_encoder", None), "config", None), "image_size", 224)
    return [torch.zeros(1, 3, side, side) for _ in layers] or None


def _is_required(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _parameters(pipe: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(pipe).__call__).parameters


class _Copy:
    """Fake copies of a pipeline's models, on which its call runs."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        parts = dict(pipe.components)
        self.originals: dict[str, nn.Module] = {k: part for k, part in parts.items() if isinstance(part, nn.Module)}
        self._others = {k: part for k, part in parts.items() if not isinstance(part, nn.Module)}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._mode.cache_enabled = False
        with pause_models(self.originals.values()):
            self._models = _fake_models(self.originals, self._mode)
        self._equals = {name: equal_modules(model) for name, model in self._models.items()}
        self._results: dict[Any, Any] = {}
        self._reading: set[tuple[str, str, str]] = set()
        self._ledger = _Ledger(self._mode)
        self._rows: dict[Any, Row] = {}
        self._order: list[Any] = []
        self._busy = False
        seen = set[nn.Module]()
        for name, model in self._models.items():
            self._watch(name, model, seen)

    def run(self, call: Mapping[str, Any]) -> Rehearsal:
        """Run the pipeline's call once on the copies, and return its record."""
        self._ledger, self._rows, self._order = _Ledger(self._mode), {}, []
        pipe = self._pipeline()
        arguments = tree_map(self._argument, dict(call))
        with torch.no_grad(), _log.to(lambda *_: None), self._ledger:  # what it logs is not about the user's call
            self._ledger.book(arguments)
            type(pipe).__call__(pipe, **arguments)
        self._end_call()
        numbers = {key: number for number, key in enumerate(self._rows)}
        return Rehearsal(tuple(self._rows.values()), tuple(numbers[key] for key in self._order))

    def run_first(self, call: Mapping[str, Any], *steps: int) -> Rehearsal | None:
        """Return the record of the first run that succeeds; None if none does.

        At a low ``strength`` no step is left of few, and some pipelines take one number of steps only."""
        for count in steps:
            with contextlib.suppress(Exception):  # the pipeline's own
                return self.run({**call, _STEPS: count})
        return None

    def _pipeline(self) -> Any:
        """A shallow copy of the pipeline with the copied models, and copies of its schedulers and tokenizers."""
        replaced = {id(part): self._models[name] for name, part in self.originals.items()}
        replaced |= {id(part): _own_copy(part) for part in self._others.values() if part is not None}
        return _copy_pipeline(self._pipe, replaced)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return torch.Generator()
        if not isinstance(value, Tensor):
            return value
        return torch.zeros(value.shape, dtype=value.dtype) if value.is_meta else value.detach().to(CPU, copy=True)

    # Answers

    def _watch(self, name: str, model: nn.Module, seen: set[nn.Module]) -> None:
        for path, module in model.named_modules(seen):
            vars(module)["_apply"] = functools.partial(self._apply, module)
            for method in _METHODS if not path else ("forward",):
                original = getattr(module, method, None)
                if callable(original):
                    answer = functools.partial(self._answer, name, path, method, original)
                    vars(module)[method] = functools.update_wrapper(answer, original)

    def _answer(
        self, name: str, path: str, method: str, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Answer a call of the pipeline; calls inside of it are the model's own."""
        if self._busy:
            return original(*args, **kwargs)
        self._end_call()
        dtype = _dtype_of(self._models[name])
        reads = (name, path, method) in self._reading
        with without_modes():  # the contents that a row records are no tensors of the pipeline
            row = row_of(name, path, method, dtype, args, kwargs, reads)
        if row.key not in self._results:
            try:
                self._results[row.key] = self._trace_call(row, original, args, kwargs)
            except Exception as error:
                if row.reads or not reads_values(error):
                    raise
                self._reading.add((name, path, method))
                with without_modes():
                    row = row_of(name, path, method, dtype, args, kwargs, reads=True)
                self._results[row.key] = self._trace_call(row, original, args, kwargs)
        given = {self._ledger.key(leaf) for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)}
        held = self._ledger.alive(given)
        known = self._rows.get(row.key)
        if known is None or sum(tensor.bytes for tensor in held) > known.held_bytes:
            row = replace(row, held=held, after_bytes=known.after_bytes if known else 0)
        else:
            row = known
        with without_modes():
            result = _zeros_like(self._results[row.key], self._mode)
            tensors = _tensors(result)
        self._rows[row.key] = replace(
            row, output_bytes=sum(tensor.nbytes for tensor in tensors), size=_map_size(tensors)
        )
        self._order.append(row.key)
        self._ledger.book(tensors)
        self._ledger.peak = self._ledger.live
        return result

    def _trace_call(self, row: Row, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a call on fake tensors."""
        self._busy = True
        equals = {} if row.reads else self._equals[row.component]
        called = functools.partial(call_with_values, row, original) if row.reads else original
        try:
            with without_modes():
                return trace_equals_once(called, args, kwargs, equals).output
        finally:
            self._busy = False

    def _end_call(self) -> None:
        """Note what the pipeline held at most since its last call of a model."""
        if self._order:
            row = self._rows[self._order[-1]]
            self._rows[row.key] = replace(row, after_bytes=max(row.after_bytes, self._ledger.peak))

    def _apply(self, module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Replace ``module._apply``, which fails on fake weights: make new ones of the type that ``convert`` gives."""
        for child in module.children() if recurse else ():
            child._apply(convert)
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None and not is_quantised(tensor):
                    registry[name] = self._convert_tensor(tensor, convert)  # type: ignore[assignment]
        return module

    def _convert_tensor(self, tensor: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        dtype = convert(torch.empty((0,) * tensor.dim(), dtype=tensor.dtype)).dtype
        if dtype == tensor.dtype:
            return tensor
        if not isinstance(tensor, FakeTensor):
            return tensor.to(dtype)
        fake = fake_empty(self._mode, tensor.shape, tensor.stride(), dtype, CPU)
        if isinstance(tensor, nn.Parameter):
            fake._is_param = True
        return fake


def _fake_models(originals: Mapping[str, nn.Module], mode: FakeTensorMode) -> dict[str, nn.Module]:
    """Copies of models with fake weights. Small buffers are copied with their values, because pipelines read them."""
    modules = (module for model in originals.values() for module in model.modules())
    buffers = {id(tensor) for module in modules for tensor in module._buffers.values() if tensor is not None}

    def stand_in(tensor: Tensor) -> Tensor:
        loaded = undo_cast(tensor)
        read = id(tensor) in buffers and not loaded.is_meta and loaded.nbytes <= _REAL
        return loaded.detach().to(CPU, copy=True) if read else fake_of(loaded, mode)

    return copies_of(originals, fakes_of(originals.values(), stand_in), ("_hf_hook",))


def _dtype_of(model: nn.Module) -> torch.dtype | None:
    dtypes = (parameter.dtype for parameter in model.parameters())
    return next((dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1), None)


def _own_copy(part: Any) -> Any:
    """A copy of a scheduler or tokenizer, which remembers its last call; the part itself if it cannot be copied."""
    try:
        return copy.deepcopy(part)
    except Exception:  # whatever a stranger's class raises
        return part


def _copy_pipeline(pipe: Any, replaced: dict[int, Any]) -> Any:
    """A shallow copy of a pipeline, and of pipelines that it holds, with other parts.

    Args:
        pipe: the pipeline.
        replaced: the new parts, by the old ones' ids; the copies of pipelines are added.
    """
    copied = replaced[id(pipe)] = object.__new__(type(pipe))
    vars(copied).update(unpatched_attributes(pipe))
    vars(copied)["_progress_bar_config"] = {"disable": True}
    for name, value in list(vars(copied).items()):
        if id(value) in replaced:
            vars(copied)[name] = replaced[id(value)]
        elif isinstance(value, (dict, list)):
            vars(copied)[name] = _replace_models(value, replaced)
        elif not isinstance(value, type) and isinstance(getattr(value, "components", None), dict):
            vars(copied)[name] = _copy_pipeline(value, replaced)
    return copied


def _replace_models(container: Any, replaced: Mapping[int, Any]) -> Any:
    """``container`` with models replaced by their copies; itself if it holds none."""
    values = container.values() if isinstance(container, dict) else container
    if not any(id(value) in replaced for value in values):
        return container
    if isinstance(container, dict):
        return type(container)((name, replaced.get(id(value), value)) for name, value in container.items())
    return [replaced.get(id(value), value) for value in container]


# Results


def _leaves(value: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Tensors in a result: in containers, and in attributes of objects such as a distribution."""
    if id(value) in seen or isinstance(value, (nn.Module, type, FakeTensorMode)):
        return
    seen[id(value)] = value
    if isinstance(value, Tensor):
        yield value
        return
    inside = list(value.values()) if isinstance(value, dict) else list(value) if _is_sequence(value) else []
    for each in (*inside, *getattr(value, "__dict__", {}).values()):
        yield from _leaves(each, seen)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset))


def _tensors(result: Any) -> list[Tensor]:
    return list(_leaves(result, {}))


def _zeros_like(result: Any, mode: FakeTensorMode) -> Any:
    """A copy of ``result`` with zeros for its tensors, and with new fake tensors for large ones."""
    memo: dict[int, Any] = {}
    for tensor in _tensors(result):
        real = tensor.nbytes <= _REAL
        memo[id(tensor)] = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype) if real else fake_of(tensor, mode)
    return copy.deepcopy(result, memo)


def _map_size(tensors: list[Tensor]) -> tuple[int, ...]:
    shape = tuple(tensors[0].shape) if tensors else ()
    return tuple(map(int, shape[-2:])) if len(shape) >= 4 else ()


# What the pipeline holds


class _Ledger(TorchDispatchMode):
    """Follows the tensors that a pipeline makes between the calls of its models, and answers noise with zeros.

    Attributes:
        live: bytes of them now.
        peak: the most bytes since the last call.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._mode = mode
        self._held: dict[int, Given] = {}
        self._deaths = Deaths(self._strike)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def key(self, tensor: Tensor) -> int:
        return storage_key(tensor)

    def alive(self, without: set[int]) -> tuple[Given, ...]:
        """The tensors that are alive now, except those with these keys."""
        self._deaths.look()
        return tuple(tensor for key, tensor in self._held.items() if key not in without)

    def book(self, tree: Any) -> None:
        """Follow the tensors in ``tree``."""
        for leaf in tree_flatten(tree)[0]:
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            if storage_key(storage) in self._held:
                continue
            whole = storage.nbytes() == leaf.nbytes
            held = Given(tuple(leaf.shape), leaf.dtype) if whole else Given((storage.nbytes(),), torch.uint8)
            self._deaths.look()
            self._held[self._deaths.watch(storage)] = held
            self.live += held.bytes
            self.peak = max(self.peak, self.live)

    def _strike(self, key: int) -> None:
        held = self._held.pop(key, None)
        self.live -= held.bytes if held else 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            result = self._zeros(func, args, kwargs)
        elif func.overloadpacket._qualified_op_name in _FACTORIES and _size(args) > _REAL:
            result = self._fake(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
            if not func._schema.is_mutable and func is not _DETACH:  # of a weight, a parameter is made of that
                result = tree_map(_real_if_small, result)  # of weights that the pipeline reads
        self.book(result)
        return result

    def _zeros(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Zeros in place of what would be drawn, so that no generator advances."""
        if func._schema.is_mutable:
            return args[0].zero_()
        return _zeros_like(self._fake(func, args, kwargs), self._mode)

    def _fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        fakes = [fake_of(arg, self._mode) if isinstance(arg, Tensor) else arg for arg in args]
        with without_modes(), self._mode:
            return func(*fakes, **{**kwargs, "device": CPU} if "device" in kwargs else kwargs)


def _real_if_small(leaf: Any) -> Any:
    """Zeros in place of a fake tensor, unless it is large: pipelines turn results into arrays."""
    if not isinstance(leaf, FakeTensor) or leaf.nbytes > _REAL:
        return leaf
    with without_modes():
        return torch.zeros(tuple(leaf.shape), dtype=leaf.dtype)


_DETACH = torch.ops.aten.detach.default
_FACTORIES = frozenset(f"aten::{new}{name}" for new in ("", "new_") for name in ("zeros", "ones", "empty", "full"))


def _size(args: tuple[Any, ...]) -> int:
    """Bytes of float32 of the size among the arguments of a factory."""
    sizes = (arg for arg in args if isinstance(arg, (list, tuple)))
    return 4 * math.prod(next(sizes, ()))
