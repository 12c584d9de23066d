"""Single files of SD1.x and SD2.x in the layout of CompVis and Stability, written atomically.

A file describes a model only by names, shapes and, for some loaders, the prediction type. So it is written only for
models that these determine: those with the widths of SD1.5 or SD2.1, with or without removed layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoints.architectures import build_components
from ...checkpoints.inspection import CheckpointKind, single_file_config
from ...checkpoints.single_file_names import single_file_state
from ...errors import BadInputError
from ...files import atomic_write
from .unet_layout import KEPT, NOTED, cut_configuration, layout_of

_FREE = {
    "unet": ("sample_size", "layers_per_block", "upcast_attention", "dropout"),
    "vae": ("sample_size", "force_upcast", "latents_mean", "latents_std"),
}
"""Settings that may differ from the built-in architecture: the file shows them, or they change only rounding."""
_OF_TEXT = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("hidden_act", "layer_norm_eps", "max_position_embeddings", "vocab_size"),
)
_INSTEAD = "name a folder with --out"


def check_single_file(parts: Mapping[str, Any]) -> None:
    """Raise BadInputError unless a single file can hold the model of ``parts``, which need no weights.

    Args:
        parts: unet, vae and text_encoder.
    """
    unet = parts["unet"].config
    _check_plain(unet)
    name = {768: "sd15", 1024: "sd21", 2048: "sdxl"}.get(unet["cross_attention_dim"])
    if name == "sdxl":
        raise BadInputError(f"this model is SDXL, and single files are written of SD1.x and SD2.x: {_INSTEAD}")
    if name is None:
        raise BadInputError(
            "single files are recognised by the width of their text, 768 for SD1.x and 1024 for SD2.x, and this "
            f"model's is {unet['cross_attention_dim']}: {_INSTEAD}"
        )
    if unet["in_channels"] not in (4, 9):
        raise BadInputError(f"a UNet of {unet['in_channels']} input channels loads from no single file: {_INSTEAD}")
    config = single_file_config(CheckpointKind(name, unet["in_channels"]), "epsilon")
    config["unet"] = cut_configuration(config["unet"], layout_of(unet))
    usual: dict[str, Any] = build_components(config, device="meta")
    for part, free in _FREE.items():
        ours, theirs = dict(parts[part].config), dict(usual[part].config)
        _check_alike(part, ours, {key: value for key, value in theirs.items() if key not in free})
    texts = (
        {key: getattr(components["text_encoder"].config, key) for key in _OF_TEXT} for components in (parts, usual)
    )
    _check_alike("text_encoder", *texts)


def _check_plain(unet: Mapping[str, Any]) -> None:
    if unet.get("experts", 1) != 1:
        raise BadInputError(f"single files have no place for experts of convolutions (CondConv): {_INSTEAD}")
    if unet.get("regions") is not None:
        raise BadInputError(f"single files have no place for regions of self-attention (GRI): {_INSTEAD}")


def _check_alike(part: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for key, usual in theirs.items():
        if not key.startswith("_") and _plain(ours.get(key)) != _plain(usual):
            raise BadInputError(
                f"{key} of this model's {part} is {ours.get(key)}, and whoever loads a single file takes {usual}, "
                f"since the file does not store it: {_INSTEAD}"
            )


def _plain(value: Any) -> Any:
    """The single value of a setting that a configuration gives once, or equally for every block."""
    if not isinstance(value, (list, tuple)):
        return value
    return value[0] if len({*map(str, value)}) == 1 else [*value]


def save_single_file(pipe: Any, file: Path) -> None:
    """Write UNet, autoencoder and text encoder of ``pipe`` to the new ``file``, each in its type.

    Raises:
        BadInputError: a single file cannot hold this model.
        OSError: it cannot be written; nothing is left then.
    """
    from safetensors.torch import save_file

    parts = {name: getattr(pipe, name) for name in ("unet", "vae", "text_encoder")}
    check_single_file(parts)
    state = single_file_state(parts)
    predicts = "v" if pipe.scheduler.config.prediction_type == "v_prediction" else "epsilon"
    metadata = {"format": "pt", "modelspec.prediction_type": predicts}
    if note := pipe.unet.config.get(KEPT):
        metadata[NOTED] = json.dumps(note)
    with atomic_write(file) as temporary:
        save_file(state, temporary, metadata)
