"""What the allocator saw, in a process of its own: ``python measure.py NAME...`` prints {"NAME": bytes, ...}.

The trace that is compared with it runs in the test's process, and the two share nothing but the models below.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

THREADS = 2
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _vae(scale: int = 1) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(32 * scale, 64 * scale, 64 * scale, 64 * scale),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=4,
    )


def _unet(**config: Any) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(**{"cross_attention_dim": 64, "block_out_channels": (64, 128, 128, 128), **config})


def _full_unet() -> Any:
    return _unet(cross_attention_dim=768, block_out_channels=(320, 640, 1280, 1280))


def _unet_call(unet: Any, batch: int, height: int, width: int, dtype: torch.dtype = torch.float32) -> Call:
    text = torch.randn(batch, 77, unet.config.cross_attention_dim, dtype=dtype)
    return unet, (torch.randn(batch, 4, height, width, dtype=dtype), torch.tensor(3), text), {}


def _sliced_vae() -> Call:
    vae = _vae()
    vae.enable_slicing()
    return vae.decode, (torch.randn(3, 4, 24, 20),), {}


def _channels_last_vae() -> Call:
    vae = _vae().to(memory_format=torch.channels_last)
    return vae.decode, (torch.randn(1, 4, 32, 40).to(memory_format=torch.channels_last),), {}


def _half_vae() -> Call:
    return _vae().to(torch.bfloat16).decode, (torch.randn(1, 4, 32, 40, dtype=torch.bfloat16),), {}


def _sliced_unet() -> Call:
    unet = _unet()
    unet.set_attention_slice(1)
    return _unet_call(unet, 2, 48, 40)


def _text_encoder() -> Call:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig(num_hidden_layers=3, vocab_size=1000)), (torch.randint(0, 999, (2, 77)),), {}


def _parking() -> Call:
    from sd_lowvram.memory import Parked, fetch, park

    def run(image: torch.Tensor) -> torch.Tensor:
        parked, rows = park(image * 2), Parked.empty(image.shape, image.dtype, image.device)
        for start in range(0, image.shape[2], 16):
            rows.store(slice(start, start + 16), image[:, :, start : start + 16].relu())
        return fetch(parked) + rows.load()

    return run, (torch.randn(2, 16, 128, 128),), {}


CASES: dict[str, Callable[[], Call]] = {
    "vae decode": lambda: (_vae().decode, (torch.randn(1, 4, 32, 40),), {}),
    "vae encode": lambda: (_vae().encode, (torch.randn(1, 3, 264, 200),), {}),
    "vae decode, bfloat16": _half_vae,
    "vae decode, channels last": _channels_last_vae,
    "vae decode, sliced batch": _sliced_vae,
    "unet": lambda: _unet_call(_unet(), 2, 48, 40),
    "unet, sliced attention": _sliced_unet,
    "text encoder": _text_encoder,
    "parking": _parking,
    "sd15 unet, full size": lambda: _unet_call(_full_unet(), 1, 24, 24),
}


def measure(*names: str) -> dict[str, int]:
    """Bytes by name of the case."""
    command = [sys.executable, __file__, *names]
    root = Path(__file__).resolve().parents[1]
    run = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from sd_lowvram.memory import measured_peak

    torch.set_num_threads(THREADS)
    peaks = {}
    for name in sys.argv[1:]:
        function, args, kwargs = CASES[name]()
        with torch.no_grad():
            peaks[name] = measured_peak(lambda: function(*args, **kwargs))  # noqa: B023
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
