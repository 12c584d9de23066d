"""Models without weights: built-in architectures, and checkpoints of which only the header is read."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..models import anatomy_of_components, dissect
from ..models.anatomy import Anatomy
from ..models.support import unsupported_error
from .architectures import (
    MODELS,
    NO_MODELS,
    architecture,
    build_components,
    class_of,
    empty_model,
    pipeline_class,
    type_for,
)
from .inspection import configuration, read_index
from .load_split import load_part
from .split_files import is_split
from .tokenizers import stand_in
from .unfilled import Unfilled


def meta_anatomy(model: str | None, dtype: torch.dtype, only: tuple[str, ...] = MODELS) -> Anatomy:
    """Return the anatomy of a model on the meta device, with the parts of :func:`meta_components`.

    Args:
        model: as for :func:`meta_components`.
        dtype: type of the weights.
        only: names of the components.

    Raises:
        CheckpointError: as for :func:`meta_components`.
    """
    config, parts = configuration(model), meta_components(model, dtype, only)
    return _pipeline_anatomy(config, parts) if "transformer" in config else anatomy_of_components("diffusers", parts)


def _pipeline_anatomy(config: dict[str, Any], parts: dict[str, nn.Module]) -> Anatomy:
    """The anatomy of a pipeline of these ``parts``, which knows how it guides.

    Raises:
        UnsupportedModelError: it is of no family that is planned.
    """
    pipe = _pipeline_of(config, parts)
    anatomy = dissect(pipe)
    if anatomy is None:
        raise unsupported_error(pipe, "transformer", parts["transformer"])
    unguided: dict[str, Any] = {"passes": 1, "calls": 1} if config.get("call", {}).get("guidance_scale") == 0 else {}
    return dataclasses.replace(anatomy, **unguided)


def _pipeline_of(config: dict[str, Any], parts: dict[str, Any]) -> Any:
    """The pipeline of a configuration with these ``parts``, and with nothing for the others that it requires."""
    kind = pipeline_class(config["pipeline"])
    taken = list(inspect.signature(kind.__init__).parameters.values())[1:]
    nothing = {parameter.name: None for parameter in taken if parameter.default is inspect.Parameter.empty}
    return kind(**nothing | parts | config.get("options", {}))


def named_pipeline(name: str, dtype: torch.dtype) -> Any:
    """Return the pipeline that one of ``PIPELINES`` names, its models on the meta device, without its tokenizers.

    Args:
        name: the name.
        dtype: type of the weights.
    """
    config = architecture(name)
    models = tuple(part for part, stated in config.items() if isinstance(stated, dict) and part not in NO_MODELS)
    return with_words(config, build_components(config, type_for(config, dtype), "meta", models))


def with_words(config: dict[str, Any], models: dict[str, nn.Module]) -> Any:
    """Return a pipeline of these ``models``, with its scheduler, and with stand-ins for its tokenizers."""
    parts: dict[str, Any] = {**models, "scheduler": class_of(config["scheduler"]).from_config(config["scheduler"])}
    taken = inspect.signature(pipeline_class(config["pipeline"]).__init__).parameters
    words = (part for part in taken if part.startswith(("tokenizer", "processor")))
    return _pipeline_of(config, parts | {part: stand_in(part) for part in words})


def meta_pipeline(name: str, folder: Path, dtype: torch.dtype) -> Any:
    """Return a pipeline of diffusers with the parts of a folder, its models on the meta device.

    Args:
        name: class of the pipeline.
        folder: diffusers folder; of models only the configurations are read.
        dtype: type of the weights.

    Raises:
        CheckpointError: the class is unknown, or the folder cannot be used for it.
    """
    kind, index = class_of({"_class_name": name}), read_index(folder)
    try:
        taken = inspect.signature(kind.__init__).parameters
        dtype = type_for(index, dtype)
        return kind(**{part: _meta_part(folder / part, index[part], dtype) for part in index if part in taken})
    except CheckpointError:
        raise
    except Exception as error:  # whatever configurations that do not belong together provoke in the libraries
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder} cannot be used for {name}: {type(error).__name__}: {reason:.300}; give a folder of that pipeline"
        ) from error


def _meta_part(place: Path, stated: Any, dtype: torch.dtype) -> Any:
    """A part of a folder, or a plain value that its index states."""
    if not isinstance(stated, list) or not place.is_dir():
        return None if isinstance(stated, list) else stated
    if (place / "scheduler_config.json").is_file():
        config = json.loads((place / "scheduler_config.json").read_text(encoding="utf-8"))
        return class_of(config).from_config(config)
    if not (place / "config.json").is_file():
        import transformers

        return getattr(transformers, stated[-1]).from_pretrained(place, local_files_only=True)
    with torch.device("meta"), Unfilled():
        model = empty_model(json.loads((place / "config.json").read_text(encoding="utf-8")))
    return nn.Module.to(model, dtype).eval().requires_grad_(False)


def meta_components(model: str | None, dtype: torch.dtype, only: tuple[str, ...] = MODELS) -> dict[str, nn.Module]:
    """The models that a model is made of, by name, on the meta device: shapes and types, and not a byte of weights.

    Args:
        model: a built-in name ("flux1-dev"), a diffusers folder, or a ``.safetensors`` file. None: the demo model.
        dtype: the type in which it would be loaded.
        only: components that are wanted.

    Raises:
        CheckpointError: missing, truncated, of an unknown kind, or a pickle, which has no header to read; or its
            configuration makes no sense.
    """
    config = configuration(model)
    folder = Path(model) if model is not None and "transformer" in config else None
    try:
        if folder is not None and is_split(folder):
            places = [folder / name for name in only if name in config]
            return {place.name: load_part(place, type_for(config, dtype), meta=True) for place in places}
        return build_components(config, dtype=type_for(config, dtype), device="meta", only=only)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a configuration that makes no sense provokes in the library
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{model or 'the demo model'} cannot be built by its configuration: {type(error).__name__}: {reason}"
        ) from error
