"""Passes of a small UNet in a process of its own: how many torch traced, and the bits of each result."""

from __future__ import annotations

import json
import sys

import families
import tiny
import torch

from sd_lowvram import Settings, attached


def main(size: int) -> None:
    followed, trace = list[int](), torch.jit.trace

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        followed.append(1)
        return trace(*args, **kwargs)

    torch.jit.trace = counted
    unet = families.plain("sd15").unet
    given = torch.ones(1, 4, size, size), torch.tensor(5), torch.ones(1, 7, unet.config.cross_attention_dim)
    with torch.inference_mode():
        plain = unet(*given).sample
        with attached(unet, Settings(traced=True), device="cpu"):
            found = [unet(*given).sample.numpy().tobytes().hex() for _ in range(4)]
    error = tiny.relative_error(torch.frombuffer(bytearray.fromhex(found[-1]), dtype=plain.dtype), plain.flatten())
    print(json.dumps({"traced": len(followed), "found": found, "error": float(error)}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
