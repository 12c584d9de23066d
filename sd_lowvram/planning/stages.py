"""The stages of a run (text, control, denoise, decode, encode), each as a call that can be traced on a fake copy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..models.anatomy import Anatomy
from ..models.calls import CONTROL, CONTROL_STAGE, TEXT_STAGE, Shape, Stage, StepInputs, denoise_step
from ..models.latents import dtype_of, latent_shape, latent_size, native_size, pixel_shape, scale_factor
from ..models.recorded import Rehearsal, Row
from ..tracing.values import call_with_values

__all__ = ["CONTROL", "Shape", "Stage", "latent_size", "native_size", "scale_factor", "stages"]


def stages(anatomy: Anatomy, shape: Shape, encodes: bool) -> list[Stage]:
    """The stages of a run of ``anatomy``'s components, in order. Call them within the fake copy's mode.

    Args:
        anatomy: parts of the target.
        shape: of the picture.
        encodes: True if the run starts from a picture (img2img, inpainting).

    Returns:
        The stages: text encoders, encode, denoise, decode, as far as the target has them.
    """
    if anatomy.rehearsal is not None:
        return _rehearsed_stages(anatomy, anatomy.rehearsal)
    helpers = anatomy.family.helper_stages(anatomy, shape)
    if anatomy.denoiser is not None and anatomy.family.known:
        step = functools.partial(denoise_step, predict=anatomy.family.predict)
        helpers.append(Stage("denoise", anatomy.denoiser, step, functools.partial(_step_inputs, anatomy, shape), True))
    name = anatomy.autoencoder
    if name is not None:
        latents, pixels = latent_shape(anatomy, shape), pixel_shape(anatomy, shape)
        decode = functools.partial(_decode, anatomy.family.decode)
        helpers.append(Stage("decode", name, decode, functools.partial(_decode_inputs, anatomy, shape, latents)))
    if not anatomy.family.known:
        helpers += [_unknown(anatomy, name) for name in anatomy.components if name != anatomy.autoencoder]
    helpers.sort(key=lambda stage: list(anatomy.components).index(stage.component))
    if name is not None and encodes:
        helpers.insert(0, Stage("encode", name, anatomy.family.encode, _one_call(anatomy, name, pixels)))
    return helpers


def _rehearsed_stages(anatomy: Anatomy, record: Rehearsal) -> list[Stage]:
    """The recorded calls of each model that is still there, one after the other; calls of an autoencoder's two methods
    are two stages. Of models that wait for their first call only the weights are known."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for row in (row for row in record.calls if row.component in anatomy.components):
        name = _recorded_name(anatomy, row)
        if row not in rows.setdefault((name, row.component), []):
            rows[name, row.component].append(row)
    repeated = {name for group in record.steps for name in group}
    stages = []
    for (name, component), alike in rows.items():
        run = functools.partial(_call_all, alike, functools.partial(dtype_of, anatomy, component))
        inputs = functools.partial(tuple[nn.Module], (anatomy.components[component],))
        facts = tuple((row.key, row.held, row.after_bytes) for row in alike)
        reads, times = any(row.reads for row in alike), record.times(alike)
        stages.append(Stage(name, component, run, inputs, component in repeated, times, facts, reads))
    return [*stages, *(_unknown(anatomy, name) for name in record.waiting if name in anatomy.components)]


def _recorded_name(anatomy: Anatomy, row: Row) -> str:
    if row.component == CONTROL:
        return CONTROL_STAGE
    if anatomy.rehearsal is not None and any(row.component in group for group in anatomy.rehearsal.steps):
        return "denoise"
    if row.method in ("encode", "decode"):
        return row.method
    return TEXT_STAGE if row.component.startswith("text_encoder") else row.component


def _call_all(rows: list[Row], dtype: Callable[[], torch.dtype], module: nn.Module) -> None:
    for row in rows:
        _call(row, dtype(), module)


def _call(row: Row, dtype: torch.dtype, module: nn.Module) -> None:
    """Make a recorded call, then hold as much as the pipeline does from there to its next call."""
    args, kwargs, held = row.empties(dtype)
    call = getattr(module.get_submodule(row.path), row.method)
    call = functools.partial(call_with_values, row.values, call) if row.reads else call
    result = call(*args, **kwargs)
    del args, kwargs
    more = row.after_bytes - row.held_bytes - row.output_bytes
    further = torch.empty(max(0, more), dtype=torch.uint8)
    del result, held, further


def _unknown(anatomy: Anatomy, name: str) -> Stage:
    """The stage of a model of which only the weights are known: nothing is called."""
    denoises = name == anatomy.denoiser
    other = "decode" if anatomy.rehearsal is not None and "decode" in anatomy.entries[name] else name
    title = "denoise" if denoises else TEXT_STAGE if name.startswith("text_encoder") else other
    return Stage(title, name, lambda: None, lambda: (), denoises)


def _step_inputs(anatomy: Anatomy, shape: Shape) -> tuple[nn.Module | None, StepInputs]:
    """Inputs of a step, and the predictions and guidance of the step before, which pipelines still hold."""
    step = anatomy.family.step_inputs(anatomy, shape)
    predicted = [torch.empty_like(step.latents) for _ in range(shape.passes + 1)]
    return anatomy.denoiser_module, step._replace(
        held=(*step.held, *_negative_embeddings(anatomy, shape, step), *predicted)
    )


def _negative_embeddings(anatomy: Anatomy, shape: Shape, step: StepInputs) -> list[Tensor]:
    """Embeddings of the negative prompt, which pipelines hold next to the joined ones, or until the second call."""
    guided = shape.passes > 1 or anatomy.calls > 1
    return [torch.empty_like(step.text[: shape.batch])] if guided else []


def _decode_inputs(anatomy: Anatomy, shape: Shape, latents: tuple[int, ...]) -> tuple[Any, ...]:
    """Latents, and the inputs of the last step from text encoders, ControlNets and adapters: pipelines hold them."""
    held: tuple[Tensor, ...] = ()
    if anatomy.denoiser is not None and anatomy.family.known:
        step = anatomy.family.step_inputs(anatomy, shape)
        held = (*step.residuals, *step.features, *step.held, step.text, *_negative_embeddings(anatomy, shape, step))
    return (*_one_call(anatomy, anatomy.autoencoder or "", latents)(), *held)


def _decode(decode: Callable[[nn.Module, Tensor], Any], module: nn.Module, latents: Tensor, *_held: Tensor) -> Any:
    return decode(module, latents)


def _one_call(anatomy: Anatomy, name: str, shape: tuple[int, ...]) -> Callable[[], tuple[nn.Module, Tensor]]:
    return lambda: (anatomy.components[name], torch.empty(shape, dtype=dtype_of(anatomy, name)))
