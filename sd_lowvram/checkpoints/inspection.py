"""Recognition of models on disk, from names and headers: nothing heavy is imported, and no weight is loaded.

Files come from strangers: anything but a regular file, which might never end, is refused unread.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from .. import doors
from ..errors import CheckpointError
from .architectures import BUILT_IN, MODELS, architecture, layers_per_block
from .gguf_files import is_gguf_file
from .safetensors_header import Header, read_header, read_values
from .scaled_files import check_formats, has_scales
from .single_file_names import UNET, usual_names

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
"""Limits of a configuration, above those of any model."""

_BLOCK = re.compile(rf"{re.escape(UNET)}((?:input|output)_blocks\.\d{{1,4}}|middle_block)\.")
_PARTS = "give it with --transformer, and again with --text-encoder and --vae where it holds these, and a --tokenizer"
_OF_PARTS = ("FLUX", "SD3", "Z-Image", "Qwen-Image")
"""Results of :func:`describe` for models that are given as files of their parts."""

_STORED = "in fp16, or in fp8 or int8 with scales"
"""Words for the further types in which the weights of whole checkpoints are read."""

_WEIGHTS = re.compile(
    r"(?:model|pytorch_model|diffusion_pytorch_model)(?:-\d{5}-of-\d{5})?(?:\.(?P<variant>[A-Za-z]\w*?))?"
    r"(?:-\d{5}-of-\d{5})?\.(?P<suffix>safetensors|bin)"
)
"""A file of weights in a part of a diffusers folder; the number of a shard is before its variant or behind."""

_TEXTS, _CLIP_TOKENS = ("cond_stage_model.", "conditioner."), 77
_NO_PICKLE = "it is a pickle, and a pickle can run any program; get it as .safetensors, or trust it with --allow-pickle"


@dataclass(frozen=True)
class OwnUNet:
    """A UNet in a single file that is not the architecture's.

    Attributes:
        config: its configuration.
        load: makes it of the file's weights by name, of the configuration, and of a type (None: float32). None: it has
            the layers of its configuration, by the names that CompVis would give them.
    """

    config: Mapping[str, Any]
    load: Callable[[Mapping[str, Any], Mapping[str, Any], Any], Any] | None = None


@dataclass(frozen=True)
class CheckpointKind:
    """Contents of a single file.

    Attributes:
        name: the built-in architecture.
        in_channels: input channels of its UNet.
        prediction: prediction type of its UNet.
        unet: its UNet, if it is not the architecture's.
        zero_snr: True if its noise schedule ends at pure noise (zero terminal SNR).
        continuous: the scheduler of a model that is sampled by noise levels (EDM), None for all other models.
        latents: mean and deviation of its latents, where the file states them.
    """

    name: str
    in_channels: int = 4
    prediction: Prediction = "epsilon"
    unet: OwnUNet | None = None
    zero_snr: bool = False
    continuous: Mapping[str, Any] | None = None
    latents: Mapping[str, Any] = field(default_factory=dict)


def check_model(path: Path, task: Task, allow_pickle: bool = False) -> None:
    """Check every file of a model before anything is loaded.

    Args:
        path: a single file or a diffusers folder.
        task: what the model shall do.
        allow_pickle: True to accept pickles.

    Raises:
        CheckpointError: a file is unreadable, truncated, of an unknown kind, for another task, or a pickle that is not
            allowed.
    """
    if path.is_dir():
        pipeline_prefix(path)
        check_folder(path, allow_pickle)
        check_channels(path, folder_configuration(path).get("unet", {}).get("in_channels", 4), task)
    elif not is_pickle(path, allow_pickle):
        check_channels(path, kind_of(path).in_channels, task)


def configuration(model: str | None) -> dict[str, Any]:
    """The configurations of the models of a built-in name, a folder or a file; None: the demo model.

    Raises:
        CheckpointError: missing, truncated, of an unknown kind, or a pickle, which has no header to read.
    """
    if model in BUILT_IN:
        return architecture(model or "")
    path = model_path(model)
    if path.is_dir():
        check_folder_formats(path)
        return folder_configuration(path)
    if path.suffix.lower() in PICKLES:
        raise CheckpointError(f"{path} is a pickle, which has no header to plan from: give a .safetensors file")
    kind = kind_of(path)
    return single_file_config(kind, kind.prediction)


def model_path(model: str | Path | None) -> Path:
    """Path of ``model`` on disk; None is the demo model.

    Raises:
        CheckpointError: the path does not exist.
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
    configs: dict[str, Any] = {}
    for name in MODELS:
        file = path / name / "config.json"
        if file.is_file():
            configs[name] = _checked_shapes(file, _read_table(file))
    if "transformer" in configs:
        plain = {name: value for name, value in read_index(path).items() if isinstance(value, bool | int | float | str)}
        options = {name: value for name, value in plain.items() if not name.startswith("_")}
        return configs | {"pipeline": pipeline_prefix(path), "options": options}
    if "unet" not in configs:
        raise CheckpointError(f"{path} is not a diffusers folder: it has no config.json of a unet or a transformer")
    return configs


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
    """Beginning of the class name of a diffusers folder's pipeline: "StableDiffusionXL", "Flux"."""
    name = str(read_index(folder).get("_class_name", ""))
    doors.find()
    theirs = (name.removesuffix("Pipeline"),) if doors.FAMILIES else ()  # which of them serves it is seen later
    prefixes = (*_PREFIXES, *theirs)
    prefix: str | None = next(
        (prefix for prefix in prefixes for end in SUFFIXES.values() if name == prefix + end), None
    )
    if prefix is None:
        raise CheckpointError(f"{folder} holds a {name or 'nameless pipeline'}: {WHOLE} are served")
    return prefix


def read_index(folder: Path) -> dict[str, Any]:
    """Read ``model_index.json`` of a diffusers folder.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    file = folder / "model_index.json"
    if not file.is_file():
        inside = ", ".join(sorted(part.name for part in folder.iterdir())[:5]) or "nothing"
        raise CheckpointError(f"{folder} is not a diffusers folder: it has no model_index.json (it holds {inside})")
    return _read_table(file)


def _read_table(file: Path) -> dict[str, Any]:
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(table, dict):
            raise ValueError("it is not a table")
        return table
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def check_folder(folder: Path, allow_pickle: bool = False) -> None:
    """Check every weight file of the diffusers folder at ``folder``.

    Args:
        folder: a diffusers folder.
        allow_pickle: True to accept pickles.

    Raises:
        CheckpointError: a file is unreadable, truncated, stored in a way that is not read, or a pickle that is not
            allowed.
    """
    for part in sorted(path for path in folder.iterdir() if path.is_dir() and path.name != "safety_checker"):
        for file in part.glob("*.safetensors"):
            read_header(file)
        weight_files(part, allow_pickle)
    check_folder_formats(folder)


def check_folder_formats(folder: Path) -> None:
    """Raise CheckpointError where a part of a diffusers folder has scales next to its weights, of which only what the
    part's configuration names would be read."""
    for part in folder.iterdir():
        if part.name not in MODELS or "quantization_config" in _config_of(part):
            continue
        for file in weight_files(part, allow_pickle=True)[1]:
            if file.suffix == ".safetensors":
                header = read_header(file)
                check_formats(file, header, "or give the whole model as one file with --model")
                if has_scales(header):
                    raise CheckpointError(
                        f"{file} holds weights of 8 bits with separate scales, which a diffusers folder cannot "
                        "describe: get the folder in fp16 or bf16, or the model as one .safetensors file"
                    )


def _config_of(part: Path) -> dict[str, Any]:
    file = part / "config.json"
    return _read_table(file) if file.is_file() else {}


def weight_files(part: Path, allow_pickle: bool = False) -> tuple[str | None, list[Path]]:
    """Find the weight files of a part of a diffusers folder.

    Of several variants the plain one (None) is read, else fp16, else bf16, else the first.

    Args:
        part: folder of the part.
        allow_pickle: True to accept pickles.

    Returns:
        The name of the variant, and its files.

    Raises:
        CheckpointError: there are only pickles, and they are not allowed.
    """
    files: dict[tuple[bool, str], list[Path]] = {}
    for file in sorted(part.glob("*")):
        if match := _WEIGHTS.fullmatch(file.name):
            files.setdefault((match["suffix"] == "bin", match["variant"] or ""), []).append(file)
    if not files:
        return None, []
    order = ("", "fp16", "bf16")
    pickled, variant = min(files, key=lambda key: (key[0], order.index(key[1]) if key[1] in order else 3, key[1]))
    if pickled and not allow_pickle:
        raise CheckpointError(f"{files[pickled, variant][0]} cannot be loaded: {_NO_PICKLE}")
    return variant or None, files[pickled, variant]


def is_pickle(path: Path, allowed: bool) -> bool:
    """Return True if the file at ``path`` is a pickle, and ``allowed``.

    Raises:
        CheckpointError: it is a pickle and not allowed, or not a regular file.
    """
    if path.suffix.lower() not in PICKLES:
        return False
    if not allowed:
        raise CheckpointError(f"{path} cannot be loaded: {_NO_PICKLE}")
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} cannot be read: it is not a regular file")
    return True


def check_channels(path: Path, channels: int, task: Task) -> None:
    """Check that a task gives a UNet all its input channels.

    Args:
        path: the model, for the error.
        channels: input channels of its UNet.
        task: what the model shall do.

    Raises:
        CheckpointError: the UNet needs more than ``task`` gives it.
    """
    if channels == 9 and task != "inpaint":
        raise CheckpointError(f"{path} is an inpainting model: give it a picture and a mask (--init-image and --mask)")


def kind_of(path: Path) -> CheckpointKind:
    """The kind of the single ``.safetensors`` file at ``path``.

    Raises:
        CheckpointError: as :func:`detect`, and where weights are stored in a way that is not read.
    """
    if is_gguf_file(path):
        raise CheckpointError(f"{path} is a GGUF file, which holds a transformer alone: give it with --transformer")
    header = read_header(path)
    check_formats(path, header, _STORED)
    header = rename_to_usual(header)
    return detect(header, path, lambda name: read_values(path, header, name))


def rename_to_usual(header: Header) -> Header:
    """``header`` by the names that most single files have."""
    names = usual_names(header.tensors)
    return Header({names[name]: entry for name, entry in header.tensors.items()}, header.metadata, header.data_offset)


def _deviation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def single_file_config(kind: CheckpointKind, prediction: str) -> dict[str, Any]:
    """Return the architecture of ``kind`` with the facts that the file itself decides.

    Args:
        kind: from ``detect``.
        prediction: "epsilon" or "v_prediction".
    """
    config = architecture(kind.name)
    if kind.unet is not None:
        config["unet"] = dict(kind.unet.config)
    config["unet"]["in_channels"] = kind.in_channels
    config["scheduler"]["prediction_type"] = prediction
    if kind.zero_snr and prediction == "v_prediction":  # noise cannot be predicted where there is nothing else
        config["scheduler"] |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        if config["scheduler"]["_class_name"] == "PNDMScheduler":  # which cannot rescale
            config["scheduler"]["_class_name"] = "DDIMScheduler"
            del config["scheduler"]["skip_prk_steps"]
    if kind.continuous is not None:
        config["scheduler"] = dict(kind.continuous)
    config["vae"] |= kind.latents
    if kind.name == "sd21" and prediction == "epsilon":
        config["unet"]["sample_size"] = 64
        config["vae"]["sample_size"] = 512
    return config


def detect(header: Header, path: Path, values: Callable[[str], list[float]]) -> CheckpointKind:
    """The kind of a single file, from names and shapes in its header, by their usual names.

    What SD2.x predicts cannot be read from names: it is taken from the file's ModelSpec metadata, else from the spread
    of one bias in the last attention block, as ComfyUI does (above 0.09 in the models that predict v). SDXL predicts
    noise unless the file carries the mark "v_pred".

    Args:
        values: gives the numbers of the tensor of a name.

    Raises:
        CheckpointError: another kind, or a file in which a part is missing.
    """
    first = header.shape(UNET + "input_blocks.0.0.weight")
    if not first:
        looks = describe(header)
        remedy = f": {_PARTS}" if looks in _OF_PARTS else ""
        raise CheckpointError(f"{path} is not an SD1.x, SD2.x or SDXL checkpoint: it looks like {looks}{remedy}")
    blocks = (f"{UNET}input_blocks.{i}.1.transformer_blocks.0.attn2.to_k.weight" for i in (1, 2, 3, 4))
    context = next((header.shape(name)[-1] for name in blocks if header.shape(name)), 0)
    parts = {
        768: ("sd15", ("cond_stage_model.transformer.text_model.",)),
        1024: ("sd21", ("cond_stage_model.",)),
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
    _check_text_length(header, path)
    unet, prediction = _own_unet(name, header, path), _prediction(name, header, values)
    kind = CheckpointKind(name, first[1], prediction, unet, "ztsnr" in header.tensors)
    return replace(kind, **_continuous(header, path, values))


def _check_text_length(header: Header, path: Path) -> None:
    for name in header.tensors:
        if name.startswith(_TEXTS) and name.endswith(("embeddings.position_embedding.weight", "positional_embedding")):
            tokens = header.shape(name)[0]
            if tokens > _CLIP_TOKENS:
                raise CheckpointError(
                    f"{path} has Long-CLIP as its text encoder, which reads {tokens} tokens: get the file with the "
                    f"usual CLIP, which reads {_CLIP_TOKENS}"
                )


def _read_numbers(
    header: Header, path: Path, values: Callable[[str], list[float]], name: str, count: int
) -> list[float]:
    """The numbers of a file's tensor ``name``, which has ``count``."""
    numbers = values(name) if math.prod(header.shape(name)) == count else []
    if not numbers or not all(map(math.isfinite, numbers)):
        raise CheckpointError(f"{path} is damaged: its {name} must be {count} finite numbers; download it again")
    return numbers


def _continuous(header: Header, path: Path, values: Callable[[str], list[float]]) -> dict[str, Any]:
    """The scheduler of a model that is sampled by noise levels, which SDXL's descendants state by marks."""
    if {"edm_mean", "edm_std"} <= header.tensors.keys():  # Playground 2.5
        mean, deviation = (
            _read_numbers(header, path, values, "edm_mean", 4),
            _read_numbers(header, path, values, "edm_std", 4),
        )
        latents = {"latents_mean": mean, "latents_std": deviation, "scaling_factor": 0.5}
        levels = {"sigma_min": 0.002, "sigma_max": 80.0, "sigma_data": 0.5}
        scheduler = {"_class_name": "EDMDPMSolverMultistepScheduler", **levels, "prediction_type": "epsilon"}
        return {"continuous": scheduler, "latents": latents}
    if "edm_vpred.sigma_max" in header.tensors:  # CosXL
        lowest, highest = (
            _read_numbers(header, path, values, name, 1)[0] if name in header.tensors else 0.002
            for name in ("edm_vpred.sigma_min", "edm_vpred.sigma_max")
        )
        levels = {"sigma_min": lowest, "sigma_max": highest, "sigma_data": 1.0}
        kind = {"_class_name": "EDMEulerScheduler", "sigma_schedule": "exponential"}
        return {"continuous": {**kind, **levels, "prediction_type": "v_prediction"}, "prediction": "v_prediction"}
    return {}


def _own_unet(name: str, header: Header, path: Path) -> OwnUNet | None:
    """The UNet in a file, None where it is the architecture's.

    Raises:
        CheckpointError: nobody knows such a UNet.
    """
    whole = architecture(name)["unet"]
    doors.find()
    for recognise in doors.UNETS.values():
        recognised: OwnUNet | None = recognise(name, whole, header, path)
        if recognised is not None:
            return recognised
    count = sum(layers + 1 for layers in layers_per_block(whole))
    usual = {"middle_block", *(f"{side}_blocks.{number}" for side in ("input", "output") for number in range(count))}
    if {match[1] for key in header.tensors if (match := _BLOCK.match(key))} != usual:
        raise CheckpointError(
            f"{path} has a UNet whose blocks do not go together: weights are missing, or it is of another kind"
        )
    return None


def _prediction(name: str, header: Header, values: Callable[[str], list[float]]) -> Prediction:
    stated = header.metadata.get("modelspec.prediction_type", "").lower()
    if stated in ("v", "v_prediction") or "v_pred" in header.tensors:
        return "v_prediction"
    if stated == "epsilon" or name != "sd21":
        return "epsilon"
    biases = (f"{UNET}output_blocks.{place}.1.transformer_blocks.0.norm1.bias" for place in range(11, 0, -1))
    last = next((bias for bias in biases if bias in header.tensors), None)
    predicts_v = last is None or _deviation(values(last)) > 0.09
    return "v_prediction" if predicts_v else "epsilon"


def describe(header: Header) -> str:
    """Words for the kind of an unsupported file, for messages."""
    signs = {
        "a LoRA (load it onto a model)": ("lora_unet_", "lora_te", ".lora_A.", ".lora_down."),
        "FLUX": ("double_blocks.", "single_transformer_blocks."),
        "SD3": ("joint_blocks.", "context_embedder."),
        "Z-Image": ("noise_refiner.",),
        "Qwen-Image": ("transformer_blocks.0.attn.add_q_proj.",),
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
