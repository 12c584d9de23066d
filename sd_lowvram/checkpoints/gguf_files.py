"""Transformers in GGUF files: what their header tells, and their weights, in the file's own blocks, mapped from it.

The ``gguf`` package reads the layout and diffusers has the layers that widen the blocks, both where such a file is
given alone. Names in these files are those of the published checkpoints, so their converters serve.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .safetensors_header import Header, TensorEntry

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def is_gguf_file(path: Path) -> bool:
    """Whether the file at ``path``, or what it is a link to, begins as a GGUF file does."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False  # whoever reads it next says why


def gguf_header(path: Path) -> Header:
    """The tensors of a GGUF file: shapes of the widened weights, and what kind of blocks each is in ("Q4_K").

    Raises:
        CheckpointError: truncated or damaged, of a kind of blocks that nothing here widens, or the ``gguf`` package,
            or a diffusers that has such layers, is not installed.
    """
    served = {kind.name for kind in _utils(path).dequantize_functions} | set(_PLAIN)
    tensors = {}
    for one in _read(path):
        kind = one.tensor_type.name
        if kind not in served:
            raise CheckpointError(
                f"{path} holds {one.name} in {kind}, which diffusers cannot widen: get the file in one of "
                f"{', '.join(sorted(served - set(_PLAIN)))}"
            )
        shape = tuple(int(size) for size in reversed(one.shape))
        tensors[one.name] = TensorEntry(kind, shape, one.data_offset, one.data_offset + one.n_bytes)
    return Header(tensors, {}, 0)


def gguf_weights(path: Path, *, meta: bool) -> dict[str, Tensor]:
    """The weights of a GGUF file by name: blocks as diffusers' ``GGUFParameter``, all else as plain tensors.

    Args:
        meta: without contents.
    """
    import torch

    utils = _utils(path)
    whole = torch.empty(path.stat().st_size, dtype=torch.uint8, device="meta") if meta else _mapped(path)
    weights = {}
    for one in _read(path):
        raw, kind = whole[one.data_offset : one.data_offset + one.n_bytes], one.tensor_type
        if kind.name in _PLAIN:
            shape = tuple(int(size) for size in reversed(one.shape))
            weights[one.name] = raw.view(getattr(torch, _PLAIN[kind.name])).view(shape)
        else:
            weights[one.name] = utils.GGUFParameter(raw.view(one.data.shape), quant_type=kind)
    return weights


def widened_gguf(blocks: Tensor, computes: torch.dtype) -> Tensor:
    """The numbers in a ``GGUFParameter``."""
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

    made: Tensor = dequantize_gguf_tensor(blocks)
    return made.to(computes)


def gguf_linear(blocks: Tensor, bias: Tensor | None, computes: torch.dtype) -> nn.Module:
    """diffusers' linear layer of a ``GGUFParameter``: it widens the weight whenever it is called."""
    import torch
    from diffusers.quantizers.gguf.utils import GGUFLinear
    from torch import nn

    rows, columns = blocks.quant_shape  # type: ignore[attr-defined]
    with torch.device("meta"):
        layer: nn.Module = GGUFLinear(columns, rows, bias is not None, computes)
    layer.weight = blocks
    layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return layer


def _mapped(path: Path) -> Tensor:
    import torch

    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _utils(path: Path) -> Any:
    try:
        import gguf  # noqa: F401 the next line's import needs it, and would not say so
        from diffusers.quantizers.gguf import utils
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a GGUF file, which takes the gguf package and a diffusers that knows it: "
            f"pip install gguf ({error})"
        ) from error
    return utils


def _read(path: Path) -> Any:
    import gguf

    try:
        tensors = gguf.GGUFReader(path).tensors
    except Exception as error:  # of numpy, struct or the reader, by where the file ends
        raise CheckpointError(f"{path} is truncated or damaged ({error}): download it again") from error
    return tensors
