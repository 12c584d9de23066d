"""The built-in architectures, as data: what diffusers would fetch from a hub is here, and nothing needs a network.

The configurations state facts of the published models: SD1.5 (Rombach et al. 2022), SD2.1 (768, v-prediction) and SDXL
base (Podell et al. 2023). The CLIP vocabulary is OpenAI's, MIT, see data/licences.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import doors
from ..errors import BadInputError, CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import nn

DATA = Path(__file__).parents[1] / "data"
NAMES = ("sd15", "sd21", "sdxl")
TRANSFORMERS = (
    *("flux1-dev", "flux1-schnell", "klein-4b", "klein-9b", "sd3.5-medium", "sd3.5-large"),
    *("z-image", "z-image-turbo", "chroma1", "qwen-image", "krea2"),
)
"""Today's models, which can be planned by their names."""


def _read(name: str) -> dict[str, Any]:
    description: dict[str, Any] = json.loads((DATA / "architectures" / f"{name}.json").read_text(encoding="utf-8"))
    return description


PIPELINES: tuple[str, ...] = tuple(_read("pipelines")["models"])
"""Pipelines that can be planned by their names, by their own call."""

BUILT_IN = (*NAMES, *TRANSFORMERS, *PIPELINES)

MODELS = ("unet", "vae", "text_encoder", "text_encoder_2", "text_encoder_3", "transformer")
NO_MODELS = ("pipeline", "options", "call", "scheduler", "billions", "licence", "sources")
"""Keys of :func:`architecture` that are not models of today's pipelines."""

_START, _END = "<|startoftext|>", "<|endoftext|>"


def architecture(name: str) -> dict[str, Any]:
    """Component name -> configuration, as diffusers and transformers write them, for one of ``BUILT_IN``.

    "pipeline" holds the prefix of the pipeline's class ("StableDiffusion", "Flux"), "options" what the class is made
    with besides, "call" what it is called with otherwise than by itself. Those of ``PIPELINES`` have a "scheduler",
    their "licence", the "sources" of the numbers, and the "billions" of parameters that the makers state.

    Raises:
        BadInputError: another name.
    """
    if name in NAMES:
        return _read(name)
    models, parts = (_read("transformers")[kind] | _read("pipelines")[kind] for kind in ("models", "parts"))
    if name not in models:
        raise BadInputError(f"unknown architecture {name!r}: choose one of {', '.join(BUILT_IN)}")
    described: dict[str, Any] = models[name]
    return {key: value if key in NO_MODELS else parts[value] for key, value in described.items()}


def parts_of_transformers() -> dict[str, dict[str, Any]]:
    """The configurations that today's models are made of, by names of our own ("t5-xxl")."""
    parts: dict[str, dict[str, Any]] = _read("transformers")["parts"]
    return parts


def schedulers_of_transformers() -> dict[str, dict[str, Any]]:
    """The configurations of their schedulers, by the kind of the transformer ("flux1")."""
    schedulers: dict[str, dict[str, Any]] = _read("transformers")["schedulers"]
    return schedulers


def layers_per_block(config: Mapping[str, Any]) -> list[int]:
    """Layers of each down block, from the outside in; the opposite up block has one more."""
    layers, blocks = config["layers_per_block"], len(config["down_block_types"])
    return [layers] * blocks if isinstance(layers, int) else [*layers]


AUTOENCODERS = ("sd15", "sdxl", "flux", "flux2", "qwen-image")
"""Names for :func:`autoencoder`."""

_WITHOUT_1X1 = {"use_quant_conv": False, "use_post_quant_conv": False}


def autoencoder(name: str) -> dict[str, Any]:
    """The configuration of a model's autoencoder; SD3, Z-Image and Chroma have that of FLUX.1, but for its scale.

    Raises:
        BadInputError: another name.
    """
    if name not in AUTOENCODERS:
        raise BadInputError(f"unknown autoencoder {name!r}: choose one of {', '.join(AUTOENCODERS)}")
    if name == "qwen-image":  # Qwen, 2025; that of Wan 2.1
        return {"_class_name": "AutoencoderKLQwenImage", "z_dim": 16}
    config: dict[str, Any] = architecture("sdxl" if name.startswith("flux") else name)["vae"]
    if name == "flux":  # Black Forest Labs, 2024
        config |= {**_WITHOUT_1X1, "latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159}
    elif name == "flux2":  # the same, 2025
        foreign = ("scaling_factor", "force_upcast")
        config = {key: value for key, value in config.items() if key not in foreign} | {"latent_channels": 32}
        config["_class_name"] = "AutoencoderKLFlux2"
    return config


def build_components(
    name: str | dict[str, Any],
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    only: tuple[str, ...] = MODELS,
    seed: int = 0,
) -> dict[str, nn.Module]:
    """Build the models of an architecture with random weights, in evaluation mode.

    The weights are uniform, scaled so that activations neither vanish nor overflow; equal seeds give equal weights.

    Args:
        name: a built-in architecture, or a dictionary like ``architecture`` returns.
        dtype: type of the weights; None: float32.
        device: on "meta" nothing is allocated.
        only: names of the components to build.
        seed: of the weights.

    Returns:
        The models by component name.
    """
    import torch

    from .unfilled import Unfilled

    config = architecture(name) if isinstance(name, str) else name
    models = {}
    for component in only:
        if component in config:
            with torch.device("meta"), Unfilled():
                model = empty_model(config[component])
            # The base class's `to`: diffusers' own warns of parts that stay in float32, which these models do not have.
            model = torch.nn.Module.to(model, dtype or torch.float32).eval().requires_grad_(False)
            models[component] = model if device == "meta" else _fill_with_noise(model, torch.device(device), seed)
    return models


def empty_model(config: dict[str, Any]) -> Any:
    """The model of a configuration of diffusers or of transformers, made as its class makes it."""
    if "_class_name" in config:
        return class_of(config).from_config(config)
    import transformers

    kind = getattr(transformers, config["architectures"][0])
    return kind(kind.config_class(**config))


def type_for(config: Mapping[str, Any], dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype``, or bfloat16 in place of float16 for transformers, which are made for its range."""
    import torch

    return torch.bfloat16 if "transformer" in config and dtype == torch.float16 else dtype


def pipeline_class(prefix: str, suffix: str = "Pipeline") -> Any:
    """The pipeline of diffusers, or one that was registered, whose name is this.

    Raises:
        CheckpointError: there is none.
    """
    return class_of({"_class_name": prefix + suffix})


def class_of(config: Mapping[str, Any]) -> Any:
    """The class that a model's configuration names: of diffusers, or one that was registered.

    diffusers takes a third-party class from a folder only if its module was imported before.

    Raises:
        CheckpointError: there is none of this name.
    """
    import diffusers

    name = str(config.get("_class_name"))
    doors.find()
    cls = doors.CLASSES[name]() if name in doors.CLASSES else getattr(diffusers, name, None)
    if cls is None:
        raise CheckpointError(
            f"a model of class {name} is known neither to diffusers nor to sd-lowvram as it is installed"
        )
    return cls


def _fill_with_noise(model: nn.Module, device: torch.device, seed: int) -> nn.Module:
    import torch

    from ..weights import draw_weights

    model = draw_weights(model, device, seed)
    for name, buffer in model.named_buffers():
        if name.endswith("position_ids"):
            buffer.copy_(torch.arange(buffer.shape[-1]).expand_as(buffer))
        elif name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            buffer.fill_(float(name.endswith("running_var")))
        else:
            raise NotImplementedError(f"no rule how to fill the buffer {name}")
    return model


def write_folder(config: dict[str, Any], pipeline: str, folder: Path) -> None:
    """Write ``config`` as a diffusers folder without weights, for a pipeline of class ``pipeline``."""
    index: dict[str, Any] = {"_class_name": pipeline, "_diffusers_version": "0.31.0"}
    if "text_encoder_2" in config:
        index["force_zeros_for_empty_prompt"] = True
    else:
        index |= {"safety_checker": [None, None], "feature_extractor": [None, None], "requires_safety_checker": False}
    for component, part in config.items():
        if component == "pipeline":
            continue
        target = folder / component
        target.mkdir()
        if component.startswith("tokenizer"):
            index[component] = ["transformers", "CLIPTokenizer"]
            write_tokenizer(part, target)
        else:
            own = "_class_name" in part
            index[component] = ["diffusers", part["_class_name"]] if own else ["transformers", part["architectures"][0]]
            name = "scheduler_config.json" if component == "scheduler" else "config.json"
            (target / name).write_text(json.dumps(part), encoding="utf-8")
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")


@lru_cache
def _merges() -> tuple[str, ...]:
    text = gzip.decompress((DATA / "clip" / "merges.txt.gz").read_bytes()).decode("utf-8")
    return tuple(text.splitlines())


def vocabulary() -> dict[str, int]:
    """Token -> number of CLIP's byte-pair vocabulary (49,408 tokens).

    Numbered as CLIP does: the 256 bytes, the same at the end of a word, every merge in order, start and end of text.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    # Bytes without a glyph of their own are written as the letters from U+0100 on, after all glyphs.
    letters = [chr(byte) for byte in printable] + [chr(256 + place) for place in range(256 - len(printable))]
    words = [letter + "</w>" for letter in letters]
    tokens = [*letters, *words, *(merge.replace(" ", "") for merge in _merges()), _START, _END]
    return {token: number for number, token in enumerate(tokens)}


def write_tokenizer(options: dict[str, Any], folder: Path) -> None:
    """Write CLIP's tokenizer into a folder.

    Args:
        options: ``pad_token`` and ``model_max_length`` are read.
        folder: an existing folder.
    """
    special = {"bos_token": _START, "eos_token": _END, "unk_token": _END, "pad_token": options["pad_token"]}
    files = {
        "vocab.json": vocabulary(),
        "special_tokens_map.json": special,
        "tokenizer_config.json": {
            **special,
            "tokenizer_class": "CLIPTokenizer",
            "do_lower_case": True,
            "add_prefix_space": False,
            "model_max_length": options["model_max_length"],
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *_merges()]) + "\n", encoding="utf-8")
