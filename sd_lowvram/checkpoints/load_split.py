"""Loads a model of split files: each part from its file, its weights by the names of diffusers and transformers.

Transformers and most autoencoders go through diffusers' own converters. Weights stay mapped from their files where
their type is the one that is asked for; 8 bits stay 8 bits, and blocks of GGUF blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .architectures import MODELS, class_of
from .complete import check_complete
from .gguf_files import gguf_weights, is_gguf_file
from .safetensors_header import read_header
from .scaled_files import convert_names, fill, split_scales, weight_of
from .split_files import Weights, tokenizers_of, weights_of
from .tokenizers import check_tokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_TORCH_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64", "I8": "int8", "U8": "uint8"}
_TORCH_TYPES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "BOOL": "bool"}


def load_split(folder: Path, pipeline: Any, dtype: torch.dtype | None) -> Any:
    """A ``pipeline`` of this class of the parts in ``folder``, on the CPU.

    Args:
        dtype: type of the weights that are not stored in 8 bits; None: float32.

    Raises:
        CheckpointError: a part lacks weights.
    """
    import torch

    parts: dict[str, Any] = {}
    for name, place in tokenizers_of(folder).items():
        config = parts_config(folder, name)
        parts[name] = _tokenizer(place, config)
        check_tokenizer(parts[name], config, place)
    for place in sorted(folder.iterdir()):
        if place.name in MODELS:
            parts[place.name] = load_part(place, dtype or torch.float32)
        elif place.name == "scheduler":
            parts["scheduler"] = _scheduler(place)
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    options = {name: value for name, value in index.items() if not name.startswith("_")}
    return pipeline(**parts, **options)


def parts_config(folder: Path, tokenizer: str) -> dict[str, Any]:
    """The configuration of the text encoder that reads what a tokenizer makes."""
    name = tokenizer.replace("tokenizer", "text_encoder")
    config: dict[str, Any] = json.loads((folder / name / "config.json").read_text(encoding="utf-8"))
    return config


def _tokenizer(place: Path, config: Mapping[str, Any]) -> Any:
    import transformers

    kind = str(config["architectures"][0])
    begins = next(name for mark, name in (("CLIP", "CLIP"), ("T5", "T5"), ("Qwen", "Qwen2")) if mark in kind)
    fast = begins != "CLIP" and hasattr(transformers, f"{begins}TokenizerFast")
    return getattr(transformers, f"{begins}Tokenizer{'Fast' if fast else ''}").from_pretrained(
        place, local_files_only=True
    )


def _scheduler(place: Path) -> Any:
    config = json.loads((place / "scheduler_config.json").read_text(encoding="utf-8"))
    return class_of(config).from_config(config)


def load_part(place: Path, dtype: torch.dtype, *, meta: bool = False) -> nn.Module:
    """The model of a part's folder.

    Args:
        dtype: type of the weights that are not stored in 8 bits.
        meta: without contents, of the types and shapes that it would have.

    Raises:
        CheckpointError: its file lacks weights.
    """
    config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    model: nn.Module = _empty(config, meta)
    source = weights_of(place)
    state = _weights(source, meta)
    names = set(model.state_dict())
    try:
        weights, scales = convert_names(
            *split_scales(state), lambda held: _rename_weights(config, held, names, source.layout.diffusers)
        )
    except KeyError as error:  # of a converter, which takes each name for granted
        raise CheckpointError(f"{source.path} lacks weights of its {type(model).__name__}: {error}") from error
    fill(model, {name: tensor for name, tensor in weights.items() if name in names}, scales, dtype)
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()
    if not meta:
        check_complete(source.path, model)
    return model.eval().requires_grad_(False)


def _empty(config: dict[str, Any], meta: bool) -> Any:
    """The model without weights; what it computes by itself when it is made is there, unless all is on ``meta``."""
    import accelerate
    import torch

    from .architectures import empty_model
    from .unfilled import Unfilled

    if meta:
        with torch.device("meta"), Unfilled():
            return empty_model(config)
    with accelerate.init_empty_weights(include_buffers=False):
        return empty_model(config)


def _weights(source: Weights, meta: bool) -> dict[str, Tensor]:
    """The weights of a part and their facts, by their names in its layout, mapped from the file; on ``meta``
    their types and shapes."""
    import torch
    from safetensors.torch import load_file

    path, layout, prefix = source
    if is_gguf_file(path):
        held = gguf_weights(path, meta=meta)
    elif not meta:
        held = load_file(path)
    else:
        held = {
            name: torch.empty(entry.shape, dtype=getattr(torch, _TORCH_TYPES[entry.dtype]), device="meta")
            for name, entry in read_header(path).tensors.items()
        }
    inner = {name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(prefix)}
    return {name: tensor for name, tensor in inner.items() if layout.names.fullmatch(weight_of(name))}


def _rename_weights(
    config: Mapping[str, Any], held: dict[str, Any], names: set[str], diffusers: bool
) -> Mapping[str, Any]:
    """Weights by the names of diffusers, or of transformers as it is installed.

    Args:
        names: of the model's weights.
        diffusers: the names are those of diffusers already.
    """
    if diffusers:
        return held
    if "architectures" in config:
        return _text_encoder(config, held, names)
    kind = config["_class_name"]
    if kind == "AutoencoderKLFlux2":
        return _autoencoder_of_flux2(held, config)
    if kind not in ("FluxTransformer2DModel", "ChromaTransformer2DModel"):
        return _converter(kind)(dict(held), config=config)
    plain = {_NORM.sub(r"\1.scale", name): tensor for name, tensor in held.items()}
    joined = _split_first_layers(plain)
    return {**_converter(kind)(plain, config=config), **joined}


_NORM = re.compile(r"(norms\.\d+|(?:query|key)_norm)\.weight")
"""Names of norms, of which some files call the scale a weight."""

_JOINED = re.compile(r"single_blocks\.(\d+)\.linear1\.(weight|bias)")
_PLACEHOLDER = 7 * 3072


def _split_first_layers(held: dict[str, Any]) -> dict[str, Any]:
    """The first layers of FLUX.1's single blocks, of which the converter knows one width alone; it is given a
    placeholder of that."""
    import torch

    weights: dict[str, Any] = {}
    for name in list(held):
        if match := _JOINED.fullmatch(name):
            block, last = f"single_transformer_blocks.{match[1]}", match[2]
            width = len(held[f"single_blocks.{match[1]}.linear2.bias"])
            q, k, v, mlp = held[name].split([width, width, width, len(held[name]) - 3 * width])
            weights |= {f"{block}.attn.to_q.{last}": q, f"{block}.attn.to_k.{last}": k, f"{block}.attn.to_v.{last}": v}
            weights[f"{block}.proj_mlp.{last}"] = mlp
            held[name] = torch.empty(1).expand(_PLACEHOLDER, *[1] * (held[name].dim() - 1))
    return weights


def _converter(kind: str) -> Callable[..., Mapping[str, Any]]:
    from diffusers.loaders import single_file_model

    classes = single_file_model.SINGLE_FILE_LOADABLE_CLASSES
    like = {"AutoencoderKLQwenImage": "AutoencoderKLWan"}.get(kind, kind)  # the same layers under the same names
    if like not in classes:
        raise CheckpointError(f"diffusers as it is installed reads no single files of {kind}: install a newer one")
    convert: Callable[..., Mapping[str, Any]] = classes[like]["checkpoint_mapping_fn"]
    return convert


def _autoencoder_of_flux2(held: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The autoencoder of FLUX.2: FLUX.1's with 1x1 convolutions inside the halves, and statistics of its latents."""
    plain = {
        name.replace("encoder.quant_conv.", "quant_conv.").replace(
            "decoder.post_quant_conv.", "post_quant_conv."
        ): weight
        for name, weight in held.items()
    }
    norm = {name: plain.pop(name) for name in list(plain) if name.startswith("bn.")}
    return {**_converter("AutoencoderKL")(plain, config=config), **norm}


def _text_encoder(config: Mapping[str, Any], held: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Names of transformers, which have had other beginnings in its versions."""
    import torch

    renamed = {}
    for name, tensor in held.items():
        inner = name.removeprefix("model.")
        tried = (name, name.removeprefix("text_model."), inner, f"model.{name}", f"model.language_model.{inner}")
        candidate = next((candidate for candidate in tried if candidate in names), None)
        if candidate is not None:
            renamed[candidate] = tensor
    shared = "shared.weight"
    if (
        shared in names and shared not in renamed and "encoder.embed_tokens.weight" in renamed
    ):  # T5's table, under either name
        renamed[shared] = renamed["encoder.embed_tokens.weight"]
    projection = "text_projection.weight"
    if projection in names and projection not in renamed:  # files of CLIP-L that were made for FLUX.1 have none
        renamed[projection] = torch.eye(config["hidden_size"])
    return renamed
