"""Loads a model from disk, offline: diffusers folders and single files of SD1.x, SD2.x and SDXL.

The kind of a single file is read from its header alone. Weights that are pickles are refused unless asked for, because
reading a pickle can run any program; when asked for, torch reads them with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import CheckpointError
from .architectures import architecture, write_folder
from .safetensors_header import Header, read_header

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

Task = Literal["txt2img", "img2img", "inpaint"]
Prediction = Literal["epsilon", "v_prediction"]
DEMO = Path(__file__).parents[1] / "demo" / "model"
PICKLES = (".ckpt", ".pt", ".pth", ".bin")
_SUFFIX = {"txt2img": "Pipeline", "img2img": "Img2ImgPipeline", "inpaint": "InpaintPipeline"}
_UNET = "model.diffusion_model."
_NO_PICKLE = "it is a pickle, and a pickle can run any program; get it as .safetensors, or trust it with --allow-pickle"


@dataclass(frozen=True)
class Kind:
    """What a single file holds: the built-in architecture, the input channels of its UNet, and what it predicts."""

    name: str
    in_channels: int = 4
    prediction: Prediction = "epsilon"


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
    ``allow_pickle``, or None for the demo model that ships with the package. ``dtype`` None keeps the folder's own type
    (float32 for single files). ``prediction`` overrides what an SD2.x or SDXL file seems to predict (see ``detect``).
    A safety checker is not loaded: it costs 1.2 GB.

    Raises:
        CheckpointError: missing, unreadable, truncated, of an unknown kind, or a pickle that was not allowed.
    """
    path = model_path(model)
    if path.is_dir():
        return _load_folder(path, task, dtype, allow_pickle)
    return _load_file(path, task, dtype, allow_pickle, prediction)


def model_path(model: str | Path | None) -> Path:
    """Where ``model`` lies on disk; None is the demo model.

    Raises:
        CheckpointError: nothing is there.
    """
    path = DEMO if model is None else Path(model).expanduser()
    if not path.exists():
        if model is None:
            raise CheckpointError(f"this installation lacks the demo model ({path}): install the package again")
        hint = " (models are read from disk, never fetched: download it first)" if str(model).count("/") == 1 else ""
        raise CheckpointError(f"there is no model at {path}{hint}: give a diffusers folder or a .safetensors file")
    return path


def _pipeline_class(prefix: str, task: Task) -> Any:
    import diffusers

    return getattr(diffusers, prefix + _SUFFIX[task])


def _read_index(folder: Path) -> dict[str, Any]:
    file = folder / "model_index.json"
    if not file.is_file():
        inside = ", ".join(sorted(part.name for part in folder.iterdir())[:5]) or "nothing"
        raise CheckpointError(f"{folder} is no diffusers folder: it has no model_index.json (it holds {inside})")
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(index, dict):
            raise ValueError("no table")
        return index
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _folder_variant(folder: Path, allow_pickle: bool) -> str | None:
    """Check every weight file of ``folder``; returns "fp16" where only files of that variant are there."""
    weights = [file for file in folder.glob("*/*.safetensors") if file.parent.name != "safety_checker"]
    for file in weights:
        read_header(file)
    pickles = [file for file in folder.glob("*/*.bin") if file.parent.name != "safety_checker"]
    if not weights and pickles and not allow_pickle:
        raise CheckpointError(f"{pickles[0]} cannot be loaded: {_NO_PICKLE}")
    unet = [file.name for file in weights or pickles if file.parent.name == "unet"]
    if unet and all(".fp16." in name for name in unet):
        return "fp16"
    return None


def _load_folder(folder: Path, task: Task, dtype: torch.dtype | None, allow_pickle: bool) -> DiffusionPipeline:
    name = str(_read_index(folder).get("_class_name", ""))
    classes = {prefix + end: prefix for prefix in ("StableDiffusionXL", "StableDiffusion") for end in _SUFFIX.values()}
    if name not in classes:
        raise CheckpointError(f"{folder} holds a {name or 'nameless pipeline'}: SD1.x, SD2.x and SDXL are served")
    prefix = classes[name]
    variant = _folder_variant(folder, allow_pickle)
    # A safety checker that the index names is skipped; SDXL's pipelines know no such argument.
    extra = {"safety_checker": None, "requires_safety_checker": False} if prefix == "StableDiffusion" else {}

    def load() -> DiffusionPipeline:
        return _pipeline_class(prefix, task).from_pretrained(
            folder,
            variant=variant,
            local_files_only=True,
            use_safetensors=None if allow_pickle else True,
            **extra,
            **_typed(dtype),
        )

    pipe = _explained(folder, load)
    _check_channels(folder, pipe, task)
    return pipe


def _load_file(
    path: Path, task: Task, dtype: torch.dtype | None, allow_pickle: bool, prediction: str | None
) -> DiffusionPipeline:
    pickled = path.suffix.lower() in PICKLES
    if pickled and not allow_pickle:
        raise CheckpointError(f"{path} cannot be loaded: {_NO_PICKLE}")
    kind = _kind_of_pickle(path) if pickled else detect(read_header(path), path, tensor_reader(path))
    if prediction not in (None, "epsilon", "v_prediction"):
        raise CheckpointError(f"prediction {prediction!r} is unknown: choose epsilon or v_prediction")
    config = single_file_config(kind, prediction or kind.prediction)
    pipeline = _pipeline_class(config["pipeline"], task)
    with tempfile.TemporaryDirectory(prefix="sd-lowvram-") as folder:
        write_folder(config, pipeline.__name__, Path(folder))

        def load() -> DiffusionPipeline:
            return pipeline.from_single_file(str(path), config=folder, local_files_only=True, **_typed(dtype))

        pipe = _explained(path, load)
    _check_channels(path, pipe, task)
    return pipe


def _typed(dtype: torch.dtype | None) -> dict[str, Any]:
    """The argument for the number type, which diffusers renamed in 0.42."""
    import diffusers

    major, minor = (int(part) for part in diffusers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (0, 42) else "torch_dtype": dtype}


def _explained(path: Path, load: Callable[[], DiffusionPipeline]) -> DiffusionPipeline:
    """Run ``load`` without the libraries' own bars and notes; what it raises becomes a CheckpointError."""
    try:
        with _silent("diffusers.utils.logging"), _silent("transformers.utils.logging"):
            return load()
    except MemoryError:
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
def _silent(module: str) -> Iterator[None]:
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


def _check_channels(path: Path, pipe: Any, task: Task) -> None:
    channels = pipe.unet.config.in_channels
    if channels == 9 and task != "inpaint":
        raise CheckpointError(f"{path} is an inpainting model: give it a picture and a mask (--init-image and --mask)")


def single_file_config(kind: Kind, prediction: str) -> dict[str, Any]:
    """The architecture of ``kind``, with what the file itself decides written into it."""
    config = architecture(kind.name)
    config["unet"]["in_channels"] = kind.in_channels
    config["scheduler"]["prediction_type"] = prediction
    if kind.name == "sd21" and prediction == "epsilon":
        config["unet"]["sample_size"] = 64
        config["vae"]["sample_size"] = 512
    return config


def detect(header: Header, path: Path, read: Callable[[str], torch.Tensor]) -> Kind:
    """The kind of a single file, from names and shapes in its header; ``read`` gives the tensor of a name.

    What SD2.x predicts cannot be told from names: it is taken from the file's ModelSpec metadata, else from the spread
    of one bias in the last attention block, as ComfyUI does (above 0.09 in the models that predict v). SDXL predicts
    noise unless the file carries the mark "v_pred".

    Raises:
        CheckpointError: another kind, or a file in which a part is missing.
    """
    first = header.shape(_UNET + "input_blocks.0.0.weight")
    if not first:
        raise CheckpointError(f"{path} is no SD1.x, SD2.x or SDXL checkpoint: it looks like {describe(header)}")
    blocks = (f"{_UNET}input_blocks.{i}.1.transformer_blocks.0.attn2.to_k.weight" for i in (1, 2, 4))
    context = next((header.shape(name)[-1] for name in blocks if header.shape(name)), 0)
    parts = {
        768: ("sd15", ("cond_stage_model.transformer.text_model.",)),
        1024: ("sd21", ("cond_stage_model.model.",)),
        2048: ("sdxl", ("conditioner.embedders.0.transformer.text_model.", "conditioner.embedders.1.model.")),
    }
    if context == 1280:
        raise CheckpointError(f"{path} is SDXL's refiner, which makes no picture by itself: give the SDXL base model")
    if context not in parts:
        raise CheckpointError(f"{path} is an unknown kind of checkpoint: its UNet attends to text of width {context}")
    name, texts = parts[context]
    for part, prefix in [("VAE", "first_stage_model."), *(("text encoder", text) for text in texts)]:
        if not any(tensor.startswith(prefix) for tensor in header.tensors):
            raise CheckpointError(f"{path} is an {name.upper()} file without {part} (no {prefix}*): get the full one")
    if len(first) != 4 or first[1] not in (4, 9):
        raise CheckpointError(
            f"{path} has a UNet whose input is of shape {first}: 4 channels, or 9 for inpainting, work"
        )
    return Kind(name, first[1], _prediction(name, header, read))


def _prediction(name: str, header: Header, read: Callable[[str], torch.Tensor]) -> Prediction:
    stated = header.metadata.get("modelspec.prediction_type", "").lower()
    if stated in ("v", "v_prediction") or "v_pred" in header.tensors:
        return "v_prediction"
    if stated == "epsilon" or name != "sd21":
        return "epsilon"
    bias = _UNET + "output_blocks.11.1.transformer_blocks.0.norm1.bias"
    predicts_v = bias not in header.tensors or read(bias).float().std(unbiased=False).item() > 0.09
    return "v_prediction" if predicts_v else "epsilon"


def tensor_reader(path: Path) -> Callable[[str], torch.Tensor]:
    def read(name: str) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            return file.get_tensor(name)

    return read


def _kind_of_pickle(path: Path) -> Kind:
    import torch

    from .safetensors_header import Entry

    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=None)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} cannot be loaded safely: {reason}") from error
    while isinstance(state, Mapping) and "state_dict" in state:
        state = state["state_dict"]
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds no table of weights but a {type(state).__name__}")
    tensors = {str(k): Entry("", tuple(v.shape), 0, 0) for k, v in state.items() if isinstance(v, torch.Tensor)}
    return detect(Header(tensors, {}, 0), path, state.__getitem__)


def describe(header: Header) -> str:
    """In a few words, what else a file might be; for messages."""
    signs = {
        "a LoRA (load it onto a model)": ("lora_unet_", "lora_te", ".lora_A.", ".lora_down."),
        "Flux": ("double_blocks.", "single_transformer_blocks."),
        "SD3": ("joint_blocks.", "context_embedder."),
        "a ControlNet": ("control_model.", "controlnet_cond_embedding."),
        "the weights of one diffusers component (give the folder above it)": ("down_blocks.", "text_model."),
        "a VAE alone": ("decoder.up", "first_stage_model."),
        "a textual inversion": ("emb_params", "clip_l", "string_to_param"),
    }
    for what, marks in signs.items():
        if any(mark in name for name in header.tensors for mark in marks):
            return what
    sample = ", ".join(list(header.tensors)[:3]) or "an empty file"
    return f"something else ({sample})"
