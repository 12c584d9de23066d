"""Host time of our own hooks on the machine at hand, in launches, measured on narrow models, where it is the most."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from ..devices.calibration import Operators, fastest_seconds, narrow_unet
from ..devices.performance import Rates
from ..hooks.parking.offload import policy_of
from ..hooks.replay.cuda_graphs import unrecordable
from ..progress import capture_events
from ..session import anatomy_of, attached
from ..settings import Settings
from ..streaming.layers import layers_of
from ..streaming.layout import lay_down
from ..streaming.timing import layers_with_weights
from ..weights import draw_weights

_WHOLE = Settings(offload="component")
_STREAMED = Settings(offload="blocks", weights_mib=1)
_RECORDED = Settings(cuda_graphs=True)
_STRIPS = Settings(vae_tiles="exact", vae_strip_mib=4)
_ROUNDS = 5


def host_time(rates: Rates, device: torch.device) -> dict[str, float]:
    """Measure the host time of our hooks on ``device`` in some seconds: of layers, fetches, and on a GPU of strips and
    replays.

    Args:
        rates: as they were measured on ``device``.

    Returns:
        The rates of :data:`.this_machine.HOST_TIME` that were measured; what does not run on ``device`` is not there.
    """
    if device.type not in ("cpu", "cuda") or not rates.launch_seconds:
        return {}
    unet, inputs = narrow_unet(device)
    call = functools.partial(unet, *inputs, return_dict=False)
    with torch.inference_mode():
        plain = fastest_seconds(call, device)
        with attached(unet, _WHOLE, device=device):
            whole = max(plain, fastest_seconds(call, device))
        with attached(unet, _STREAMED, device=device):
            streamed = max(whole, fastest_seconds(call, device))
        layout = lay_down(layers_of({"unet": unet}), policy_of(_STREAMED, denoises=True), {})
        copied = sum(layout.blocks[number].bytes for number in layout.streamed) if device.type == "cpu" else 0
        seconds = {
            "layer_launches": (whole - plain) / len(layers_with_weights(unet)),
            "fetch_launches": max(0.0, streamed - whole - copied / rates.copy_bandwidth) / len(layout.streamed),
        }
        if device.type == "cuda":
            seconds["strip_launches"] = _strip_seconds(device)
            replay = _replay_seconds(unet, call, device)
            seconds |= {} if replay is None else {"replay_launches": replay}
    return {name: value / rates.launch_seconds for name, value in seconds.items()}


def _strip_seconds(device: torch.device) -> float:
    """Seconds of an operator in a decode of 512x512 in strips of 4 MiB."""
    from diffusers import AutoencoderKL

    with torch.inference_mode(False):
        with torch.device("meta"):
            empty = AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                block_out_channels=(32,) * 4,
                norm_num_groups=8,
            )
        vae: Any = draw_weights(empty, device).requires_grad_(False)
    call = functools.partial(vae.decode, torch.zeros(1, 4, 64, 64, device=device), return_dict=False)
    with attached(vae, _STRIPS, device=device):
        seconds = fastest_seconds(call, device, 1)
        with torch.inference_mode(False), torch.no_grad(), Operators() as counted:
            call()
    return float(seconds / counted.number)


def _replay_seconds(unet: Any, call: Callable[[], object], device: torch.device) -> float | None:
    """Seconds until a replayed pass returns, for each module of ``unet``; None where nothing is recorded."""
    if unrecordable(anatomy_of(unet), device) is not None:
        return None
    heard_of: list[str] = []
    with attached(unet, _RECORDED, device=device), capture_events(heard_of.append):
        for _ in range(2):  # a pass is recorded when it is repeated
            call()
        best = float("inf")
        for _ in range(_ROUNDS):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
    refused = any(sentence.startswith("cuda_graphs: ") for sentence in heard_of)
    return None if refused else best / sum(1 for _ in unet.modules())
