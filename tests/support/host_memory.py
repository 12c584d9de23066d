"""Host memory of a streamed UNet in seven tenths of SD1.5's width, in a process: ``python host_memory.py FILE``.

Prints one JSON object: for each budget of host memory, the most anonymous bytes above the level after the imports, as
the system counts them, what of these the plan has on the device, and whether the run gave the bits of the plain one.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SIDE = 64
LATENTS = SIDE // 8


def unweighted_unet() -> Any:
    """SD1.5's UNet in seven tenths of its width, of one block a level, without weights: half a gigabyte."""
    from sd_lowvram.checkpoints.architectures import architecture, build_components

    config = architecture("sd15")["unet"]
    config |= {"block_out_channels": [224, 448, 896, 896], "layers_per_block": 1}
    return build_components({"unet": config}, dtype=torch.float16, device="meta", only=("unet",))["unet"]


def write(path: Path) -> None:
    """The UNet's weights as a safetensors file: the same random numbers over and over, which takes a second."""
    header: dict[str, Any] = {}
    end = 0
    for name, weight in unweighted_unet().state_dict().items():
        header[name] = {"dtype": "F16", "shape": list(weight.shape), "data_offsets": [end, end + 2 * weight.numel()]}
        end += 2 * weight.numel()
    text = json.dumps(header).encode()
    noise = (0.02 * torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))).half().numpy().tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while end > 0:
            end -= file.write(noise[: min(len(noise), end)])


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("the system does not tell RssAnon")


@contextmanager
def watching() -> Iterator[list[int]]:
    """Yields a list that holds the most anonymous bytes that were seen, every few milliseconds."""
    most, stop = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            most[0] = max(most[0], anonymous_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        stop.set()
        thread.join()
        most[0] = max(most[0], anonymous_bytes())


def mapped_unet(path: Path) -> Any:
    from safetensors.torch import load_file

    unet = unweighted_unet()
    unet.load_state_dict(load_file(path), assign=True)
    return unet.requires_grad_(False)


def denoise(unet: Any) -> torch.Tensor:
    noise = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 4, LATENTS, LATENTS, generator=noise).half()
    with torch.inference_mode():
        return unet(latents, torch.tensor(500), torch.randn(1, 77, 768, generator=noise).half(), return_dict=False)[0]


def main(path: Path) -> None:
    import diffusers.models

    import sd_lowvram
    from sd_lowvram.hooks.parking.offload import policy_of
    from sd_lowvram.streaming.layers import layers_of
    from sd_lowvram.streaming.layout import lay_down
    from sd_lowvram.weights import weight_bytes

    assert diffusers.models.UNet2DConditionModel
    torch.set_num_threads(1)
    base = anonymous_bytes()
    unet = mapped_unet(path)
    weights = weight_bytes(unet)
    sizes: dict[str, Any] = {"width": SIDE, "height": SIDE, "device": "cpu", "vram": "8GB"}
    fixed = sd_lowvram.Settings.policy("diffusers-default")  # so that few plans are traced
    streamed, last = (
        dataclasses.replace(fixed, offload="layer", attention=None),
        sd_lowvram.Settings(channels_last=True),
    )
    least = sd_lowvram.plan(unet, settings=streamed, **sizes).minimum_ram_bytes
    found: dict[str, Any] = {"weights": weights, "minimum_ram": least, "runs": {}}
    outputs = []
    for name, ram, settings in (
        ("minimum", least, streamed),
        ("ample", 2 * weights, streamed),
        ("minimum, channels last", least, dataclasses.replace(streamed, channels_last=True)),
    ):
        start = time.perf_counter()
        with watching() as most:
            chosen = sd_lowvram.optimize(unet, ram=f"{ram} b", settings=settings, **sizes)
            outputs.append(denoise(unet))
        room = lay_down(layers_of({"unet": unet}), policy_of(chosen.settings, True), {}).bytes
        seconds = time.perf_counter() - start
        found["runs"][name] = {"above": most[0] - base, "device": room, "seconds": seconds}
        found["runs"][name]["planned_host"] = chosen.predicted.host_bytes
        sd_lowvram.restore(unet)
    plain = denoise(unet)
    with sd_lowvram.attached(unet, last, device="cpu"):
        reordered = denoise(unet)
    wanted = plain, plain, reordered
    found["same"] = list(map(torch.equal, outputs, wanted))
    found["finite"] = bool(plain.isfinite().all())
    print(json.dumps(found))


def measured(path: Path) -> dict[str, Any]:
    """What this file prints about the weights in ``path``."""
    run = subprocess.run([sys.executable, __file__, str(path)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(Path(sys.argv[1]))
