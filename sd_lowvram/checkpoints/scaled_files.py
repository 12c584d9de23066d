"""Weights of 8 bits in ComfyUI's files: facts from the header, and models that hold the weights as they are.

Two layouts are read, as ComfyUI's own code has them: ``scaled_fp8``, in which a layer's ``scale_weight`` is next to
its weight, and the newer one, in which ``weight_scale`` does and ``comfy_quant``, or the file's metadata, says what the
layer is stored as. Weights in fp8 without a scale stay as they are, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .gguf_files import gguf_linear, widened_gguf
from .safetensors_header import Header

if TYPE_CHECKING:
    from torch import Tensor, dtype, nn

SERVED = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")
"""ComfyUI's names of the formats that are read."""

_SCALES = (".scale_weight", ".weight_scale")
_LEFT_OUT = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
"""Suffixes of tensors that a layer does not need if it computes in the model's own type."""

_REFUSED = {
    ".wscales": "nunchaku's 4 bits",
    ".smooth_factor": "nunchaku's 4 bits",
    ".weight_scale_2": "nvfp4",
    ".pre_quant_scale": "smoothed inputs (pre_quant_scale)",
    ".weight_s_rel": "asym_w4a8_int8",
    "bitsandbytes__nf4": "nf4 of bitsandbytes",
    "bitsandbytes__fp4": "fp4 of bitsandbytes",
    ".SCB": "int8 of bitsandbytes",
    ".qzeros": "the 4 bits of GPTQ or AWQ",
    ".weight._data": "the bits of optimum-quanto",
}
"""Names of unsupported formats, by a mark in a weight's name."""


def check_formats(path: Path, header: Header, instead: str = "in fp8 or int8 with scales, or in GGUF") -> None:
    """Look at how the weights of a file are stored, before any of them is read.

    Args:
        instead: what else is read of such files.

    Raises:
        CheckpointError: in a way that is not served, which is named.
    """
    for name in header.tensors:
        for mark, kind in _REFUSED.items():
            if mark in name:
                raise _refusal(path, kind, instead)
    for kind in {_format_of(entry) for entry in _stated_formats(path, header)}:
        if kind not in SERVED:
            raise _refusal(path, kind, instead)


def has_scales(header: Header) -> bool:
    """True if scales are stored next to weights in a file."""
    return any(name.endswith((*_SCALES, ".comfy_quant")) for name in header.tensors)


def _refusal(path: Path, kind: str, instead: str) -> CheckpointError:
    return CheckpointError(
        f"{path} holds weights in {kind}, for which there is no kernel here: get the file in bf16, {instead}"
    )


def _format_of(entry: Mapping[str, Any]) -> str:
    """The format in what ComfyUI writes of a layer; rotated weights are one of their own."""
    more = entry.get("params")
    rotated = entry.get("convrot") or (isinstance(more, Mapping) and more.get("convrot"))
    return f"{entry.get('format')} of rotated weights (convrot)" if rotated else str(entry.get("format"))[:40]


def _stated_formats(path: Path, header: Header) -> Iterator[dict[str, Any]]:
    """ComfyUI's record of each layer with a format of its own."""
    try:
        layers = json.loads(header.metadata.get("_quantization_metadata", "{}")).get("layers", {})
        yield from (dict(layer) for layer in layers.values())
        with open(path, "rb") as file:
            for name, entry in header.tensors.items():
                if name.endswith(".comfy_quant"):
                    file.seek(header.data_offset + entry.begin)
                    yield dict(json.loads(file.read(entry.end - entry.begin)))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: what it says of its weights is not a table ({error})") from error


def weight_of(name: str) -> str:
    """The name of the weight that ``name`` is, or is a fact on; empty: it is a fact on the whole file."""
    mark = next((suffix for suffix in (*_SCALES, *_LEFT_OUT) if name.endswith(suffix)), None)
    if mark is None:
        return name
    layer = name.removesuffix(mark)
    return f"{layer}.weight" if layer else ""


Scales = dict[str, "Tensor"]
"""Scales by the name of their weight."""

Convert = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Function from the weights of a file to those of a model, by name; it may empty the dictionary on the way."""


def split_scales(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Scales]:
    """The weights of a file, and their scales."""
    import torch

    weights: dict[str, Tensor] = {}
    scales: Scales = {}
    for name, tensor in state.items():
        mark = next((suffix for suffix in _SCALES if name.endswith(suffix)), None)
        if mark is not None:
            scales[name.removesuffix(mark) + ".weight"] = tensor.float()
        elif not name.endswith(_LEFT_OUT):
            weights[name] = tensor
    for name in scales:
        if name in weights and weights[name].dtype == torch.uint8:  # older writers stored fp8 in this type
            weights[name] = weights[name].view(torch.float8_e4m3fn)
    return weights, scales


def convert_names(weights: dict[str, Tensor], scales: Scales, convert: Convert) -> tuple[dict[str, Tensor], Scales]:
    """Both by the names of a model.

    A converter cuts, joins and renames weights and knows of no scales. It is therefore called a second time with the
    scales spread to the shape of their weights, of which the first column of each is taken then; without memory, as
    nothing is written out that is only cut.
    """
    import torch

    from ..kernels.scaled import EIGHT_BITS

    unit = torch.ones(())
    spread = {
        name: _scale_by_rows(scales[name], weight) if name in scales else unit.to(weight.device).expand(weight.shape)
        for name, weight in weights.items()
    }
    by_name = dict(convert(dict(weights)))
    if not scales:
        return by_name, {}
    columns = {name: tensor for name, tensor in convert(spread).items() if by_name[name].dtype in EIGHT_BITS}
    return by_name, {name: _shortest(tensor) for name, tensor in columns.items()}


def _scale_by_rows(scale: Tensor, weight: Tensor) -> Tensor:
    shaped = scale.reshape(()) if scale.numel() == 1 else scale.reshape(-1, *[1] * (weight.dim() - 1))
    return shaped.expand(weight.shape)


def _shortest(spread: Tensor) -> Tensor:
    """The scales of a weight's rows (out, 1), or one number where all are alike."""
    rows = spread[:, :1]
    if spread.stride(0) == 0:  # one number, never written out
        return rows[0, 0].clone()
    if rows.device.type != "meta" and bool((rows == rows[0, 0]).all()):
        return rows[0, 0].clone()
    return rows.clone()


def fill(model: nn.Module, state: Mapping[str, Tensor], scales: Scales, computes: dtype) -> list[str]:
    """Assign the weights of ``state`` to ``model``.

    Weights of linear layers in 8 bits, or in blocks of GGUF, stay as they are; the rest is converted to ``computes``.

    Args:
        model: a model without contents.
        state: weights by name.
        scales: scales of weights in 8 bits.
        computes: type in which the model computes.

    Returns:
        The names that the model has no place for.

    Raises:
        CheckpointError: weights in int8 without a scale.
    """
    import torch
    from torch import nn

    from ..kernels.scaled import EIGHT_BITS, ScaledLinear, widen_scaled
    from ..weight_parts import is_gguf

    rest: dict[str, Tensor] = {}
    for name, tensor in state.items():
        blocks = is_gguf(tensor)
        if tensor.dtype not in EIGHT_BITS and not blocks:
            rest[name] = tensor.to(computes) if tensor.is_floating_point() else tensor
            continue
        scale = scales.get(name)
        if scale is None and tensor.dtype == torch.int8:
            raise CheckpointError(f"{name} is stored in int8 without a scale")
        path, _, last = name.rpartition(".")
        owner = _submodule(model, path)
        shape = tuple(tensor.quant_shape if blocks else tensor.shape)  # type: ignore[attr-defined]
        if type(owner) is nn.Linear and last == "weight" and shape == tuple(owner.weight.shape):
            bias = None if owner.bias is None else state.get(f"{path}.bias", owner.bias).to(computes)
            layer = gguf_linear(tensor, bias, computes) if blocks else ScaledLinear(tensor, scale, bias, computes)
            above, _, called = path.rpartition(".")
            setattr(model.get_submodule(above), called, layer)
        else:  # tables, which are looked up, and what is not a matrix
            rest[name] = widened_gguf(tensor, computes) if blocks else widen_scaled(tensor, scale, computes)
    result = model.load_state_dict(rest, strict=False, assign=True)
    return list(result.unexpected_keys)


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
