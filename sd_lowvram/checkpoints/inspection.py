"""What a model on disk is, told from names and headers: nothing heavy is imported, and no weight is loaded.

Files come from strangers: a name that is no regular file, which might never end, is refused unread.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import doors
from ..errors import CheckpointError
from .architectures import MODELS, NAMES, TRANSFORMERS, architecture, layers_per_block
from .safetensors_header import Header, read_header, read_values

Task = Literal["txt2img", "img2img", "inpaint"]
Prediction = Literal["epsilon", "v_prediction"]
DEMO = Path(__file__).parents[1] / "demo" / "model"
PICKLES = (".ckpt", ".pt", ".pth", ".bin")
PREDICTIONS = ("epsilon", "v_prediction")
SUFFIXES = {"txt2img": "Pipeline", "img2img": "Img2ImgPipeline", "inpaint": "InpaintPipeline"}
WHOLE = "SD1.x, SD2.x, SDXL, SD3, FLUX.1, FLUX.2 Klein, Z-Image, Chroma, Qwen-Image and Krea 2"
_PREFIXES = (
    *("StableDiffusionXL", "StableDiffusion", "StableDiffusion3", "Flux", "Flux2Klein"),
    *("ZImage", "Chroma", "QwenImage", "Krea2"),
)
_LARGEST_NUMBER, _MOST_LEVELS, _MOST_LAYERS = 1 << 16, 16, 256
"""Of a configuration: more than any model has."""

_UNET = "model.diffusion_model."
_BLOCK = re.compile(rf"{re.escape(_UNET)}((?:input|output)_blocks\.\d{{1,4}}|middle_block)\.")
_NO_PICKLE = "it is a pickle, and a pickle can run any program; get it as .safetensors, or trust it with --allow-pickle"


@dataclass(frozen=True)
class OwnUNet:
    """A UNet in a single file that is not the architecture's: its configuration, and what loads it from the path with
    the configuration, in a type (None: float32)."""

    config: Mapping[str, Any]
    load: Callable[[Path, Mapping[str, Any], Any], Any]


@dataclass(frozen=True)
class CheckpointKind:
    """What a single file holds: the built-in architecture, the input channels of its UNet, what it predicts, and its
    UNet where that is not the architecture's."""

    name: str
    in_channels: int = 4
    prediction: Prediction = "epsilon"
    unet: OwnUNet | None = None


def check_model(path: Path, task: Task, allow_pickle: bool = False) -> None:
    """Look at every file of the model at ``path`` that can be wrong before anything is loaded.

    Raises:
        CheckpointError: unreadable, truncated, of an unknown kind, for another task, or a pickle that was not allowed.
    """
    if path.is_dir():
        pipeline_prefix(path)
        folder_variant(path, allow_pickle)
        check_channels(path, folder_configuration(path).get("unet", {}).get("in_channels", 4), task)
    elif not is_pickle(path, allow_pickle):
        check_channels(path, kind_of(path).in_channels, task)


def configuration(model: str | None) -> dict[str, Any]:
    """The configurations of the models of a built-in name, a folder or a file; None: the demo model.

    Raises:
        CheckpointError: missing, truncated, of an unknown kind, or a pickle, which has no header to read.
    """
    if model in (*NAMES, *TRANSFORMERS):
        return architecture(model or "")
    path = model_path(model)
    if path.is_dir():
        return folder_configuration(path)
    if path.suffix.lower() in PICKLES:
        raise CheckpointError(f"{path} is a pickle, which has no header to plan from: give a .safetensors file")
    kind = kind_of(path)
    return single_file_config(kind, kind.prediction)


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


def folder_configuration(path: Path) -> dict[str, Any]:
    """The configurations of a diffusers folder's models, of which its UNet or transformer must have one; with a
    transformer also of its pipeline, as :func:`architecture` has it."""
    found: dict[str, Any] = {}
    for name in MODELS:
        file = path / name / "config.json"
        if file.is_file():
            found[name] = _checked_shapes(file, _read_table(file))
    if "transformer" in found:
        plain = {
            name: value for name, value in _read_index(path).items() if isinstance(value, bool | int | float | str)
        }
        options = {name: value for name, value in plain.items() if not name.startswith("_")}
        return found | {"pipeline": pipeline_prefix(path), "options": options}
    if "unet" not in found:
        raise CheckpointError(f"{path} is no diffusers folder: it has no config.json of a unet or a transformer")
    return found


def _checked_shapes(file: Path, table: dict[str, Any]) -> dict[str, Any]:
    """``table``, the configuration in ``file``, if what is asked of it before a model is built of it makes sense."""
    side, channels = table.get("sample_size"), table.get("block_out_channels", [1])
    sides = side if isinstance(side, list) and len(side) == 2 else [side]
    numbers = [number for number in (*sides, table.get("in_channels")) if number is not None]
    numbers += channels if isinstance(channels, list) and 0 < len(channels) <= _MOST_LEVELS else [None]
    if not all(type(number) is int and 0 < number <= _LARGEST_NUMBER for number in numbers):
        named = "sample_size, in_channels and block_out_channels"
        raise CheckpointError(f"{file} cannot be used: {named} must be whole numbers above 0, the last a list of them")
    layers = table.get("layers_per_block", 2)
    counts = layers if isinstance(layers, list) else [layers]
    if not all(type(count) is int and 0 <= count <= _MOST_LAYERS for count in counts):
        what = f"from 0 to {_MOST_LAYERS}, or a list of such numbers"
        raise CheckpointError(f"{file} cannot be used: layers_per_block is {str(layers)[:60]} and must be {what}")
    return table


def pipeline_prefix(folder: Path) -> str:
    """What the class of a diffusers folder's pipeline begins with: "StableDiffusionXL", "Flux"."""
    name = str(_read_index(folder).get("_class_name", ""))
    doors.find()
    theirs = (name.removesuffix("Pipeline"),) if doors.FAMILIES else ()  # which of them serves it is seen later
    prefixes = (*_PREFIXES, *theirs)
    found: str | None = next((prefix for prefix in prefixes for end in SUFFIXES.values() if name == prefix + end), None)
    if found is None:
        raise CheckpointError(f"{folder} holds a {name or 'nameless pipeline'}: {WHOLE} are served")
    return found


def _read_index(folder: Path) -> dict[str, Any]:
    file = folder / "model_index.json"
    if not file.is_file():
        inside = ", ".join(sorted(part.name for part in folder.iterdir())[:5]) or "nothing"
        raise CheckpointError(f"{folder} is no diffusers folder: it has no model_index.json (it holds {inside})")
    return _read_table(file)


def _read_table(file: Path) -> dict[str, Any]:
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(table, dict):
            raise ValueError("it is no table")
        return table
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def folder_variant(folder: Path, allow_pickle: bool) -> str | None:
    """Check every weight file of ``folder``; returns "fp16" where only files of that variant are there."""
    weights = [file for file in folder.glob("*/*.safetensors") if file.parent.name != "safety_checker"]
    for file in weights:
        read_header(file)
    pickles = [file for file in folder.glob("*/*.bin") if file.parent.name != "safety_checker"]
    if not weights and pickles and not allow_pickle:
        raise CheckpointError(f"{pickles[0]} cannot be loaded: {_NO_PICKLE}")
    unet = [file.name for file in weights or pickles if file.parent.name in ("unet", "transformer")]
    if unet and all(".fp16." in name for name in unet):
        return "fp16"
    return None


def is_pickle(path: Path, allowed: bool) -> bool:
    """Whether the file at ``path`` is a pickle, to which it must be ``allowed``.

    Raises:
        CheckpointError: it is one and is not allowed, or no regular file.
    """
    if path.suffix.lower() not in PICKLES:
        return False
    if not allowed:
        raise CheckpointError(f"{path} cannot be loaded: {_NO_PICKLE}")
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} cannot be read: it is no regular file")
    return True


def check_channels(path: Path, channels: int, task: Task) -> None:
    """Raise CheckpointError where a UNet of so many input ``channels`` needs more than ``task`` gives it."""
    if channels == 9 and task != "inpaint":
        raise CheckpointError(f"{path} is an inpainting model: give it a picture and a mask (--init-image and --mask)")


def kind_of(path: Path) -> CheckpointKind:
    """The kind of the single ``.safetensors`` file at ``path``."""
    header = read_header(path)
    return detect(header, path, lambda name: _deviation(read_values(path, header, name)))


def _deviation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def single_file_config(kind: CheckpointKind, prediction: str) -> dict[str, Any]:
    """The architecture of ``kind``, with what the file itself decides written into it."""
    config = architecture(kind.name)
    if kind.unet is not None:
        config["unet"] = dict(kind.unet.config)
    config["unet"]["in_channels"] = kind.in_channels
    config["scheduler"]["prediction_type"] = prediction
    if kind.name == "sd21" and prediction == "epsilon":
        config["unet"]["sample_size"] = 64
        config["vae"]["sample_size"] = 512
    return config


def detect(header: Header, path: Path, deviation: Callable[[str], float]) -> CheckpointKind:
    """The kind of a single file, from names and shapes in its header.

    What SD2.x predicts cannot be told from names: it is taken from the file's ModelSpec metadata, else from the spread
    of one bias in the last attention block, as ComfyUI does (above 0.09 in the models that predict v). SDXL predicts
    noise unless the file carries the mark "v_pred".

    Args:
        deviation: gives the standard deviation of the tensor of a name.

    Raises:
        CheckpointError: another kind, or a file in which a part is missing.
    """
    first = header.shape(_UNET + "input_blocks.0.0.weight")
    if not first:
        raise CheckpointError(f"{path} is no SD1.x, SD2.x or SDXL checkpoint: it looks like {describe(header)}")
    blocks = (f"{_UNET}input_blocks.{i}.1.transformer_blocks.0.attn2.to_k.weight" for i in (1, 2, 3, 4))
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
    return CheckpointKind(name, first[1], _prediction(name, header, deviation), _own_unet(name, header, path))


def _own_unet(name: str, header: Header, path: Path) -> OwnUNet | None:
    """The UNet in a file, None where it is the architecture's.

    Raises:
        CheckpointError: nobody knows such a UNet.
    """
    whole = architecture(name)["unet"]
    doors.find()
    for known in doors.UNETS.values():
        found: OwnUNet | None = known(name, whole, header, path)
        if found is not None:
            return found
    count = sum(layers + 1 for layers in layers_per_block(whole))
    usual = {"middle_block", *(f"{side}_blocks.{number}" for side in ("input", "output") for number in range(count))}
    if {match[1] for key in header.tensors if (match := _BLOCK.match(key))} != usual:
        raise CheckpointError(
            f"{path} has a UNet whose blocks do not go together: weights are missing, or it is of another kind"
        )
    return None


def _prediction(name: str, header: Header, deviation: Callable[[str], float]) -> Prediction:
    stated = header.metadata.get("modelspec.prediction_type", "").lower()
    if stated in ("v", "v_prediction") or "v_pred" in header.tensors:
        return "v_prediction"
    if stated == "epsilon" or name != "sd21":
        return "epsilon"
    biases = (f"{_UNET}output_blocks.{place}.1.transformer_blocks.0.norm1.bias" for place in range(11, 0, -1))
    last = next((bias for bias in biases if bias in header.tensors), None)
    predicts_v = last is None or deviation(last) > 0.09
    return "v_prediction" if predicts_v else "epsilon"


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
