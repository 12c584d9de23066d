"""What torch.compile gains here and how long it takes, on a part of SD1.5's UNet: two levels of four, as wide."""

from __future__ import annotations

import copy
import functools
import time
from typing import Any

import torch
from torch import Tensor

from ..devices.compiling import Compiling
from ..hooks.compiled import kinds_of
from ..kernels import compiler
from ..session import anatomy_of, attached
from ..settings import Settings
from .in_turn import compared
from .models import dtype_on

_PAIRS = 3
_COMPILED = Settings(compile="regional", channels_last=True)


def measured_compiling(device: torch.device) -> Compiling:
    """Takes up to some minutes, most of them the compiler's."""
    from diffusers import UNet2DConditionModel

    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        unet: Any = UNet2DConditionModel(
            sample_size=32,
            block_out_channels=(320, 640),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=768,
            attention_head_dim=8,
        )
        unet = unet.to(device, dtype_on(device)).requires_grad_(False).eval()
        drawn = torch.randn(2, 4, 32, 32), torch.randn(2, 77, 768)
    given = drawn[0].to(device, dtype_on(device)), drawn[1].to(device, dtype_on(device))
    plain, kinds = copy.deepcopy(unet), kinds_of(anatomy_of(unet))["denoise"]
    call, warm_ups = functools.partial(_call, given=given), []
    with torch.inference_mode():
        for _ in range(2):
            compiler.forget()
            with attached(unet, _COMPILED, device=device):
                start = time.perf_counter()
                call(unet)
                warm_ups.append(time.perf_counter() - start)
                found = compared(functools.partial(call, plain), functools.partial(call, unet), _PAIRS, device)
    first, again = (max(0.0, warm_up - found["seconds"]) / len(kinds) for warm_up in warm_ups)
    return Compiling(found["ratio"], first, again)


def _call(unet: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    predicted: Tensor = unet(given[0], 500, given[1], return_dict=False)[0]
    return predicted
