"""Weights that stay in a GGUF file's blocks: streamed as they are, widened layer by layer, the bits of a plain run."""

from __future__ import annotations

import gguf
import numpy
import pytest
import todays
import torch
from diffusers.quantizers.gguf import utils as theirs
from torch import Tensor, nn

from sd_lowvram import Settings
from sd_lowvram.session import attached

KINDS = sorted({kind.name for kind in theirs.dequantize_functions} - {"BF16"})


def layer(kind: str, weight: Tensor, bias: Tensor | None) -> nn.Module:
    made = theirs.GGUFLinear(weight.shape[1], weight.shape[0], bias is not None, torch.float32)
    made.weight = theirs.GGUFParameter(blocks(kind, weight), quant_type=gguf.GGMLQuantizationType[kind])
    made.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    return made


def blocks(kind: str, weight: Tensor) -> Tensor:
    """The weight by the library's own quantiser or, of kinds that it only reads, blocks drawn by a seed."""
    known = gguf.GGMLQuantizationType[kind]
    try:
        return torch.from_numpy(gguf.quants.quantize(weight.detach().numpy(), known))
    except NotImplementedError:
        size, nbytes = gguf.GGML_QUANT_SIZES[known]
        rows, columns = weight.shape
        drawn = numpy.random.default_rng(0).integers(0, 60, (rows, columns // size * nbytes), dtype=numpy.uint8)
        return torch.from_numpy(drawn)  # below 60 in every byte no scale is infinite or no number


def in_blocks(model: nn.Module, kind: str) -> nn.Module:
    """The same model, the linear layers of its blocks exchanged."""
    for name, module in list(model.named_modules()):
        for child, inner in list(module.named_children()):
            if type(inner) is nn.Linear and inner.in_features % 32 == 0 and "block" in f"{name}.{child}":
                setattr(module, child, layer(kind, inner.weight, inner.bias))
    return model.requires_grad_(False)


@pytest.mark.parametrize("offload", ["layer", "component"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_kind_has_the_bits_of_a_resident_run(kind: str, offload: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer(kind, torch.randn(256, 256), torch.randn(256)) for _ in range(3)))
    x = torch.randn(2, 256)
    wanted = model(x)
    assert wanted.isfinite().all()
    held = [one.weight for one in model]
    with attached(model, Settings(offload=offload)):
        assert torch.equal(model(x), wanted) and torch.equal(model(x), wanted)
    assert all(one.weight is before for one, before in zip(model, held, strict=True))
    assert torch.equal(model(x), wanted)


@pytest.mark.slow(30)
@pytest.mark.parametrize(("family", "kind"), [("flux", "Q8_0"), ("qwen_image", "Q4_0")])
def test_a_pipeline_is_planned_with_what_widening_takes(family: str, kind: str) -> None:
    pipe = getattr(todays, family)()
    in_blocks(pipe.transformer, kind)
    todays.check_budgets(pipe)
