"""Loads a model from disk, offline: diffusers folders, and single files of SD1.x, SD2.x and SDXL.

The kind of a single file is read from its header alone. Weights that are pickles are refused unless asked for, because
reading a pickle can run any program; when asked for, torch reads them with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInputError, CheckpointError
from .architectures import class_of, pipeline_class, write_folder
from .inspection import (
    PREDICTIONS,
    SUFFIXES,
    CheckpointKind,
    Task,
    check_channels,
    check_model,
    detect,
    folder_configuration,
    folder_variant,
    is_pickle,
    kind_of,
    model_path,
    pipeline_prefix,
    single_file_config,
)
from .safetensors_header import Header, TensorEntry
from .split_files import is_split
from .tokenizers import check_tokenizer, check_tokenizer_files

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline


def load_pipeline(
    model: str | Path | None,
    task: Task = "txt2img",
    dtype: torch.dtype | None = None,
    *,
    allow_pickle: bool = False,
    prediction: str | None = None,
) -> DiffusionPipeline:
    """The pipeline for ``task`` with the weights of ``model``, on the CPU; nothing is fetched from a network.

    ``model`` is a diffusers folder, a single ``.safetensors`` file (SD1.x, SD2.x, SDXL), a ``.ckpt`` with
    ``allow_pickle``, or None for the demo model that ships with the package. ``dtype`` None is float32, whatever is
    stored (see ``load_as_stored``). ``prediction`` overrides what an SD2.x or SDXL file seems to predict (see
    ``detect``).
    A safety checker is not loaded: it costs 1.2 GB.

    Raises:
        CheckpointError: missing, unreadable, truncated, of an unknown kind, or a pickle that was not allowed.
    """
    path = model_path(model)
    check_model(path, task, allow_pickle)
    if path.is_dir():
        return _load_folder(path, task, dtype, allow_pickle)
    return _load_file(path, task, dtype, allow_pickle, prediction)


def _pipeline_class(prefix: str, task: Task) -> Any:
    import diffusers

    if task != "txt2img" and not hasattr(diffusers, prefix + SUFFIXES[task]):
        raise BadInputError(f"diffusers has no {prefix}{SUFFIXES[task]}: leave --init-image and --mask out")
    return pipeline_class(prefix, SUFFIXES[task])


def _load_folder(folder: Path, task: Task, dtype: torch.dtype | None, allow_pickle: bool) -> DiffusionPipeline:
    prefix = pipeline_prefix(folder)
    variant = folder_variant(folder, allow_pickle)
    # A safety checker that the index names is skipped; SDXL's pipelines know no such argument.
    extra = {"safety_checker": None, "requires_safety_checker": False} if prefix == "StableDiffusion" else {}

    if "_class_name" in (unet := folder_configuration(folder).get("unet", {})):
        class_of(unet)
    kind = _pipeline_class(prefix, task)
    if is_split(folder):
        from .load_split import load_split

        with explained(folder):
            return load_split(folder, kind, dtype)
    reads = {
        name.replace("text_encoder", "tokenizer"): encoder
        for name, encoder in folder_configuration(folder).items()
        if name.startswith("text_encoder")
    }
    for name, encoder in reads.items():
        if (folder / name).is_dir():
            check_tokenizer_files(folder / name, encoder)
    with explained(folder):
        pipeline: DiffusionPipeline = kind.from_pretrained(
            folder,
            variant=variant,
            local_files_only=True,
            use_safetensors=None if allow_pickle else True,
            **extra,
            **typed(dtype),
        )
    for name, encoder in reads.items():
        check_tokenizer(getattr(pipeline, name, None), encoder, folder / name)
    return pipeline


def _load_file(
    path: Path, task: Task, dtype: torch.dtype | None, allow_pickle: bool, prediction: str | None
) -> DiffusionPipeline:
    kind = _kind_of_pickle(path) if is_pickle(path, allow_pickle) else kind_of(path)
    check_channels(path, kind.in_channels, task)  # of a pickle, which tells them only now
    if prediction not in (None, *PREDICTIONS):
        raise CheckpointError(f"prediction {prediction!r} is unknown: choose {' or '.join(PREDICTIONS)}")
    config = single_file_config(kind, prediction or kind.prediction)
    pipeline = _pipeline_class(config["pipeline"], task)
    own = {} if kind.unet is None else {"unet": kind.unet.load(path, config["unet"], dtype)}
    with tempfile.TemporaryDirectory(prefix="sd-lowvram-") as folder:
        write_folder(config, pipeline.__name__, Path(folder))
        with explained(path):
            return pipeline.from_single_file(str(path), config=folder, local_files_only=True, **own, **typed(dtype))


def typed(dtype: torch.dtype | None) -> dict[str, Any]:
    """The argument for the number type, which diffusers renamed in 0.42."""
    import diffusers

    major, minor = (int(part) for part in diffusers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (0, 42) else "torch_dtype": dtype}


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Inside, the libraries show no bars and notes of their own; what they raise becomes a CheckpointError."""
    try:
        with silent("diffusers.utils.logging"), silent("transformers.utils.logging"):
            yield
    except (MemoryError, CheckpointError):
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if shapes := re.search(r"because (\S+) expected shape \S*?\[([\d, ]*)\]\)?, but got \S*?\[([\d, ]*)\]", text):
        # diffusers goes on with advice on arguments of its own.
        name, wanted, found = shapes.groups()
        return (
            f"{name} is of shape [{found}] where this kind of model has [{wanted}]. A model with changed layers loads "
            "from a diffusers folder, which states its shapes"
        )
    return f"{type(error).__name__}: {text[:400]}"


@contextlib.contextmanager
def silent(module: str) -> Iterator[None]:
    """Inside, a library of Hugging Face, by its logging module, shows no bars and notes of its own."""
    logging: Any = importlib.import_module(module)
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _kind_of_pickle(path: Path) -> CheckpointKind:
    import torch

    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=None)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} cannot be loaded safely: {reason}") from error
    while isinstance(state, Mapping) and "state_dict" in state:
        state = state["state_dict"]
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds no table of weights but a {type(state).__name__}")
    tensors = {str(k): TensorEntry("", tuple(v.shape), 0, 0) for k, v in state.items() if isinstance(v, torch.Tensor)}
    return detect(Header(tensors, {}, 0), path, lambda name: state[name].float().std(unbiased=False).item())
