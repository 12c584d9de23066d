"""What the allocator saw, in a process of its own: ``python measure.py FILE NAME...`` prints {"NAME": bytes, ...}.

The trace that is compared with it runs in the test's process, and the two share nothing but the models below.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

THREADS = 1


class Call(NamedTuple):
    """A call of a model's method, with hooks attached to the model when there are settings."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    settings: dict[str, Any] = {}  # noqa: RUF012

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the hooks are on the model, as a plan for the CPU attaches them."""
        from sd_lowvram import Settings, attached

        with torch.no_grad():
            if not self.settings:
                yield
                return
            model = getattr(self.function, "__self__", self.function)
            with attached(model, Settings(**self.settings), device="cpu"):
                yield


def _vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(32, 64, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=4,
    )


def denoiser(**config: Any) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(**{"cross_attention_dim": 64, "block_out_channels": (64, 128, 128, 128), **config})


def _full_unet() -> Any:
    """With whatever lies in memory for weights: only bytes are counted, and drawing numbers takes ten seconds."""
    with torch.device("meta"):
        unet = denoiser(cross_attention_dim=768, block_out_channels=(320, 640, 1280, 1280))
    return unet.to_empty(device="cpu")


def denoiser_call(unet: Any, batch: int, height: int, width: int, dtype: torch.dtype = torch.float32) -> Call:
    text = torch.randn(batch, 77, unet.config.cross_attention_dim, dtype=dtype)
    return Call(unet, (torch.randn(batch, 4, height, width, dtype=dtype), torch.tensor(3), text))


def _sliced_vae() -> Call:
    vae = _vae()
    vae.enable_slicing()
    return Call(vae.decode, (torch.randn(3, 4, 24, 20),))


def _channels_last_vae() -> Call:
    vae = _vae().to(memory_format=torch.channels_last)
    return Call(vae.decode, (torch.randn(1, 4, 24, 16).to(memory_format=torch.channels_last),))


def _half_vae() -> Call:
    return Call(_vae().to(torch.bfloat16).decode, (torch.randn(1, 4, 24, 16, dtype=torch.bfloat16),))


def _sliced_unet() -> Call:
    unet = denoiser()
    unet.set_attention_slice(1)
    return denoiser_call(unet, 2, 32, 24)


def _text_encoder() -> Call:
    from transformers import CLIPTextConfig, CLIPTextModel

    return Call(CLIPTextModel(CLIPTextConfig(num_hidden_layers=3, vocab_size=1000)), (torch.randint(0, 999, (2, 77)),))


def _parking() -> Call:
    from sd_lowvram.memory import Parked, fetch, park

    def run(image: torch.Tensor) -> torch.Tensor:
        parked, rows = park(image * 2), Parked.empty(image.shape, image.dtype, image.device)
        for start in range(0, image.shape[2], 16):
            rows.store(slice(start, start + 16), image[:, :, start : start + 16].relu())
        return fetch(parked) + rows.load()

    return Call(run, (torch.randn(2, 16, 128, 128),))


def _decode(**settings: Any) -> Call:
    return Call(_vae().decode, (torch.randn(1, 4, 28, 20),), settings)


def _denoise(**settings: Any) -> Call:
    return denoiser_call(denoiser(), 2, 32, 24)._replace(settings=settings)


EXACT = {"vae_tiles": "exact", "vae_strip_mib": 1}
UNET_HOOKS = {
    "feed_forward_chunks": 4,
    "residual_strips": 4,
    "transformer_chunks": 4,
    "park_skips": True,
    "guidance_in_turn": True,
}
SLICED = {"attention": "sliced", "attention_mib": 1}
FUSED = {"attention": "fused-softmax", "attention_mib": 1}
LAYERS = {"offload": "layer"}

CASES: dict[str, Callable[[], Call]] = {
    "vae decode": _decode,
    "vae encode": lambda: Call(_vae().encode, (torch.randn(1, 3, 184, 136),)),
    "vae decode, bfloat16": _half_vae,
    "vae decode, channels last": _channels_last_vae,
    "vae decode, sliced batch": _sliced_vae,
    "vae decode, exact tiles, held": lambda: _decode(**EXACT, vae_map="held"),
    "vae decode, exact tiles, parked": lambda: _decode(**EXACT, vae_map="parked"),
    "vae decode, exact tiles, recomputed": lambda: _decode(**EXACT, vae_map="recomputed"),
    "vae encode, exact tiles": lambda: Call(
        _vae().encode, (torch.randn(1, 3, 184, 136),), {**EXACT, "vae_map": "parked"}
    ),
    "vae decode, smallest": lambda: _decode(**EXACT, **FUSED, **LAYERS, vae_map="parked", vae_slices=True),
    "unet": _denoise,
    **{f"unet, {name}": functools.partial(_denoise, **{name: value}) for name, value in UNET_HOOKS.items()},
    "unet, attention sliced": lambda: _denoise(**SLICED),
    "unet, attention fused": lambda: _denoise(**FUSED),
    "unet, channels last": lambda: _denoise(channels_last=True),
    "unet, layer by layer": lambda: _denoise(**LAYERS),
    "unet, streamed": lambda: _denoise(offload="blocks", weights_mib=4),
    "unet, halves": lambda: _denoise(offload="halves"),
    "unet, layers split": lambda: _denoise(**LAYERS, split_layers=True),
    "unet, smallest": lambda: _denoise(**UNET_HOOKS, **FUSED, **LAYERS),
    "unet, diffusers' slices": _sliced_unet,
    "text encoder": _text_encoder,
    "parking": _parking,
    "sd15 unet, full size": lambda: denoiser_call(_full_unet(), 1, 16, 16),
}


def _convolution(dtype: torch.dtype = torch.float32, channels_last: bool = False) -> Call:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    image, weight = torch.randn(1, 32, 192, 128, dtype=dtype), torch.randn(32, 32, 3, 3, dtype=dtype)
    arguments = (tensor.to(memory_format=memory_format) for tensor in (image, weight))
    return Call(functools.partial(torch.nn.functional.conv2d, padding=1), tuple(arguments))


CONVOLUTIONS: dict[str, Callable[[], Call]] = {
    "convolution": _convolution,
    "convolution, bfloat16": lambda: _convolution(torch.bfloat16),
    "convolution, channels last": lambda: _convolution(channels_last=True),
}
"""One convolution of each kind, which shows how this processor's kernels go about it."""


def copies(name: str) -> int:
    """Bytes that a convolution holds besides its result where the kernels reorder as most processors' do: input and
    weight before, the result after, in half types twice; in channels last the weight alone."""
    image, weight = (tensor.numel() * tensor.element_size() for tensor in CONVOLUTIONS[name]().args)
    if "channels last" in name:
        return weight
    return max(image + weight, image * (2 if "bfloat16" in name else 1))


def convolves_as_known(name: str, measured: dict[str, int]) -> bool:
    """True also where nothing convolves, or nothing was measured of that kind."""
    if not name.startswith(("vae", "unet", "sd15 unet")):
        return True
    kind = next((one for one in CONVOLUTIONS if one.partition(", ")[2] == name.partition(", ")[2]), "convolution")
    if kind not in measured:
        return True
    result = CONVOLUTIONS[kind]().args[0]
    held = measured[kind] - result.numel() * result.element_size()
    return abs(held - copies(kind)) <= 0.02 * measured[kind]


def measure(*names: str, file: str | Path = __file__) -> dict[str, int]:
    """Bytes by name of the case among ``CASES`` of ``file``, but for those after a convolution that shows that this
    processor's kernels hold what no trace predicts: some of them take very long."""
    command = [sys.executable, __file__, str(file), *names]
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from sd_lowvram.memory import measured_peak

    torch.set_num_threads(THREADS)
    peaks: dict[str, int] = {}
    known = CASES | CONVOLUTIONS | runpy.run_path(sys.argv[1])["CASES"]
    for name in sys.argv[2:]:
        if not convolves_as_known(name, peaks):
            continue
        call = known[name]()
        gc.freeze()  # each measurement collects, which takes long among all that is imported
        with call.attached():
            peaks[name] = measured_peak(functools.partial(call.function, *call.args))
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
