"""The stages of a run (text, control, denoise, decode, encode), each as a call that can be traced on a fake copy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.private import tree_map
from ..models.anatomy import Anatomy
from ..models.calls import CONTROL, CONTROL_STAGE, TEXT_STAGE, Shape, Stage, StepInputs, denoise_step
from ..models.latents import dtype_of, latent_shape, pixel_shape
from ..models.recorded import Given, Rehearsal, Row, given_bytes, row_of
from ..tracing.values import call_with_values


def stages(anatomy: Anatomy, shape: Shape, encodes: bool) -> list[Stage]:
    """The stages of a run of ``anatomy``'s components, in order. Call them within the fake copy's mode.

    Args:
        anatomy: parts of the target.
        shape: of the picture; a record has its own.
        encodes: True if the run starts from a picture (img2img, inpainting).

    Returns:
        The stages: text encoders, encode, denoise, decode, as far as the target has them.
    """
    record = anatomy.rehearsal or stated_calls(anatomy, shape, encodes)
    return _hosted_stages(anatomy, shape, encodes) if record is None else _recorded_stages(anatomy, record)


def stated_calls(anatomy: Anatomy, shape: Shape, encodes: bool) -> Rehearsal | None:
    """Return the calls that a family of diffusers states of its models, for models without a pipeline, and pipelines
    that cannot be rehearsed; None if it states none.

    Args:
        anatomy: parts of the target.
        shape: of the picture.
        encodes: True if the run starts from a picture.
    """
    if anatomy.family.arguments is None:
        return None
    rows: list[Row] = []
    held: tuple[Given, ...] = ()
    with torch.device("meta"):
        for name in anatomy.components:
            given = anatomy.family.arguments(anatomy, name, shape)
            if given is None:
                continue
            row = row_of(name, "", "forward", dtype_of(anatomy, name), *given)
            if name == anatomy.denoiser:
                held = _held_in_step(anatomy, shape, row)
                row = dataclasses.replace(row, held=held)
            rows.append(row)
        rows += _autoencoder_rows(anatomy, shape, encodes, held)
    order = list(anatomy.components)
    rows.sort(key=lambda row: -1 if row.method == "encode" else order.index(row.component))
    steps = ((anatomy.denoiser,),) if anatomy.denoiser else ()
    waiting = tuple(name for name in order if name not in {row.component for row in rows})
    return Rehearsal(tuple(rows), tuple(range(len(rows))), steps, anatomy.denoiser or "", waiting, stated=True)


def states_all_calls(anatomy: Anatomy) -> bool:
    """Return True if a family of diffusers states the calls of each model of ``anatomy``."""
    record = stated_calls(anatomy, Shape(256, 256), encodes=False)
    return record is not None and not record.waiting


def stated_texts(anatomy: Anatomy) -> tuple[Tensor | list[Tensor] | None, Tensor | None]:
    """Return one prompt as a family states it for its denoiser, zeros (1, words, width) or a list of (words, width),
    and its pooled form (1, width); None if the family states none."""
    record = stated_calls(anatomy, Shape(256, 256, passes=1), encodes=False)
    rows = [] if record is None else [row for row in record.rows if row.component == anatomy.denoiser]
    given = rows[0].kwargs if rows else {}
    text = given.get("encoder_hidden_states", given.get("cap_feats"))
    pooled = given.get("pooled_projections", (given.get("added_cond_kwargs") or {}).get("text_embeds"))
    shapes = (text[:1] if isinstance(text, list) else text, pooled)
    zeros = tree_map(lambda leaf: leaf and torch.zeros(leaf.shape, dtype=leaf.dtype), shapes)
    return zeros[0], zeros[1]


def _held_in_step(anatomy: Anatomy, shape: Shape, row: Row) -> tuple[Given, ...]:
    """Tensors that a pipeline holds during a step besides the arguments: latents, as many predictions as there are
    passes and one more, and the embeddings of the negative prompt, which are no larger than the largest argument."""
    latents = Given(latent_shape(anatomy, shape), dtype_of(anatomy, row.component))
    guided = shape.passes > 1 or anatomy.calls > 1
    text = max((given.bytes for given in row.tensors), default=0) if guided else 0
    return *(latents,) * (2 + shape.passes), Given((text // shape.passes,), torch.uint8)


def _autoencoder_rows(anatomy: Anatomy, shape: Shape, encodes: bool, held: tuple[Given, ...]) -> Iterator[Row]:
    """The decode, and the encode of a run that starts from a picture."""
    if (name := anatomy.autoencoder) is None:
        return
    dtype, shapes = dtype_of(anatomy, name), {"decode": latent_shape(anatomy, shape)}
    shapes |= {"encode": pixel_shape(anatomy, shape)} if encodes else {}
    for method, size in shapes.items():
        row = row_of(name, "", method, dtype, (torch.empty(size, dtype=dtype),), {})
        yield dataclasses.replace(row, held=held if method == "decode" else (), size=(shape.height, shape.width))


def _recorded_stages(anatomy: Anatomy, record: Rehearsal) -> list[Stage]:
    """The recorded calls of each model that is still there, one after the other; calls of an autoencoder's two methods
    are two stages. Of models that wait for their first call only the weights are known."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for row in (row for row in record.calls if row.component in anatomy.components):
        name = _recorded_name(record, row)
        if row not in rows.setdefault((name, row.component), []):
            rows[name, row.component].append(row)
    repeated = {name for group in record.steps for name in group}
    stages = []
    for (name, component), alike in rows.items():
        calls = [_hold_joined(row, record) for row in alike] if component == CONTROL else alike
        run = functools.partial(_call_all, calls, anatomy, component)
        inputs = functools.partial(tuple[nn.Module], (anatomy.components[component],))
        facts = tuple((row.key, row.held, row.after_bytes) for row in alike)
        reads, times = any(row.reads for row in alike), record.times(alike)
        stages.append(Stage(name, component, run, inputs, component in repeated, times, facts, reads))
    return [*stages, *(_unknown(anatomy, name) for name in record.waiting if name in anatomy.components)]


def _hosted_stages(anatomy: Anatomy, shape: Shape, encodes: bool) -> list[Stage]:
    """The denoiser's step as its host's family states it, and the autoencoder's calls."""
    family, name, found = anatomy.family, anatomy.autoencoder, []
    if anatomy.denoiser is not None and family.step_inputs is not None and family.predict is not None:
        step = functools.partial(denoise_step, predict=family.predict)
        found.append(Stage("denoise", anatomy.denoiser, step, functools.partial(_step_inputs, anatomy, shape), True))
    if name is not None:
        latents, pixels = latent_shape(anatomy, shape), pixel_shape(anatomy, shape)
        inputs = functools.partial(_decode_inputs, anatomy, shape, latents)
        found.append(Stage("decode", name, functools.partial(_decode, family.decode), inputs))
    if not family.known:
        found += [_unknown(anatomy, name) for name in anatomy.components if name != anatomy.autoencoder]
    found.sort(key=lambda stage: list(anatomy.components).index(stage.component))
    if name is not None and encodes:
        found.insert(0, Stage("encode", name, family.encode, _one_call(anatomy, name, pixels)))
    return found


def _hold_joined(row: Row, record: Rehearsal) -> Row:
    """Return a ControlNet's call with the maps that it made before in one buffer (``hooks/joined_maps.py``)."""
    before, held = list(record.control_maps), []
    for given in row.held:
        if given in before:
            before.remove(given)
        else:
            held.append(given)
    joined = given_bytes(record.control_maps) - given_bytes(before)
    return dataclasses.replace(row, held=(*held, *([Given((joined,), torch.uint8)] if joined else [])))


def _recorded_name(record: Rehearsal, row: Row) -> str:
    if row.component == CONTROL:
        return CONTROL_STAGE
    if any(row.component in group for group in record.steps):
        return "denoise"
    if row.method in ("encode", "decode"):
        return row.method
    return TEXT_STAGE if row.component.startswith("text_encoder") else row.component


def _call_all(rows: list[Row], anatomy: Anatomy, component: str, module: nn.Module) -> None:
    if component == anatomy.denoiser:
        anatomy.family.forget(module)
    for row in rows:
        _call(row, dtype_of(anatomy, component), module)


def _call(row: Row, dtype: torch.dtype, module: nn.Module) -> None:
    """Make a recorded call, then hold as much as the pipeline does from there to its next call."""
    args, kwargs, held = row.empties(dtype)
    called: Any = module.get_submodule(row.path)
    call = called if row.method == "forward" else getattr(called, row.method)  # with what others hooked to it
    call = functools.partial(call_with_values, row, call) if row.reads else call
    result = call(*args, **kwargs)
    del args, kwargs
    more = row.after_bytes - row.held_bytes - row.output_bytes
    further = torch.empty(max(0, more), dtype=torch.uint8)
    del result, held, further


def _unknown(anatomy: Anatomy, name: str) -> Stage:
    """The stage of a model of which only the weights are known: nothing is called."""
    denoises = name == anatomy.denoiser
    other = "decode" if "decode" in anatomy.entries[name] else name
    title = "denoise" if denoises else TEXT_STAGE if name.startswith("text_encoder") else other
    return Stage(title, name, lambda: None, lambda: (), denoises)


def _step_inputs(anatomy: Anatomy, shape: Shape) -> tuple[nn.Module | None, StepInputs]:
    """Inputs of a step, and the predictions and guidance of the step before, which hosts still hold."""
    assert anatomy.family.step_inputs is not None
    step = anatomy.family.step_inputs(anatomy, shape)
    predicted = [torch.empty_like(step.latents) for _ in range(shape.passes + 1)]
    return anatomy.denoiser_module, step._replace(held=(*_negative_embeddings(shape, step), *predicted))


def _negative_embeddings(shape: Shape, step: StepInputs) -> list[Tensor]:
    """Embeddings of the negative prompt, which hosts hold next to the joined ones."""
    return [torch.empty_like(step.text[: shape.batch])] if shape.passes > 1 else []


def _decode_inputs(anatomy: Anatomy, shape: Shape, latents: tuple[int, ...]) -> tuple[Any, ...]:
    """Latents, and the embeddings, which hosts hold."""
    held: tuple[Tensor, ...] = ()
    if anatomy.denoiser is not None and anatomy.family.step_inputs is not None:
        step = anatomy.family.step_inputs(anatomy, shape)
        held = (step.text, *_negative_embeddings(shape, step))
    return (*_one_call(anatomy, anatomy.autoencoder or "", latents)(), *held)


def _decode(decode: Callable[[nn.Module, Tensor], Any], module: nn.Module, latents: Tensor, *_held: Tensor) -> Any:
    return decode(module, latents)


def _one_call(anatomy: Anatomy, name: str, shape: tuple[int, ...]) -> Callable[[], tuple[nn.Module, Tensor]]:
    return lambda: (anatomy.components[name], torch.empty(shape, dtype=dtype_of(anatomy, name)))
