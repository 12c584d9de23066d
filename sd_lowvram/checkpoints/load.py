"""Loads a model from disk, offline: diffusers folders, and single files of SD1.x, SD2.x and SDXL.

The kind of a single file is read from its header alone. Weights that are pickles are refused unless asked for, because
reading a pickle can run any program; when asked for, torch reads them with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import doors
from ..errors import BadInputError, CheckpointError
from .architectures import MODELS, class_of, pipeline_class, write_folder
from .complete import check_complete, check_found
from .inspection import (
    PREDICTIONS,
    SUFFIXES,
    CheckpointKind,
    Task,
    check_channels,
    check_model,
    detect,
    folder_configuration,
    is_pickle,
    kind_of,
    model_path,
    pipeline_prefix,
    read_index,
    rename_to_usual,
    single_file_config,
    weight_files,
)
from .safetensors_header import Header, TensorEntry
from .scaled_files import check_formats
from .single_file import file_weights, load_text, load_unet, load_vae, plain_weights
from .single_file_names import usual_names
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
    """Load the pipeline for ``task`` on the CPU; nothing is fetched from a network. A safety checker (1.2 GB) is not
    loaded.

    Args:
        model: a diffusers folder, a single ``.safetensors`` file (SD1.x, SD2.x, SDXL), a ``.ckpt`` with
            ``allow_pickle``, or None for the included demo model.
        task: such as "txt2img".
        dtype: type of the weights; None: float32, whatever is stored (see ``load_as_stored``).
        allow_pickle: True to load pickles, without the right to run code.
        prediction: in place of what an SD2.x or SDXL file seems to predict (see ``detect``).

    Returns:
        The pipeline of diffusers.

    Raises:
        CheckpointError: the model is missing, unreadable, truncated, of an unknown kind, or a pickle that is not
            allowed.
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
    from torch import nn

    prefix = pipeline_prefix(folder)
    # A safety checker that the index names is skipped; SDXL's pipelines know no such argument.
    extra = {"safety_checker": None, "requires_safety_checker": False} if prefix == "StableDiffusion" else {}

    if "_class_name" in (unet := folder_configuration(folder).get("unet", {})):
        class_of(unet)
    kind = _pipeline_class(prefix, task)
    if is_split(folder):
        from .load_split import load_split

        with explain_errors(folder):
            return load_split(folder, kind, dtype)
    reads = {
        name.replace("text_encoder", "tokenizer"): encoder
        for name, encoder in folder_configuration(folder).items()
        if name.startswith("text_encoder")
    }
    for name, encoder in reads.items():
        if (folder / name).is_dir():
            check_tokenizer_files(folder / name, encoder)
    with explain_errors(folder):
        extra |= _load_parts(folder, extra, dtype, allow_pickle)
        pipeline: DiffusionPipeline = kind.from_pretrained(
            folder, local_files_only=True, **extra, **dtype_argument(dtype)
        )
    for name, encoder in reads.items():
        check_tokenizer(getattr(pipeline, name, None), encoder, folder / name)
    for name, model in pipeline.components.items():
        if isinstance(model, nn.Module):  # of another library, too
            check_complete(folder / name, model)
    return pipeline


def _load_parts(
    folder: Path, skipped: Collection[str], dtype: torch.dtype | None, allow_pickle: bool
) -> dict[str, Any]:
    """Load the models that the index of ``folder`` names; None for an optional one that is not there."""
    parts: dict[str, Any] = {}
    for name, stated in read_index(folder).items():
        if not isinstance(stated, list) or name in skipped or not all(isinstance(value, str) for value in stated):
            continue
        library, called, part = stated[0], stated[-1], folder / name
        if name in _OPTIONAL and not part.is_dir():
            parts[name] = None
        elif name in (*MODELS, "image_encoder") and (library in _LIBRARIES or called in doors.CLASSES):
            parts[name] = load_folder_part(part, library, called, dtype, allow_pickle)
    return parts


_OPTIONAL = ("feature_extractor", "image_encoder")
"""Parts in the index of a folder that no run needs, and that people delete."""


_LIBRARIES = ("diffusers", "transformers")


def load_folder_part(part: Path, library: str, name: str, dtype: torch.dtype | None, allow_pickle: bool = False) -> Any:
    """Load one part of a diffusers folder.

    Args:
        part: folder of the part.
        library: library of its class.
        name: name of its class.
        dtype: type of the weights; None: float32.
        allow_pickle: True to load pickles.

    Raises:
        CheckpointError: weights are missing, which the library would leave without contents or fill at random.
    """
    import torch

    kind = class_of({"_class_name": name}) if library != "transformers" else _class_of_transformers(name)
    variant, files = weight_files(part, allow_pickle)
    model, loading = kind.from_pretrained(
        part,
        **({"variant": variant} if variant else {}),
        local_files_only=True,
        use_safetensors=None if allow_pickle else True,
        output_loading_info=True,
        **_typed_part(library, dtype or torch.float32),
    )
    where = files[0] if len(files) == 1 else part
    check_found(where, model, sorted(loading.get("missing_keys", ())))
    check_complete(where, model)
    return model


def _load_file(
    path: Path, task: Task, dtype: torch.dtype | None, allow_pickle: bool, prediction: str | None
) -> DiffusionPipeline:
    if is_pickle(path, allow_pickle):
        state = _read_pickle(path)
        kind = _kind_of_pickle(path, state)
    else:
        state, kind = None, kind_of(path)
    check_channels(path, kind.in_channels, task)  # a pickle's channels are known only now
    if prediction not in (None, *PREDICTIONS):
        raise CheckpointError(f"prediction {prediction!r} is unknown: choose {' or '.join(PREDICTIONS)}")
    config = single_file_config(kind, prediction or kind.prediction)
    pipeline = _pipeline_class(config["pipeline"], task)
    with explain_errors(path):
        weights = file_weights(path, dtype) if state is None else plain_weights(state, path, dtype)
        if kind.unet is not None and kind.unet.load is not None:
            unet = kind.unet.load(weights, config["unet"], dtype)
        else:
            unet = load_unet(config["unet"], weights, path, dtype)
        parts = {"unet": unet, "vae": load_vae(config["vae"], weights, path, dtype)}
        for name, prefix in _TEXT_PLACES["text_encoder_2" in config].items():
            parts[name] = load_text(config[name], weights, path, prefix, dtype)
        with tempfile.TemporaryDirectory(prefix="sd-lowvram-") as folder:
            write_folder(config, pipeline.__name__, Path(folder))
            return pipeline.from_pretrained(folder, local_files_only=True, **parts, **dtype_argument(dtype))


_TEXT_PLACES = (
    {"text_encoder": "cond_stage_model."},
    {"text_encoder": "conditioner.embedders.0.", "text_encoder_2": "conditioner.embedders.1."},
)
"""Prefixes of text encoders in a single file: of SD1.x and SD2.x, of SDXL."""


def _class_of_transformers(name: str) -> Any:
    import transformers

    cls = getattr(transformers, name, None)
    if cls is None:
        raise CheckpointError(f"a model of class {name} is not known to transformers as it is installed")
    return cls


def _typed_part(library: str, dtype: torch.dtype) -> dict[str, Any]:
    """The argument for the number type of one part; transformers renamed its own in 4.56."""
    if library != "transformers":
        return dtype_argument(dtype)
    import transformers

    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (4, 56) else "torch_dtype": dtype}


def dtype_argument(dtype: torch.dtype | None) -> dict[str, Any]:
    """The argument for the number type, which diffusers renamed in 0.42."""
    import diffusers

    major, minor = (int(part) for part in diffusers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (0, 42) else "torch_dtype": dtype}


@contextlib.contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Silence the libraries' bars and notes, and turn their errors into CheckpointError, within the block."""
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
        name, wanted, shape = shapes.groups()
        return (
            f"{name} is of shape [{shape}] where this kind of model has [{wanted}]. A model with changed layers loads "
            "from a diffusers folder, which states its shapes"
        )
    return f"{type(error).__name__}: {text[:400]}"


@contextlib.contextmanager
def silent(module: str) -> Iterator[None]:
    """Silence a Hugging Face library, given by its logging module, within the block."""
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


def _read_pickle(path: Path) -> dict[str, Any]:
    """The weights in a pickle by name, read without running it."""
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
    return {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _kind_of_pickle(path: Path, state: Mapping[str, Any]) -> CheckpointKind:
    header = Header({name: TensorEntry("", tuple(value.shape), 0, 0) for name, value in state.items()}, {}, 0)
    if any(name.endswith(".comfy_quant") for name in state):
        raise CheckpointError(f"{path} is a pickle of quantised weights: get it as .safetensors")
    check_formats(path, header)
    usual = {ours: state[theirs] for theirs, ours in usual_names(state).items()}
    return detect(rename_to_usual(header), path, lambda name: usual[name].float().flatten().tolist())
