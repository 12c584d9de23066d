"""Measured gain of compiling and of recording, and the time of compiling, on two of four levels of SD1.5's UNet at full
width."""

from __future__ import annotations

import copy
import functools
import time
from typing import Any

import torch
from torch import Tensor

from ..devices.compiling import Compiling
from ..devices.info import dtype_on
from ..devices.pairs import compare
from ..devices.this_machine import RECORDED
from ..hooks.replay.compiled import kinds_of
from ..hooks.replay.cuda_graphs import unrecordable
from ..kernels import compiler
from ..progress import capture_events
from ..session import anatomy_of, attached
from ..settings import Settings
from ..weights import draw_weights

_PAIRS = 3
_RECORDED = Settings(cuda_graphs=True)
_COMPILED = Settings(compile="regional", channels_last=True)


def measured_compiling(device: torch.device) -> Compiling:
    """Measure the gain of torch.compile on ``device``; takes up to some minutes, most of them in the compiler."""
    unet, inputs = _part_of_unet(device)
    plain, kinds = copy.deepcopy(unet), kinds_of(anatomy_of(unet))["denoise"]
    call, warm_ups = functools.partial(_call, inputs=inputs), []
    with torch.inference_mode():
        for _ in range(2):
            compiler.forget()
            with attached(unet, _COMPILED, device=device):
                start = time.perf_counter()
                call(unet)
                warm_ups.append(time.perf_counter() - start)
                gains = compare(functools.partial(call, plain), functools.partial(call, unet), _PAIRS, device)
    first, again = (max(0.0, warm_up - gains["seconds"]) / len(kinds) for warm_up in warm_ups)
    return Compiling(gains["ratio"], first, again)


def measured_recording(device: torch.device) -> dict[str, float]:
    """Speed-up of a pass that is replayed as a CUDA graph, by name: launch seconds over replay seconds.

    Empty on devices where nothing is recorded."""
    unet, inputs = _part_of_unet(device)
    if unrecordable(anatomy_of(unet), device) is not None:
        return {}
    plain, call = copy.deepcopy(unet), functools.partial(_call, inputs=inputs)
    heard_of: list[str] = []
    with torch.inference_mode(), attached(unet, _RECORDED, device=device), capture_events(heard_of.append):
        call(unet)  # a pass is recorded when it is repeated
        comparison = compare(functools.partial(call, plain), functools.partial(call, unet), _PAIRS, device)
    refused = any(sentence.startswith("cuda_graphs: ") for sentence in heard_of)
    return {} if refused else {RECORDED: comparison["ratio"]}


_Given = tuple[Tensor, Tensor, Tensor]


def _part_of_unet(device: torch.device) -> tuple[Any, _Given]:
    """A UNet, and latents, step and texts for two rows of a batch."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        empty = UNet2DConditionModel(
            sample_size=32,
            block_out_channels=(320, 640),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=768,
            attention_head_dim=8,
        )
    unet = draw_weights(empty, device).to(dtype_on(device)).requires_grad_(False).eval()
    noise = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=noise) for shape in ((2, 4, 32, 32), (2, 77, 768)))
    latents, text = (tensor.to(device, dtype_on(device)) for tensor in drawn)
    return unet, (latents, torch.tensor(500, device=device), text)


def _call(unet: Any, inputs: _Given) -> Tensor:
    predicted: Tensor = unet(*inputs, return_dict=False)[0]
    return predicted
